"""A drain whose steps fail, hang or are slow: it still ends in time, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from gracekit import (
    Context,
    Service,
)
from gracekit.config.settings import ALARM_AFTER_HARD_LIMIT_S
from gracekit.process import Point
from tests.service.kit import Doors, Fault, World, now, run_row

pytestmark = pytest.mark.looptime


async def test_a_failing_step_does_not_stop_the_drain(world: World, svc: Service):
    """Intent, hooks and stop record may fail: each is told, and the next step begins."""
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


async def test_a_run_with_a_broken_store_says_why_it_drains(world: World, svc: Service):
    """Its store cannot take the stop-intent, so the record says nothing: the run itself is
    asked.
    """
    world.expects_faults = True
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work)
    await doors.wait(1)
    control, run_id = life.runtime.wired.control, life.runtime.run_id
    assert (await control.carry_out("status", run_id, {}))["stop"] is None
    life.plan(Point.ACCEPT_AND_BEGIN, Fault.BROKEN)
    await client.cast(work)
    await life.hears("drain.started")

    stop = (await control.carry_out("status", run_id, {}))["stop"]
    assert (stop["source"], "the store is broken" in stop["reason"]) == ("error", True)
    assert run_row(world)["stop_by"] is None
    doors.open("work")
    await life.wait_end()


async def test_a_hand_over_that_hangs_holds_nobody(world: World, svc: Service):
    """The row of a handler that did not return stays RUNNING, and the end comes all the same."""
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
    """A store that hangs in a question or a commit, a transport that confirms no cancel: each step
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
    """Each step before it ends so early that the record has 0.7 s until the kernel's alarm."""
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
    life.runtime.ground.telemetry.subscribe(
        lambda _, fields: cut_at.append(now()) if fields.get("step") == "stop of hooks" else None
    )
    life.faults.delay_s = 3600.0
    life.plan(Point.HAND_OVER, Fault.DELAY)
    life.faults.plan("transport", "cancel", Fault.DELAY, times=1000)
    asked_at = now()
    await life.drain()

    alarm_at = asked_at + life.runtime.settings.hard_limit_s + ALARM_AFTER_HARD_LIMIT_S
    assert alarm_at - cut_at[-1] >= 0.7


async def test_a_keyboard_interrupt_in_a_step_of_the_drain_forces_it(world: World, svc: Service):
    """asyncio raises a program's second Ctrl-C wherever the main thread is. The step is taken
    again, what runs is handed over, and the end is on record.
    """

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(3600)

    life = await world.start(svc, drain_timeout_s=60.0)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await asyncio.sleep(1)
    raised = []

    def interrupt(name: str, _: object) -> None:
        if name == "intake.closed" and not raised:
            raised.append(name)
            raise KeyboardInterrupt

    life.runtime.ground.telemetry.subscribe(interrupt)
    asked_at = now()
    report = await life.drain()

    assert raised
    assert now() - asked_at < 10
    assert (report.forced, report.exit_code) == (True, 75)
    assert list(report.handed_over) == ["w"]
    assert run_row(world)["exit_code"] == 75


async def test_a_stop_hook_that_hangs_leaves_the_transport_a_moment(world: World, svc: Service):
    """It is cut before the step that it belongs to, so that the connection is still closed."""

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
    """What is under way at the gate, or at the end of the wait, still counts if it comes in time;
    if it does not, the process leaves so that others can prove it dead.
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
    """It was submitted before the drain and lands during its last steps: the row is nobody's
    then.
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
    """The row stays RUNNING; the next run sees that its owner is gone."""
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
    """A failing on_start ends in a stop with exit 70 on record; the error comes out."""
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


async def test_a_release_that_fails_is_made_up_for(world: World, svc: Service):
    """A singleton job, and a lease taken in a handler, are not lost for the life of the process."""
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


async def test_a_hook_that_the_deadline_cuts_is_logged_and_called_by_the_next_run(
    world: World, svc: Service
):
    """The log names the task and says what follows."""
    doors, called = Doors(), []

    @svc.rpc
    async def charge(ctx: Context) -> None:
        await doors.pass_("charge")

    @charge.errored
    async def _(ctx: Context, reason: str) -> None:
        called.append(reason)
        await doors.pass_("hook")

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="sh1").cast(charge)
    await doors.wait(1)
    await life.crash()
    life = await world.start(svc)
    await world.until(lambda: called)
    status = await world.verb(life, "status")
    report = await life.drain()

    (work,) = status["tasks"]
    assert (work["method"], work["about"]) == ("errored hook of charge", "sh1")
    assert (report.unfinished, report.exit_code) == (1, 75)  # so that a supervisor starts it again
    (told,) = life.told("hook.failed")
    assert (told["hook"], told["task_id"]) == ("charge.errored", "sh1")
    assert told["error"] == "cancelled (drain deadline); the next run calls it again"

    doors.open("hook")
    life = await world.start(svc)
    await world.until(lambda: not world.task("sh1")["errored_due"])
    assert len(called) == 2
    assert (await life.drain()).exit_code == 0


@pytest.mark.parametrize("way", ["raises", "hangs"])
async def test_an_errored_hook_that_fails_is_on_record_and_not_called_again(
    world: World, svc: Service, way: str
):
    """Its incident says why, also of one that ends at `probe_timeout` in a longer drain. Hooks are
    called one at a time.
    """
    doors, called = Doors(), []

    @svc.rpc
    async def charge(ctx: Context) -> None:
        await doors.pass_("charge")

    @charge.errored
    async def _(ctx: Context, reason: str) -> None:
        called.append((ctx.request_id, now()))
        if way == "raises":
            raise LookupError("no ledger")
        await doors.pass_("hook")

    life = await world.start(svc)
    client = await world.client(svc)
    for task_id in ("a", "b"):
        await client.prepare(request_id=task_id).cast(charge)
    await doors.wait(2)
    await life.crash()
    life = await world.start(svc, probe_timeout_s=3)
    await world.until(lambda: called)
    life.ask_to_stop()
    await life.wait_end()
    await (await world.start(svc, probe_timeout_s=3)).hears("service.serving")
    await world.until(lambda: not world.rows("SELECT 1 FROM task WHERE errored_due = 1"))

    why = "LookupError('no ledger')" if way == "raises" else "no answer within 3 s (probe_timeout)"
    failed = [(note["request_id"], note["detail"]) for note in world.incidents("hook_failed")]
    assert failed == [("a", why), ("b", why)]
    assert [task_id for task_id, _ in called] == ["a", "b"]
    if way == "hangs":
        assert called[1][1] - called[0][1] >= 3
    assert world.tally()["hook_failed"] == 2
