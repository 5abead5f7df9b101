"""Tasks that count as stuck, and what a run reports that a task waits for."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service
from gracekit.listings.store_view import RunReport, StoreView
from gracekit.listings.task_list import TaskList, TaskQuery, list_tasks
from gracekit.process import Point
from tests.service.kit import Doors, Fault, Life, World

pytestmark = pytest.mark.looptime
MINUTE_S = 60.0


async def listed(world: World, life: Life, *others: Life, stuck: bool = True) -> TaskList:
    """What is listed, read by the engine of a run instead of the command line's."""
    reports = {}
    for one in (life, *others):
        if one.process.lives:
            answer = await world.verb(one, "status")
            reports[one.runtime.run_id] = RunReport(answer=answer, tasks=answer["tasks"])
    view = StoreView(life.engine, life.process, None, world.clock)
    return await list_tasks(view, reports, TaskQuery(stuck=stuck))


async def reasons(world: World, life: Life, *others: Life) -> dict[str, str | None]:
    tasks = (await listed(world, life, *others)).tasks
    return {str(task.columns["request_id"]): task.why_listed for task in tasks}


async def test_a_task_is_stuck_after_three_times_its_p95(world: World, svc: Service):
    """The time counts from its last safe point, or its start; tasks with progress are not
    listed.
    """

    @svc.rpc
    async def copy(ctx: Context, pace: float, blocks: int = 10) -> None:
        async for _ in ctx.steps(range(blocks)):
            await asyncio.sleep(pace)

    life = await world.start(svc)
    client = await world.client(svc)
    for _ in range(5):
        await client.prepare(timeout=100).call(copy, pace=1.0)
    await client.prepare(request_id="slow").cast(copy, pace=1000.0)
    await client.prepare(request_id="long").cast(copy, pace=1.0, blocks=100)
    await life.hears("task.started", 7)
    await asyncio.sleep(29)
    early = await reasons(world, life)
    await asyncio.sleep(6)
    late = await reasons(world, life)
    (slow,) = [t for t in (await listed(world, life)).tasks if t.columns["request_id"] == "slow"]

    assert early == {}
    assert late == {"slow": "3.5x its p95 of 10s"}
    assert slow.as_json()["why_listed"] == "3.5x its p95 of 10s"
    assert slow.as_json()["p95_s"] == pytest.approx(10.0, abs=0.1)


async def test_the_last_safe_point_of_a_stuck_task_is_told(world: World, svc: Service):
    """The reason says how long ago the last safe point was."""
    doors = Doors()

    @svc.rpc
    async def copy(ctx: Context, blocks: int) -> None:
        async for n in ctx.steps(range(blocks)):
            await asyncio.sleep(5)
            if n == 2:
                await doors.pass_(n)

    life = await world.start(svc)
    client = await world.client(svc)
    for _ in range(5):
        await client.prepare(timeout=100).call(copy, blocks=2)
    await client.prepare(request_id="slow").cast(copy, blocks=4)
    await doors.wait(1)
    await asyncio.sleep(35)

    assert await reasons(world, life) == {
        "slow": "4.0x its p95 of 10s, no safe point since 40s",
    }


async def test_without_history_ten_minutes_are_the_measure(world: World, svc: Service):
    """If too few attempts of a method have ended, only the time decides."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="new").cast(work)
    await doors.wait(1)
    await asyncio.sleep(9 * MINUTE_S)
    early = await reasons(world, life)
    await asyncio.sleep(5 * MINUTE_S)

    assert early == {}
    assert await reasons(world, life) == {"new": "no history, running 14m00s"}


async def test_a_task_in_line_says_whom_it_waits_for(world: World, svc: Service):
    """The holder of a lease is named, in the same process and in another one of the store."""
    doors = Doors()

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        await doors.pass_(vm)

    @svc.rpc(max_running=1)
    async def heavy(ctx: Context) -> None:
        await doors.pass_("heavy")

    first = await world.start(svc, instance="api-1")
    client = await world.client(svc)
    await client.prepare(request_id="holder").cast(work, vm="1")
    await first.hears("task.started")
    second = await world.start(svc, instance="api-2")
    await world.verb(first, "quiet")
    await client.prepare(request_id="other").cast(work, vm="1")
    await client.prepare(request_id="next").cast(work, vm="1")
    await client.prepare(request_id="one").cast(heavy)
    await client.prepare(request_id="two").cast(heavy)
    await second.hears("task.started")
    await asyncio.sleep(3)
    found = {
        task.columns["request_id"]: task.waits_for
        for task in (await listed(world, first, second, stuck=False)).tasks
    }
    await asyncio.sleep(14 * MINUTE_S)
    why = await reasons(world, first, second)

    assert found == {
        "holder": None,
        "one": None,
        "other": "lease vm:1 held by task holder on api-1",
        "next": "lease vm:1, behind others",
        "two": "a task of its method to end: as many as its max_running run",
    }
    assert why["other"] == "not begun for 14m03s; waits for lease vm:1 held by task holder on api-1"


async def test_after_a_crash_the_list_says_for_how_long_no_task_gets_the_lease(
    world: World, svc: Service
):
    """The task that was cut waits, although no process works on it; a new request stands behind
    it.
    """
    doors = Doors()

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def work(ctx: Context, vm: str) -> None:
        await doors.pass_(vm)

    first = await world.start(svc, instance="api-1")
    client = await world.client(svc)
    await client.prepare(request_id="cut").cast(work, vm="1")
    await first.hears("task.started")
    await first.crash()
    second = await world.start(svc, instance="api-2")
    await client.prepare(request_id="next").cast(work, vm="1")
    await asyncio.sleep(3)
    found = {
        task.columns["request_id"]: task.waits_for
        for task in (await listed(world, second, stuck=False)).tasks
    }
    await second.hears("task.started")

    words = "lease vm:1 that no task gets for another 7s, because a process died"
    assert found == {"cut": words, "next": "lease vm:1, behind others"}


async def test_the_next_of_a_resource_names_the_task_that_has_it(world: World, svc: Service):
    """Within one process the task's own run knows which one holds the resource."""
    doors = Doors()

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        await doors.pass_(vm)

    life = await world.start(svc, max_running=2)
    client = await world.client(svc)
    for request_id in ("a", "b"):
        await client.prepare(request_id=request_id).cast(work, vm="1")
    await client.prepare(request_id="c").cast(work, vm="2")
    await client.prepare(request_id="d").cast(work, vm="3")
    await doors.wait(2)
    await world.settle()
    said = {
        task["task_id"]: task["waits_for"] for task in (await world.verb(life, "status"))["tasks"]
    }

    assert said["a"] is None
    assert said["b"] == "lease vm:1 held by task a"
    assert said["d"] == "a task of its lane to end: as many as max_running run"


async def test_an_outcome_that_the_store_does_not_take_is_told(world: World, svc: Service):
    """Its handler has returned, and the task waits for the store."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await doors.wait(1)
    life.plan(Point.FINISH, Fault.REFUSED, times=4)
    doors.open("work")
    await life.hears("store.error")
    (task,) = (await world.verb(life, "status"))["tasks"]

    assert task["waits_for"] == "the store to take its outcome"


async def test_a_handed_over_task_that_nobody_takes_is_listed(world: World, svc: Service):
    """Ten minutes after its hand-over, however long it ran before."""
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc, drain_timeout_s=1)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await doors.wait(1)
    await asyncio.sleep(20 * MINUTE_S)
    await life.drain()
    other = Service("storage")
    looker = await world.start(other)
    await asyncio.sleep(9 * MINUTE_S)
    early = await reasons(world, looker)
    await asyncio.sleep(2 * MINUTE_S)

    assert early == {}
    assert await reasons(world, looker) == {
        "w": "handed over, not taken by any run for 10m00s or more",
    }
