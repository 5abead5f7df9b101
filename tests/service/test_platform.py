"""Messages to systemd: requests for time in a drain, and before it how much there is to do."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service
from gracekit.drain.bounded import BoundedSteps
from gracekit.drain.progress import Movement
from gracekit.drain.report import DrainReport
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import FEWEST, Lane, TrackedTask
from gracekit.tracker.tracker import Tracker
from tests.service.kit import Doors, Life, Systemd, World, now

pytestmark = pytest.mark.looptime


def extensions(systemd: Systemd) -> list[tuple[float, float]]:
    """When time was asked for, and how many seconds."""
    key = "EXTEND_TIMEOUT_USEC="
    return [
        (at, int(line.removeprefix(key)) / 1_000_000)
        for at, text in systemd.told
        for line in text.splitlines()
        if line.startswith(key)
    ]


async def begin_drain(life: Life) -> float:
    """A drain that a signal asks for; when it began."""
    life.ask_to_stop()
    await life.hears("drain.started")
    return now()


async def test_a_drain_in_which_nothing_moves_asks_for_no_time(
    world: World, svc: Service, systemd: Systemd
):
    """Whoever set the time-out of a stop meant it for a task that hangs; the status says so."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    systemd.listen()
    life = await world.start(svc, drain_timeout_s=60.0)
    await (await world.client(svc)).cast(work)
    await doors.wait(1)
    await begin_drain(life)
    await asyncio.sleep(30)

    assert extensions(systemd) == []
    assert systemd.texts("STOPPING=1") == ["STOPPING=1\nSTATUS=draining: 1 running"]
    assert systemd.statuses()[-1].startswith("draining: 1 running, no progress for ")
    doors.open("work")
    await life.wait_end()


async def test_an_open_hold_is_no_progress_and_the_end_of_one_is(
    world: World, svc: Service, systemd: Systemd
):
    """With nothing running, time is asked for within a second of the end of a hold, and not
    before.
    """

    @svc.rpc
    async def begin(ctx: Context, vm: str, s: int) -> None:
        await ctx.hold("migration", vm, at_most=s)

    systemd.listen()
    life = await world.start(svc, drain_timeout_s=60.0)
    client = await world.client(svc)
    for vm, s in (("a", 20), ("b", 300)):
        await client.call(begin, vm=vm, s=s)
    began_at = await begin_drain(life)
    await asyncio.sleep(15)

    assert extensions(systemd) == []
    assert systemd.statuses()[-1].startswith("draining: 0 running, 2 holds, no progress for ")
    await asyncio.sleep(25)
    assert [(round(at - began_at), s) for at, s in extensions(systemd)] == [(21, 15)]
    report = await life.wait_end()
    assert report.open_holds == 1


async def test_a_drain_whose_tasks_go_on_ending_asks_for_time(
    world: World, svc: Service, systemd: Systemd
):
    """Within a second of each end, for fifteen seconds more."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    systemd.listen()
    life = await world.start(svc, drain_timeout_s=60.0)
    client = await world.client(svc)
    for n in range(4):
        await client.cast(work, n=n)
    await doors.wait(4)
    began_at = await begin_drain(life)
    for n in range(3):
        await asyncio.sleep(8)
        doors.open(n)
    await asyncio.sleep(3)

    asked = [round(at - began_at) for at, s in extensions(systemd) if at > began_at + 2 and s == 15]
    assert asked == [9, 17, 25]
    doors.open(3)
    await life.wait_end()


async def test_a_safe_point_an_answer_and_a_step_are_progress():
    """And a start is none: a drain begins nothing that it did not have to."""
    tracker, steps = Tracker(), BoundedSteps(Telemetry())
    task = TrackedTask(request_id="a", method="copy", lane=Lane.REQUESTS)
    ops = TrackedTask(request_id="b", method="ping", lane=Lane.OPS, holds_drain=False)
    tracker.add(task)
    movement = Movement(DrainReport(), tracker, steps)

    tracker.add(ops)
    tracker.started(ops)
    assert not movement.has_come_further()
    task.safe_point_at = 3.0
    assert movement.has_come_further()
    tracker.remove(ops)
    assert movement.has_come_further()
    tracker.started(task)
    movement.has_come_further()
    await steps.bounded("close of intake", asyncio.sleep(0), 1.0)
    assert not movement.has_come_further()
    tracker.ended(task)
    movement.has_come_further()
    await steps.bounded("hooks", asyncio.sleep(0), 1.0)
    assert movement.has_come_further()
    assert not movement.has_come_further()


async def test_a_task_that_is_expected_to_end_in_time_is_waited_for(
    world: World, svc: Service, systemd: Systemd
):
    """Its method's history is why: time is asked for each second, and never beyond the hard
    limit.
    """

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(20)

    systemd.listen()
    life = await world.start(svc, drain_timeout_s=25.0)
    client = await world.client(svc)
    for _ in range(FEWEST):
        await client.call(work)
    await client.cast(work)
    await life.hears("task.started", FEWEST + 1)
    began_at = await begin_drain(life)
    await life.wait_end()

    asked = extensions(systemd)
    assert len(asked) >= 18
    hard_limit = began_at + life.runtime.settings.hard_limit_s
    assert all(at + seconds <= hard_limit + 0.1 for at, seconds in asked)


async def test_its_status_is_the_state_of_the_service(world: World, svc: Service, systemd: Systemd):
    """A line is sent when the state changes, and none in between."""
    systemd.listen()
    life = await world.start(svc)
    await asyncio.sleep(20)
    await world.verb(life, "quiet")
    await asyncio.sleep(20)

    assert systemd.statuses() == ["serving", "quiet"]
    await life.drain()
