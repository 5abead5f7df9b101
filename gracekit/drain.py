"""One drain, in one class.

`ShutdownCoordinator` alone advances the `Phase` of the service from SERVING on; `DrainReport` is
what a drain leaves behind. `drain()` reads like the eight steps of ARCHITECTURE.md, and every step
is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from gracekit import sdnotify
from gracekit.background import keep_on
from gracekit.clock import Clock
from gracekit.config import Settings
from gracekit.dispatcher import Dispatcher
from gracekit.errors import GracekitError
from gracekit.exits import ExitCode
from gracekit.periodic import PeriodicJobs
from gracekit.phase import Phase, ServiceState
from gracekit.process import Process
from gracekit.recovery.reconciler import Reconciler
from gracekit.rpc.server import RpcServer
from gracekit.telemetry import Telemetry
from gracekit.tracker.holds import Hold, Holds
from gracekit.tracker.journal import TaskRow
from gracekit.tracker.task import CancelCause, Lane, TaskState, TrackedTask
from gracekit.tracker.tracker import Tracker

T = TypeVar("T")

INTENT_TIMEOUT_S: Final = 1.0
SHORTEST_STEP_S: Final = 0.25
"""What a step gets at least, even past the deadline."""
ALARM_AFTER_HARD_LIMIT_S: Final = 0.5
SLOW_STEP_S: Final = 1.0
"""A step that takes longer is logged while it goes on."""
FREE_TRIES: Final = 3
LISTED_TASKS: Final = 5
LISTED_HOLDS: Final = 5
MOST_AWAITED: Final = 1000
"""Tasks that the start of a drain names, the oldest: each is a line in the log."""
HOLD_POLL_S: Final = 0.5
"""A hold may be ended or lapse in another process, which rings no bell here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Who wants a stop, and how much.

    Attributes:
        source: signal, operator, user or error.
        by: A signal's name, or who asked.
        reason: A sentence for the record.
        final: Whether it cannot be resumed; signals and errors are final.
        at: Loop time at which it was asked for; deadlines count from here.
        timeout_s: Seconds of this drain; None for the setting.
    """

    source: str
    by: str
    reason: str
    final: bool
    at: float
    timeout_s: float | None = None


@dataclass(slots=True, kw_only=True)
class DrainReport:
    """What a drain leaves behind.

    Attributes:
        waited_s: Seconds from the request to the end of the wait.
        finished: Tasks that held the drain and ended by themselves.
        handed_over: Request ids handed over: at a safe point, or cut at the deadline.
        not_started: Request ids accepted and never started; anyone may claim them.
        unclean: Request ids whose handler had not returned.
        given_back: Deliveries and `requeue` tasks given back to the transport.
        open_holds: Holds that were still open at the deadline.
        holds: The oldest of them, `name key` each, LISTED_HOLDS at most.
        leases_kept: Leases that only the death of this process frees.
        left_behind: Requests that were still in gracekit's own hands, in a commit or a reply.
        unfinished: Rows and holds in the store that this run could have settled, those of earlier
            runs among them; None if the store did not say.
        forced: Whether a second signal cut the wait short.
        failure: Why the end was not in order; None if it was.
        failed_as: What the process tells its supervisor then.
    """

    waited_s: float = 0.0
    finished: int = 0
    handed_over: list[str] = field(default_factory=list)
    not_started: list[str] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)
    given_back: int = 0
    open_holds: int = 0
    holds: list[str] = field(default_factory=list)
    leases_kept: int = 0
    left_behind: int = 0
    unfinished: int | None = 0
    forced: bool = False
    failure: str | None = None
    failed_as: ExitCode = ExitCode.INTERNAL

    @property
    def must_die(self) -> bool:
        """Whether the process has to leave by `os._exit`, to be proven dead by others."""
        return bool(self.unclean or self.leases_kept or self.left_behind)

    @property
    def exit_code(self) -> ExitCode:
        """What the process tells its supervisor."""
        if self.failure is not None:
            return self.failed_as
        if self.handed_over or self.not_started or self.unclean or self.open_holds:
            return ExitCode.HANDED_OVER
        if self.unfinished != 0:  # unknown is not nothing
            return ExitCode.HANDED_OVER
        return ExitCode.DRAINED

    def as_json(self) -> dict[str, Any]:
        """Plain data, as the stop record keeps it; `left` says that nothing can act any more."""
        return asdict(self) | {"exit_code": int(self.exit_code), "left": not self.must_die}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a drain stops, in its order; the Runtime builds it.

    Attributes:
        record_intent: Commits the stop-intent.
        withdraw_intent: Takes it back after a resume.
        stop_rest: Step 7: ops server, on_stop, transport; its hooks end by the loop time that it
            is given, so that the transport has a moment.
        record_stop: Step 8: the stop record.
        alarm: Whether the kernel alarm may be armed: only where the Runtime owns the signals.
    """

    tracker: Tracker
    dispatcher: Dispatcher
    requests: RpcServer
    ops: RpcServer
    jobs: PeriodicJobs
    reconciler: Reconciler
    holds: Holds
    record_intent: Callable[[StopRequest], Awaitable[None]]
    withdraw_intent: Callable[[], Awaitable[None]]
    stop_rest: Callable[[float], Awaitable[None]]
    record_stop: Callable[[DrainReport], Awaitable[None]]
    process: Process
    alarm: bool


class ShutdownCoordinator:
    """The owner of every drain of one service.

    Args:
        phase: The state that it alone advances from SERVING on.
        parts: What it acts on.
        settings: Its times.
    """

    def __init__(
        self, phase: Phase, parts: Parts, settings: Settings, telemetry: Telemetry, clock: Clock
    ) -> None:
        self._phase = phase
        self._parts = parts
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._report = DrainReport()
        self._request: StopRequest | None = None
        self._requested = asyncio.Event()
        self._cut_short = asyncio.Event()
        self._resumed = False
        self._past_return = False
        self._step: str | None = None  # the bounded one that is under way
        self._finished_before = 0  # tasks, when the drain began

    # -- what others ask ----------------------------------------------------------------

    def request_stop(self, request: StopRequest) -> None:
        """Ask for a drain. The first request stands; a final one makes a resumable drain final."""
        if self._request is None:
            self._request = request
        elif request.final and not self._request.final:
            self._make_final(self._request, request)
        self._requested.set()

    def _make_final(self, first: StopRequest, final: StopRequest) -> None:
        """A signal's patience is its sender's: a longer drain has to fit into it from now on."""
        deadline = min(self._deadline_of(first), self._deadline_of(final))
        self._request = replace(first, final=True, timeout_s=deadline - first.at)
        self._past_return = True
        self._resumed = False
        if self._phase.deadline is not None:
            self._phase.deadline = deadline
        self._parts.tracker.poke()

    def _deadline_of(self, request: StopRequest) -> float:
        wait = self._settings.drain_timeout_s if request.timeout_s is None else request.timeout_s
        return request.at + wait

    def force(self) -> None:
        """Go to the deadline step at once: a second INT, or QUIT."""
        self._report.forced = True
        self._cut_short.set()
        self._parts.tracker.poke()

    def fail(self, reason: str, code: ExitCode | None = None) -> None:
        """The end will not be in order, whatever else happens: exit 70, or *code*."""
        self._report.failure = self._report.failure or reason
        self._report.failed_as = code or self._report.failed_as

    async def wait_requested(self) -> StopRequest:
        """Wait until somebody asks for a stop."""
        await self._requested.wait()
        assert self._request is not None
        return self._request

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for and stands."""
        return self._request is not None

    async def quiet(self) -> None:
        """Close intake and go on with what runs; `resume` undoes it."""
        self._phase.advance(ServiceState.QUIET)
        self._telemetry.emit("service.quieted")
        await self._close_intake()

    async def resume(self) -> None:
        """Undo quiet, or a drain that no signal asked for.

        Raises:
            GracekitError: the service is not quiet or draining, or it is too late.
        """
        state = self._phase.state
        if state is ServiceState.DRAINING:
            handed_over = bool(self._parts.dispatcher.unfinished.handed_over)
            if self._past_return or handed_over or (self._request and self._request.final):
                raise GracekitError(
                    "the drain is final: it was asked for by a signal, or a task was handed over, "
                    "or nothing is left to wait for; start the service again when it has stopped"
                )
            self._resumed = True
            self._parts.tracker.poke()
            return
        if state is not ServiceState.QUIET:
            raise GracekitError(f"the service is {state.value}: there is nothing to resume")
        await self._reopen()

    # -- one drain ----------------------------------------------------------------------

    async def drain(self, request: StopRequest) -> DrainReport | None:
        """Stop the service in eight bounded steps.

        Returns:
            The report; None if the drain was resumed and the service goes on.
        """
        await self._insist(partial(self._announce, request))  # 1
        name, telling = "gracekit-progress", self._tell_progress
        telling_on = keep_on(telling, name, telemetry=self._telemetry, clock=self._clock)
        progress = asyncio.create_task(telling_on, name=name)
        try:
            await self._insist(self._close_intake)  # 2, and 3: periodic jobs and recovery
            if not await self._insist(partial(self._wait_idle, request)):  # 4
                await self._withdraw()
                return None
            await self._insist(self._hand_over)  # 5
            await self._insist(self._flush)  # 6
            await self._insist(self._stop_rest)  # 7
            await self._insist(self._record)  # 8
            return self._report
        finally:
            progress.cancel()

    async def _insist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Take a step, again if somebody cancels it: a drain ends only when it is over.

        A program whose loop is torn down, or a handler that cancels every task of the process,
        cancels the drain's task too. Then there is no time left for waiting.
        """
        while True:
            try:
                return await step()
            except asyncio.CancelledError as error:
                self.survive(error)
                self.force()

    def survive(self, error: asyncio.CancelledError) -> None:
        """Go on after a cancellation of gracekit's own task, which gracekit did not ask for."""
        if self._parts.process.has_ended():
            raise error
        self.fail(f"something in this process cancelled gracekit's own task: {error!r}")
        if (task := asyncio.current_task()) is not None:
            task.uncancel()

    @property
    def _deadline(self) -> float:
        """Loop time; a signal may have brought it nearer since the drain began."""
        assert self._phase.deadline is not None
        return self._phase.deadline

    @property
    def _hard_limit(self) -> float:
        return self._after(self._deadline)

    @property
    def _flush_by(self) -> float:
        """Loop time at which outcomes and replies have left, or are left to the next start."""
        return self._hard_limit - self._settings.exit_margin_s

    @property
    def _stop_by(self) -> float:
        """Loop time at which each step before the record has ended, or is cut.

        The record then has a quarter of the margin, and the time from the hard limit to the alarm.
        """
        return self._hard_limit - self._settings.exit_margin_s / 4

    def _until(self, end: float) -> float:
        """Seconds that a step gets which must end at *end*, loop time."""
        return max(SHORTEST_STEP_S, end - self._clock.loop())

    def _after(self, deadline: float) -> float:
        """The hard limit of a drain with that deadline; both loop time."""
        return deadline + self._settings.hard_limit_s - self._settings.drain_timeout_s

    async def _announce(self, request: StopRequest) -> None:
        """Step 1: kernel alarm, stop-intent, and then the state that everybody sees."""
        if self._parts.alarm:
            left = self._after(self._deadline_of(request)) - self._clock.loop()
            self._parts.process.arm_alarm(max(0.1, left + ALARM_AFTER_HARD_LIMIT_S))
        # The record first: a handler that sees the drain may keep the interpreter to itself from
        # then on, and nothing could be recorded any more.
        await self._bounded("stop-intent", self._parts.record_intent(request), INTENT_TIMEOUT_S)
        request = self._request or request  # a signal may have made it final and shorter meanwhile
        if self._phase.state is not ServiceState.DRAINING:  # the step may be taken again
            self._phase.advance(ServiceState.DRAINING)
            self._finished_before = self._parts.tracker.finished
        self._phase.asked_at, self._phase.deadline = request.at, self._deadline_of(request)
        running = [task for task in self._parts.tracker if task.running and task.holds_drain]
        self._telemetry.emit(
            "drain.started",
            source=request.source,
            by=request.by,
            in_flight=len(self._parts.tracker),
            running=len(running),
            timeout_s=self._phase.drain_timeout,
        )
        for task in running[:MOST_AWAITED]:
            self._tell_awaited(task)
        if request.final:
            self._say_stopping()

    def _tell_awaited(self, task: TrackedTask) -> None:
        self._telemetry.emit(
            "task.awaited",
            task_id=task.request_id,
            method=task.method,
            channel=task.lane.word,
            resource=task.resource,
            attempt=task.attempt,
            running_s=self._age(task.started_at),
            safe_point_s=self._since(task.safe_point_at),
            expected_s=self._left_s(task),
        )

    async def _close_intake(self) -> None:
        """Steps 2 and 3: the gate, then the consumers, then what was under way at the gate."""
        parts = self._parts
        parts.dispatcher.close_gate(Lane.REQUESTS)
        parts.jobs.pause()
        parts.reconciler.pause()
        # Before waiting, not after: a delivery that arrives during the wait would be settled
        # by nobody and seen again only when the connection drops.
        timeout = self._within(self._settings.cancel_ok_timeout_s + 1)
        given_back = await self._bounded(
            "close of the new-request intake", parts.requests.close_intake(), timeout
        )
        self._parts.dispatcher.unfinished.given_back += given_back or 0
        # Not added up: the gate lists all since it was opened, also what a quiet has left.
        self._report.not_started = await parts.dispatcher.wait_gate(
            Lane.REQUESTS, deadline=self._clock.loop() + self._within(timeout)
        )
        self._telemetry.emit(
            "intake.closed",
            channel=Lane.REQUESTS.value,
            given_back=given_back or 0,
            not_started=len(self._report.not_started),
        )

    async def _wait_idle(self, request: StopRequest) -> bool:
        """Step 4: wait for what runs, then for a quiet ops lane; false if resumed."""
        await self._wait_running()
        if self._resumed:
            return False
        self._past_return = True
        if not request.final:
            self._say_stopping()
        await self._wait_ops_quiet()
        # One that came by the ops lane and held no drain may have let another begin that does,
        # or opened a hold, which only the ops lane can end.
        while not self._idle_wait_over() and await self._is_held():
            await self._wait_running()
            await self._wait_ops_quiet()
        await self._close_ops()
        await self._wait_running()
        self._report.waited_s = self._clock.loop() - request.at
        return True

    async def _wait_running(self) -> None:
        """Until nothing runs that holds the drain, and no hold is open; or the deadline."""
        while not self._idle_wait_over():
            if self._parts.tracker.running or self._parts.dispatcher.is_entering():
                await self._parts.tracker.wait_change(deadline=self._deadline)
            elif await self._count_holds() != 0:
                poll = min(self._deadline, self._clock.loop() + HOLD_POLL_S)
                await self._parts.tracker.wait_change(deadline=poll)
            else:
                return

    async def _is_held(self) -> bool:
        return self._parts.tracker.running > 0 or await self._count_holds() != 0

    def _idle_wait_over(self) -> bool:
        return self._cut_short.is_set() or self._resumed or self._clock.loop() >= self._deadline

    async def _count_holds(self) -> int | None:
        """Open holds; None if that cannot be told now, which is no reason to leave."""
        asking = self._bounded("count of holds", self._parts.holds.mine(), INTENT_TIMEOUT_S)
        holds: list[Hold] | None = await asking
        if holds is None:
            return None
        self._report.open_holds = len(holds)
        self._report.holds = [f"{hold.name} {hold.key}" for hold in holds[:LISTED_HOLDS]]
        return len(holds)

    def _within(self, limit_s: float) -> float:
        """At most *limit_s*, and not past the deadline: the hand-over must still fit."""
        end = self._clock.loop() + limit_s
        if self._phase.deadline is not None:
            end = min(end, self._phase.deadline)
        if self._cut_short.is_set():
            end = 0.0
        return max(SHORTEST_STEP_S, end - self._clock.loop())

    async def _wait_ops_quiet(self) -> None:
        """A last ops task may need a callback: its intake closes once its lane was idle."""
        tracker = self._parts.tracker
        quiet = min(self._deadline, self._clock.loop() + self._settings.ops_quiet_timeout_s)
        if not self._cut_short.is_set():
            await tracker.wait_until(
                lambda: tracker.count(Lane.OPS) == 0 or self._cut_short.is_set(), deadline=quiet
            )

    async def _close_ops(self) -> None:
        """The ops gate, then its consumers, then what was under way at the gate."""
        self._parts.dispatcher.close_gate(Lane.OPS)
        timeout = self._within(self._settings.cancel_ok_timeout_s)
        # Idle or not: behind the closed gate a delivery would go back and come again for ever.
        given_back = await self._bounded(
            "close of the ops intake", self._parts.ops.close_intake(), timeout
        )
        self._parts.dispatcher.unfinished.given_back += given_back or 0
        not_started = await self._parts.dispatcher.wait_gate(
            Lane.OPS, deadline=self._clock.loop() + self._within(INTENT_TIMEOUT_S)
        )
        self._report.not_started += not_started
        self._telemetry.emit(
            "intake.closed",
            channel=Lane.OPS.value,
            given_back=given_back or 0,
            not_started=len(not_started),
        )

    async def _hand_over(self) -> None:
        """Step 5: cancel what still runs, wait the grace, record the rest as unclean."""
        tracker = self._parts.tracker
        self._parts.dispatcher.seal()
        cause = CancelCause.FORCED if self._report.forced else CancelCause.DRAIN_DEADLINE
        for task in tracker:
            if task.running:
                task.cancel(cause)
        grace = self._clock.loop() + self._settings.handover_grace_s
        await tracker.wait_until(lambda: tracker.running + tracker.running_ops == 0, deadline=grace)
        stuck = [task for task in tracker if task.running]
        for task in stuck:
            self._telemetry.emit(
                "task.stuck",
                task_id=task.request_id,
                method=task.method,
                channel=task.lane.word,
                resource=task.resource,
                attempt=task.attempt,
                running_s=self._age(task.started_at),
                safe_point_s=self._since(task.safe_point_at),
            )
        if stuck:
            ids = [task.request_id for task in stuck]
            self._report.unclean = list(dict.fromkeys([*self._report.unclean, *ids]))
            # Of the time for outcomes and replies, which stuck tasks do not have; the freeing of
            # rows still follows.
            end = min(self._clock.loop() + 1.0, self._flush_by - SHORTEST_STEP_S)
            limit_s = self._until(end)
            await self._bounded(
                "hand-over of stuck tasks", self._parts.dispatcher.hand_over_stuck(stuck), limit_s
            )

    async def _flush(self) -> None:
        """Step 6: outcomes and replies."""
        flush_s = self._until(
            min(self._clock.loop() + self._settings.handover_flush_s, self._flush_by)
        )
        deadline = self._clock.loop() + flush_s
        await self._parts.dispatcher.wait_flushed(deadline=deadline)
        await self._free_forgotten(deadline)
        self._report.leases_kept = self._parts.dispatcher.kept_leases()
        self._report.left_behind = self._parts.dispatcher.left_behind()

    async def _free_forgotten(self, deadline: float) -> None:
        """No row of ours stays that nobody works on: a failed commit may have left one.

        Within the time of the flush: a slow store must not eat that of the steps after it.
        """
        acted = {*self._report.unclean, *self._parts.dispatcher.unfinished.handed_over}
        for _ in range(FREE_TRIES):
            left = max(SHORTEST_STEP_S, deadline - self._clock.loop())
            freeing = self._parts.reconciler.free_forgotten(acted)
            rows = await self._bounded("freeing of rows", freeing, left)
            if rows is not None:
                self._add_forgotten(rows)
            if rows is not None or self._clock.loop() >= deadline:
                return

    def _add_forgotten(self, rows: Sequence[TaskRow]) -> None:
        lists = {
            TaskState.RUNNING: self._parts.dispatcher.unfinished.handed_over,
            TaskState.ACCEPTED: self._report.not_started,
        }
        for row in rows:  # a HANDED_OVER one was only claimed, to be settled
            known = lists.get(row.state)
            if known is not None and row.request_id not in known:
                known.append(row.request_id)
                self._telemetry.emit(
                    "task.not_started",
                    task_id=row.request_id,
                    method=row.method,
                    channel=row.lane.word,
                    resource=row.resource,
                    attempt=row.attempts,
                )

    async def _stop_rest(self) -> None:
        """Step 7: ops server, on_stop, transport."""
        margin_s = self._settings.exit_margin_s
        closing_s = self._until(
            min(self._clock.loop() + margin_s / 2, self._stop_by - margin_s / 2)
        )
        await self._bounded("close of the ops intake", self._parts.ops.close_intake(), closing_s)
        stopping = self._parts.stop_rest(self._stop_by - margin_s / 4)
        await self._bounded("stop", stopping, self._until(self._stop_by))

    async def _record(self) -> None:
        """Step 8: the stop record, whose exit code is the report's."""
        if self._phase.state is not ServiceState.STOPPED:  # the step may be taken again
            self._phase.advance(ServiceState.STOPPED)
        self._add_unfinished()
        # Within what is left: the stop record matters more.
        left = self._hard_limit - self._clock.loop() - INTENT_TIMEOUT_S
        limit = max(SHORTEST_STEP_S, min(INTENT_TIMEOUT_S, left))
        counting = self._parts.reconciler.count_unfinished()
        self._report.unfinished = await self._bounded("count of rows", counting, limit)
        await self._bounded("stop record", self._parts.record_stop(self._report), 1.0)
        report = self._report
        self._telemetry.emit(
            "drain.finished",
            waited_s=round(report.waited_s, 3),
            finished=report.finished,
            handed_over=len(report.handed_over) + len(report.unclean),
            not_started=len(report.not_started),
            given_back=report.given_back,
            open_holds=report.open_holds,
            holds=self._names_of_holds(),
            unfinished=report.unfinished,
            exit_code=int(report.exit_code),
        )

    def _add_unfinished(self) -> None:
        """What became of requests in this drain: assigned, as the step may be taken again."""
        unfinished = self._parts.dispatcher.unfinished
        self._report.finished = self._parts.tracker.finished - self._finished_before
        self._report.handed_over = list(unfinished.handed_over)
        self._report.given_back = unfinished.given_back
        for task in unfinished.unrecorded:
            self.fail(f"the hand-over of {task} could not be recorded")

    # -- undo ---------------------------------------------------------------------------

    async def _withdraw(self) -> None:
        self._request = None
        self._requested.clear()
        self._resumed = False
        if self._parts.alarm:
            self._parts.process.disarm_alarm()
        await self._bounded(
            "withdrawal of the stop", self._parts.withdraw_intent(), INTENT_TIMEOUT_S
        )
        await self._reopen()

    async def _reopen(self) -> None:
        self._phase.advance(ServiceState.SERVING)
        self._phase.asked_at = self._phase.deadline = None
        self._report = DrainReport()
        self._parts.dispatcher.open_gate(Lane.REQUESTS)
        # Before the await: a stop that comes meanwhile pauses them again, and that must stand.
        self._parts.jobs.resume()
        self._parts.reconciler.resume()
        await self._parts.requests.open_intake()
        self._telemetry.emit("drain.resumed")
        self._telemetry.emit("intake.opened", channel=Lane.REQUESTS.value)

    # -- the small print ----------------------------------------------------------------

    async def _bounded(self, what: str, step: Awaitable[Any], timeout_s: float) -> Any:
        """Run one step; its failure or slowness is told and does not stop the drain."""
        loop, self._step = asyncio.get_running_loop(), what
        slow = loop.call_later(SLOW_STEP_S, self._tell_slow, what, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await step
        except TimeoutError:
            self._telemetry.emit("drain.step_failed", step=what, error=f"took over {timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - whatever fails, the rest must still happen
            self._telemetry.emit("drain.step_failed", step=what, error=repr(error))
        finally:
            slow.cancel()
            self._step = None
        return None

    def _tell_slow(self, step: str, limit_s: float) -> None:
        self._telemetry.emit("drain.waiting", step=step, limit_s=round(limit_s, 1))

    async def _tell_progress(self) -> None:
        """One line every few seconds, and a longer stop time from systemd while it is of use."""
        tick = self._settings.progress_every_s
        while True:
            await asyncio.sleep(tick)
            running = [task for task in self._parts.tracker if task.running]
            self._telemetry.emit(
                "drain.progress",
                step=self._step,
                in_flight=len(self._parts.tracker),
                running=len(running),
                open_holds=self._report.open_holds,
                holds=self._names_of_holds(),
                tasks=self._list(running),
                left_s=round(max(0.0, self._deadline - self._clock.loop()), 1),
                expected_s=self._expected_s(running),
            )
            sdnotify.status(self._status(running), extend_s=3 * tick)

    def _list(self, running: list[TrackedTask]) -> str:
        """`migrate vm:vm-1 12.3s (expected finish 8.1s), copy 3.0s and 7 more`, oldest first."""
        oldest = sorted(running, key=lambda task: task.started_at or 0.0)[:LISTED_TASKS]
        more = len(running) - len(oldest)
        return ", ".join(map(self._line, oldest)) + (f" and {more} more" if more else "")

    def _names_of_holds(self) -> str | None:
        """`migration vm-1, migration vm-2 and 3 more`; None without holds."""
        more = self._report.open_holds - len(self._report.holds)
        return ", ".join(self._report.holds) + (f" and {more} more" if more > 0 else "") or None

    def _line(self, task: TrackedTask) -> str:
        words = [task.method, *([":".join(task.resource)] if task.resource else [])]
        words.append(f"{self._age(task.started_at)}s")
        left_s = self._left_s(task)
        return " ".join(words) + ("" if left_s is None else f" (expected finish {left_s}s)")

    def _left_s(self, task: TrackedTask) -> float | None:
        """Seconds until *task* is expected to end; None if its history says nothing."""
        now = self._clock.loop()
        end = task.expected_end(now)
        return None if end is None else round(end - now, 1)

    def _expected_s(self, running: list[TrackedTask]) -> float | None:
        """Seconds until the last of *running* is expected to end; None if one is not known."""
        left = [self._left_s(task) for task in running]
        known = [seconds for seconds in left if seconds is not None]
        return max(known, default=None) if len(known) == len(left) else None

    def _status(self, running: list[TrackedTask]) -> str:
        expected_s = self._expected_s(running)
        known = "" if expected_s is None else f", expected finish {expected_s:.0f}s"
        return f"draining: {len(running)} running{known}"

    def _say_stopping(self) -> None:
        sdnotify.stopping(extend_s=3 * self._settings.progress_every_s)

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else self._age(moment)

    def _age(self, since: float | None) -> float:
        return 0.0 if since is None else round(self._clock.loop() - since, 1)
