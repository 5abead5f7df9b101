"""What a drain waits for: the ops lane, holds, background work."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import (
    Context,
    Draining,
    RpcClient,
    Service,
    ServiceState,
)
from tests.service.kit import Doors, Systemd, World, now

pytestmark = pytest.mark.looptime


async def test_ops_are_answered_until_the_last_task_ends(world: World, svc: Service):
    """The ops server answers in a drain; methods that are not ops, and those that refuse, do
    not.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    @svc.ops
    async def ping(ctx: Context) -> str:
        return "pong"

    @svc.ops(in_drain="refuse")
    async def begin_other(ctx: Context) -> str:
        return "begun"

    life = await world.start(svc)
    client = await world.client(svc)
    assert await client.call(begin_other) == "begun"
    await client.cast(work)
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("intake.closed")
    for _ in range(3):
        await asyncio.sleep(5)
        assert await client.prepare(timeout=1).call(ping) == "pong"
    with pytest.raises(Draining, match="does not take begin_other"):
        await client.call(begin_other)
    with pytest.raises(Draining, match="does not take work"):
        await client.prepare(ops=True).call(work)
    doors.open("work")
    report = await life.wait_end()

    assert report.exit_code == 0
    rejected = world.rows("SELECT reason FROM task WHERE state = 'rejected'")
    assert [row["reason"] for row in rejected] == ["draining", "draining"]


async def test_a_last_ops_task_gets_its_callback(world: World, svc: Service):
    """After the last task the ops lane stays open until it was idle once."""
    doors = Doors()

    @svc.ops
    async def finish(ctx: Context) -> None:
        await doors.pass_("finish")

    @svc.ops
    async def callback(ctx: Context) -> str:
        return "called back"

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(finish)
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("intake.closed")
    await asyncio.sleep(2)
    assert await client.prepare(timeout=1).call(callback) == "called back"
    doors.open("finish")
    asked_at = now()
    report = await life.wait_end()

    assert now() - asked_at < 1
    assert report.exit_code == 0


async def test_an_ops_task_is_awaited_to_its_end(world: World, svc: Service):
    """A drain with the time for it ends no resize on the ops topic."""

    @svc.ops
    async def resize(ctx: Context) -> str:
        await ctx.safe_point(1)  # a drain stops no ops task there
        await asyncio.sleep(50)
        await ctx.safe_point(2)
        return "resized"

    life = await world.start(svc, drain_timeout_s=60.0)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=100).call(resize))
    await world.until(lambda: list(world.states().values()) == ["running"])
    report = await life.drain()

    assert await call == "resized"
    assert (report.exit_code, report.waited_s) == (0, pytest.approx(50, abs=1))


async def test_ops_are_answered_as_long_as_an_awaited_ops_task_runs(world: World, svc: Service):
    """It may need another ops request; a later one is awaited too, behind a closed intake."""
    doors = Doors()

    @svc.ops
    async def resize(ctx: Context) -> None:
        await doors.pass_("resize")

    @svc.ops
    async def finish(ctx: Context) -> None:
        await doors.pass_("finish")

    @svc.ops
    async def ping(ctx: Context) -> str:
        return "pong"

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(resize)
    await doors.wait(1)
    life.ask_to_stop()
    await asyncio.sleep(10)  # past `ops_quiet_timeout`
    assert await client.prepare(timeout=1).call(ping) == "pong"
    await client.prepare(request_id="late").cast(finish)
    await doors.wait(2)
    doors.open("resize")
    await life.hears("intake.closed", 2)
    await client.cast(ping)
    await asyncio.sleep(5)
    assert not life.told("service.stopped")
    doors.open("finish")
    report = await life.wait_end()

    assert (report.exit_code, world.state("late")) == (0, "succeeded")
    assert world.broker.waiting("compute-ops") == 1


async def test_steady_polling_does_not_hold_a_drain(world: World, svc: Service):
    """The ops lane is never idle, and closes when the requests of the first five seconds have
    ended.
    """

    @svc.ops(on_interrupt="requeue")
    async def poll(ctx: Context) -> None:
        await asyncio.sleep(2)

    async def ask(client: RpcClient) -> None:
        while True:
            await client.cast(poll)
            await asyncio.sleep(0.5)

    life = await world.start(svc)
    polling = asyncio.create_task(ask(await world.client(svc)))
    await asyncio.sleep(3)
    report = await life.drain()
    polling.cancel()

    assert report.exit_code == 0
    assert report.waited_s == pytest.approx(9, abs=1)  # 5 s, the last one's 2 s, and later ones


async def test_a_drain_that_awaits_an_ops_task_can_be_undone(world: World, svc: Service):
    """An operator's drain is not final yet, and the service goes on with that task."""
    doors = Doors()

    @svc.ops
    async def resize(ctx: Context) -> str:
        await doors.pass_("resize")
        return "resized"

    @svc.rpc
    async def build(ctx: Context) -> str:
        return "built"

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=100).call(resize))
    await doors.wait(1)
    await world.verb(life, "drain")
    await asyncio.sleep(10)
    await world.verb(life, "resume")
    await life.hears("intake.opened")

    assert await client.call(build) == "built"
    doors.open("resize")
    assert await call == "resized"


async def test_an_ops_task_that_outlives_the_deadline_is_handed_over(world: World, svc: Service):
    """Like every other task."""
    doors = Doors()

    @svc.ops(on_interrupt="retry")
    async def watch(ctx: Context) -> None:
        await doors.pass_("watch")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="watch").cast(watch)
    await doors.wait(1)
    report = await life.drain()

    assert report.waited_s == pytest.approx(25, abs=0.5)
    assert (report.exit_code, report.handed_over) == (75, ["watch"])


async def test_ops_deliveries_that_found_no_place_go_back_at_the_end(world: World, svc: Service):
    """And are counted as all else that goes back."""
    doors = Doors()

    @svc.ops
    async def look(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, ops_max_accepted=1, ops_max_running=1, ops_threads=1)
    client = await world.client(svc)
    for n in range(2):
        await client.cast(look, n=n)
    await doors.wait(1)
    report = await life.drain()

    assert report.given_back == 1
    assert doors.entered == [0]


async def test_ops_tasks_that_wait_for_a_slot_at_the_end_are_listed(world: World, svc: Service):
    """What was accepted on the ops lane and never started is not started, not forgotten."""
    doors = Doors()

    @svc.ops
    async def watch(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, ops_max_running=1)
    client = await world.client(svc)
    for n in range(2):
        await client.prepare(request_id=f"o{n}").cast(watch, n=n)
    await doors.wait(1)
    report = await life.drain()

    assert report.handed_over == ["o0"]
    assert report.not_started == ["o1"]
    assert world.task("o1")["owner"] is None


async def test_a_hold_keeps_the_host_until_it_is_ended(world: World, svc: Service):
    """The destination of a migration runs nothing between two calls, and yet stays."""

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="15m")

    @svc.ops
    async def done(ctx: Context, vm: str) -> bool:
        return await ctx.end_hold("migration", vm)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(prepare_host, vm="v")
    life.ask_to_stop()
    await asyncio.sleep(12)
    assert life.runtime.state is ServiceState.DRAINING
    assert await client.call(done, vm="v") is True
    report = await life.wait_end()

    assert report.waited_s == pytest.approx(12, abs=0.6)
    assert (report.exit_code, report.open_holds) == (0, 0)


async def test_a_hold_that_is_opened_in_a_drain_keeps_the_ops_lane_open(world: World, svc: Service):
    """Only a request that comes by it can end the hold."""
    doors = Doors()

    @svc.ops
    async def prepare_host(ctx: Context, vm: str) -> None:
        await doors.pass_(vm)
        await ctx.hold("migration", vm, at_most="15m")

    @svc.ops
    async def done(ctx: Context, vm: str) -> bool:
        return await ctx.end_hold("migration", vm)

    life = await world.start(svc)
    client = await world.client(svc)
    preparing = asyncio.create_task(client.call(prepare_host, vm="v"))
    await doors.wait(1)
    life.ask_to_stop()
    await asyncio.sleep(1)
    doors.open("v")
    await preparing
    await asyncio.sleep(10)
    assert await client.prepare(timeout=2).call(done, vm="v") is True
    report = await life.wait_end()

    assert (report.exit_code, report.open_holds) == (0, 0)
    assert report.waited_s == pytest.approx(11, abs=1)


async def test_a_hold_lapses(world: World, svc: Service):
    """Nobody ends it: its time does."""

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most=8)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(prepare_host, vm="v")
    report = await life.drain()

    assert report.waited_s == pytest.approx(8, abs=0.6)
    assert report.open_holds == 0


async def test_a_hold_that_has_lapsed_and_is_opened_again_is_shown_again(
    world: World, svc: Service
):
    """It is the same row, and the drain waits for it."""

    @svc.rpc
    async def expect(ctx: Context, at_most: str) -> None:
        await ctx.hold("migration", "v", at_most=at_most)

    @svc.ops
    async def expect_again(ctx: Context) -> None:
        await ctx.hold("migration", "v", at_most="10s")

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(12)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(expect, at_most="2s")
    await client.cast(work)
    await world.until(lambda: "running" in world.states().values())
    life.ask_to_stop()
    await life.hears("hold.ended")
    await client.call(expect_again)
    await life.wait_end()

    assert [name for name in life.names() if name.startswith("hold.")] == [
        *("hold.awaited", "hold.ended", "hold.awaited", "hold.ended")
    ]


async def test_a_hold_that_outlives_the_deadline_is_counted_and_named(world: World, svc: Service):
    """The drain ends in time; log and report say how many holds are open and which, and rows
    stay.
    """

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="1h")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(prepare_host, vm="v")
    report = await life.drain()

    assert (report.open_holds, report.holds) == (1, ["migration v"])
    assert report.waited_s == pytest.approx(25, abs=0.6)
    assert {told["holds"] for told in life.told("drain.progress")} == {"migration v"}
    (finished,) = life.told("drain.finished")
    assert (finished["open_holds"], finished["holds"]) == (1, "migration v")
    (hold,) = world.rows("SELECT ended_at, args FROM hold")
    assert hold == {"ended_at": None, "args": '{"vm":"v"}'}


async def test_a_hold_is_reported_open_beside_a_task_that_was_handed_over(
    world: World, svc: Service
):
    """The drain waits for the task until the deadline, and yet says which hold it leaves."""

    @svc.rpc
    async def migrate(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="15m")

    @svc.rpc(on_interrupt="retry")
    async def copy(ctx: Context) -> None:
        await asyncio.sleep(7200)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(migrate, vm="v")
    await client.prepare(request_id="c").cast(copy)
    await world.until(lambda: world.state("c") == "running")
    report = await life.drain()

    assert report.handed_over == ["c"]
    assert (report.open_holds, report.holds) == (1, ["migration v"])
    (finished,) = life.told("drain.finished")
    assert (finished["open_holds"], finished["holds"]) == (1, "migration v")


async def test_holds_are_named_while_tasks_still_run(world: World, svc: Service, systemd: Systemd):
    """The log and systemd's status say what the drain waits for: tasks and holds, from its
    begin.
    """

    @svc.rpc
    async def migrate(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="15m")

    @svc.rpc(on_interrupt="retry")
    async def copy(ctx: Context) -> None:
        await asyncio.sleep(7200)

    systemd.listen()
    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(migrate, vm="v")
    await client.prepare(request_id="c").cast(copy)
    await world.until(lambda: world.state("c") == "running")
    await life.drain()

    first, *_ = life.told("drain.progress")
    assert (first["running"], first["open_holds"], first["holds"]) == (1, 1, "migration v")
    assert first["tasks"].startswith("copy ")
    assert "draining: 1 running, 1 hold, no progress for 5s" in systemd.statuses()


async def test_background_work_of_a_handler_is_waited_for(world: World, svc: Service):
    """`ctx.track` outlives the request that started it, and holds the drain."""
    tasks, ended = [], []

    @svc.rpc
    async def kick_off(ctx: Context) -> None:
        async def sync() -> None:
            async with ctx.track("sync"):
                await asyncio.sleep(9)
                ended.append(1)

        tasks.append(asyncio.create_task(sync()))

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(kick_off)
    report = await life.drain()

    assert ended == [1]
    assert report.waited_s == pytest.approx(9, abs=0.1)


async def test_background_work_is_cancelled_at_the_deadline(world: World, svc: Service):
    """Like a handler."""
    tasks = []

    @svc.rpc
    async def kick_off(ctx: Context) -> None:
        async def sync() -> None:
            async with ctx.track("sync"):
                await asyncio.sleep(3600)

        tasks.append(asyncio.create_task(sync()))

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(kick_off)
    report = await life.drain()

    assert tasks[0].cancelled()
    assert report.waited_s == pytest.approx(25, abs=0.1)
    assert not report.must_die
