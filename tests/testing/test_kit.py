"""The test kit for applications: what a test may do to a service, and what it then sees."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gracekit import (
    CallTimeoutError,
    ConfigError,
    Context,
    Done,
    GracekitError,
    LeaseHeld,
    RemoteError,
    Retry,
    Service,
    TaskInterruptedError,
)
from gracekit.rpc.methods import Method
from gracekit.testing import (
    Fault,
    InMemoryService,
    NothingLeftError,
    Point,
    ServiceFaultError,
    TaskState,
    run,
)
from tests.service.kit import World
from tests.testing.virtual import virtual

Copy = Method[[str], str]


class Disk:
    """What the outside world saw of a copy."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.unwound: list[int] = []


@pytest.fixture
def svc() -> Service:
    return Service("compute")


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def copy(svc: Service, disk: Disk) -> Copy:
    """Five blocks of a second, with a safe point after each."""

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def copy(ctx: Context, vm: str) -> str:
        try:
            async for block in ctx.steps(range(5)):
                await asyncio.sleep(1)
                disk.blocks.append((ctx.attempt, block))
        finally:
            disk.unwound.append(ctx.attempt)
        return f"{vm} is copied"

    return copy


# -- the played drain ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_interrupt_at_stops_the_handler_at_exactly_that_safe_point(svc, copy, disk, seed):
    """In any order of events: two blocks, the report, and the rest in the next life."""

    async def main() -> None:
        async with InMemoryService(svc) as one:
            one.interrupt_at(2)
            pending = one.start_call(copy, vm="v1")
            report = await one.wait_stopped()
            assert disk.blocks == [(1, 0), (1, 1)]
            assert report.handed_over == [pending.request_id]
            assert report.exit_code == 75
            assert one.state_of(pending.request_id) is TaskState.HANDED_OVER
            assert one.row(pending.request_id)["cursor"] == 1

            await one.start()
            assert await pending == "v1 is copied"
            assert disk.blocks[2:] == [(2, 2), (2, 3), (2, 4)]
            assert one.state_of(pending.request_id) is TaskState.SUCCEEDED

    run(main(), seed=seed)


@virtual
async def test_at_the_last_safe_point_the_handler_ends_instead_of_stopping(svc, copy, disk):
    """Nothing is left to be done after it: the drain finds the task finished."""
    async with InMemoryService(svc) as one:
        one.interrupt_at(5)
        pending = one.start_call(copy, vm="v1")
        report = await one.wait_stopped()

        assert (report.finished, report.handed_over) == (1, [])
        assert await pending == "v1 is copied"


@virtual
async def test_the_service_s_own_defaults_hold_in_the_kit_too():
    """As where it runs; a test may set them otherwise."""
    svc = Service("compute", defaults={"drain_timeout": "180s", "threads": 3})
    async with InMemoryService(svc, threads=5) as one:
        settings = one.runtime.settings

        assert (settings.drain_timeout_s, settings.threads) == (180.0, 5)


@virtual
async def test_safe_points_of_one_method_can_be_counted_alone(svc, copy, disk):
    """`of=` leaves out what other methods pass meanwhile."""

    @svc.rpc
    async def chatter(ctx: Context) -> None:
        for n in range(100):
            await ctx.safe_point(n)
            await asyncio.sleep(0.05)

    async with InMemoryService(svc) as one:
        one.interrupt_at(2, of=copy)
        await one.cast(chatter)
        await one.cast(copy, vm="v1")
        await one.wait_stopped()

        assert disk.blocks == [(1, 0), (1, 1)]


@virtual
async def test_the_played_drain_is_the_production_drain(svc, copy):
    """A signal's: on record as SIGTERM, in the eight steps, with the settings' deadline."""

    @svc.rpc(on_interrupt="retry")
    async def long(ctx: Context) -> None:
        assert ctx.time_left == pytest.approx(60, abs=1)
        await asyncio.sleep(3600)

    async with InMemoryService(svc, drain_timeout="7s") as one:
        pending = one.start_call(long)
        await one.pass_time(1)
        begun = one.clock.loop()
        report = await one.drain()

        assert one.clock.loop() - begun == pytest.approx(7, abs=0.1)
        assert report.handed_over == [pending.request_id]
        assert one.told("signal.received") == [{"signal": "SIGTERM"}]
        assert one.told("drain.finished")[0]["exit_code"] == 75
        (row,) = one.machine.rows("SELECT stop_source, stop_by, exit_code FROM run")
        assert row == {"stop_source": "signal", "stop_by": "SIGTERM", "exit_code": 75}


@virtual
async def test_quit_hands_over_at_once(svc):
    """SIGQUIT does not wait for the deadline."""

    @svc.rpc(on_interrupt="retry")
    async def long(ctx: Context) -> None:
        await asyncio.sleep(3600)

    async with InMemoryService(svc) as one:
        await one.cast(long)
        await one.pass_time(1)
        report = await one.drain(signal.SIGQUIT)

        assert report.forced
        assert one.clock.loop() == pytest.approx(1, abs=0.5)


@virtual
async def test_handler_that_never_returns_is_unclean_and_its_process_is_gone(svc):
    """As after `os._exit`: it does nothing more, and the next life runs the task again."""
    acts: list[int] = []

    @svc.rpc(on_interrupt="retry")
    async def stubborn(ctx: Context) -> str:
        while ctx.attempt == 1:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                acts.append(1)
        return "done"

    async with InMemoryService(svc) as one:
        pending = one.prepare(timeout="1h").start_call(stubborn)
        await one.pass_time(1)
        report = await one.drain()
        assert report.must_die
        assert report.unclean == [pending.request_id]

        await one.start()
        assert await pending == "done"
        assert acts == [1]


# -- the played crash ---------------------------------------------------------------------


@virtual
async def test_crash_stops_everything_where_it_is(svc, copy, disk):
    """Not even a `finally` runs; what was done since the last commit is done again."""
    async with InMemoryService(svc) as one:
        pending = one.start_call(copy, vm="v1")
        await one.pass_time(2.5)
        await one.crash()
        await one.pass_time(100)
        assert disk.unwound == []
        assert disk.blocks == [(1, 0), (1, 1)]
        assert one.state_of(pending.request_id) is TaskState.RUNNING
        with pytest.raises(CallTimeoutError):
            await pending

        await one.start()
        await one.settled()
        assert disk.blocks[2:] in ([(2, 1), (2, 2), (2, 3), (2, 4)], [(2, 2), (2, 3), (2, 4)])
        assert disk.unwound == [2]


@virtual
async def test_crash_at_a_safe_point_is_before_anything_after_it(svc, copy, disk):
    """The second block is copied and its cursor is not on disk: it is copied twice."""
    async with InMemoryService(svc) as one:
        one.crash_at(2)
        pending = one.start_call(copy, vm="v1")
        await one.wait_crashed()
        await one.start()

        assert await pending == "v1 is copied"
        assert disk.blocks == [(1, 0), (1, 1), (2, 1), (2, 2), (2, 3), (2, 4)]


@pytest.mark.parametrize(("phase", "attempts"), [("before", [1, 2]), ("after", [1])])
def test_crash_at_a_point_leaves_what_that_point_leaves(svc, phase, attempts):
    """Before the outcome's commit the task runs again; after it the reply comes from the record."""
    seen: list[int] = []

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> int:
        seen.append(ctx.attempt)
        return 42

    async def main() -> None:
        async with InMemoryService(svc) as one:
            one.crash_at(Point.FINISH, phase)
            pending = one.start_call(work)
            await one.wait_crashed()
            await one.start()

            assert await pending == 42
            assert seen == attempts

    run(main())


@virtual
async def test_a_killed_process_logs_nothing_when_its_tasks_are_cleared_away(svc, caplog):
    """The log that pytest shows for a failing test has no errors of a process that was dead."""

    @svc.rpc(on_interrupt="error")
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100)

    async with InMemoryService(svc) as one:
        one.start_call(work)
        await asyncio.sleep(1)
        await one.crash()
        caplog.clear()

    assert caplog.messages == []


@virtual
async def test_recovery_itself_can_be_killed(svc, copy):
    """What is asked for while nothing lives is kept for the next start."""
    async with InMemoryService(svc) as one:
        one.crash_at(2)
        pending = one.start_call(copy, vm="v1")
        await one.wait_crashed()
        one.crash_at(Point.ADOPT, "before")
        await one.start()
        assert not one.lives
        one.crash_at(Point.CLAIM, "after")
        await one.start()
        await one.wait_crashed()
        await one.start()

        assert await pending == "v1 is copied"
        assert len(one.told("service.starting")) == 4


@pytest.mark.parametrize("seed", [None, 1])
def test_a_crash_at_any_point_loses_nothing(svc, seed):
    """Every step with a name, on either side: the caller is answered by a later life."""

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> str:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(10 if ctx.attempt == 1 else 0))
        return "answered"

    async def main() -> None:
        async with InMemoryService(svc) as one:
            for point, phase in itertools.product(Point, ("before", "after")):
                one.crash_at(point, phase)
                pending = one.prepare(timeout="2h").start_call(work)
                await one.pass_time(5)
                if one.lives:
                    await one.crash()
                one.forget()
                await one.start()
                assert await pending == "answered"
            await one.settled()

    run(main(), seed=seed)


@virtual
async def test_a_thread_of_a_killed_process_is_waited_for_and_ignored(svc):
    """It cannot be killed; what it returns is nobody's."""
    entered, leave = threading.Event(), threading.Event()

    @svc.rpc(on_interrupt="retry")
    def work(ctx: Context) -> int:
        if ctx.attempt == 1:
            entered.set()
            leave.wait(60)
        return ctx.attempt

    async with InMemoryService(svc) as one:
        pending = one.start_call(work)
        while not entered.is_set():
            await asyncio.sleep(0)
        await one.crash()
        leave.set()
        await one.start()

        assert await pending == 2


# -- every policy, in both ----------------------------------------------------------------

Stop = Callable[[InMemoryService], Any]


async def by_drain(one: InMemoryService) -> None:
    await one.drain()


async def by_crash(one: InMemoryService) -> None:
    await one.crash()


@pytest.fixture(params=[by_drain, by_crash])
def stop(request: pytest.FixtureRequest) -> Stop:
    stop: Stop = request.param
    return stop


@virtual
async def test_retry_runs_again(svc, stop):
    """Under drain and crash: the same request id, the next attempt."""

    @svc.rpc(on_interrupt="retry")
    async def work(ctx: Context) -> int:
        await asyncio.sleep(3600 if ctx.attempt == 1 else 0)
        return ctx.attempt

    async with InMemoryService(svc, drain_timeout=1) as one:
        pending = one.start_call(work)
        await one.pass_time(1)
        await stop(one)
        await one.start()

        assert await pending == 2


@pytest.mark.parametrize(("is_there", "attempts"), [(True, [1]), (False, [1, 2])])
def test_probe_decides_by_the_truth(svc, stop, is_there, attempts):
    """Done ends it with the result, Retry runs it again."""
    seen: list[int] = []
    asked: list[str] = []

    @svc.rpc(on_interrupt="probe")
    async def create(ctx: Context, name: str) -> str:
        seen.append(ctx.attempt)
        await asyncio.sleep(3600 if ctx.attempt == 1 else 0)
        return name

    @create.probe
    async def probe(ctx: Context, name: str) -> Done | Retry:
        asked.append(name)
        return Done(name) if is_there else Retry()

    async def main() -> None:
        async with InMemoryService(svc, drain_timeout=1) as one:
            pending = one.start_call(create, name="vol")
            await one.pass_time(1)
            await stop(one)
            await one.start()

            assert await pending == "vol"
            assert (asked, seen) == (["vol"], attempts)

    run(main())


@virtual
async def test_error_is_told_to_hook_and_caller(svc, stop):
    """It is not run again."""
    told: list[str] = []

    @svc.rpc
    async def charge(ctx: Context, card: str) -> None:
        await asyncio.sleep(3600)

    @charge.errored
    async def errored(ctx: Context, reason: str, card: str) -> None:
        told.append(card)

    async with InMemoryService(svc, drain_timeout=1) as one:
        pending = one.start_call(charge, card="c1")
        await one.pass_time(1)
        await stop(one)
        await one.start()
        with pytest.raises(TaskInterruptedError):
            await pending
        await one.settled()

        assert told == ["c1"]
        assert one.state_of(pending.request_id) is TaskState.ERRORED


@virtual
async def test_requeue_goes_back_to_the_queue(svc, stop):
    """Given back by a drain, delivered again after a crash; there never was a row of the first
    try.
    """
    tries: list[int] = []

    @svc.rpc(on_interrupt="requeue")
    async def read(ctx: Context) -> str:
        tries.append(ctx.attempt)
        await asyncio.sleep(3600 if len(tries) == 1 else 0)
        return "read"

    async with InMemoryService(svc, drain_timeout=1) as one:
        pending = one.start_call(read)
        await one.pass_time(1)
        assert one.state_of(pending.request_id) is None
        await stop(one)
        await one.start()

        assert await pending == "read"
        assert len(tries) == 2


# -- holds, leases, jobs, threads ---------------------------------------------------------


@virtual
async def test_hold_keeps_the_process_in_its_drain(svc):
    """Until an ops call ends it."""

    @svc.rpc
    async def expect(ctx: Context, vm: str) -> None:
        await ctx.hold("migration", vm, at_most="1h")

    @svc.ops
    async def arrived(ctx: Context, vm: str) -> bool:
        return await ctx.end_hold("migration", vm)

    async with InMemoryService(svc, drain_timeout="1h") as one:
        await one.call(expect, vm="v1")
        one.interrupt()
        await one.pass_time(1800)
        assert one.lives
        assert await one.call(arrived, vm="v1")

        report = await one.wait_stopped()
        assert (report.exit_code, report.open_holds) == (0, 0)


@virtual
async def test_requests_of_one_resource_run_in_turn_with_rising_fences(svc, stop):
    """Also across a restart."""
    spans: list[tuple[int | None, float, float]] = []

    @svc.rpc(resource="vm", on_interrupt="retry")
    async def resize(ctx: Context, vm: str) -> None:
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(5)
        spans.append((ctx.fence, begun, asyncio.get_running_loop().time()))

    async with InMemoryService(svc, drain_timeout=1) as one:
        for _ in range(3):
            await one.cast(resize, vm="v1")
        await one.pass_time(7)
        await stop(one)
        await one.start()
        await one.settled()

        fences = [fence for fence, _, _ in spans]
        assert fences == sorted(set(fences))
        assert len(spans) == 3
        assert all(first[2] <= second[1] for first, second in itertools.pairwise(spans))


@virtual
async def test_a_second_process_beside_the_first_meets_its_leases(svc):
    """One machine, one disk; when the holder is killed the other gets the lease."""

    @svc.rpc(on_interrupt="retry")
    async def take(ctx: Context) -> str:
        async with ctx.lease("vm", "v1"):
            await asyncio.sleep(3600 if ctx.attempt == 1 else 0)
        return "taken"

    async with (
        InMemoryService(svc) as one,
        InMemoryService(svc, beside=one, host="node-2") as two,
    ):
        first = one.prepare(host="node-1", timeout="2h").start_call(take)
        await one.pass_time(1)
        with pytest.raises(LeaseHeld):
            await two.prepare(host="node-2").call(take)
        await one.crash()
        await one.start()

        assert await first == "taken"


@virtual
async def test_another_service_can_be_called_beside(svc):
    """A handler's client is made by the test, and its tasks are the handler's process's."""
    other = Service("images")

    @other.rpc
    async def image(ctx: Context) -> str:
        return "image"

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> str:
        return await two.client.call(image)

    async with InMemoryService(svc) as one, InMemoryService(other, beside=one) as two:
        assert await one.call(build) == "image"


@pytest.mark.parametrize("url", ["sqlite:///queue.db", "amqp://127.0.0.1"])
@virtual
async def test_a_hook_that_opens_a_real_client_is_told_what_a_test_does_instead(svc, url):
    """Nothing waits for its threads or sockets in virtual time: the hook hung until its timeout."""

    @svc.on_start
    async def connect() -> None:
        await Service("images").client(url).start()

    with pytest.raises(ConfigError, match=r"virtual time does not wait: .* calls another one"):
        async with InMemoryService(svc):
            pass


@virtual
async def test_periodic_jobs_run_as_time_passes(svc):
    """An hour of them takes no time; a drain starts none."""
    runs: list[float] = []

    @svc.periodic(every="10m")
    async def sweep(ctx: Context) -> None:
        runs.append(asyncio.get_running_loop().time())

    async with InMemoryService(svc) as one:
        await one.pass_time(3700)
        assert len(runs) in {6, 7}
        await one.drain()
        known = len(runs)
        await one.pass_time(3600)
        assert len(runs) == known


@pytest.mark.parametrize("blow", ["drain", "crash"])
def test_plain_functions_run_in_threads_while_time_stands_still(svc, blow):
    """A blow at a safe point meets the thread there; a killed one does nothing more."""
    seen: list[tuple[int, int]] = []
    threads: set[int] = set()

    @svc.rpc(on_interrupt="retry")
    def convert(ctx: Context, pages: int) -> float:
        for page in ctx.steps(range(pages)):
            threads.add(threading.get_ident())
            seen.append((ctx.attempt, page))
        return ctx.attempt

    async def main() -> None:
        async with InMemoryService(svc) as one:
            (one.interrupt_at if blow == "drain" else one.crash_at)(2)
            begun = one.clock.loop()
            pending = one.start_call(convert, pages=4)
            await (one.wait_stopped if blow == "drain" else one.wait_crashed)()
            assert one.clock.loop() == begun
            assert seen == [(1, 0), (1, 1)]
            assert threading.get_ident() not in threads
            await one.start()

            assert await pending == 2
            again = 2 if blow == "drain" else 0
            assert seen[2:] == [(2, page) for page in range(again, 4)]

    run(main())


# -- faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.LOST_BEFORE, Fault.LOST_AFTER, Fault.REFUSED])
@pytest.mark.parametrize("point", [Point.ACCEPT_AND_BEGIN, Point.FINISH, Point.ACK])
def test_a_fault_at_one_step_costs_no_request_and_no_second_run(svc, point, fault):
    """A commit whose answer is lost is looked up, not repeated."""
    runs: list[int] = []

    @svc.rpc
    async def work(ctx: Context) -> str:
        runs.append(ctx.attempt)
        return "once"

    async def main() -> None:
        async with InMemoryService(svc) as one:
            one.fail_next(point, fault)

            assert await one.call(work) == "once"
            await one.settled()
            assert runs == [1]

    run(main())


@virtual
async def test_start_that_fails_can_be_repeated(svc, copy):
    """A transport that cannot be reached at a start is an error of that start."""
    async with InMemoryService(svc) as one:
        await one.drain()
        one.fail_next(Point.CONNECT, Fault.REFUSED)
        with pytest.raises(GracekitError, match="transport cannot be reached"):
            await one.start()
        assert not one.lives
        await one.start()

        assert await one.call(copy, vm="v1") == "v1 is copied"


@virtual
async def test_broken_disk_ends_the_process_in_order(svc, copy):
    """Exit 70, and the next life goes on with another disk under it."""
    async with InMemoryService(svc) as one:
        one.fail_next(Point.SAFE_POINT, Fault.BROKEN)
        pending = one.prepare(timeout="1h").start_call(copy, vm="v1")
        report = await one.wait_stopped()
        assert report.exit_code == 70
        await one.start()

        assert await pending == "v1 is copied"


# -- time and sight -----------------------------------------------------------------------


@virtual
async def test_time_passes_only_when_asked(svc):
    """An hour in no time, on the loop's clock and on the wall's."""
    async with InMemoryService(svc) as one:
        began, wall = one.clock.loop(), one.clock.wall()
        await one.pass_time(3600)

        assert one.clock.loop() - began == 3600
        assert one.clock.wall() - wall == 3600


@virtual
async def test_events_of_all_lives_are_heard(svc, copy):
    """`told`, `hears` and `events` go on from one process to the next; unknown names are
    refused.
    """
    async with InMemoryService(svc) as one:
        await one.cast(copy, vm="v1")
        started = await one.hears("task.started")
        assert started["method"] == "copy"
        await one.crash()
        await one.start()
        again = await one.hears("task.started", 2)

        assert again["attempt"] == 2
        assert [name for name, _ in one.events].count("service.serving") == 2
        with pytest.raises(GracekitError, match=r"did you mean task\.started"):
            one.told("task.startet")


@virtual
async def test_until_and_settled_say_what_is_left(svc):
    """Within the time given, or AssertionError with the unfinished."""

    @svc.rpc(on_interrupt="retry")
    async def long(ctx: Context) -> None:
        await asyncio.sleep(3600)

    async with InMemoryService(svc) as one:
        request_id = await one.cast(long)
        with pytest.raises(AssertionError, match=f"long {request_id} running"):
            await one.settled(within_s=60)
        with pytest.raises(AssertionError, match=f"not within 5 s; .*{request_id}"):
            await one.until(lambda: False, within_s=5)
        await one.settled()

        assert one.state_of(request_id) is TaskState.SUCCEEDED


@virtual
async def test_row_reads_what_the_journal_keeps(svc, copy):
    """JSON columns as values; an unknown id lists the known ones."""
    async with InMemoryService(svc) as one:
        pending = one.prepare(request_id="mine").start_call(copy, vm="v1")
        assert pending.request_id == "mine"
        await pending

        assert one.row("mine")["result"] == "v1 is copied"
        with pytest.raises(LookupError, match="'mine'"):
            one.row("yours")


async def trace(svc: Service, copy: Copy) -> list[Any]:
    """A story with every kind of end, as its events tell it."""
    async with InMemoryService(svc, seed=5) as one:
        one.interrupt_at(4)
        calls = [one.prepare(timeout="1h").start_call(copy, vm=f"v{n % 2}") for n in range(5)]
        await one.wait_stopped()
        one.crash_at(6)
        await one.start()
        await one.wait_crashed()
        await one.start()
        for call in calls:
            await call
        return one.events


def test_the_same_seed_gives_the_same_result(svc, copy):
    """Events with their ids and times, to the letter; another seed is another order."""
    first, again = (run(trace(svc, copy), seed=11) for _ in range(2))
    others = [run(trace(svc, copy), seed=seed) for seed in range(4)]

    assert first == again
    assert any(other != first for other in others)


# -- what goes unseen ---------------------------------------------------------------------


@virtual
async def test_failed_hook_ends_the_test(svc):
    """Unless it is expected."""

    @svc.on_stop
    async def broken() -> None:
        raise RuntimeError("no")

    with pytest.raises(ServiceFaultError, match=r"hook\.failed: .*broken.*expect\('hook"):
        async with InMemoryService(svc):
            pass
    async with InMemoryService(svc) as one:
        one.expect("hook.failed")


@virtual
async def test_faults_of_gracekit_end_the_test(svc, monkeypatch):
    """A dispatcher that raises is told at the exit, whatever the test looked at."""

    @svc.rpc
    async def work(ctx: Context) -> None: ...

    async def raising(*args: object) -> None:
        raise RuntimeError("planted")

    async def story() -> None:
        async with InMemoryService(svc) as one:
            monkeypatch.setattr(one.runtime.wired.dispatcher, "_finish", raising)
            await one.cast(work)
            await one.pass_time(1)

    with pytest.raises(ServiceFaultError, match=r"dispatch\.failed: .*planted"):
        await story()


@virtual
async def test_failed_call_that_nobody_awaited_ends_the_test(svc):
    """Its error would be lost; one that was awaited is the test's own."""

    @svc.rpc
    async def refuse(ctx: Context, n: int) -> None:
        raise LookupError("no such n")

    async def story() -> None:
        async with InMemoryService(svc) as one:
            one.start_call(refuse, n=1)
            await one.settled()

    with pytest.raises(ServiceFaultError, match=r"refuse\(n=1\) failed, .*no such n"):
        await story()
    async with InMemoryService(svc) as one:
        pending = one.start_call(refuse, n=1)
        with pytest.raises((LookupError, RemoteError)):
            await pending


@virtual
async def test_what_was_asked_for_and_did_not_happen_ends_the_test(svc, copy):
    """A test that does not meet its own fault proves nothing."""

    async def story() -> None:
        async with InMemoryService(svc) as one:
            one.interrupt_at(9, of=copy)
            one.crash_at(Point.DEAD_LETTER)
            one.fail_next(Point.GIVE_BACK, Fault.REFUSED)
            await one.call(copy, vm="v1")

    with pytest.raises(ServiceFaultError) as caught:
        await story()

    assert "interrupt_at(9, of=copy): 4 more safe points were needed" in str(caught.value)
    assert "crash_at(Point.DEAD_LETTER, 'after')" in str(caught.value)
    assert "fail_next: REFUSED at transport.give_back" in str(caught.value)


@virtual
async def test_an_error_of_the_test_is_not_hidden(svc, copy):
    """No drain and no complaint after a failed assertion."""
    one = InMemoryService(svc)

    async def story() -> None:
        async with one:
            one.interrupt_at(9)
            await one.cast(copy, vm="v1")
            raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine"):
        await story()
    assert one.told("drain.started") == []


@virtual
async def test_a_start_that_fails_leaves_nothing_behind(svc):
    """Its error is the application's own, and the next test can open another machine."""
    fails = [True]

    @svc.on_start
    async def connect() -> None:
        if fails:
            raise RuntimeError(f"no backend {fails.pop()}")

    with pytest.raises(RuntimeError, match="no backend"):
        await InMemoryService(svc).__aenter__()
    async with InMemoryService(svc) as one:
        assert one.lives


@virtual
async def test_plain_hooks_take_no_virtual_time(svc):
    """They run in threads, for which virtual time stands still, as it does for handlers."""
    called: list[str] = []

    @svc.on_start
    def connect() -> None:
        time.sleep(0.05)
        called.append("start")

    @svc.on_stop
    def leave() -> None:
        time.sleep(0.05)
        called.append("stop")

    async with InMemoryService(svc) as one:
        began = one.clock.loop()
        await one.drain()
        assert one.clock.loop() - began < 1

    assert called == ["start", "stop"]


# -- mistakes of tests --------------------------------------------------------------------


async def test_another_loop_is_refused_with_the_remedy(svc):
    """On a loop of real time the message says how to run the test."""
    with pytest.raises(GracekitError, match=r"gracekit\.testing\.run\(main\(\)\)"):
        await InMemoryService(svc).__aenter__()


def test_outside_of_its_block_it_says_so(svc, copy):
    """Nothing is there before `async with`."""
    with pytest.raises(GracekitError, match="async with InMemoryService"):
        InMemoryService(svc).start_call(copy, vm="v1")


def test_wrong_settings_are_all_named(svc):
    """As `gracekit run` names them; where queue and store are is no matter of a test."""
    with pytest.raises(
        ConfigError,
        match=r"g drain_timeot; did you mean drain_timeout(?s:.*)g thread; did you mean threads",
    ):
        InMemoryService(svc, drain_timeot="1s", thread=3)
    with pytest.raises(GracekitError, match="store_url cannot be set here"):
        InMemoryService(svc, store_url="sqlite:///x.db")


def test_a_deadlock_says_who_waits(svc):
    """The loop would go round for ever with the service's own timers."""

    async def main() -> None:
        async with InMemoryService(svc):
            await asyncio.Event().wait()

    with pytest.raises(NothingLeftError, match=r"waiting: main\(\) at test_kit.py:\d+"):
        run(main())


def test_a_deadlock_without_a_service_says_who_waits():
    """Where no timer is left it is known at once."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeftError, match=r"nothing can .*; waiting: main\(\) at test_kit.py"):
        run(main())


@virtual
@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda one: one.interrupt_at(0), "safe point=0: write a whole number"),
        (lambda one: one.interrupt_at(1.5), "safe point=1.5: write"),
        (lambda one: one.interrupt_at(True), "safe point=True: write"),
        (lambda one: one.interrupt_at(1, of="work"), "of='work' is no method"),
        (lambda one: one.crash_at("x"), r"crash_at\('x'\): write the number of a safe point, or a"),
        (lambda one: one.crash_at(Point.FINISH, "middle"), "'middle' is none of before, after"),
        (
            lambda one: one.fail_next("finish", Fault.REFUSED),
            r"'finish' is no Point; write one of .*Point\.FINISH",
        ),
        (lambda one: one.fail_next(("PARK", 1), Fault.REFUSED), r"write one of Point\.\w+, Point"),
        (
            lambda one: one.fail_next(Point.FINISH, 7),
            r"7 is no Fault; write one of Fault\.DELAY, F",
        ),
        (lambda one: one.fail_next(Point.FINISH, Fault.REFUSED, times=0), "times=0: write"),
        (lambda one: one.interrupt(signal.SIGKILL), r"is none of signal\.SIGTERM.*crash\(\) is k"),
        (lambda one: one.interrupt("SIGTERM"), r"'SIGTERM' is none of signal\.SIGTERM"),
    ],
)
async def test_wrong_orders_are_refused(svc, ask, said):
    """A test that asks for what cannot happen would go well, and prove nothing."""
    async with InMemoryService(svc) as one:
        with pytest.raises(ValueError, match=said):
            ask(one)


@virtual
@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "x", True, None])
async def test_time_passes_by_seconds_that_come_to_an_end(svc, seconds):
    """Virtual time of nan or inf would go on for ever."""
    async with InMemoryService(svc) as one:
        with pytest.raises(ValueError, match="0 or more, that come to an end"):
            await one.pass_time(seconds)


@virtual
async def test_an_argument_that_no_verb_has_is_told_with_the_name_of_the_kit(svc):
    """Python names the class in which the verb is written, which no test has heard of."""
    async with InMemoryService(svc) as one:
        with pytest.raises(TypeError, match=r"InMemoryService\.reconcile\(\) got .*'dryrun'"):
            await one.reconcile(dryrun=True)
        with pytest.raises(TypeError, match=r"InMemoryService\.pending\(\) takes 1"):
            one.pending("x")


@virtual
@pytest.mark.parametrize("condition", [True, None, asyncio.sleep])
async def test_a_condition_is_a_plain_function(svc, condition):
    """A value never changes, and the coroutine of an async function is always true."""
    async with InMemoryService(svc) as one:
        with pytest.raises(TypeError, match=r"until\(.*\): write a plain function that says"):
            await one.until(condition)


def test_what_is_no_service_is_refused(svc):
    """Its topic is easily given in its place."""
    with pytest.raises(GracekitError, match=r"'compute'\) is no Service: give the Service object"):
        InMemoryService("compute")
    with pytest.raises(GracekitError, match="beside='one' is no InMemoryService: write beside=one"):
        InMemoryService(svc, beside="one")


def test_a_function_that_was_not_called_is_refused():
    """The message writes the call."""

    async def main() -> None: ...

    with pytest.raises(TypeError, match=r"is no coroutine: call the function, as run\(main\(\)\)"):
        run(main)


@virtual
async def test_verbs_at_the_wrong_time_are_refused(svc, copy):
    """One process at a time, and none that is dead is drained or killed."""
    async with InMemoryService(svc) as one:
        with pytest.raises(GracekitError, match="lives: drain"):
            await one.start()
        with pytest.raises(ValueError, match="ACK cannot meet BROKEN; it can meet DELAY"):
            one.fail_next(Point.ACK, Fault.BROKEN)
        with pytest.raises(ValueError, match="caller's step"):
            one.fail_next(Point.PUBLISH, Fault.REFUSED)
        with pytest.raises(TypeError, match="did you mean timeout"):
            one.prepare(timout=3)
        with pytest.raises(GracekitError, match="beside=other"):
            await InMemoryService(svc).__aenter__()
        with pytest.raises(AssertionError, match="still serves after 5 s"):
            await one.wait_stopped(within_s=5)
        await one.crash()
        with pytest.raises(AssertionError, match="was killed before its drain"):
            await one.wait_stopped()
        for verb in (one.crash, one.drain, one.settled):
            with pytest.raises(GracekitError, match=r"start\(\) the next one"):
                await verb()
        await one.start()
        await one.drain()
        with pytest.raises(AssertionError, match="ended in order"):
            await one.wait_crashed()


@pytest.mark.looptime
async def test_a_death_is_not_logged_after_its_machine_is_closed(
    svc: Service, caplog: pytest.LogCaptureFixture
):
    """By then another test may run, whatever it does."""
    world = World()
    life = await world.start(svc)

    async def dies() -> None:
        life.process.die("in a background task")

    task = asyncio.create_task(dies())
    await asyncio.wait({task})
    await world.close()
    del task
    gc.collect()

    assert "never retrieved" not in caplog.text
