"""Who pays for a crash or a fault: only what caused it is given up, and nothing goes round for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gracekit import Context, Done, Fail, GracekitError, RemoteError, Service, Wait
from tests.service.kit import World

pytestmark = pytest.mark.looptime


# -- faults of gracekit's own steps around a handler -----------------------------------------


class OddArgsError(Exception):
    """Its `args` cannot be read, and so not its text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    @property
    def args(self) -> Any:  # type: ignore[override]  # that is the point
        raise RuntimeError("no args")


class OddTextError(Exception):
    """Its text ends the interpreter."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class OddKind(type):
    """A class whose name cannot be read."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]  # that is the point
        raise RuntimeError("no name")


class OddNameError(Exception, metaclass=OddKind):
    """Its class has no name."""


class OddMapping(Mapping[str, Any]):
    """A result that cannot be walked."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, key: str) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        raise self.error

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise self.error


@pytest.mark.parametrize("odd", [OddArgsError, OddTextError, OddNameError], ids=lambda kind: "odd")
async def test_an_exception_that_cannot_be_written_down_fails_its_task(
    world: World, svc: Service, odd: type[Exception]
):
    """
    The task is FAILED and its caller hears, whatever the exception object does; it runs once.
    """
    starts = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        starts.append(ctx.attempt)
        raise odd

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(Exception, match="cannot be"):
        await client.prepare(request_id="w", timeout=30).call(work)

    assert world.state("w") == "failed"
    assert starts == [1]


async def test_a_result_that_cannot_be_written_down_fails_its_task(world: World, svc: Service):
    """
    Whatever its encoding raises.
    """

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context, n: int) -> Any:
        return OddMapping([RuntimeError("no"), SystemExit(3), KeyboardInterrupt()][n])

    await world.start(svc)
    client = await world.client(svc)
    for n in range(3):
        with pytest.raises((RemoteError, GracekitError)):
            await client.prepare(request_id=f"w{n}", timeout=30).call(work, n=n)

    assert set(world.states().values()) == {"failed"}


class Refusing(logging.Filter):
    """A filter of the application's that raises at one event."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "event", None) == "task.started":
            raise RuntimeError("no log")
        return True


@pytest.fixture
def refusing() -> Iterator[None]:
    """An application's logging that raises when a task is started."""
    logger = logging.getLogger("gracekit")
    level, refusing = logger.level, Refusing()
    logger.setLevel(logging.DEBUG)
    logger.addFilter(refusing)
    yield
    logger.removeFilter(refusing)
    logger.setLevel(level)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("policy", ["retry", "requeue", "error"])
async def test_a_fault_around_the_handler_is_counted(world: World, svc: Service, policy: Any):
    """
    Its process lives on, so no crash counts it; yet it ends, and its lease is free.
    """

    @svc.rpc(on_interrupt=policy, settle=0, resource=None if policy == "requeue" else "vm")
    async def work(ctx: Context, vm: str) -> None: ...

    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work, vm="v")
    await world.until(lambda: world.state("w") == "errored")

    reason = "interrupted" if policy == "error" else "attempts"
    assert world.task("w")["reason"] == reason
    assert len(life.told("dispatch.failed")) == {"retry": 3, "requeue": 4, "error": 1}[policy]
    assert world.rows("SELECT 1 FROM lease WHERE owner IS NOT NULL") == []


@pytest.mark.parametrize("answer", ["done", "fail", "odd", "raises"])
async def test_a_probe_with_an_odd_answer_ends_its_task(world: World, svc: Service, answer: str):
    """
    What the answer's or the error's own code raises is no reason to ask for ever.
    """
    asked = []

    @svc.rpc(on_interrupt="probe", settle=0, max_wait="1m")
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    @work.probe
    async def _(ctx: Context) -> Any:
        asked.append(1)
        odd = OddMapping(RuntimeError("no"))
        match answer:
            case "done":
                return Done(odd)
            case "fail":
                return Fail(odd)  # type: ignore[arg-type]  # that is the point
            case "odd":
                return odd
            case _:
                raise OddTextError

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await life.hears("task.started")
    await life.crash()
    await world.start(svc)
    await world.until(lambda: world.state("w") in {"failed", "errored"})

    assert (world.state("w"), world.task("w")["reason"]) == (
        ("failed", None) if answer in {"done", "fail"} else ("errored", "gave_up")
    )


async def test_an_errored_hook_with_an_odd_error_is_called_once(world: World, svc: Service):
    """
    What it raised cannot be shown; that it was called is on record all the same.
    """
    told = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    @work.errored
    async def _(ctx: Context, reason: str) -> None:
        told.append(reason)
        raise OddTextError

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await life.hears("task.started")
    await life.crash()
    await world.start(svc)
    await world.until(lambda: bool(told))
    await asyncio.sleep(200)

    assert told == ["interrupted"]
    assert world.task("w")["errored_due"] == 0


_ = Wait  # used below
