"""How long a task may wait for capacity: who ends it, when, and once."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, NoCapacity, Service
from gracekit.errors import StoreError, TaskInterruptedError
from gracekit.process import Point
from tests.service.kit import Doors, Fault, World, now
from tests.service.parked import TIMEOUT_S, Builds

pytestmark = pytest.mark.looptime

DAY_S = 86_400.0
SHORT_S = 300.0


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


@pytest.mark.parametrize("timeout_s", [5.0, 31.0, TIMEOUT_S])
async def test_a_run_ends_a_task_at_its_deadline(world: World, svc: Service, timeout_s: float):
    """ERRORED(expired) within a second, its errored hook called once, and reported."""
    builds = Builds(world, svc)
    life = await builds.start(pending_timeout_s=timeout_s)
    begun = now()
    await builds.park(memory_mb=5)
    await asyncio.sleep(timeout_s - 0.5)
    assert builds.state() == "pending"

    await builds.ends("errored")

    assert timeout_s <= now() - begun < timeout_s + 1.5
    assert builds.row()["reason"] == "expired"
    assert "none became free (no host has 5 MiB free)" in builds.row()["detail"]
    assert world.tally()["pending_expired"] == 1
    await asyncio.sleep(100)
    assert builds.hooks == [("v", "expired")]
    assert [one["reason"] for one in life.told("task.errored")] == ["expired"]
    steps = await builds.steps()
    assert steps[-1:] == ["pending>errored expired 1"]


async def test_a_second_task_with_an_earlier_deadline_is_not_late(world: World, svc: Service):
    """A pause of recovery that was made for a later deadline is cut short by an earlier one."""
    builds = Builds(world, svc)

    @svc.rpc(on_interrupt="retry", pending_timeout="10s")
    async def hasty(ctx: Context) -> None:
        raise NoCapacity("full")

    await builds.start(reconcile_every_s=3600)
    await builds.park(memory_mb=5)
    await asyncio.sleep(100)
    begun = now()
    await (await builds.client()).prepare(request_id="h").cast(hasty)

    await builds.ends("errored", "h")

    assert 10 <= now() - begun < 11.5
    assert builds.state() == "pending"


async def test_a_method_has_a_timeout_of_its_own(world: World, svc: Service):
    """`pending_timeout` of the method goes before the setting."""
    builds = Builds(world, svc, pending_timeout="2m")
    await builds.start(pending_timeout_s=20)
    begun = world.clock.wall()

    parked = await builds.park(memory_mb=5)

    assert parked.deadline == pytest.approx(begun + 120, abs=1)


async def test_parked_again_behind_its_deadline_it_expires_at_once(world: World, svc: Service):
    """A last attempt that was begun in time may run; it does not get more time to wait."""

    @svc.rpc(on_interrupt="retry", pending_timeout="10s")
    async def slow(ctx: Context) -> None:
        await asyncio.sleep(0 if ctx.attempt == 1 else 20)
        raise NoCapacity("full")

    builds = Builds(world, svc)
    await builds.start(reconcile_every_s=3600)
    await (await builds.client()).prepare(request_id="t").cast(slow)
    await builds.ends("pending")
    await asyncio.sleep(5)
    await builds.order("retry")
    begun = now()

    await builds.ends("errored")

    assert 19.5 <= now() - begun < 22
    assert (builds.row()["reason"], builds.row()["parkings"]) == ("expired", 2)


async def test_the_next_start_ends_it_before_it_takes_requests(world: World, svc: Service):
    """With nobody there it stays; then it is no longer PENDING when the first request is
    answered.
    """
    builds = Builds(world, svc)
    life = await builds.start()
    await builds.park(memory_mb=5)
    await life.drain()
    await asyncio.sleep(TIMEOUT_S + 180)
    assert builds.state() == "pending"

    await builds.start(startup_reconciliation_enabled=False)
    assert builds.state() == "errored"

    assert (await builds.api("get", task_id="t"))["reason"] == "expired"
    await asyncio.sleep(100)
    assert builds.hooks == [("v", "expired")]


async def test_two_runs_end_it_once(world: World, svc: Service):
    """Both look at the same moment: one end, one hook, one notification, one record, of each
    task.
    """
    builds = Builds(world, svc)
    await builds.start(host="a", pending_timeout_s=SHORT_S)
    await builds.start(host="b", pending_timeout_s=SHORT_S)
    names = [f"t{number}" for number in range(120)]
    for name in names:
        await builds.park(name, name, memory_mb=5)
    await builds.read()

    await asyncio.sleep(SHORT_S + 60)

    assert {builds.state(name) for name in names} == {"errored"}
    assert sorted(builds.hooks) == [(name, "expired") for name in sorted(names)]
    assert len(world.incidents("pending_expired")) == len(names)
    assert len(await builds.steps()) == len(names)


async def test_a_retry_at_the_deadline_meets_one_end(world: World, svc: Service):
    """It runs, or it has expired: never both."""
    builds = Builds(world, svc)
    await builds.start(host="a", pending_timeout_s=SHORT_S)
    await builds.start(host="b", pending_timeout_s=SHORT_S)
    for number in range(10):
        await builds.park("v", f"t{number}", memory_mb=5)
    deadline = now() + SHORT_S - 5
    builds.free = 5
    client = await builds.client()
    await asyncio.sleep(deadline - now())
    orders = []
    for number in range(10):
        view = client.prepare(ops=True, namespace="gracekit.tasks", version="1.1", timeout=60)
        orders.append(asyncio.create_task(view.call("retry", task_id=f"t{number}", version=1)))
        await asyncio.sleep(0.7)
    answers = await asyncio.gather(*orders, return_exceptions=True)
    await asyncio.sleep(100)

    for number, answer in enumerate(answers):
        was_done = isinstance(answer, dict)
        assert builds.state(f"t{number}") == ("succeeded" if was_done else "errored"), answer
    assert len(builds.begun) == 10 + sum(isinstance(answer, dict) for answer in answers)


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("by_s", [-DAY_S, DAY_S])
async def test_a_clock_that_is_set_neither_hurries_nor_delays(
    world: World, svc: Service, by_s: float, runs: int
):
    """What waits keeps its own length, also where several runs see the clock being set."""
    builds = Builds(world, svc)
    for number in range(runs):
        await builds.start(host=f"node-{number}", pending_timeout_s=SHORT_S)
    begun = now()
    await builds.park(memory_mb=5)
    await asyncio.sleep(50)
    world.clock.shift_s += by_s
    await asyncio.sleep(50)
    late = await builds.park("w", "u", memory_mb=5)
    assert late.deadline == pytest.approx(world.clock.wall() + SHORT_S, abs=1)
    world.clock.shift_s -= by_s / 2

    await builds.ends("errored", within_s=2 * SHORT_S)
    assert SHORT_S <= now() - begun < SHORT_S + 2
    assert builds.state("u") == "pending"
    await builds.ends("errored", "u", within_s=2 * SHORT_S)
    assert SHORT_S + 100 <= now() - begun < SHORT_S + 102


@pytest.mark.parametrize("phase", ["quiet", "drain"])
async def test_a_run_that_begins_nothing_still_ends_tasks_at_their_deadline(
    world: World, svc: Service, phase: str
):
    """In a quiet, and in a drain; their hooks are called when it takes requests again, or by the
    next start.
    """
    builds = Builds(world, svc)
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def long(ctx: Context) -> None:
        await doors.pass_("b")

    life = await builds.start(pending_timeout_s=75, drain_timeout_s=600)
    begun = now()
    await builds.park(memory_mb=5)
    await (await builds.client()).cast(long)
    await doors.wait(1)
    coordinator = life.runtime.wired.coordinator
    if phase == "quiet":
        await world.run_as(life, coordinator.quiet())
    else:
        life.ask_to_stop()

    world.clock.shift_s += 100
    await life.hears("clock.set")  # after which recovery has looked, and found nothing overdue

    await builds.ends("errored")

    assert 75 <= now() - begun < 77
    assert builds.hooks == []
    steps = await builds.steps()
    assert steps[-1:] == ["pending>errored expired 1"]
    doors.open("b")
    if phase == "quiet":
        await world.run_as(life, coordinator.resume())
    else:
        await life.wait_end()
        await builds.start()
    await world.until(lambda: builds.hooks == [("v", "expired")])


async def test_a_run_that_starts_ends_tasks_at_their_deadline(world: World, svc: Service):
    """Its `on_start` may take longer than they wait; their hooks are called when it is ready."""
    builds = Builds(world, svc)
    life = await builds.start(pending_timeout_s=40)
    begun = now()
    await builds.park(memory_mb=5)
    await life.drain()
    doors = Doors()

    @svc.on_start
    async def slow() -> None:
        await doors.pass_("s")

    life = world.life(svc, use_pending_state=True, pending_timeout_s=40)
    starting = asyncio.create_task(life.start())
    await doors.wait(1)

    await builds.ends("errored")

    assert 40 <= now() - begun < 42
    assert builds.hooks == []
    doors.open("s")
    await starting
    await world.until(lambda: builds.hooks == [("v", "expired")])


@pytest.mark.parametrize("phase", ["serving", "quiet", "starting"])
async def test_a_sibling_ends_what_a_killed_run_has_parked_in_time(
    world: World, svc: Service, phase: str
):
    """Nobody tells it of the deadline: it looks as often as the shortest time-out."""
    builds = Builds(world, svc)
    doors = Doors()
    life = await builds.start(pending_timeout_s=12)
    if phase == "starting":

        @svc.on_start
        async def slow() -> None:
            await doors.pass_("s")

        sibling = world.life(svc, host="other", use_pending_state=True, pending_timeout_s=12)
        starting = asyncio.create_task(sibling.start())
        await doors.wait(1)
    else:
        sibling = await builds.start(host="other", pending_timeout_s=12)
    if phase == "quiet":
        await world.run_as(sibling, sibling.runtime.wired.coordinator.quiet())
    await asyncio.sleep(4)
    begun = now()
    await builds.park(memory_mb=5)
    life.end()

    await builds.ends("errored")

    assert 12 <= now() - begun < 13
    if phase == "starting":
        doors.open("s")
        await starting


async def test_a_task_ends_at_its_deadline_while_a_stop_hook_runs(world: World, svc: Service):
    """To the end of the process: nobody may be there after it."""
    builds = Builds(world, svc)

    @svc.on_stop
    async def slow() -> None:
        await asyncio.sleep(8)

    life = await builds.start(pending_timeout_s=5, stop_hook_timeout_s=20)
    await builds.park(memory_mb=5)
    await life.drain()

    assert builds.state() == "errored"
    assert "task.update" in {one.event_type for one in await builds.read()}


async def test_many_hooks_are_called_one_after_the_other(world: World, svc: Service):
    """Not so many in each period of recovery."""
    builds = Builds(world, svc)
    await builds.start(pending_timeout_s=60)
    for number in range(250):
        await builds.park(f"v{number}", f"t{number}", memory_mb=5)

    await builds.ends("errored", "t249")
    await asyncio.sleep(5)

    assert len(builds.hooks) == 250


async def test_a_duplicate_of_what_has_expired_is_told_so(world: World, svc: Service):
    """By the record: nothing is started for it."""
    builds = Builds(world, svc)
    await builds.start(pending_timeout_s=60)
    await builds.park(memory_mb=5)
    await builds.ends("errored")

    with pytest.raises(TaskInterruptedError, match=r"ERRORED\(expired\)"):
        await builds.call(memory_mb=5)


async def test_no_more_than_pending_max_wait(world: World, svc: Service):
    """The next one has failed, with the limit in its text, and is counted; each that leaves makes
    room for another; another service's tasks do not count.
    """
    other = Service("network")
    builds, others = Builds(world, svc), Builds(world, other)
    await builds.start(pending_max=2)
    await world.start(other, use_pending_state=True)
    await others.park(task_id="o", memory_mb=5)
    for name in ("a", "b"):
        await builds.park(name, name, memory_mb=5)

    with pytest.raises(NoCapacity, match="GRACEKIT_PENDING_MAX allows 2 parked tasks"):
        await builds.call("c", "c", memory_mb=5)
    row = builds.row("c")
    assert (row["state"], row["parkings"]) == ("failed", 0)
    assert (world.tally()["not_parked"], world.tally()["parked"]) == (1, 3)
    await builds.order("cancel", "a")
    await builds.park("d", "d", memory_mb=5)
    # Two find the last place free at one moment.
    await builds.order("cancel", "b")
    answers = await asyncio.gather(
        *(builds.park(name, name, memory_mb=5) for name in ("e", "f")), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["NoCapacity", "Parked"]


async def test_a_task_that_runs_again_may_find_its_place_taken(world: World, svc: Service):
    """The limit is one of the service: another task was parked meanwhile, and this one has
    failed.
    """
    doors = Doors()
    builds = Builds(world, svc)

    @svc.rpc(on_interrupt="retry")
    async def slow(ctx: Context) -> None:
        if ctx.attempt > 1:
            await doors.pass_("s")
        raise NoCapacity("full")

    await builds.start(pending_max=1)
    await (await builds.client()).prepare(request_id="s").cast(slow)
    await builds.ends("pending", "s")
    await builds.order("retry", "s")
    await doors.wait(1)
    await builds.park(memory_mb=5)
    doors.open("s")

    await builds.ends("failed", "s")
    assert "GRACEKIT_PENDING_MAX" in builds.row("s")["detail"]


# -- the store ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.REFUSED])
@pytest.mark.parametrize("there", [True, False])
async def test_a_sweep_whose_commit_is_in_doubt_has_one_end(
    world: World, svc: Service, fault: Fault, there: bool
):
    """With a run there, and at a start; one hook, one record, one notification."""
    world.expects_faults = True
    builds = Builds(world, svc)
    life = await builds.start(pending_timeout_s=SHORT_S)
    await builds.park(memory_mb=5)
    await builds.read()
    if there:
        life.plan(Point.UNPARK, fault)
    else:
        await life.drain()
        await asyncio.sleep(SHORT_S)
        life = world.life(svc, use_pending_state=True)
        life.plan(Point.UNPARK, fault)
        try:
            await life.start()
        except StoreError:  # a store that refuses at a start ends it
            assert fault is Fault.REFUSED
            await builds.start(pending_timeout_s=SHORT_S)

    await builds.ends("errored", within_s=2 * SHORT_S)
    await asyncio.sleep(100)

    assert builds.hooks == [("v", "expired")]
    assert len(world.incidents("pending_expired")) == 1
    assert await builds.steps() == ["pending>errored expired 1"]
