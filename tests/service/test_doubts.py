"""A store in doubt or broken, while requests come in, begin and end."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, Service
from gracekit.process import Point
from tests.service.kit import Doors, Fault, Life, World

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
@pytest.mark.parametrize("point", [Point.ACCEPT_AND_BEGIN, Point.FINISH])
async def test_a_commit_in_doubt_loses_nothing_and_runs_nothing_twice(
    world: World, svc: Service, point: Point, fault: Fault
):
    """The row decides: the handler runs once, its caller is answered soon, the row is terminal."""
    starts = []

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> int:
        starts.append(ctx.attempt)
        return 7

    life = await world.start(svc)
    client = await world.client(svc)
    life.plan(point, fault)

    assert await client.prepare(request_id="d", timeout=5).call(work, vm="v") == 7
    assert starts == [1]
    assert world.state("d") == "succeeded"
    assert await client.prepare(timeout=5).call(work, vm="v") == 7
    await asyncio.sleep(100)
    assert world.rows("SELECT * FROM reply") == []


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
async def test_a_begin_in_doubt_runs_once_in_the_end(world: World, svc: Service, fault: Fault):
    """A task whose turn came while the store hesitated is started once, at the latest when
    recovery looks.
    """
    doors = Doors()

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc)
    client = await world.client(svc)
    ids = [await client.cast(work, vm="v", n=n) for n in range(2)]
    await doors.wait(1)
    life.plan(Point.BEGIN, fault)
    doors.open(0, 1)
    await world.until(lambda: set(world.states().values()) == {"succeeded"})

    assert doors.entered == [0, 1]
    assert world.task(ids[1])["attempts"] == 1


@pytest.mark.parametrize("on_interrupt", ["error", "retry"])
async def test_an_acceptance_whose_trace_is_lost_is_settled_by_the_living_run(
    world: World, svc: Service, on_interrupt: str
):
    """Commit unknown and the read after it failed too: the row is found, its lease freed, and it
    ends, without a restart.
    """
    starts = []

    @svc.rpc(resource="vm", on_interrupt=on_interrupt)
    async def work(ctx: Context, vm: str) -> None:
        starts.append(ctx.attempt)

    life = await world.start(svc, look_every_s=60.0)  # which reads, too
    client = await world.client(svc)
    await asyncio.sleep(3)  # until nothing else reads
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.LOST_AFTER)
    life.faults.plan("store", "query", Fault.REFUSED)
    request_id = await client.cast(work, vm="v")
    await world.until(lambda: world.state(request_id) in {"errored", "succeeded"}, within_s=120)

    assert len(life.told("task.adopted")) == 1
    # That it never started is known to the run that accepted it: also `error` may be run.
    assert (world.state(request_id), len(starts)) in {("succeeded", 1), ("errored", 0)}
    assert world.task(request_id)["attempts"] <= 2
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]


@pytest.mark.parametrize(
    ("point", "again_after_s"),
    [
        (Point.ACCEPT_AND_BEGIN, 0.0),
        (Point.ACCEPT_AND_BEGIN, 20.0),
        (Point.ACCEPT, 0.0),
        (Point.ACCEPT, 20.0),
        (Point.BEGIN, None),
    ],
)
async def test_an_entry_whose_trace_is_lost_is_found_as_soon_as_it_has_left(
    world: World, svc: Service, point: Point, again_after_s: float | None
):
    """While its task, or that of its next delivery, is in the tracker recovery takes the row for
    known: it looks once more after that, and a caller does not wait for a whole period.
    """
    doors = Doors()

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: str) -> None:
        await doors.pass_(ctx.request_id)

    life = await world.start(svc, look_every_s=60.0)  # which reads, too
    client = await world.client(svc)
    doors.open("lost")
    if point is not Point.ACCEPT_AND_BEGIN:  # it has to wait for its turn
        await client.prepare(request_id="first").cast(work, vm="v")
        await doors.wait(1)
    if point is Point.BEGIN:
        await client.prepare(request_id="lost").cast(work, vm="v")
        await world.until(lambda: world.state("lost") == "accepted")
    await asyncio.sleep(3)  # until nothing else reads
    life.plan(point, Fault.LOST_AFTER)
    life.faults.plan("store", "query", Fault.REFUSED)
    begun = asyncio.get_running_loop().time()
    if point is Point.BEGIN:
        doors.open("first")
    else:
        await client.prepare(request_id="lost").cast(work, vm="v")
    await life.hears("store.error")
    if again_after_s:
        life.faults.delay_s = again_after_s
        life.plan("deliver", Fault.DELAY)
    await life.hears("task.adopted")
    doors.open("first")
    await world.until(lambda: world.state("lost") == "succeeded")

    assert asyncio.get_running_loop().time() - begun < 5


async def claimed_in_flight(world: World, svc: Service, doors: Doors) -> Life:
    """A life that has claimed a row whose last attempt has still to leave the tracker."""

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        await doors.pass_(ctx.attempt)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="t").cast(work)
    await doors.wait(1)
    world.disk.execute("UPDATE task SET state = 'accepted', owner = NULL")
    life.runtime.wired.trigger.poke()
    await asyncio.sleep(10)
    return life


async def test_a_row_that_is_claimed_while_its_task_is_in_flight_begins_after_it(
    world: World, svc: Service
):
    """Its last attempt is over on record, and has not left the tracker: the row is not started
    beside that one, and as soon as it has left.
    """
    doors = Doors()
    await claimed_in_flight(world, svc, doors)
    assert doors.entered == [1]

    doors.open(1, 2)
    await world.settle()
    assert doors.ended == [1, 2]
    assert world.state("t") == "succeeded"


async def test_a_row_that_is_claimed_while_its_task_is_in_flight_is_not_kept_by_a_drain(
    world: World, svc: Service
):
    """The drain does not wait for what the row waits for: the row is anyone's again."""
    doors = Doors()
    life = await claimed_in_flight(world, svc, doors)
    life.ask_to_stop()
    await life.hears("intake.closed")

    assert world.rows("SELECT state, owner FROM task") == [{"state": "accepted", "owner": None}]
    doors.open(1)
    assert (await life.wait_end()).not_started == ["t"]


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER])
async def test_a_duplicate_in_doubt_starts_nothing(world: World, svc: Service, fault: Fault):
    """The duplicate of an ended task meets a commit of unknown outcome: the old row is not mistaken
    for a new acceptance.
    """
    starts = []

    @svc.rpc
    async def work(ctx: Context) -> int:
        starts.append(1)
        return len(starts)

    life = await world.start(svc)
    client = (await world.client(svc)).prepare(request_id="same", timeout=5)
    assert await client.call(work) == 1
    life.plan(Point.ACCEPT_AND_BEGIN, fault)

    assert await client.call(work) == 1
    assert starts == [1]


@pytest.mark.parametrize("policy", ["error", "requeue"])
async def test_an_ack_that_fails_costs_nothing(world: World, svc: Service, policy: str):
    """The request runs once and is answered; the unacked copy comes again after the connection and
    is a duplicate, or an idempotent second read; no slot and no count is lost.
    """
    starts = []

    @svc.rpc(on_interrupt=policy, max_running=1)
    async def work(ctx: Context) -> int:
        starts.append(1)
        return 3

    life = await world.start(svc)
    client = await world.client(svc)
    life.plan("ack", Fault.REFUSED)
    for _ in range(2):
        assert await client.prepare(timeout=5).call(work) == 3
    await world.settle()
    assert life.runtime.wired.tracker.running == 0
    report = await life.drain()
    assert (report.exit_code, report.waited_s) == (0, pytest.approx(0, abs=0.1))
    assert world.broker.waiting("compute") == 1

    await world.start(svc)
    await world.until(lambda: world.broker.waiting("compute") == 0)
    await asyncio.sleep(1)
    assert len(starts) == (2 if policy == "error" else 3)


async def test_a_broken_store_ends_the_service_in_order(world: World, svc: Service):
    """Intake stops, what was not accepted stays in the queue, what runs may end, and the exit is
    70.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc)
    client = await world.client(svc)
    running = await client.cast(work, n=0)
    await doors.wait(1)
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.BROKEN)
    await client.cast(work, n=1)
    await life.hears("drain.started")
    doors.open(0)
    world.expects_faults = True
    report = await life.wait_end()

    assert report.exit_code == 70
    assert "the disk is gone" in (report.failure or "")
    assert doors.ended == [0]
    assert world.broker.waiting("compute") == 1
    assert world.state(running) == "running"
    assert "store.broken" in life.names()


async def test_a_pause_that_cannot_give_back_does_not_end_intake(world: World, svc: Service):
    """What a transport cannot take back now it owes; consuming goes on when a place is free."""
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, max_accepted=1, accept_wait_s=1, prefetch=4)
    client = await world.client(svc)
    for n in range(3):
        await client.cast(work, n=n)
    await doors.wait(1)
    life.plan("give_back", Fault.REFUSED)
    await asyncio.sleep(30)
    doors.open(0, 1, 2)

    await doors.wait(3)
    assert sorted(map(int, doors.entered)) == [0, 1, 2]


async def test_an_outcome_that_the_store_refuses_for_long_is_not_dropped(
    world: World, svc: Service
):
    """The answer waits with it, and both come when the store takes it."""

    @svc.rpc
    async def work(ctx: Context) -> str:
        return "done"

    life = await world.start(svc)
    client = await world.client(svc)
    life.plan(Point.FINISH, Fault.REFUSED, times=20)
    answer = await client.prepare(request_id="w", timeout=100).call(work)

    assert answer == "done"
    assert world.state("w") == "succeeded"


async def test_a_broken_store_does_not_send_deliveries_round_and_round(world: World, svc: Service):
    """The ops lane stays open in the drain that follows; what comes by it waits between two
    tries.
    """
    world.expects_faults = True
    doors = Doors()

    @svc.ops
    async def look(ctx: Context) -> None: ...

    @svc.rpc(on_interrupt="requeue")
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work)
    await doors.wait(1)
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.BROKEN)
    await client.cast(look)
    await life.hears("store.broken")
    await asyncio.sleep(5)

    tries = [fields for fields in life.told("store.error") if fields["what"] != "tally"]
    assert 2 <= len(tries) <= 30
    doors.open("work")
    assert (await life.wait_end()).exit_code == 70
