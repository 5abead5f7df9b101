"""A drain that is resumed, made final or asked about; and quiet."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

import pytest

from gracekit import (
    Context,
    GracekitError,
    Service,
    ServiceState,
)
from gracekit.control.door_wire import LONGEST_LINE, line_of_answer
from gracekit.control.verbs import MAX_PAGE
from gracekit.drain.report import StopRequest
from gracekit.errors import InvalidArgumentsError, RunEndedError
from gracekit.process import Point
from gracekit.rpc.oslo_wire import MAX_NAME
from tests.service.kit import Doors, Fault, Systemd, World, now, run_row, start_with_work

pytestmark = pytest.mark.looptime


async def test_a_resume_is_answered_when_the_service_serves(world: World, svc: Service):
    """So the next command finds it serving, and a second resume is refused."""
    life, doors = await start_with_work(world, svc)
    for _ in range(3):
        await world.verb(life, "drain")
        await life.hears("intake.closed")
        await world.verb(life, "resume")
        assert life.runtime.state is ServiceState.SERVING
        await world.verb(life, "quiet")
        await world.verb(life, "resume")
        with pytest.raises(GracekitError, match="nothing to resume"):
            await world.verb(life, "resume")
    doors.open("work")
    assert (await life.drain()).exit_code == 0


async def test_quiet_closes_intake_and_resume_opens_it(world: World, svc: Service):
    """What runs goes on; what waits for its turn is let go and taken again."""
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


async def test_who_asked_is_recorded_also_when_the_store_is_slow(world: World, svc: Service):
    """The answer comes after a second; the records follow when the store takes them, and the log
    does not say that they failed.
    """
    life = await world.start(svc)
    life.faults.delay_s = 8.0
    life.plan(Point.TALLY, Fault.DELAY)
    asked_at = now()

    await world.verb(life, "quiet", by="ann")
    await world.verb(life, "resume", by="bob")

    assert now() - asked_at == pytest.approx(2, abs=0.1)
    await asyncio.sleep(10)
    assert [one["detail"] for one in world.incidents("operator_quiet")] == ["ann: no reason given"]
    assert [one["detail"] for one in world.incidents("operator_resume")] == ["bob: no reason given"]
    assert "store.error" not in life.names()


async def test_a_service_that_is_quiet_says_so_when_it_is_quieted_again(world: World, svc: Service):
    """As `resume` of a serving one: the answer is what it is, and that nothing is to be done."""
    life = await world.start(svc)
    await world.verb(life, "quiet")

    with pytest.raises(GracekitError, match="the service is quiet: there is no intake to close"):
        await world.verb(life, "quiet")

    await world.verb(life, "resume")
    assert (await life.drain()).exit_code == 0


async def test_a_drain_after_quiet_lists_each_task_once(world: World, svc: Service):
    """What quiet has left unstarted is not counted twice."""
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
    """A commit that outlasts the closing of intake lands in a quiet service: its task is handed
    over untouched, and begins when intake is open again.
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
    await life.runtime.wired.coordinator.quiet()
    await asyncio.sleep(60)
    assert starts == []
    assert world.rows("SELECT state, cut FROM task") == [
        {"state": "handed_over", "cut": "safe_point"}
    ]

    await life.runtime.wired.coordinator.resume()
    await life.hears("task.finished")
    assert len(starts) == 1


async def test_a_drain_by_control_verb_can_be_resumed_while_it_waits(world: World, svc: Service):
    """The stop-intent is withdrawn, the alarm disarmed, everything opens again."""
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
    assert life.runtime.state is ServiceState.DRAINING
    await world.verb(life, "resume")
    await life.hears("drain.resumed")

    assert life.runtime.state is ServiceState.SERVING
    assert run_row(world)["stop_at"] is None
    assert life.process.alarms == [pytest.approx(3600 + 4.5, abs=0.2), None]
    assert life.runtime.ground.phase.deadline is None
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
    """STOPPING cannot be taken back: a signal's drain says it at once, an operator's when nothing
    is left to wait for.
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


async def test_the_platform_shows_at_once_what_state_the_service_is_in(
    world: World, svc: Service, systemd: Systemd
):
    """Quiet, a drain from its first moment, and either undone: also where reopening takes long."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    async def shown() -> str:
        await asyncio.sleep(2 * systemd.EVERY_S)
        return systemd.statuses()[-1]

    systemd.listen()
    life = await world.start(svc)
    await (await world.client(svc)).cast(work)
    await doors.wait(1)
    assert await shown() == "serving"
    await world.verb(life, "quiet")
    assert await shown() == "quiet"
    await world.verb(life, "resume")
    assert await shown() == "serving"

    await world.verb(life, "drain")
    assert await shown() == "draining: 1 running"
    await asyncio.sleep(10)
    life.faults.delay_s = 20
    life.plan("consume", Fault.DELAY)
    await world.verb(life, "resume")
    await asyncio.sleep(0)
    assert await shown() == "serving"
    await life.hears("service.deaf")
    assert await shown() == "requests cannot be read: it is not read yet"
    await life.hears("service.hears")
    assert await shown() == "serving"

    life.ask_to_stop()
    assert await shown() == "draining: 1 running"
    doors.open("work")
    await life.wait_end()


async def test_a_drain_is_final_once_a_task_was_handed_over(world: World, svc: Service):
    """What left the process cannot be taken back."""
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
    await client.prepare(request_id="c").cast(copy)
    await client.cast(work)
    await doors.wait(1)
    await world.verb(life, "drain")
    await life.hears("task.handed_over")
    with pytest.raises(
        GracekitError, match=r"the drain is final: 1 task was handed over already; start"
    ):
        await world.verb(life, "resume")
    doors.open("work")
    await life.wait_end()


async def test_a_drain_by_signal_is_final(world: World, svc: Service):
    """TERM cannot be undone."""
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
    with pytest.raises(GracekitError, match="the drain is final: signal test asked for it; start"):
        await world.verb(life, "resume")
    doors.open("work")
    assert (await life.wait_end()).exit_code == 0


async def test_a_drain_whose_deadline_has_passed_cannot_be_resumed(world: World, svc: Service):
    """The handler is being cancelled and has not returned."""
    cut = asyncio.Event()

    @svc.rpc
    async def work(ctx: Context) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cut.set()
            await asyncio.sleep(1)
            raise

    life = await world.start(svc)
    await (await world.client(svc)).prepare(request_id="w").cast(work)
    await world.until(lambda: world.state("w") == "running")
    await world.verb(life, "drain", timeout="5s")
    await cut.wait()
    with pytest.raises(GracekitError, match="the drain is final: it waits for no task"):
        await life.runtime.wired.coordinator.resume()
    await life.wait_end()


async def test_a_drain_that_waits_for_nothing_says_so_to_a_resume(world: World, svc: Service):
    """The last task has ended before the deadline, and the service is on its way out."""
    entered = asyncio.Event()

    @svc.on_stop
    async def slow() -> None:
        entered.set()
        await asyncio.sleep(2)

    life = await world.start(svc)
    await world.verb(life, "drain")
    await entered.wait()
    with pytest.raises(GracekitError, match="the drain is final: it waits for no task"):
        await life.runtime.wired.coordinator.resume()
    await life.wait_end()


async def test_a_fault_that_makes_a_drain_final_is_named_to_a_resume(world: World, svc: Service):
    """An operator began it; then the service could not go on, and its own request counts."""
    life, doors = await start_with_work(world, svc)
    await world.verb(life, "drain")
    life.runtime.wired.coordinator.give_up("the store is gone", by="watch")
    with pytest.raises(
        GracekitError, match=r"is final: a fault asked for it \(the store is gone\)"
    ):
        await world.verb(life, "resume")
    doors.open("work")
    await life.wait_end()


async def test_a_signal_makes_an_operators_drain_final_and_as_short_as_its_own(
    world: World, svc: Service
):
    """The platform will not wait an hour because an operator would."""
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
    """Whoever asked first is on record, and it is final."""
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
    life.runtime.wired.coordinator.request_stop(asked)
    life.ask_to_stop()
    report = await life.wait_end()

    assert now() - asked.at == pytest.approx(waits_s, abs=0.5)
    assert report.handed_over == ["w"]
    assert run_row(world)["stop_by"] == "ann"


async def test_a_signal_right_after_a_resume_is_not_lost(world: World, svc: Service):
    """Resume and TERM in the same moment: TERM wins."""
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
    await life.runtime.wired.coordinator.resume()
    life.ask_to_stop()
    doors.open("work")
    report = await life.wait_end()

    assert report.exit_code == 0
    assert "drain.resumed" not in life.names()


async def test_a_drain_right_after_a_resume_takes_the_resume_back(world: World, svc: Service):
    """It is the drain that goes on then, with the time of the last command and its alarm."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc, signals=True)
    await (await world.client(svc)).cast(work)
    await doors.wait(1)
    life.faults.delay_s = 5
    life.plan("cancel", Fault.DELAY)
    await world.verb(life, "drain", by="ann", timeout="1h")
    await asyncio.sleep(1)
    await world.verb(life, "resume", by="ann")
    await world.verb(life, "drain", by="bob", timeout="5m")
    asked_at = now()
    report = await life.wait_end()

    assert now() - asked_at == pytest.approx(300, abs=1)
    assert "drain.resumed" not in life.names()
    assert len(report.handed_over) == 1
    armed = [round(seconds / 60) for seconds in life.process.alarms if seconds is not None]
    assert armed == [60, 5]
    assert [one["detail"] for one in world.incidents("operator_drain")] == [
        *("ann: no reason given", "bob: no reason given")
    ]


async def test_a_resume_while_a_resume_is_recorded_does_not_undo_the_next_drain(
    world: World, svc: Service
):
    """The second one has nothing to do any more, and a later SIGTERM drains."""
    life, doors = await start_with_work(world, svc)
    await world.verb(life, "drain")
    await life.hears("intake.closed")
    life.faults.delay_s = 0.5
    life.plan(Point.WITHDRAW_STOP, Fault.DELAY)
    coordinator = life.runtime.wired.coordinator
    await coordinator.resume()
    await asyncio.sleep(0.2)
    await coordinator.resume()
    await life.hears("drain.resumed")
    life.ask_to_stop()
    await life.hears("drain.started", 2)
    await asyncio.sleep(5)

    assert life.runtime.state is ServiceState.DRAINING
    doors.open("work")
    assert (await life.wait_end()).exit_code == 0


@pytest.mark.parametrize("part", ["hooks", "state"])
async def test_a_drain_that_has_cut_a_start_is_not_resumed(world: World, svc: Service, part: str):
    """Only a part of the service was started: it would say that it serves, and do half of it."""
    begun = asyncio.Event()

    @svc.on_start
    async def warm_up() -> None:
        begun.set()
        if part == "hooks":
            await asyncio.sleep(12)

    life = world.life(svc)
    life.faults.delay_s = 1
    starting = asyncio.ensure_future(life.start())
    await begun.wait()
    if part == "state":
        life.plan(Point.JOIN, Fault.DELAY)
        await life.hears("intake.opened", 2)
    await asyncio.sleep(0.5)
    life.ask_to_stop(source="operator", final=False)
    coordinator = life.runtime.wired.coordinator
    with pytest.raises(GracekitError, match=r"was still starting.*start it again"):
        await coordinator.resume()
    await life.hears("drain.started")
    with pytest.raises(GracekitError, match=r"was still starting.*start it again"):
        await coordinator.resume()
    await starting

    assert (await life.wait_end()).exit_code == 0
    assert "drain.resumed" not in life.names()


async def test_a_resume_before_the_drain_has_begun_undoes_it(world: World, svc: Service):
    """The drain has been confirmed, and its record is still on the way to the store."""
    life = await world.start(svc)
    life.faults.delay_s = 0.5
    for state in (ServiceState.SERVING, ServiceState.QUIET):
        life.plan(Point.STOP_INTENT, Fault.DELAY)
        life.ask_to_stop(source="operator", final=False)
        await asyncio.sleep(0.1)
        assert life.runtime.state is state
        await life.runtime.wired.coordinator.resume()
        await asyncio.sleep(5)
        assert life.runtime.state is ServiceState.SERVING
        assert run_row(world)["stop_at"] is None
        await world.verb(life, "quiet")

    assert (await life.drain()).exit_code == 0


async def test_verbs_are_for_one_run_and_say_what_they_cannot_do(world: World, svc: Service):
    """A verb for another run, an unknown verb, a resume of nothing: each a clear error."""
    life = await world.start(svc)
    control = life.runtime.wired.control

    with pytest.raises(RunEndedError, match=r"run x of node-1-0 ended meanwhile.*gracekit status"):
        await control.carry_out("drain", "x", {})
    with pytest.raises(InvalidArgumentsError, match="names no run"):
        await control.carry_out("drain", None, {})
    with pytest.raises(GracekitError, match="did you mean drain"):
        await world.verb(life, "drian")
    with pytest.raises(GracekitError, match="nothing to resume"):
        await world.verb(life, "resume")
    with pytest.raises(GracekitError, match="not a duration"):
        await world.verb(life, "drain", timeout="soon")
    status = await world.verb(life, "status")
    assert (status["phase"], status["in_flight"], status["tasks"]) == ("serving", 0, [])


async def test_the_status_of_many_tasks_is_paged_and_each_page_fits(world: World, svc: Service):
    """Whatever names the callers have chosen, and however many tasks end between two pages."""
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
    await world.until(lambda: len(life.runtime.wired.tracker) == number)

    pages = [await world.verb(life, "status")]
    await world.verb(life, "cancel", task_id=pages[0]["tasks"][0]["task_id"])
    await world.until(lambda: len(life.runtime.wired.tracker) == number - 1)
    while (after := pages[-1]["next"]) is not None:
        pages.append(await world.verb(life, "status", after=after, limit=10**9))
    some = pages[1]["tasks"][3]["task_id"]
    one = await world.verb(life, "status", task_id=some)
    none = await world.verb(life, "status", limit=0)
    gate.set()

    seen = [task["task_id"] for page in pages for task in page["tasks"]]
    assert len(seen) == len(set(seen)) == number
    assert (pages[0]["in_flight"], pages[1]["in_flight"]) == (number, number - 1)
    assert (none["tasks"], none["longest"]["task_id"]) == ([], seen[1])
    assert one["tasks"][0]["task_id"] == some
    assert all(len(line_of_answer(page)) <= LONGEST_LINE for page in (*pages, one, none))


async def test_a_resume_whose_first_consume_fails_tries_again(world: World, svc: Service):
    """A transport that refuses once does not leave a service that says it serves and takes
    nothing.
    """
    world.expects_faults = True

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> int:
        return 1

    life = await world.start(svc)
    client = await world.client(svc)
    await life.runtime.wired.coordinator.quiet()
    life.plan("consume", Fault.REFUSED)
    await life.runtime.wired.coordinator.resume()

    assert await client.prepare(timeout=30).call(work) == 1
    assert not life.runtime.wired.trigger.is_paused


async def test_a_stop_that_comes_while_intake_reopens_stands(world: World, svc: Service):
    """SIGTERM in the middle of a resume: recovery and periodic jobs stay paused in the drain."""
    doors = Doors()

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.cast(work)
    await doors.wait(1)
    await life.runtime.wired.coordinator.quiet()
    life.faults.delay_s = 0.2
    life.plan("consume", Fault.DELAY)
    resuming = world.spawn_as(life, life.runtime.wired.coordinator.resume())
    await asyncio.sleep(0.1)
    life.ask_to_stop()
    await asyncio.sleep(1)

    assert life.runtime.state is ServiceState.DRAINING
    assert life.runtime.wired.trigger.is_paused
    doors.open("work")
    await asyncio.wait({resuming})


@pytest.mark.parametrize("undone", ["quiet", "drain"])
async def test_a_sigterm_drains_at_once_while_a_resume_waits_for_the_broker(
    world: World, svc: Service, undone: str
):
    """The broker is away, so that the intake cannot be opened: the drain does not wait for that."""
    life, doors = await start_with_work(world, svc)
    await world.verb(life, undone)
    await life.hears("intake.closed")
    life.faults.delay_s = 60
    life.plan("consume", Fault.DELAY)
    await world.verb(life, "resume")
    asked_at = now()
    life.ask_to_stop()
    await life.hears("drain.started", 1 if undone == "quiet" else 2)
    await life.hears("intake.closed", 2)

    assert now() - asked_at < 0.1
    assert "drain.resumed" not in life.names()
    doors.open("work")
    assert (await life.wait_end()).exit_code == 0


async def test_a_signal_does_not_wait_for_a_broker_that_is_away(world: World, svc: Service):
    """SIGTSTP closes the intake although the SIGCONT before it still waits to open it."""
    life = await world.start(svc, signals=True)
    signals = life.runtime.ground.signals
    assert signals is not None
    signals.came(signal.SIGTSTP, now())
    await life.hears("intake.closed")
    life.faults.delay_s = 6
    life.plan("consume", Fault.DELAY)
    for number in (signal.SIGCONT, signal.SIGTSTP):
        signals.came(number, now())
        await asyncio.sleep(2)

    assert life.runtime.state is ServiceState.QUIET
    assert (await life.drain()).exit_code == 0


async def test_cont_undoes_what_tstp_has_done_and_nothing_else(world: World, svc: Service):
    """A debugger sends SIGCONT too: a quiet or a drain that a command has asked for stands."""
    life = await world.start(svc, signals=True)
    signals = life.runtime.ground.signals
    assert signals is not None

    async def state_after(number: int) -> str:
        signals.came(number, now())
        await asyncio.sleep(1)
        return life.runtime.state.value

    await world.verb(life, "quiet")
    assert await state_after(signal.SIGCONT) == "quiet"
    assert await state_after(signal.SIGTSTP) == "quiet"  # ignored: it is quiet already
    assert await state_after(signal.SIGCONT) == "quiet"
    await world.verb(life, "resume")
    await state_after(signal.SIGTSTP)
    assert await state_after(signal.SIGCONT) == "serving"
    await state_after(signal.SIGTSTP)
    await world.verb(life, "quiet", by="ann")  # the operator too wants it to stay so
    assert await state_after(signal.SIGCONT) == "quiet"
    assert world.incidents("operator_quiet")[-1]["detail"] == "ann: no reason given"
    with pytest.raises(GracekitError, match="no intake to close"):
        await world.verb(life, "quiet", by="bob")

    await world.verb(life, "resume")
    await state_after(signal.SIGTSTP)
    life.faults.delay_s = 0.5
    life.plan(Point.STOP_INTENT, Fault.DELAY)
    life.ask_to_stop(source="operator", final=False)
    await asyncio.sleep(0.1)
    await state_after(signal.SIGCONT)
    assert (await life.wait_end()).exit_code == 0
    by_signal = [one["detail"] for one in world.incidents("operator_resume")]
    assert by_signal.count("signal SIGCONT: no reason given") == 1


async def test_cont_opens_nothing_where_a_term_comes_with_it(world: World, svc: Service):
    """systemd sends SIGTERM and then SIGCONT; two threads may take them in the other order."""
    life = await world.start(svc, signals=True)
    signals = life.runtime.ground.signals
    assert signals is not None
    signals.came(signal.SIGTSTP, now())
    await asyncio.sleep(1)

    signals.came(signal.SIGCONT, now())
    await asyncio.sleep(0.05)
    signals.came(signal.SIGTERM, now())

    assert (await life.wait_end()).exit_code == 0
    assert not world.incidents("operator_resume")


async def test_signals_about_the_intake_are_obeyed_in_their_order(world: World, svc: Service):
    """However fast they come and however slow the transport is, the last signal decides."""
    life = await world.start(svc, signals=True)
    signals = life.runtime.ground.signals
    assert signals is not None
    life.faults.delay_s = 2
    life.plan("cancel", Fault.DELAY)
    for number in (signal.SIGTSTP, signal.SIGCONT):
        signals.came(number, now())
    await asyncio.sleep(10)
    first = life.runtime.state
    for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGTSTP):
        signals.came(number, now())
    await asyncio.sleep(10)

    assert (first, life.runtime.state) == (ServiceState.SERVING, ServiceState.QUIET)
    assert [one["what"] for one in world.rows("SELECT what FROM incident ORDER BY id")] == [
        *("operator_quiet", "operator_resume"),
        *("operator_quiet", "operator_resume", "operator_quiet"),
    ]
    assert (await life.drain()).exit_code == 0
