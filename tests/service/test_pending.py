"""A task whose handler finds no capacity: what parks it, what its callers get, and what is free."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Context, NoCapacity, Parked, Service
from gracekit.errors import MethodTimeoutError, RemoteError
from tests.service.kit import Doors, World, now
from tests.service.parked import TIMEOUT_S, Builds, full_placement

pytestmark = pytest.mark.looptime


@pytest.fixture
def svc() -> Service:
    return Service("compute", task_api=True)


# -- in ----------------------------------------------------------------------------------------


async def test_a_parked_task_waits_without_owner_and_keeps_what_it_needs(
    world: World, svc: Service
):
    """PENDING in one commit: no owner, a free lease, its arguments, what is missing, and the
    deadline.
    """
    builds = Builds(world, svc)
    life = await builds.start()

    parked = await builds.park(memory_mb=5)

    row = builds.row()
    deadline = world.clock.wall() + TIMEOUT_S
    assert (parked.task_id, parked.version) == ("t", 1)
    assert parked.deadline == pytest.approx(deadline, abs=1)
    assert row["pending_deadline"] == parked.deadline
    assert (row["state"], row["owner"], row["reason"]) == ("pending", None, "no_capacity")
    assert (row["args"], row["requested"]) == ('{"vm":"v","memory_mb":5}', '{"memory_mb":5}')
    assert (row["detail"], row["finished_at"]) == ("no host has 5 MiB free", None)
    assert world.rows("SELECT owner FROM lease") == [{"owner": None}]
    assert (world.tally()["parked"], len(world.incidents("parked"))) == (1, 1)
    assert life.told("task.failed") == []
    assert builds.hooks == []
    await world.settle()
    assert len(life.runtime.ground.tracker) == 0
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])


async def test_without_the_setting_the_task_has_failed(world: World, svc: Service):
    """NoCapacity is a failure as any other, for callers of both kinds; nothing is notified."""
    builds = Builds(world, svc)
    await builds.start(use_pending_state=False)

    with pytest.raises(NoCapacity, match="no host has 5 MiB free"):
        await builds.call(memory_mb=5)

    row = builds.row()
    assert (row["state"], row["parkings"], row["pending_deadline"]) == ("failed", 0, None)
    assert row["owner"] is not None
    assert builds.unsent() == []
    assert await builds.read() == []
    assert "parked" not in world.tally()


async def test_callers_of_both_kinds_are_answered_at_once(world: World, svc: Service):
    """`Parked` for the caller that has said that it knows the state, NoCapacity for any other, also
    where both wait for one request.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        await doors.pass_("b")
        raise NoCapacity("full")

    await world.start(svc, use_pending_state=True)
    client = await world.client(svc)
    one = client.prepare(request_id="t", timeout=30)
    calls = [
        asyncio.create_task(view.call(build))
        for view in (one.prepare(pending=True), one, one.prepare(pending=True), one)
    ]
    await doors.wait(1)
    await world.until(lambda: len(world.rows("SELECT * FROM reply")) == 4)
    begun = now()
    doors.open("b")

    answers = await asyncio.gather(*calls, return_exceptions=True)

    assert [type(answer) for answer in answers] == [Parked, NoCapacity, Parked, NoCapacity]
    assert now() - begun < 1
    assert doors.entered == ["b"]
    await world.settle()
    await world.until(lambda: world.rows("SELECT * FROM reply") == [])


@pytest.mark.parametrize(
    ("details", "text"),
    [("full", "no host has 5 MiB free"), ("message", "no host has 5 MiB free"), ("none", "")],
)
async def test_what_is_shown_of_no_capacity_follows_error_details(
    world: World, svc: Service, details: str, text: str
):
    """The traceback only with `full`, the handler's words not with `none`; `Parked` has neither."""
    builds = Builds(world, svc)
    await builds.start(error_details=details)
    client = await builds.client()

    with pytest.raises((NoCapacity, RemoteError)) as plain:
        await client.prepare(request_id="t").call(builds.build, vm="v", memory_mb=5)
    again = await builds.park(memory_mb=5)

    assert text in str(plain.value)
    assert ("no host" in str(plain.value)) == bool(text)
    assert (again.task_id, again.version) == ("t", 1)
    assert "no host" not in str(again)


async def test_the_resource_is_free_while_its_task_waits(world: World, svc: Service):
    """Lease, line and place in the lane go back: another request for the same VM runs meanwhile."""
    builds = Builds(world, svc)

    @svc.rpc(resource="vm")
    async def look(ctx: Context, vm: str) -> int | None:
        return ctx.fence

    await builds.start(max_running=1)
    await builds.park(memory_mb=5)

    assert await (await builds.client()).prepare(timeout=1).call(look, vm="v") == 2
    assert builds.state() == "pending"


async def test_a_subclass_of_no_capacity_parks(world: World, svc: Service):
    """What an application derives counts, and is on record under its own name."""

    class NoValidHost(NoCapacity):
        pass

    @svc.rpc(on_interrupt="error")
    async def build(ctx: Context) -> None:
        raise NoValidHost("none", requested={"vcpus": 2})

    await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").cast(build)
    await world.until(lambda: world.state("t") == "pending")

    assert world.task("t")["requested"] == '{"vcpus":2}'
    assert '"NoValidHost"' in world.task("t")["failure"]


async def test_a_plain_def_parks(world: World, svc: Service):
    """A handler in a thread raises it as others do."""

    @svc.rpc(on_interrupt="retry")
    def grind(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise NoCapacity("full")
        return "built"

    builds = Builds(world, svc)
    await builds.start()
    await (await builds.client()).prepare(request_id="t").cast(grind)
    await builds.ends("pending")
    await builds.order("retry")

    await builds.ends("succeeded")


async def test_an_ops_method_parks_and_runs_again(world: World, svc: Service):
    """The lane makes no difference: it has a row as others do."""

    @svc.ops(on_interrupt="retry")
    async def move(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise NoCapacity("full")
        return "built"

    builds = Builds(world, svc)
    await builds.start()
    await (await builds.client()).prepare(ops=True, request_id="t").cast(move)
    await builds.ends("pending")
    await builds.order("retry")

    await builds.ends("succeeded")


# -- not in ------------------------------------------------------------------------------------


async def test_a_requeue_request_has_failed_although_the_setting_is_on(world: World, svc: Service):
    """It has no row that could wait."""

    @svc.rpc(on_interrupt="requeue")
    async def build(ctx: Context) -> None:
        raise NoCapacity("full")

    await world.start(svc, use_pending_state=True)

    with pytest.raises(NoCapacity, match="full"):
        await (await world.client(svc)).prepare(pending=True).call(build)
    assert world.rows("SELECT * FROM task WHERE state = 'pending'") == []
    assert world.rows("SELECT * FROM outbox") == []


async def test_a_requeue_request_that_came_again_has_failed(world: World, svc: Service):
    """After a crash it has a row, and is no more parked than before."""
    seen: list[int] = []

    @svc.rpc(on_interrupt="requeue", settle=0)
    async def build(ctx: Context) -> None:
        seen.append(ctx.attempt)
        if len(seen) == 1:
            await asyncio.sleep(1000)
        raise NoCapacity("full")

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").cast(build)
    await world.until(lambda: bool(seen))
    await life.crash()
    await world.start(svc, use_pending_state=True)
    await world.until(lambda: world.state("t") not in {"", "running", "accepted"})

    assert (world.state("t"), len(seen)) == ("failed", 2)


async def test_a_copy_of_a_fanout_has_failed(world: World, svc: Service):
    """Each instance has its own copy: nobody could let "the task" run again."""

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        raise NoCapacity("full")

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").fanout(build)
    await life.hears("task.finished")

    assert [row["state"] for row in world.rows("SELECT state FROM task")] == ["failed"]


async def test_no_capacity_of_a_callee_parks_only_where_it_is_raised_anew(
    world: World, svc: Service
):
    """It is another task's; the handler that means its own raises a new one."""
    placement, claim = await full_placement(world)

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context, how: str) -> None:
        try:
            await placement.call(claim)
        except NoCapacity as error:
            if how == "passed on":
                raise
            raise NoCapacity(f"placement says {error}") from error

    await world.start(svc, use_pending_state=True)
    client = await world.client(svc)
    for how in ("passed on", "anew"):
        with pytest.raises(NoCapacity, match="no inventory"):
            await client.prepare(request_id=how).call(build, how=how)

    assert world.states()["passed on"] == "failed"
    assert world.states()["anew"] == "pending"


async def test_a_group_that_holds_no_capacity_has_failed(world: World, svc: Service):
    """It may hold anything else besides: the handler unwraps it if it means one of them."""

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self_parking())

    async def self_parking() -> None:
        raise NoCapacity("full")

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").cast(build)
    await life.hears("task.finished")

    assert world.state("t") == "failed"


async def test_what_a_timed_out_handler_raises_parks_nothing(world: World, svc: Service):
    """The timeout is the outcome, whatever the clean-up ends with."""

    @svc.rpc(on_interrupt="retry", timeout=5)
    async def build(ctx: Context) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            raise NoCapacity("full") from None

    await world.start(svc, use_pending_state=True)

    with pytest.raises(MethodTimeoutError):
        await (await world.client(svc)).prepare(request_id="t", pending=True).call(build)
    await world.until(lambda: world.state("t") == "failed")


async def test_what_a_drain_has_cut_is_handed_over(world: World, svc: Service):
    """Interrupted is not parked: the next start runs it again, and may park it then."""

    @svc.rpc(on_interrupt="retry", settle=0)
    async def build(ctx: Context) -> None:
        try:
            await asyncio.sleep(1000 if ctx.attempt == 1 else 0)
        except asyncio.CancelledError:
            raise NoCapacity("full") from None
        raise NoCapacity("still full")

    life = await world.start(svc, use_pending_state=True, drain_timeout_s=5)
    await (await world.client(svc)).prepare(request_id="t").cast(build)
    await life.hears("task.started")
    await life.drain()
    assert world.state("t") == "handed_over"
    await world.start(svc, use_pending_state=True)

    await world.until(lambda: world.state("t") == "pending")
    assert world.task("t")["detail"] == "still full"


async def test_a_drain_that_waits_lets_a_task_be_parked(world: World, svc: Service):
    """Before its deadline nothing was cut; the task is left to its resolver, and the end is 0."""
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        await doors.pass_("b")
        raise NoCapacity("full")

    life = await world.start(svc, use_pending_state=True)
    await (await world.client(svc)).prepare(request_id="t").cast(build)
    await doors.wait(1)
    life.ask_to_stop()
    await asyncio.sleep(1)
    doors.open("b")
    report = await life.wait_end()

    assert (world.state("t"), report.exit_code, report.unfinished) == ("pending", 0, 0)
    assert world.rows("SELECT * FROM outbox") == []
