"""What a method's history is used for: safe points in a drain, and what operators are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, Method, Service
from tests.service.kit import Life, World

pytestmark = pytest.mark.looptime


def copying(svc: Service) -> Method[Any, Any]:
    """A method that copies block after block, a safe point after each."""

    @svc.rpc
    async def copy(ctx: Context, blocks: int, pace: float = 1.0) -> str:
        async for _ in ctx.steps(range(blocks)):
            await asyncio.sleep(pace)
        return f"attempt {ctx.attempt}"

    return copy


async def with_history(world: World, svc: Service, method: Any, **settings: Any) -> Life:
    """A run in which ten blocks took ten seconds, five times."""
    life = await world.start(svc, **settings)
    client = await world.client(svc)
    for _ in range(5):
        await client.prepare(timeout=100).call(method, blocks=10)
    return life


async def start_at_block_three(world: World, life: Life, svc: Service, method: Any, **args: Any):
    client = await world.client(svc)
    before = len(life.told("task.started"))
    call = asyncio.create_task(client.prepare(request_id="c", timeout=3000).call(method, **args))
    call.add_done_callback(lambda done: done.cancelled() or done.exception())
    await life.hears("task.started", before + 1)
    await asyncio.sleep(3.5)
    return call


async def test_a_task_that_ends_in_time_passes_its_safe_points(world: World, svc: Service):
    """It is expected to end before the deadline, so the drain waits instead of cutting it."""
    copy = copying(svc)
    life = await with_history(world, svc, copy, drain_timeout_s=25)
    call = await start_at_block_three(world, life, svc, copy, blocks=10)
    report = await life.drain()

    assert (report.exit_code, report.handed_over, report.finished) == (0, [], 1)
    assert report.waited_s == pytest.approx(6.5, abs=0.2)
    assert await call == "attempt 1"


async def test_a_task_that_ends_too_late_stops_at_its_next_safe_point(world: World, svc: Service):
    """The deadline comes before its expected end: it stops at once, and goes on after the
    restart.
    """
    copy = copying(svc)
    life = await with_history(world, svc, copy, drain_timeout_s=6)
    call = await start_at_block_three(world, life, svc, copy, blocks=10)
    report = await life.drain()

    assert (report.exit_code, report.handed_over) == (75, ["c"])
    assert report.waited_s < 1
    assert (world.task("c")["cut"], world.task("c")["cursor"]) == ("safe_point", "3")
    await world.start(svc)
    assert await call == "attempt 2"


async def test_a_task_without_history_stops_at_its_next_safe_point(world: World, svc: Service):
    """Four attempts are none: the unknown stops."""
    copy = copying(svc)
    life = await world.start(svc, drain_timeout_s=600)
    client = await world.client(svc)
    for _ in range(4):
        await client.prepare(timeout=100).call(copy, blocks=10)
    await start_at_block_three(world, life, svc, copy, blocks=10)
    report = await life.drain()

    assert (report.handed_over, report.waited_s < 1) == (["c"], True)


async def test_a_task_that_outlives_all_of_its_history_stops(world: World, svc: Service):
    """The expectation was wrong: past it nothing is expected, and the next safe point is the
    end.
    """
    copy = copying(svc)
    life = await with_history(world, svc, copy, drain_timeout_s=600)
    await start_at_block_three(world, life, svc, copy, blocks=100)
    report = await life.drain()

    assert report.handed_over == ["c"]
    assert report.waited_s == pytest.approx(6.5, abs=0.2)
    assert world.task("c")["cursor"] == "9"


async def test_a_wrong_expectation_is_handed_over_at_the_deadline(world: World, svc: Service):
    """A task that went on and was slower than ever is cut at the deadline; its safe point is
    kept.
    """
    copy = copying(svc)
    life = await with_history(world, svc, copy, drain_timeout_s=8)
    call = await start_at_block_three(world, life, svc, copy, blocks=4, pace=3.0)
    life.ask_to_stop()
    await life.hears("drain.progress")
    report = await life.wait_end()

    assert (report.exit_code, report.handed_over) == (75, ["c"])
    row = world.task("c")
    assert (row["state"], row["cut"]) == ("handed_over", "cancelled")
    assert row["cursor"] == "2"
    assert report.waited_s == pytest.approx(8, abs=0.2)
    call.cancel()


async def test_threads_use_the_history_too(world: World, svc: Service):
    """A plain handler that never was slow goes on past its safe points."""
    passed = []

    @svc.rpc
    def count(ctx: Context) -> None:
        for n in ctx.steps(range(50)):
            if n == 10 and ctx.request_id == "c":
                while not ctx.draining:
                    pass
            passed.append(n)

    # Virtual time leaps while a thread works, so that both times are far away.
    life = await world.start(svc, drain_timeout_s=1e7)
    client = await world.client(svc)
    for _ in range(5):
        await client.prepare(timeout=1e6).call(count)
    life.runtime.wired.history.of(None, "count").add(5e6)
    await client.prepare(request_id="c").cast(count)
    await life.hears("task.started", 6)
    report = await life.drain()

    assert (report.exit_code, passed[-50:]) == (0, list(range(50)))


async def test_a_start_learns_from_the_journal(world: World, svc: Service):
    """The history of earlier runs counts, without attempts that did a part of the work only."""
    copy = copying(svc)
    first = await with_history(world, svc, copy)
    await first.drain()
    life = await world.start(svc)

    durations = life.runtime.wired.history.of(None, "copy")
    assert durations.expected(0.0) == pytest.approx(10, abs=0.1)
    assert durations.expected(11.0) is None


async def test_operators_are_told_the_expected_finish(world: World, svc: Service):
    """In the status of a run and in the progress of its drain; without history nothing is said."""
    copy = copying(svc)

    @svc.rpc
    async def other(ctx: Context) -> None:
        await asyncio.sleep(20)

    life = await with_history(world, svc, copy, progress_every_s=2, drain_timeout_s=60)
    await start_at_block_three(world, life, svc, copy, blocks=10)
    (task,) = (await world.verb(life, "status"))["tasks"]
    assert task["expected_s"] == pytest.approx(6.5, abs=0.1)
    await (await world.client(svc)).cast(other)
    await life.hears("task.started", 7)
    life.ask_to_stop()
    told = await life.hears("drain.progress")
    assert told["tasks"].startswith("copy 5.5s (expected finish 4.5s), other 2.0s")
    assert told["expected_s"] is None
    await life.hears("task.finished", 6)
    await life.wait_end()
