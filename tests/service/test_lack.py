"""What the process itself lacks fails no task: no thread can be started for a plain function."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from gracekit import Context, Service
from tests.service.kit import World, now

pytestmark = pytest.mark.looptime

TOO_LARGE: Final = 1 << 46
"""Bytes for the stack of a thread that no kernel gives: the start of each new thread fails."""


@pytest.fixture
def starve() -> Iterator[Callable[[], None]]:
    """From its call on no thread of this process can be started, until the test ends or `feed`."""
    yield lambda: threading.stack_size(TOO_LARGE) and None
    feed()


def feed() -> None:
    """Let threads be started again."""
    threading.stack_size(0)


@pytest.mark.parametrize("policy", ["error", "retry", "probe"])
async def test_a_handler_that_got_no_thread_has_not_failed(
    world: World, svc: Service, starve: Callable[[], None], policy: Any
):
    """Whatever its policy is, its task is handed over without a charge, tried again with pauses
    that grow, and runs once when threads can be started again. The log names the limits.
    """
    ran = []

    @svc.rpc(on_interrupt=policy)
    def work(ctx: Context, n: int) -> int:
        ran.append(n)
        return n

    life = await world.start(svc)
    client = await world.client(svc)
    starve()
    call = asyncio.create_task(client.prepare(request_id="w", timeout=500).call(work, n=1))
    at = []
    for number in range(1, 6):
        await life.hears("task.interrupted", number)
        at.append(now())
    await asyncio.sleep(0.1)
    (cut,) = world.rows("SELECT state, cut, crashes, owner FROM task")
    feed()

    assert await call == 1
    assert ran == [1]
    assert cut == {"state": "handed_over", "cut": "safe_point", "crashes": 0, "owner": None}
    pauses = [later - before for before, later in itertools.pairwise(at)]
    assert pauses == sorted(pauses)
    assert 1 <= pauses[0] < pauses[-1] <= 10
    assert "no thread can be started: look at pids.max" in life.told("task.interrupted")[0]["error"]
    assert world.task("w")["crashes"] == 0
    assert not life.told("task.failed")


async def test_a_requeue_request_that_got_no_thread_goes_back(
    world: World, svc: Service, starve: Callable[[], None]
):
    """Its caller gets the answer of the handler, not that a thread was missing. It is journaled
    when it comes again, so it does not go back and forth until the broker gives it up.
    """

    @svc.rpc(on_interrupt="requeue")
    def work(ctx: Context, n: int) -> int:
        return n

    life = await world.start(svc)
    client = await world.client(svc)
    starve()
    call = asyncio.create_task(client.prepare(request_id="w", timeout=500).call(work, n=1))
    await life.hears("task.handed_over", 3)
    feed()

    assert await call == 1
    assert len(life.told("task.given_back")) == 1
    assert world.task("w")["crashes"] == 0


async def test_others_do_not_try_meanwhile_what_cannot_succeed(
    world: World, svc: Service, starve: Callable[[], None]
):
    """A task that waits for its next try keeps its place, so that a thousand do not fail one by
    one.
    """

    @svc.rpc
    def work(ctx: Context, n: int) -> int:
        return n

    life = await world.start(svc, threads=2)
    client = await world.client(svc)
    starve()
    for n in range(10):
        await client.cast(work, n=n)
    began = now()
    await life.hears("task.interrupted", 10)
    feed()

    assert now() - began >= 4  # two at a time, each with a pause of a second or more
    await world.until(lambda: set(world.states().values()) == {"succeeded"})


async def test_a_drain_does_not_wait_for_the_next_try(
    world: World, svc: Service, starve: Callable[[], None]
):
    """It hands over at once what got no thread, uncharged, and a later run does the work."""

    @svc.rpc
    def work(ctx: Context, n: int) -> int:
        return n

    life = await world.start(svc)
    client = await world.client(svc)
    starve()
    for n in range(3):
        await client.prepare(request_id=f"w{n}").cast(work, n=n)
    await life.hears("task.interrupted", 12)
    began = now()
    report = await life.drain()

    assert now() - began < 1
    assert (int(report.exit_code), report.unclean, report.must_die) == (75, [], False)
    feed()
    await world.start(svc)
    await world.until(lambda: set(world.states().values()) == {"succeeded"})
    assert {row["crashes"] for row in world.rows("SELECT crashes FROM task")} == {0}


async def test_an_order_during_the_pause_finds_the_task_handed_over(
    world: World, svc: Service, starve: Callable[[], None]
):
    """So it is carried out on record, and nobody is told that the task ends while it runs again."""

    @svc.rpc
    def work(ctx: Context) -> None: ...

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    starve()
    await life.hears("task.interrupted", 3)
    await asyncio.sleep(0.1)
    answer = await world.verb(life, "cancel", task_id="w", by="ann@desk", reason="wrong host")
    feed()

    assert (answer["state"], answer["moved"]) == ("handed_over", True)
    assert "asked" not in answer


async def test_an_errored_hook_that_got_no_thread_is_still_due(
    world: World, svc: Service, starve: Callable[[], None]
):
    """It was not called, so it has not failed."""
    told = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    @work.errored
    def _(ctx: Context, reason: str) -> None:
        told.append(reason)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await life.hears("task.started")
    await life.crash()
    starve()
    life = await world.start(svc)
    await life.hears("store.error", 2)
    feed()
    await world.until(lambda: told)

    assert told == ["interrupted"]
    assert "no thread can be started" in life.told("store.error")[0]["error"]
    assert not world.incidents("hook_failed")


async def test_a_request_whose_arguments_got_no_thread_to_be_read_in_is_kept(
    world: World, svc: Service, starve: Callable[[], None]
):
    """It is neither given back again and again, until its queue gives it up, nor forgotten."""

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> str:
        return vm

    work.reads_early = lambda _, args: ("vm", args["vm"])
    life = await world.start(svc)
    client = await world.client(svc)
    starve()
    call = asyncio.create_task(client.prepare(request_id="w", timeout=500).call(work, vm="1"))
    await life.hears("task.interrupted", 3)
    feed()

    assert await call == "1"
    assert world.task("w")["resource_id"] == "1"
