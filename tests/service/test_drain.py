"""A drain through a whole Runtime: eight steps, each seen from outside, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from gracekit import (
    CallTimeoutError,
    Context,
    Draining,
    GracekitError,
    RpcClient,
    Runtime,
    Service,
    ServiceState,
    Settings,
)
from gracekit.control import MAX_PAGE
from gracekit.drain import ALARM_AFTER_HARD_LIMIT_S, DrainReport, StopRequest
from gracekit.errors import RunEndedError
from gracekit.process import Point
from gracekit.rpc.memory import MemoryBroker
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.testing.ports import PlayedProcess, PlayedTransport
from tests.service.kit import Doors, Fault, World

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


def run_row(world: World) -> dict[str, Any]:
    return world.rows("SELECT * FROM run ORDER BY started_at DESC LIMIT 1")[0]


# -- the steps ------------------------------------------------------------------------------


async def test_a_drain_takes_its_eight_steps_in_order(world: World, svc: Service):
    """
    Intent, intake, background, wait, hand-over, flush, stop, record: each before the next.
    """
    doors, seen = Doors(), []

    @svc.rpc
    async def work(ctx: Context) -> str:
        await doors.pass_("work")
        return "done"

    @svc.on_stop
    async def closing() -> None:
        seen.append(("on_stop", world.states(), run_row(world)["ended_at"]))

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="w").call(work))
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("intake.closed")
    row = run_row(world)
    assert (row["stop_source"], row["stop_by"], row["phase"]) == ("signal", "test", "draining")
    assert life.runtime.phase.state is ServiceState.DRAINING
    await asyncio.sleep(7)
    doors.open("work")

    report = await life.wait_end()

    assert await call == "done"
    steps = [n for n in life.names() if n.split(".")[0] in {"drain", "intake", "service", "task"}]
    assert steps[4:] == [
        "task.started",
        "drain.started",
        "task.awaited",
        "intake.closed",
        "drain.progress",
        "task.finished",
        "intake.closed",
        "service.stopped",
        "drain.finished",
    ]
    assert seen == [("on_stop", {"w": "succeeded"}, None)]
    assert life.runtime.phase.state is ServiceState.STOPPED
    assert (report.exit_code, report.finished, report.handed_over) == (0, 1, [])
    assert report.waited_s == pytest.approx(7, abs=0.1)
    row = run_row(world)
    assert (row["exit_code"], row["phase"]) == (0, "stopped")
    assert json.loads(row["report"]) == report.as_json()


async def test_an_idle_service_drains_at_once(world: World, svc: Service):
    """
    Nothing to wait for, nothing waited.
    """
    life = await world.start(svc)
    begun = now()
    report = await life.drain()

    assert now() - begun < 0.1
    assert (report.exit_code, report.must_die, report.waited_s) == (0, False, pytest.approx(0))


async def test_requests_sent_in_a_drain_stay_in_the_queue(world: World, svc: Service):
    """
    From the closing of intake on nothing is accepted; what was not accepted is for others.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, max_accepted=1)
    client = await world.client(svc)
    await client.cast(work, n=0)
    await doors.wait(1)
    await client.cast(work, n=1)  # delivered, waits for a place
    life.ask_to_stop()
    await life.hears("intake.closed")
    await client.cast(work, n=2)
    await asyncio.sleep(1)
    doors.open(0, 1, 2)
    report = await life.wait_end()

    assert world.broker.waiting("compute") == 2
    assert report.given_back == 1
    assert world.tally()["accepted"] == 1

    other = await world.start(svc)
    await other.hears("task.finished", 2)
    assert doors.ended == [0, 1, 2]


async def test_what_was_accepted_and_not_started_is_left_to_anyone(world: World, svc: Service):
    """
    The gate stops tasks that wait for their turn; they are listed, and run at the next start.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> int:
        await doors.pass_(n)
        return ctx.attempt

    life = await world.start(svc, max_running=1)
    client = await world.client(svc)
    calls = [
        asyncio.create_task(client.prepare(request_id=f"r{n}").call(work, n=n)) for n in range(3)
    ]
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("intake.closed")
    doors.open(0, 1, 2)
    report = await life.wait_end()

    assert report.not_started == ["r1", "r2"]
    assert report.exit_code == 75
    assert [world.task(f"r{n}")["owner"] for n in (1, 2)] == [None, None]
    assert doors.entered == [0]

    await world.start(svc)
    assert await asyncio.gather(*calls) == [1, 1, 1]


async def test_at_the_deadline_what_runs_is_handed_over(world: World, svc: Service):
    """
    Cancelled with a reason, recorded with cause and cursor, free at once; its lease stays with
    the process, which must therefore die.
    """
    begun, cause = asyncio.Event(), []

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        await ctx.safe_point(41)
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError as error:
            cause.append(str(error))
            raise

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work, vm="v")
    await begun.wait()
    asked_at = now()
    report = await life.drain()

    assert cause == ["drain deadline"]
    assert now() - asked_at == pytest.approx(25, abs=0.5)
    assert (report.handed_over, report.unclean, report.exit_code) == (["w"], [], 75)
    assert (report.leases_kept, report.must_die) == (1, True)
    row = world.task("w")
    assert (row["state"], row["cut"], row["owner"], row["cursor"]) == (
        "handed_over",
        "cancelled",
        None,
        "41",
    )
    assert row["crashes"] == 0
    assert world.rows("SELECT owner FROM lease") == [{"owner": life.runtime.run_id}]


async def test_a_handler_that_ignores_its_cancellation_holds_nobody(world: World, svc: Service):
    """
    After the grace it is recorded unclean and keeps its row; the end comes before the hard limit.
    """
    begun = asyncio.Event()

    @svc.rpc
    async def stubborn(ctx: Context) -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        await asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="s").cast(stubborn)
    await begun.wait()
    asked_at = now()
    report = await life.drain()

    assert (report.unclean, report.handed_over) == (["s"], [])
    assert (report.exit_code, report.must_die) == (75, True)
    assert now() - asked_at <= life.runtime.settings.hard_limit_s
    row = world.task("s")
    assert (row["state"], row["cut"], row["owner"]) == (
        "handed_over",
        "unclean",
        life.runtime.run_id,
    )
    assert [fields["task_id"] for fields in life.told("task.stuck")] == ["s"]


@pytest.mark.parametrize("on_interrupt", ["error", "retry", "probe"])
async def test_a_task_stops_at_its_safe_point_and_goes_on_from_there(
    world: World, svc: Service, on_interrupt: str
):
    """
    No interruption under any policy: cursor exact, lease returned, no item twice, none left out.
    """
    seen: list[int] = []
    third = asyncio.Event()

    @svc.rpc(resource="vm", on_interrupt=on_interrupt)
    async def copy(ctx: Context, vm: str) -> list[int]:
        async for block in ctx.steps(range(10)):
            seen.append(block)
            if block == 3:
                third.set()
            await asyncio.sleep(0.3)
        return [ctx.attempt, ctx.fence or 0]

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="c").call(copy, vm="v"))
    await third.wait()
    report = await life.drain()

    assert report.handed_over == ["c"]
    assert report.waited_s < 1
    assert (report.exit_code, report.must_die) == (75, False)
    row = world.task("c")
    assert (row["state"], row["cut"], row["owner"], row["cursor"]) == (
        "handed_over",
        "safe_point",
        None,
        "3",
    )
    assert world.rows("SELECT owner, release_reason FROM lease") == [
        {"owner": None, "release_reason": "handoff"}
    ]

    await world.start(svc)
    assert await call == [2, 2]
    assert seen == list(range(10))


async def test_a_requeue_task_is_given_back_and_journaled_when_it_comes_again(
    world: World, svc: Service
):
    """
    At the deadline it goes back to the transport; redelivered it has a row, so that a killer ends.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> int:
        await doors.pass_(ctx.attempt)
        return 5

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(request_id="q").call(read))
    await doors.wait(1)
    report = await life.drain()

    assert (report.given_back, report.handed_over, report.exit_code) == (1, [], 0)
    assert world.broker.waiting("compute") == 1
    assert world.states() == {}

    other = await world.start(svc)
    await doors.wait(2)
    assert world.task("q")["state"] == "running"
    assert world.task("q")["on_interrupt"] == "requeue"
    doors.open(1)
    assert await call == 5
    await other.drain()


async def test_all_that_goes_back_is_counted(world: World, svc: Service):
    """
    Two that were cut at the deadline, and one that was never accepted.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, max_accepted=2)
    client = await world.client(svc)
    for n in range(3):
        await client.cast(read, n=n)
    await doors.wait(2)
    report = await life.drain()

    assert report.given_back == 3
    assert world.broker.waiting("compute") == 3


@pytest.mark.parametrize(
    ("report", "code", "left"),
    [
        (DrainReport(finished=3, given_back=1, forced=True), 0, True),
        (DrainReport(handed_over=["r"]), 75, True),
        (DrainReport(not_started=["r"]), 75, True),
        (DrainReport(open_holds=1), 75, True),
        (DrainReport(unclean=["r"]), 75, False),
        (DrainReport(unfinished=1), 75, True),
        (DrainReport(unfinished=None), 75, True),
        (DrainReport(leases_kept=1), 0, False),
        (DrainReport(left_behind=1), 0, False),
        (DrainReport(handed_over=["r"], failure="no disk"), 70, True),
    ],
)
def test_a_report_says_how_it_ended_and_whether_anything_can_still_act(
    report: DrainReport, code: int, left: bool
):
    """
    Others believe `left` without a proof of death, so nothing may be able to act any more.
    """
    kept = report.as_json()

    assert (kept["exit_code"], kept["left"], report.must_die) == (code, left, not left)


@pytest.mark.parametrize("fault", [None, Fault.REFUSED])
async def test_a_row_of_ours_that_nobody_works_on_is_let_go_and_reported(
    world: World, svc: Service, fault: Fault | None
):
    """
    A commit of unknown end may have left it. What had begun counts as handed over, what had not as
    not started; one that recovery had only claimed is neither. A store that refuses is asked again.
    """
    world.expects_faults = fault is not None

    @svc.rpc
    async def work(ctx: Context) -> None:
        pass

    life = await world.start(svc)
    client = await world.client(svc)
    for request_id in ("running", "accepted", "handed_over"):
        await client.prepare(request_id=request_id).cast(work)
    await life.hears("task.finished", 3)
    world.disk.execute("UPDATE task SET state = request_id, finished_at = NULL, cut = 'cancelled'")
    if fault is not None:
        life.plan(Point.ADOPT, fault)
    report = await life.drain()

    assert (report.handed_over, report.not_started) == (["running"], ["accepted"])
    assert report.exit_code == 75
    owners = world.rows("SELECT owner, state FROM task ORDER BY id")
    assert owners == [
        {"owner": None, "state": "handed_over"},
        {"owner": None, "state": "accepted"},
        {"owner": None, "state": "handed_over"},
    ]


async def test_the_report_tells_everything(world: World, svc: Service):
    """
    What ended, what was handed over, not started, unclean, given back: each by its id, once.
    """
    begun: list[str] = []

    async def sleep(ctx: Context, seconds: float) -> None:
        begun.append(ctx.request_id)
        await asyncio.sleep(seconds)

    @svc.rpc
    async def work(ctx: Context, seconds: float) -> None:
        await sleep(ctx, seconds)

    @svc.rpc(max_running=1)
    async def single(ctx: Context) -> None:
        await sleep(ctx, 3)

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> None:
        await sleep(ctx, 3600)

    @svc.rpc
    async def stuck(ctx: Context) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await sleep(ctx, 3600)
        await asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="ends").cast(work, seconds=4)
    await client.prepare(request_id="cut").cast(work, seconds=3600)
    await client.prepare(request_id="one").cast(single)
    await client.prepare(request_id="two").cast(single)
    await client.prepare(request_id="read").cast(read)
    await client.prepare(request_id="stuck").cast(stuck)
    await world.until(lambda: len(begun) == 5)
    report = await life.drain()

    assert report.finished == 2
    assert report.handed_over == ["cut"]
    assert report.not_started == ["two"]
    assert report.unclean == ["stuck"]
    assert report.given_back == 1
    assert not report.forced
    assert report.exit_code == 75
    assert report.waited_s == pytest.approx(25, abs=0.2)
    (told,) = life.told("drain.finished")
    assert (told["finished"], told["handed_over"], told["not_started"]) == (2, 2, 1)


async def test_a_second_signal_of_the_right_kind_goes_to_the_deadline(world: World, svc: Service):
    """
    Forced: what runs is cancelled at once and handed over.
    """
    begun = asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await begun.wait()
    life.ask_to_stop()
    await life.hears("intake.closed")
    asked_at = now()
    life.runtime.coordinator.force()
    report = await life.wait_end()

    assert now() - asked_at < 1
    assert (report.forced, report.handed_over, report.exit_code) == (True, ["w"], 75)


async def test_progress_is_told_while_a_drain_waits(world: World, svc: Service):
    """
    Every few seconds: what is oldest, how long it has run, what time is left.
    """
    begun = asyncio.Event()

    @svc.rpc(resource="vm")
    async def work(ctx: Context, vm: str) -> None:
        begun.set()
        await asyncio.sleep(12)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work, vm="v1")
    await begun.wait()
    await life.drain()

    first, second = life.told("drain.progress")
    assert (first["running"], first["tasks"]) == (1, "work vm:v1 5.0s")
    assert second["left_s"] == pytest.approx(15, abs=0.2)


async def test_progress_lists_the_oldest_and_counts_the_rest(world: World, svc: Service):
    """
    A line is for people: five tasks, and how many more.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc)
    client = await world.client(svc)
    for n in range(7):
        await client.cast(work, n=n)
        await doors.wait(n + 1)
        await asyncio.sleep(1)
    life.ask_to_stop()
    told = await life.hears("drain.progress")
    doors.open(*range(7))
    await life.wait_end()

    assert told["tasks"] == "work 12.0s, work 11.0s, work 10.0s, work 9.0s, work 8.0s and 2 more"


async def test_the_alarm_counts_from_the_request(world: World, svc: Service):
    """
    The kernel ends a process that hangs half a second past the hard limit, however long it has run.
    """
    life = await world.start(svc, signals=True)
    await asyncio.sleep(100)
    await life.drain()

    assert life.process.alarms[0] == pytest.approx(29.5, abs=0.01)


# -- ops, holds, background ------------------------------------------------------------------


async def test_ops_are_answered_until_the_last_task_ends(world: World, svc: Service):
    """
    The ops server answers in a drain; methods that are not ops, and those that refuse, do not.
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
    """
    After the last task the ops lane stays open until it was idle once.
    """
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


async def test_an_ops_lane_that_never_rests_is_closed_all_the_same(world: World, svc: Service):
    """
    At most 5 s more; then the ops task is handed over, and what comes for it stays in the queue.
    """
    doors = Doors()

    @svc.ops(on_interrupt="retry")
    async def watch(ctx: Context) -> None:
        await doors.pass_("watch")

    @svc.ops
    async def ping(ctx: Context) -> None: ...

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="watch").cast(watch)
    await doors.wait(1)
    asked_at = now()
    life.ask_to_stop()
    await asyncio.sleep(5.5)
    await client.cast(ping)
    await world.settle()
    report = await life.wait_end()

    assert now() - asked_at == pytest.approx(5.5, abs=0.6)
    assert report.handed_over == ["watch"]
    assert world.broker.waiting("compute-ops") == 1


async def test_ops_deliveries_that_found_no_place_go_back_at_the_end(world: World, svc: Service):
    """
    And are counted as all else that goes back.
    """
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
    """
    What was accepted on the ops lane and never started is not started, not forgotten.
    """
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
    """
    The destination of a migration runs nothing between two calls, and yet stays.
    """

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
    assert life.runtime.phase.state is ServiceState.DRAINING
    assert await client.call(done, vm="v") is True
    report = await life.wait_end()

    assert report.waited_s == pytest.approx(12, abs=0.6)
    assert (report.exit_code, report.open_holds) == (0, 0)


async def test_a_hold_that_is_opened_in_a_drain_keeps_the_ops_lane_open(world: World, svc: Service):
    """
    Only a request that comes by it can end the hold.
    """
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
    """
    Nobody ends it: its time does.
    """

    @svc.rpc
    async def prepare_host(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most=8)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(prepare_host, vm="v")
    report = await life.drain()

    assert report.waited_s == pytest.approx(8, abs=0.6)
    assert report.open_holds == 0


async def test_a_hold_that_outlives_the_deadline_is_counted_and_named(world: World, svc: Service):
    """
    The drain ends in time; log and report say how many holds are open and which, and rows stay.
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


async def test_background_work_of_a_handler_is_waited_for(world: World, svc: Service):
    """
    `ctx.track` outlives the request that started it, and holds the drain.
    """
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
    """
    Like a handler.
    """
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


async def test_a_drain_starts_no_periodic_job_and_waits_for_a_running_one(
    world: World, svc: Service
):
    """
    Periodic jobs are refused in a drain; a running one finishes.
    """
    doors, ticks = Doors(), []

    @svc.periodic(every="10s")
    async def long_job(ctx: Context) -> None:
        await doors.pass_("job")

    @svc.periodic(every="1s")
    async def tick(ctx: Context) -> None:
        ticks.append(now())

    life = await world.start(svc)
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("intake.closed")
    before = len(ticks)
    await asyncio.sleep(6)
    assert len(ticks) == before
    doors.open("job")
    report = await life.wait_end()

    assert report.waited_s == pytest.approx(6, abs=0.1)
    assert doors.ended == ["job"]


async def test_a_periodic_job_never_overlaps_and_survives_its_faults(world: World, svc: Service):
    """
    The pause counts from the end; whatever a job raises, the next still comes.
    """
    starts = []

    @svc.periodic(every=10)
    async def job(ctx: Context) -> None:
        starts.append(now())
        await asyncio.sleep(5)
        if len(starts) == 2:
            raise ValueError("no")
        if len(starts) == 3:
            raise SystemExit(1)

    life = await world.start(svc)
    begun = now()
    await asyncio.sleep(72)

    assert [round(at - begun) for at in starts] == [10, 25, 40, 55, 70]
    assert len(life.told("hook.failed")) == 2
    await life.drain()


async def test_a_singleton_job_runs_in_one_process_of_the_store(world: World, svc: Service):
    """
    The others skip while it runs.
    """
    running, most = [0], [0]

    @svc.periodic(every=10, singleton=True)
    async def job(ctx: Context) -> None:
        assert ctx.fence is not None
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(15)
        running[0] -= 1

    for n in range(3):
        await world.start(svc, instance=f"i{n}")
    await asyncio.sleep(200)

    assert most == [1]


async def test_a_lease_that_lands_after_its_job_was_cancelled_is_given_back(
    world: World, svc: Service
):
    """
    A drain cuts a singleton job while the store takes its time over the lease: who leaves with 0
    leaves no lease behind.
    """

    world.expects_faults = True  # the stop-intent is behind it

    @svc.periodic(every=10, singleton=True)
    async def sweep(ctx: Context) -> None: ...

    life = await world.start(svc, drain_timeout_s=1)
    life.faults.delay_s = 3
    life.plan(Point.TAKE_LEASE, Fault.DELAY)
    await asyncio.sleep(10.5)
    report = await life.drain()

    assert report.exit_code == 0
    assert world.rows("SELECT lver, owner FROM lease") == [{"lver": 1, "owner": None}]


async def test_the_last_give_back_of_a_lease_is_bounded(world: World, svc: Service):
    """
    A store that stands still then does not hold the process until its alarm: our death frees the
    lease too.
    """
    world.expects_faults = True  # the stop record finds the store as it is

    @svc.periodic(every=10, singleton=True)
    async def sweep(ctx: Context) -> None: ...

    life = await world.start(svc, drain_timeout_s=1)
    hard_limit_s = life.runtime.settings.hard_limit_s
    life.faults.delay_s = 3
    life.plan(Point.TAKE_LEASE, Fault.DELAY)
    await asyncio.sleep(10.5)
    life.faults.delay_s = hard_limit_s
    life.plan(Point.RELEASE_LEASE, Fault.DELAY)
    begun = now()
    await life.drain()

    assert now() - begun < hard_limit_s


async def test_a_singleton_whose_holder_was_killed_runs_again_at_once(world: World, svc: Service):
    """
    A sibling that meets the dead one's lease has it looked at now, not at the next reconciliation.
    """
    ran_by = []

    @svc.periodic(every=1, singleton=True)
    async def job(ctx: Context) -> None:
        ran_by.append(ctx.fence)
        await asyncio.sleep(3600 if len(ran_by) == 1 else 0)

    victim = await world.start(svc, instance="a")
    await world.until(lambda: ran_by == [1])
    sibling = await world.start(svc, instance="b")
    await asyncio.sleep(100)
    assert ran_by == [1]
    await victim.crash()
    killed_at = now()
    await world.until(lambda: len(ran_by) > 1)

    assert now() - killed_at <= 3
    assert ran_by[1] > ran_by[0]
    assert len(sibling.told("run.classified")) == 1


# -- undo -------------------------------------------------------------------------------------


async def test_quiet_closes_intake_and_resume_opens_it(world: World, svc: Service):
    """
    What runs goes on; what waits for its turn is let go and taken again.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, max_running=1)
    client = await world.client(svc)
    for n in range(2):
        await client.prepare(request_id=f"r{n}").cast(work, n=n)
    await doors.wait(1)
    assert (await world.verb(life, "quiet"))["phase"] == "quiet"
    await client.prepare(request_id="r2").cast(work, n=2)
    doors.open(0, 1, 2)
    await asyncio.sleep(60)
    assert doors.ended == [0]
    assert world.state("r1") == "accepted"
    assert world.broker.waiting("compute") == 1

    await world.verb(life, "resume")
    await life.hears("task.finished", 3)
    assert set(doors.ended) == {0, 1, 2}
    report = await life.drain()
    assert (report.exit_code, report.not_started) == (0, [])


async def test_a_drain_after_quiet_lists_each_task_once(world: World, svc: Service):
    """
    What quiet has left unstarted is not counted twice.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    life = await world.start(svc, max_running=1)
    client = await world.client(svc)
    for n in range(2):
        await client.prepare(request_id=f"r{n}").cast(work, n=n)
    await doors.wait(1)
    await world.verb(life, "quiet")
    doors.open(0)
    report = await life.drain()

    assert report.not_started == ["r1"]


async def test_nothing_begins_behind_a_gate_that_was_shut(world: World, svc: Service):
    """
    A commit that outlasts the closing of intake lands in a quiet service: its task is handed over
    untouched, and begins when intake is open again.
    """
    starts = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        starts.append(ctx.attempt)

    life = await world.start(svc)
    client = await world.client(svc)
    life.faults.delay_s = 20
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.DELAY)
    await client.cast(work)
    await asyncio.sleep(1)
    await life.runtime.coordinator.quiet()
    await asyncio.sleep(60)
    assert starts == []
    assert world.rows("SELECT state, cut FROM task") == [
        {"state": "handed_over", "cut": "safe_point"}
    ]

    await life.runtime.coordinator.resume()
    await life.hears("task.finished")
    assert len(starts) == 1


async def test_a_drain_by_control_verb_can_be_resumed_while_it_waits(world: World, svc: Service):
    """
    The stop-intent is withdrawn, the alarm disarmed, everything opens again.
    """
    doors, ticks = Doors(), []

    @svc.rpc
    async def work(ctx: Context, n: int) -> int:
        await doors.pass_(n)
        return n

    @svc.rpc(on_interrupt="requeue", max_running=1)
    async def read(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    @svc.periodic(every=1)
    async def tick(ctx: Context) -> None:
        ticks.append(now())

    life = await world.start(svc, signals=True)
    client = await world.client(svc)
    await client.cast(work, n=0)
    await client.cast(read, n=1)
    await client.cast(read, n=2)
    await doors.wait(2)
    await world.verb(life, "drain", by="ann", reason="maintenance", timeout="1h")
    await life.hears("intake.closed")
    assert run_row(world)["stop_by"] == "ann"
    await asyncio.sleep(600)
    assert life.runtime.phase.state is ServiceState.DRAINING
    await world.verb(life, "resume")
    await life.hears("drain.resumed")

    assert life.runtime.phase.state is ServiceState.SERVING
    assert run_row(world)["stop_at"] is None
    assert life.process.alarms == [pytest.approx(3600 + 4.5, abs=0.2), None]
    assert life.runtime.phase.deadline is None
    before = len(ticks)
    doors.open(0, 1, 2, 3)
    assert await client.prepare(timeout=5).call(work, n=3) == 3
    await life.hears("task.finished", 2)
    await doors.wait(4)
    await asyncio.sleep(3)
    assert len(ticks) > before
    assert run_row(world)["phase"] == "serving"
    assert set(doors.ended) == {0, 1, 2, 3}
    report = await life.drain()
    assert (report.exit_code, report.given_back) == (0, 0)


async def test_the_platform_hears_of_a_stop_when_it_is_final_and_not_before(
    world: World, svc: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """
    STOPPING cannot be taken back: a signal's drain says it at once, an operator's when nothing is
    left to wait for.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as platform:
        platform.setblocking(False)
        platform.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def stops() -> list[bool]:
            told = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    told.append(platform.recv(4096).decode())
            # Three ticks of five seconds: the next sign of life comes long before.
            extended = [text for text in told if "EXTEND_TIMEOUT_USEC=15000000" in text]
            assert extended == [text for text in told if "STOPPING" in text or "draining" in text]
            return [True for text in told if "STOPPING=1" in text]

        for n, final in enumerate((False, True)):
            life = await world.start(svc)
            await (await world.client(svc)).cast(work, n=n)
            await doors.wait(n + 1)
            life.ask_to_stop(source="signal" if final else "operator", final=final)
            await asyncio.sleep(10)
            assert stops() == [True] * final
            doors.open(n)
            await life.wait_end()
            assert stops() == [True] * (not final)


async def test_a_drain_is_final_once_a_task_was_handed_over(world: World, svc: Service):
    """
    What left the process cannot be taken back.
    """
    doors = Doors()

    @svc.rpc
    async def copy(ctx: Context) -> None:
        async for _ in ctx.steps(range(100)):
            await asyncio.sleep(1)

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(copy)
    await client.cast(work)
    await doors.wait(1)
    await world.verb(life, "drain")
    await life.hears("task.handed_over")
    with pytest.raises(GracekitError, match="the drain is final"):
        await world.verb(life, "resume")
    doors.open("work")
    await life.wait_end()


async def test_a_drain_by_signal_is_final(world: World, svc: Service):
    """
    TERM cannot be undone.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work)
    await doors.wait(1)
    life.ask_to_stop()
    await life.hears("intake.closed")
    with pytest.raises(GracekitError, match="asked for by a signal"):
        await world.verb(life, "resume")
    doors.open("work")
    assert (await life.wait_end()).exit_code == 0


async def test_a_signal_makes_an_operators_drain_final_and_as_short_as_its_own(
    world: World, svc: Service
):
    """
    The platform will not wait an hour because an operator would.
    """
    begun = asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(7200)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await begun.wait()
    await world.verb(life, "drain", timeout="1h")
    await asyncio.sleep(60)
    life.ask_to_stop()
    with pytest.raises(GracekitError, match="final"):
        await world.verb(life, "resume")
    asked_at = now()
    report = await life.wait_end()

    assert now() - asked_at == pytest.approx(25, abs=0.5)
    assert report.handed_over == ["w"]


@pytest.mark.parametrize(("timeout_s", "waits_s"), [(5, 5), (3600, 25), (None, 25)])
async def test_of_a_signal_and_an_operator_before_the_drain_begins_the_shorter_counts(
    world: World, svc: Service, timeout_s: float | None, waits_s: float
):
    """
    Whoever asked first is on record, and it is final.
    """
    begun = asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        begun.set()
        await asyncio.sleep(7200)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await begun.wait()
    asked = StopRequest(
        source="operator", by="ann", reason="", final=False, at=now(), timeout_s=timeout_s
    )
    life.runtime.coordinator.request_stop(asked)
    life.ask_to_stop()
    report = await life.wait_end()

    assert now() - asked.at == pytest.approx(waits_s, abs=0.5)
    assert report.handed_over == ["w"]
    assert run_row(world)["stop_by"] == "ann"


async def test_a_signal_right_after_a_resume_is_not_lost(world: World, svc: Service):
    """
    Resume and TERM in the same moment: TERM wins.
    """
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work)
    await doors.wait(1)
    await world.verb(life, "drain")
    await life.hears("intake.closed")
    await life.runtime.coordinator.resume()
    life.ask_to_stop()
    doors.open("work")
    report = await life.wait_end()

    assert report.exit_code == 0
    assert "drain.resumed" not in life.names()


async def test_verbs_are_for_one_run_and_say_what_they_cannot_do(world: World, svc: Service):
    """
    A verb for another run, an unknown verb, a resume of nothing: each a clear error.
    """
    life = await world.start(svc)
    view = (await world.client(svc)).prepare(namespace="gracekit", ops=True)

    with pytest.raises(RunEndedError, match=r"run x of node-1-0 ended meanwhile.*gracekit status"):
        await view.call("drain", run_id="x")
    with pytest.raises(GracekitError, match="did you mean drain"):
        await view.call("drian", run_id=life.runtime.run_id)
    with pytest.raises(GracekitError, match="nothing to resume"):
        await world.verb(life, "resume")
    with pytest.raises(GracekitError, match="not a duration"):
        await world.verb(life, "drain", timeout="soon")
    status = await world.verb(life, "status")
    assert (status["phase"], status["in_flight"], status["tasks"]) == ("serving", 0, [])


async def test_the_status_of_many_tasks_is_paged_and_each_page_fits(world: World, svc: Service):
    """
    Whatever names the callers have chosen, and however many tasks end between two pages.
    """
    worst, gate = "\x01" * (MAX_NAME - 4), asyncio.Event()

    @svc.rpc(resource="thing")
    async def hold(ctx: Context, thing: str) -> None:
        await gate.wait()

    number = 2 * MAX_PAGE + 10
    life = await world.start(svc)
    client = await world.client(svc)
    for n in range(number):
        named = client.prepare(request_id=f"{worst}{n:04d}")
        await named.cast(hold, thing=f"{n}{chr(34) * 250}")
    await world.until(lambda: len(life.runtime.tracker) == number)

    first = await world.verb(life, "status")
    await world.verb(life, "cancel", task_id=first["tasks"][0]["task_id"])
    await world.until(lambda: len(life.runtime.tracker) == number - 1)
    second = await world.verb(life, "status", after=first["next"])
    third = await world.verb(life, "status", after=second["next"], limit=10**9)
    one = await world.verb(life, "status", task_id=second["tasks"][3]["task_id"])
    none = await world.verb(life, "status", limit=0)
    gate.set()

    seen = [task["task_id"] for page in (first, second, third) for task in page["tasks"]]
    assert len(seen) == len(set(seen)) == number
    assert (first["in_flight"], second["in_flight"]) == (number, number - 1)
    assert (third["next"], none["tasks"], none["longest"]["task_id"]) == (None, [], seen[1])
    assert one["tasks"][0]["task_id"] == second["tasks"][3]["task_id"]


# -- when steps fail ---------------------------------------------------------------------------


async def test_a_failing_step_does_not_stop_the_drain(world: World, svc: Service):
    """
    Intent, hooks and stop record may fail: each is told, and the next step begins.
    """
    doors = Doors()
    world.expects_faults = True

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    @svc.on_stop
    async def bad() -> None:
        raise ValueError("cannot close")

    @svc.on_stop
    async def worse() -> None:
        raise SystemExit(3)

    @svc.on_stop
    async def slow() -> None:
        await asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await doors.wait(1)
    life.plan(Point.STOP_INTENT, Fault.REFUSED)
    life.plan(Point.STOP_RECORD, Fault.REFUSED)
    life.ask_to_stop()
    await life.hears("intake.closed")
    doors.open("work")
    asked_at = now()
    report = await life.wait_end()

    assert report.exit_code == 0
    assert world.state("w") == "succeeded"
    assert {fields["step"] for fields in life.told("drain.step_failed")} == {
        "stop-intent",
        "stop record",
    }
    assert [fields["hook"] for fields in life.told("hook.failed")] == ["bad", "worse", "slow"]
    assert now() - asked_at < life.runtime.settings.hard_limit_s


async def test_a_hand_over_that_hangs_holds_nobody(world: World, svc: Service):
    """
    The row of a handler that did not return stays RUNNING, and the end comes all the same.
    """
    world.expects_faults = True
    begun = asyncio.Event()

    @svc.rpc
    async def stubborn(ctx: Context) -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(7200)
        await asyncio.sleep(7200)

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="s").cast(stubborn)
    await begun.wait()
    life.faults.delay_s = 3600.0
    life.plan(Point.HAND_OVER, Fault.DELAY)
    asked_at = now()
    report = await life.drain()

    assert now() - asked_at <= life.runtime.settings.hard_limit_s
    assert (report.unclean, report.must_die) == (["s"], True)
    assert "hand-over of stuck tasks" in {
        fields["step"] for fields in life.told("drain.step_failed")
    }


@pytest.mark.parametrize(
    ("port", "step", "late", "code"),
    [
        (
            *("store", "query"),
            {"count of holds", "freeing of rows", "count of rows", "stop record"},
            75,  # what is left is not known
        ),
        ("store", "stop_intent", {"stop-intent", "freeing of rows", "stop record"}, 0),
        ("store", "stop_record", {"stop record"}, 0),
        ("transport", "cancel", {"close of the ops intake"}, 0),
    ],
)
async def test_what_answers_nothing_holds_up_no_drain(
    world: World, svc: Service, port: str, step: str, late: set[str], code: int
):
    """
    A store that hangs in a question or a commit, a transport that confirms no cancel: each step
    has a time of its own, and together they stay below the hard limit.
    """
    world.expects_faults = True
    life = await world.start(svc)
    await asyncio.sleep(100)
    life.faults.delay_s = 3600.0
    life.faults.plan(port, step, Fault.DELAY, times=1000)
    asked_at = now()
    report = await life.drain()

    assert now() - asked_at <= life.runtime.settings.hard_limit_s
    assert (report.exit_code, report.open_holds) == (code, 0)
    assert {fields["step"] for fields in life.told("drain.step_failed")} == late


async def test_whatever_hangs_leaves_room_for_the_stop_record(world: World, svc: Service):
    """
    Each step before it ends so early that the record has 0.7 s until the kernel's alarm.
    """
    world.expects_faults = True
    begun, cut_at = asyncio.Event(), list[float]()

    @svc.rpc
    async def stubborn(ctx: Context) -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(7200)
        await asyncio.sleep(7200)

    async def slow() -> None:
        await asyncio.sleep(3600)

    for _ in range(20):  # each gets a moment at least
        svc.on_stop(slow)
    life = await world.start(svc, drain_timeout_s=5.0)
    await (await world.client(svc)).prepare(request_id="s").cast(stubborn)
    await begun.wait()
    life.runtime.telemetry.subscribe(
        lambda _, fields: cut_at.append(now()) if fields.get("step") == "stop" else None
    )
    life.faults.delay_s = 3600.0
    life.plan(Point.HAND_OVER, Fault.DELAY)
    life.faults.plan("transport", "cancel", Fault.DELAY, times=1000)
    asked_at = now()
    await life.drain()

    alarm_at = asked_at + life.runtime.settings.hard_limit_s + ALARM_AFTER_HARD_LIMIT_S
    assert alarm_at - cut_at[-1] >= 0.7


async def test_a_stop_hook_that_hangs_leaves_the_transport_a_moment(world: World, svc: Service):
    """
    It is cut before the step that it belongs to, so that the connection is still closed.
    """

    @svc.on_stop
    async def slow() -> None:
        await asyncio.sleep(3600)

    life = await world.start(svc, drain_timeout_s=5.0, stop_hook_timeout_s=60.0)
    await life.drain()

    assert [fields["hook"] for fields in life.told("hook.failed")] == ["slow"]
    assert life.told("drain.step_failed") == []


@pytest.mark.parametrize("delay_s", [0.7, 3600.0])
@pytest.mark.parametrize(("point", "asked_s"), [(Point.ACCEPT_AND_BEGIN, 0.1), (Point.FINISH, 2.9)])
async def test_a_slow_commit_is_waited_for_and_a_hung_one_is_not(
    world: World, svc: Service, point: Point, asked_s: float, delay_s: float
):
    """
    What is under way at the gate, or at the end of the wait, still counts if it comes in time; if
    it does not, the process leaves so that others can prove it dead.
    """
    world.expects_faults = True

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(3)

    life = await world.start(svc)
    life.faults.delay_s = delay_s
    life.plan(point, Fault.DELAY)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await asyncio.sleep(asked_s)
    asked_at = now()
    report = await life.drain()

    assert now() - asked_at <= life.runtime.settings.hard_limit_s
    hung = delay_s > 1
    assert report.must_die is hung
    assert (report.finished, report.left_behind + len(report.unclean)) == (not hung, hung)
    if not hung:
        assert (world.state("w"), report.exit_code) == ("succeeded", 0)


async def test_a_claim_that_a_slow_store_takes_late_is_let_go_of(world: World, svc: Service):
    """
    It was submitted before the drain and lands during its last steps: the row is nobody's then.
    """
    world.expects_faults = True
    ends = Doors()

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context, n: int) -> None:
        await ends.pass_(n)

    former = await world.start(svc, max_running=1)
    client = await world.client(svc)
    for n in range(2):
        await client.prepare(request_id=f"w{n}").cast(work, n=n)
    await ends.wait(1)
    former.ask_to_stop()
    await asyncio.sleep(1)
    ends.open(0)
    assert (await former.wait_end()).not_started == ["w1"]

    life = world.life(svc, drain_timeout_s=1)
    life.faults.delay_s = 1.5
    life.plan(Point.CLAIM, Fault.DELAY)
    await life.start()
    await asyncio.sleep(0.01)
    report = await life.drain()

    assert ends.entered == [0]
    assert (report.unfinished, world.task("w1")["owner"]) == (1, None)


async def test_a_hand_over_that_cannot_be_written_is_found_at_the_next_start(
    world: World, svc: Service
):
    """
    The row stays RUNNING; the next run sees that its owner is gone.
    """
    begun, runs = asyncio.Event(), []

    @svc.rpc(on_interrupt="retry", settle=1)
    async def work(ctx: Context) -> None:
        runs.append(ctx.attempt)
        begun.set()
        if ctx.attempt == 1:
            await asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await begun.wait()
    life.plan(Point.HAND_OVER, Fault.REFUSED, times=3)
    report = await life.drain()
    assert report.exit_code == 70
    assert world.state("w") == "running"

    await world.start(svc)
    await world.until(lambda: world.state("w") == "succeeded")
    assert runs == [1, 2]


async def test_a_start_that_fails_is_undone_in_order(world: World, svc: Service):
    """
    A failing on_start ends in a stop with exit 70 on record; the error comes out.
    """
    stopped = []

    @svc.on_start
    async def broken() -> None:
        raise RuntimeError("no backend")

    @svc.on_stop
    async def closing() -> None:
        stopped.append(1)

    life = world.life(svc)
    with pytest.raises(RuntimeError, match="no backend"):
        await life.start()

    assert stopped == [1]
    row = run_row(world)
    assert (row["exit_code"], row["stop_source"]) == (70, "error")
    assert "no backend" in json.loads(row["report"])["failure"]


async def test_a_stop_during_the_start_ends_the_start(world: World, svc: Service):
    """
    A signal while on_start hangs: no requests were taken, and the end is in order.
    """
    entered = asyncio.Event()

    @svc.on_start
    async def hangs() -> None:
        entered.set()
        await asyncio.sleep(3600)

    life = world.life(svc)
    starting = world.spawn_as(life, life.start())
    await entered.wait()
    life.ask_to_stop()
    await starting
    report = await life.wait_end()

    assert report.exit_code == 0
    assert "service.serving" not in life.names()


async def test_an_embedded_block_drains_at_its_end():
    """
    `async with Runtime(...)`: leaving the block is the drain, also with `serve()` beside it.
    """
    svc = Service("compute")
    done = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(3)
        done.append(1)

    settings = Settings(transport_url="memory://", store_url="memory://", host="h")
    broker = MemoryBroker()
    async with Runtime(svc, settings, broker=broker) as runtime:
        serving = asyncio.create_task(runtime.serve())
        transport = PlayedTransport(broker, PlayedProcess(set(), 1))
        await transport.start()
        await RpcClient(transport, "compute").cast(work)
        await asyncio.sleep(1)

    assert done == [1]
    assert (await serving).exit_code == 0


async def test_a_call_in_flight_survives_the_restart(world: World, svc: Service):
    """
    The caller of a task that was handed over is answered by the next owner.
    """

    @svc.rpc
    async def copy(ctx: Context) -> int:
        async for _ in ctx.steps(range(20)):
            await asyncio.sleep(1)
        return ctx.attempt

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.call(copy))
    await asyncio.sleep(5)
    await life.drain()
    await world.start(svc)

    assert await call == 2


async def test_the_caller_of_a_task_cut_for_good_hears_of_it(world: World, svc: Service):
    """
    The next start marks it ERRORED and answers; nobody waits for nothing.
    """

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(3600)

    life = await world.start(svc)
    client = await world.client(svc)
    call = asyncio.create_task(client.prepare(timeout=300, request_id="w").call(work))
    await asyncio.sleep(1)
    await life.drain()
    assert world.state("w") == "handed_over"
    await world.start(svc)

    with pytest.raises(GracekitError, match=r"marked ERRORED\(interrupted\)") as caught:
        await call
    assert not isinstance(caught.value, CallTimeoutError)


# -- undone, and in trouble -----------------------------------------------------------------


async def test_a_resume_whose_first_consume_fails_tries_again(world: World, svc: Service):
    """
    A transport that refuses once does not leave a service that says it serves and takes nothing.
    """
    world.expects_faults = True

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> int:
        return 1

    life = await world.start(svc)
    client = await world.client(svc)
    await life.runtime.coordinator.quiet()
    life.plan("consume", Fault.REFUSED)
    await life.runtime.coordinator.resume()

    assert await client.prepare(timeout=30).call(work) == 1
    assert not life.runtime.reconciler.is_paused()


async def test_a_stop_that_comes_while_intake_reopens_stands(world: World, svc: Service):
    """
    SIGTERM in the middle of a resume: recovery and periodic jobs stay paused in the drain.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work)
    await doors.wait(1)
    await life.runtime.coordinator.quiet()
    life.faults.delay_s = 0.2
    life.plan("consume", Fault.DELAY)
    resuming = world.spawn_as(life, life.runtime.coordinator.resume())
    await asyncio.sleep(0.1)
    life.ask_to_stop()
    await asyncio.sleep(1)

    assert life.runtime.phase.state is ServiceState.DRAINING
    assert life.runtime.reconciler.is_paused()
    doors.open("work")
    await asyncio.wait({resuming})


async def test_a_release_that_fails_is_made_up_for(world: World, svc: Service):
    """
    A singleton job, and a lease taken in a handler, are not lost for the life of the process.
    """
    world.expects_faults = True
    ticks, done = [], []

    @svc.periodic(every="10s", singleton=True)
    async def tick(ctx: Context) -> None:
        ticks.append(now())

    @svc.rpc
    async def borrow(ctx: Context) -> None:
        async with ctx.lease("vm", "1"):
            pass

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def change(ctx: Context, vm: str) -> None:
        done.append(vm)

    life = await world.start(svc)
    client = await world.client(svc)
    life.plan(Point.RELEASE_LEASE, Fault.REFUSED, times=2)
    await client.call(borrow)
    await client.cast(change, vm="1")
    await world.until(lambda: len(ticks) > 3 and bool(done), within_s=200)
