"""Parked tasks where something odd happens: input that no message carries, doubts, a set clock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracekit import Context, NoCapacity, Parked, Service
from gracekit.errors import TaskCancelledError
from gracekit.process import Point
from gracekit.tracker.task import TaskState
from tests.service.kit import Fault, World
from tests.service.parked import TIMEOUT_S, Builds

pytestmark = pytest.mark.looptime


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


def deep(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = {"more": value}
    return value


# -- odd input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [deep(25), "x" * 300_000], ids=["deep", "large"])
async def test_an_odd_context_is_left_out_of_notifications(world: World, svc: Service, odd: Any):
    """The rest of that notification comes, and so do those of other tasks."""
    builds = Builds(world, svc)
    await builds.start()
    client = (await builds.client()).prepare(context={"project_id": odd, "user_id": "u"})
    await client.prepare(request_id="t").cast(builds.build, vm="v", memory_mb=5)
    await builds.ends("pending")
    await builds.park("w", "u", memory_mb=5)

    wants = [one for one in await builds.read() if one.event_type == "task.no_capacity"]

    assert [one.payload["context"] for one in wants] == [{"user_id": "u"}, {}]
    assert builds.unsent() == []


async def test_what_no_message_carries_is_dropped_and_counted(world: World, svc: Service):
    """It keeps none of the others."""
    builds = Builds(world, svc)
    life = await builds.start()
    life.plan("publish", Fault.REFUSED, times=1000)
    await (await builds.client()).prepare(request_id="t").cast(builds.build, vm="v", memory_mb=5)
    await builds.ends("pending")
    world.disk.execute(
        "UPDATE outbox SET payload = json_set(payload, '$.reason', ?) WHERE priority = 'ERROR'",
        ("x" * 1_100_000,),
    )
    life.faults.forget()

    await world.until(lambda: not builds.unsent())

    assert [one.event_type for one in await builds.read()] == ["task.update"]
    assert world.tally()["notification_unsendable"] == 1
    assert len(life.told("notification.unsendable")) == 1


class BareError(NoCapacity):
    """Its `__init__` leaves out that of its base."""

    def __init__(self, host: str) -> None:
        self.host = host


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_subclass_without_requested_is_one_attempt(world: World, is_on: bool):
    """Its task is parked, or fails, as that of any NoCapacity; so does one that was changed
    since.
    """
    svc, begun = Service("compute", task_api=True), list[str]()

    @svc.rpc(on_interrupt="retry")
    async def bare(ctx: Context) -> None:
        begun.append("bare")
        raise BareError("node-1")

    @svc.rpc(on_interrupt="retry")
    async def changed(ctx: Context) -> None:
        begun.append("changed")
        error = NoCapacity("full", requested={"disk": 1})
        error.requested["odd"] = object()
        raise error

    builds = Builds(world, svc)
    await builds.start(use_pending_state=is_on)
    client = await builds.client()
    for method in (bare, changed):
        await client.prepare(request_id=method.name).cast(method)
        await builds.ends("pending" if is_on else "failed", method.name)

    assert begun == ["bare", "changed"]
    assert [builds.row(name)["requested"] for name in begun] == (
        ["{}"] * 2 if is_on else [None] * 2
    )


async def test_a_callee_s_parked_is_not_the_caller_s(world: World, svc: Service):
    """A handler that lets `Parked` pass has failed, and its caller gets no other task's id."""

    @svc.rpc
    async def front(ctx: Context) -> None:
        raise Parked("another", 1_900_000_000.0, 1)

    builds = Builds(world, svc)
    await builds.start()

    with pytest.raises(NoCapacity, match="it called a service, whose task another waits"):
        await (await builds.client()).prepare(request_id="t", pending=True).call(front)
    assert builds.state() == "failed"


# -- doubts ------------------------------------------------------------------------------------


async def test_cancel_pending_looks_again_after_a_lost_commit(world: World, svc: Service):
    """A commit of unknown end is not somebody else's order: the task is cancelled all the same."""
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    life.plan(Point.UNPARK, Fault.LOST_BEFORE)

    cancelled = await (await builds.client()).call(builds.delete, vm="v")

    assert (cancelled, builds.state()) == (1, "cancelled")


async def test_an_order_that_comes_while_parking_is_refused_counts(world: World, svc: Service):
    """It was answered as taken, so the task ends by it and does not wait."""
    builds = Builds(world, svc)
    life = await builds.start()
    life.plan(Point.PARK, Fault.REFUSED, times=1000)
    call = asyncio.create_task(builds.call(memory_mb=5))
    await world.until(lambda: builds.begun != [])
    await asyncio.sleep(5)

    answer = await world.verb(life, "cancel", task_id="t", by="ann", reason="no need")
    life.faults.forget()

    assert answer["asked"]
    await builds.ends(TaskState.CANCELLED.value)
    with pytest.raises(TaskCancelledError):
        await call


async def test_rows_of_a_run_that_was_adopted_before_are_sent(world: World, svc: Service):
    """It was taken for dead and wrote them before it noticed."""
    builds = Builds(world, svc)
    life = await builds.start()
    life.crash_at(Point.PARK, "after")
    call = asyncio.create_task(builds.call(memory_mb=5))
    async with asyncio.timeout(600):
        await life.over.wait()
    world.disk.execute("UPDATE run SET adopted_at = 1.0, adopted_by = 'other', verdict = 'killed'")
    world.disk.execute("DELETE FROM beat")
    await builds.start()

    with pytest.raises(Parked):
        await call
    await world.until(lambda: not builds.unsent())
    assert len(await builds.read()) == 2


# -- the clock ---------------------------------------------------------------------------------


async def test_a_clock_set_while_it_runs_again_leaves_its_time(world: World, svc: Service):
    """Parked a second time, it waits until the moment that the first parking meant."""
    builds = Builds(world, svc)
    go_on = asyncio.Event()

    @svc.rpc(on_interrupt="retry")
    async def slow(ctx: Context) -> None:
        if ctx.attempt > 1:
            await go_on.wait()
        raise NoCapacity("full")

    await builds.start()
    await (await builds.client()).prepare(request_id="t").cast(slow)
    await builds.ends("pending")
    await asyncio.sleep(60)
    await builds.order("retry")
    await builds.ends("running")
    world.clock.shift_s += 7200
    await asyncio.sleep(60)
    go_on.set()
    await builds.ends("pending")

    left_s = builds.row()["pending_deadline"] - world.clock.wall()
    assert left_s == pytest.approx(TIMEOUT_S - 120, abs=5)
    await asyncio.sleep(60)
    assert builds.state() == "pending"


async def test_a_set_clock_drops_no_notification(world: World, svc: Service):
    """What waits for the broker is sent when it is back, as the task waits too."""
    builds = Builds(world, svc)
    life = await builds.start()
    life.plan("publish", Fault.REFUSED, times=1000)
    await (await builds.client()).prepare(request_id="t").cast(builds.build, vm="v", memory_mb=5)
    await builds.ends("pending")
    world.clock.shift_s += 86_400
    await asyncio.sleep(60)
    life.faults.forget()
    await world.until(lambda: not builds.unsent())

    assert len(await builds.read()) == 2
    assert builds.state() == "pending"


async def test_an_old_next_check_does_not_keep_a_retried_task(world: World, svc: Service):
    """What a row had waited for before it ran is over when its task is parked."""
    go_on = asyncio.Event()

    @svc.rpc(on_interrupt="retry")
    async def slow(ctx: Context) -> None:
        if ctx.attempt == 1:
            await go_on.wait()
            raise NoCapacity("full")

    builds = Builds(world, svc)
    await builds.start()
    await (await builds.client()).prepare(request_id="t").cast(slow)
    await builds.ends("running")
    world.disk.execute("UPDATE task SET next_check = 1e10, not_before = 1e10")  # as by a set clock
    go_on.set()
    await builds.ends("pending")
    await builds.order("retry")

    await builds.ends("succeeded", within_s=5)
