"""A drain through a whole Runtime: eight steps, each seen from outside, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from gracekit import (
    CallTimeoutError,
    Context,
    GracekitError,
    RpcClient,
    Runtime,
    Service,
    ServiceState,
    Settings,
)
from gracekit.drain.report import DrainReport
from gracekit.process import Point
from gracekit.rpc.memory import MemoryBroker
from tests.played import PlayedProcess, PlayedTransport
from tests.service.kit import Doors, Fault, World, now, run_row

pytestmark = pytest.mark.looptime


async def test_a_drain_takes_its_eight_steps_in_order(world: World, svc: Service):
    """Intent, intake, background, wait, hand-over, flush, stop, record: each before the next."""
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
    assert life.runtime.state is ServiceState.DRAINING
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
        "drain.finished",
        "service.stopped",
    ]
    assert seen == [("on_stop", {"w": "succeeded"}, None)]
    assert life.runtime.state is ServiceState.STOPPED
    assert (report.exit_code, report.finished, report.handed_over) == (0, 1, [])
    assert report.waited_s == pytest.approx(7, abs=0.1)
    row = run_row(world)
    assert (row["exit_code"], row["phase"]) == (0, "stopped")
    assert json.loads(row["report"]) == report.as_json()


async def test_an_idle_service_drains_at_once(world: World, svc: Service):
    """Nothing to wait for, nothing waited."""
    life = await world.start(svc)
    begun = now()
    report = await life.drain()

    assert now() - begun < 0.1
    assert (report.exit_code, report.must_die, report.waited_s) == (0, False, pytest.approx(0))


async def test_requests_sent_in_a_drain_stay_in_the_queue(world: World, svc: Service):
    """From the closing of intake on nothing is accepted; what was not accepted is for others."""
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
    """The gate stops tasks that wait for their turn; they are listed, and run at the next start."""
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
    """Cancelled with a reason, recorded with cause and cursor, free at once; its lease stays with
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
    """After the grace it is recorded unclean and keeps its row; the end comes before the hard
    limit.
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
    assert [fields["cut"] for fields in life.told("task.handed_over")] == ["unclean"]


@pytest.mark.parametrize("on_interrupt", ["error", "retry", "probe"])
async def test_a_task_stops_at_its_safe_point_and_goes_on_from_there(
    world: World, svc: Service, on_interrupt: str
):
    """No interruption under any policy: cursor exact, lease returned, no item twice, none left
    out.
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
    """At the deadline it goes back to the transport; redelivered it has a row, so that a killer
    ends.
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
    """One that was cut at the deadline, and one that was never accepted; what is on record stays
    here.
    """
    doors = Doors()

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context, n: int) -> None:
        await doors.pass_(n)

    @svc.rpc
    async def write(ctx: Context) -> None:
        await doors.pass_("write")

    life = await world.start(svc, max_accepted=2)
    client = await world.client(svc)
    await client.cast(write)
    for n in range(3):
        await client.cast(read, n=n)
    await doors.wait(2)
    await world.settle()
    assert world.broker.waiting("compute") == 1, "it was never read"
    report = await life.drain()

    assert report.given_back == 2
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
    """Others believe `left` without a proof of death, so nothing may be able to act any more."""
    kept = report.as_json()

    assert (kept["exit_code"], kept["left"], report.must_die) == (code, left, not left)


@pytest.mark.parametrize("fault", [None, Fault.REFUSED])
async def test_a_row_of_ours_that_nobody_works_on_is_let_go_and_reported(
    world: World, svc: Service, fault: Fault | None
):
    """A commit of unknown end may have left it. What had begun counts as handed over, what had not
    as not started; one that recovery had only claimed is neither. A store that refuses is asked
    again.
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
    """What ended, what was handed over, not started, unclean, given back: each by its id, once."""
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
    """Forced: what runs is cancelled at once and handed over."""
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
    life.runtime.wired.coordinator.force()
    report = await life.wait_end()

    assert now() - asked_at < 1
    assert (report.forced, report.handed_over, report.exit_code) == (True, ["w"], 75)


async def test_progress_is_told_while_a_drain_waits(world: World, svc: Service):
    """Every few seconds: what is oldest, how long it has run, what time is left."""
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
    """A line is for people: five tasks, and how many more."""
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
    """The kernel ends a process that hangs half a second past the hard limit, however long it
    has run.
    """
    life = await world.start(svc, signals=True)
    await asyncio.sleep(100)
    await life.drain()

    assert life.process.alarms[0] == pytest.approx(29.5, abs=0.01)


async def test_a_stop_during_the_start_ends_the_start(world: World, svc: Service):
    """A signal while on_start hangs: no requests were taken, and the end is in order."""
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
    """`async with Runtime(...)`: leaving the block is the drain, also with `serve()` beside it."""
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
    """The caller of a task that was handed over is answered by the next owner."""

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
    """The next start marks it ERRORED and answers; nobody waits for nothing."""

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
