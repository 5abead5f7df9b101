"""Each start of a handler is told, and so is its end: for metrics, and for who reads the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from gracekit import Context, NoSuchMethodError, Service
from gracekit.process import Point
from gracekit.telemetry.catalogue import LOGGER
from tests.service.kit import Fault, Life, World

pytestmark = pytest.mark.looptime

ENDS: Final = ("task.finished", "task.handed_over", "task.given_back")

Step = Callable[[World, Life], Awaitable[None]]


def ends_of(life: Life) -> list[str]:
    """The ends of the handler starts of one process, each with its outcome or cut.

    Every start has one, and there is no other.
    """
    open_ids: list[str] = []
    ends = []
    for name, fields in life.events:
        if name == "task.started":
            assert fields["task_id"] not in open_ids
            open_ids.append(fields["task_id"])
        elif name in ENDS:
            open_ids.remove(fields["task_id"])
            ends.append(" ".join((name, fields.get("outcome") or fields.get("cut") or "")))
    assert open_ids == []
    return ends


async def nothing(world: World, life: Life) -> None:
    """The handler ends by itself."""


async def drain(world: World, life: Life) -> None:
    await life.drain()


async def order_cancel(world: World, life: Life) -> None:
    await world.verb(life, "cancel", task_id="t", by="ann@desk", reason="wrong host")


async def order_fail(world: World, life: Life) -> None:
    await world.verb(life, "fail", task_id="t", by="ann@desk", reason="wrong host")


async def cancel_its_task(world: World, life: Life) -> None:
    (task,) = life.runtime.wired.tracker
    assert task.handler is not None
    task.handler.cancel()


async def works(ctx: Context) -> str:
    return "done"


async def raises(ctx: Context) -> None:
    raise LookupError("no such disk")


async def returns_what_is_no_json(ctx: Context) -> object:
    return object()


async def sleeps(ctx: Context) -> None:
    await asyncio.sleep(1000)


async def stays(ctx: Context) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(1000)
    await asyncio.sleep(1000)


async def steps(ctx: Context) -> None:
    async for _ in ctx.steps(range(1000)):
        await asyncio.sleep(1)


WAYS: Final = [
    # handler, what happens then, how a journaled and how a requeue attempt ends
    (works, nothing, "task.finished succeeded", "task.finished succeeded"),
    (raises, nothing, "task.finished failed", "task.finished failed"),
    (returns_what_is_no_json, nothing, "task.finished succeeded", "task.finished succeeded"),
    (sleeps, nothing, "task.finished failed", "task.finished failed"),  # its timeout
    (sleeps, order_cancel, "task.finished cancelled", "task.finished cancelled"),
    (sleeps, order_fail, "task.finished failed", "task.finished failed"),
    (sleeps, drain, "task.handed_over cancelled", "task.given_back cancelled"),
    (stays, drain, "task.handed_over unclean", "task.given_back unclean"),
    (steps, drain, "task.handed_over safe_point", "task.given_back cancelled"),
    (sleeps, cancel_its_task, "task.handed_over unclean", "task.given_back unclean"),
]


@pytest.mark.parametrize("policy", ["error", "requeue"])
@pytest.mark.parametrize(("handler", "step", "journaled", "requeued"), WAYS)
async def test_every_start_of_a_handler_has_one_end(
    world: World,
    svc: Service,
    policy: Any,
    handler: Any,
    step: Step,
    journaled: str,
    requeued: str,
):
    """Whether it returns, raises, is cut, or is stopped by whomever; with a row or without."""
    svc.rpc(on_interrupt=policy, timeout=100)(handler)
    life = await world.start(svc, drain_timeout_s=3)
    client = (await world.client(svc)).prepare(request_id="t", timeout=500)
    calling = asyncio.create_task(client.call(handler.__name__))
    await life.hears("task.started")

    await step(world, life)
    ended = lambda: any(name in ENDS for name, _ in life.events)  # noqa: E731 - asked once
    await world.until(ended)
    calling.cancel()
    if life.report is None:
        await life.drain()  # what was given back has begun again

    end = requeued if policy == "requeue" else journaled
    assert ends_of(life)[0] == end
    assert len(life.told("task.failed")) == int(end == "task.finished failed")


@pytest.mark.parametrize("policy", ["error", "requeue"])
async def test_a_fault_of_gracekit_itself_leaves_no_start_without_an_end(
    world: World, svc: Service, policy: Any
):
    """Here a filter of the application's raises; the attempt is told as handed over or given
    back.
    """
    world.expects_faults = True

    class Refusing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return 1 / int(getattr(record, "event", "") != "task.interrupted") > 0

    refusing = Refusing()
    logging.getLogger(LOGGER).addFilter(refusing)

    @svc.rpc(on_interrupt=policy)
    async def work(ctx: Context) -> None:
        raise asyncio.CancelledError

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="t").cast(work)
    await life.hears("dispatch.failed")
    logging.getLogger(LOGGER).removeFilter(refusing)
    await life.drain()

    assert len(life.told("task.started")) == len(ends_of(life)) > 0


async def test_a_request_whose_acceptance_failed_goes_back_and_comes_again(
    world: World, svc: Service
):
    """Once there was no memory: nobody would settle the delivery, or see it, until the next
    start.
    """
    world.expects_faults = True
    lacks = [MemoryError()]

    def once(record: logging.LogRecord) -> bool:
        if getattr(record, "event", "") == "task.rejected" and lacks:
            raise lacks.pop()
        return True

    @svc.rpc
    async def work(ctx: Context) -> None: ...

    logging.getLogger(LOGGER).addFilter(once)
    life = await world.start(svc)
    call = asyncio.create_task((await world.client(svc)).call("unknown"))
    await life.hears("dispatch.failed")
    with pytest.raises(NoSuchMethodError):
        await call
    logging.getLogger(LOGGER).removeFilter(once)

    assert life.told("dispatch.failed")[0]["error"] == "MemoryError()"
    assert world.broker.waiting("compute") == 0


async def test_a_cancelled_step_of_gracekit_leaves_no_start_without_an_end(
    world: World, svc: Service
):
    """A program that cancels all tasks, one at its outcome's commit among them: the row decides."""
    world.expects_faults = True  # the stop-intent waits behind the slow commit

    @svc.rpc
    async def work(ctx: Context) -> None: ...

    life = await world.start(svc)
    life.plan(Point.FINISH, Fault.DELAY)
    await (await world.client(svc)).prepare(request_id="t").cast(work)
    await life.hears("task.started")
    await world.until(lambda: world.state("t") == "running")
    (task,) = life.runtime.wired.tracker
    assert task.handler is not None
    task.handler.cancel()
    await life.drain()

    assert len(life.told("task.started")) == len(ends_of(life)) > 0


async def test_attempts_of_requeue_methods_are_history(world: World, svc: Service):
    """So they have an expected finish, like others."""

    @svc.rpc(on_interrupt="requeue")
    async def work(ctx: Context, s: float) -> None:
        await asyncio.sleep(s)

    life = await world.start(svc)
    client = await world.client(svc)
    for _ in range(5):
        await client.call(work, s=4)
    await client.cast(work, s=3)
    await life.hears("task.started", 6)

    (task,) = life.runtime.wired.tracker
    assert task.expected_end(now := asyncio.get_running_loop().time()) == pytest.approx(now + 4)
