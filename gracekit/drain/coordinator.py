"""The owner of a drain, from the request to the stop record.

Once the service is SERVING, only `ShutdownCoordinator` changes its `Phase`. `drain()` reads like
the eight steps of ARCHITECTURE.md, and each step has a timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from gracekit import background
from gracekit.clock import Clock
from gracekit.config.live import LiveSettings
from gracekit.drain.bounded import BoundedSteps, Drained
from gracekit.drain.hand_over import HandOver
from gracekit.drain.progress import DrainProgress
from gracekit.drain.report import DrainReport, StopRequest
from gracekit.drain.times import SHORTEST_STEP_S, Times
from gracekit.errors import GracekitError
from gracekit.exits import ExitCode
from gracekit.journal.holds import Hold
from gracekit.parts import PartList
from gracekit.phase import Phase, ServiceState
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane

T = TypeVar("T")

RECORD: Final = "record"
"""Name of the part that writes the stop record, in the list of parts."""
INTENT_TIMEOUT_S: Final = 1.0
RECORD_TIMEOUT_S: Final = 1.0
LAST_STEPS: Final = 3
"""Waits after the stop record, for executors, other tasks and threads, `exit_margin_s` each."""
_INTAKES: Final = {Lane.REQUESTS: "new-request", Lane.OPS: "ops"}
HOLD_POLL_S: Final = 0.5
"""Seconds between two reads of the holds; another process that ends one does not wake this one."""


class ShutdownCoordinator:
    """The owner of every drain of one service.

    Args:
        phase: State of the service, which only it changes from SERVING on.
        parts: The objects on which a drain acts.
        settings: Times of a drain.
    """

    def __init__(
        self,
        phase: Phase,
        parts: Drained,
        settings: LiveSettings,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._phase = phase
        self._parts = parts
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._report = DrainReport()
        self._request: StopRequest | None = None
        self._requested = asyncio.Event()
        self._resumed = False
        self._past_return = False
        self._wait_over = False
        self._times = Times(phase, settings, clock)
        self._steps = BoundedSteps(telemetry)
        self._finished_before = 0  # tasks, when the drain began
        self._progress = self._new_progress()  # of this drain

    # -- what others ask ----------------------------------------------------------------

    def request_stop(self, request: StopRequest) -> bool:
        """Ask for a drain; returns whether that changed anything.

        The first request counts. A final one makes a resumable drain final. Any request cancels a
        resume that has not taken effect yet.
        """
        if self._request is None:
            self._request = request
        elif request.stays_down and not self._request.stays_down:
            # The drain goes on as it was asked for; only the wish is new.
            self._request = msgspec.structs.replace(self._request, stays_down=True)
            keep = partial(self._parts.record.keep_down, request.by, request.reason)
            background.start(keep, "gracekit-wish", telemetry=self._telemetry, clock=self._clock)
            return True
        elif request.final and not self._request.final:
            self._make_final(self._request, request)
        elif self._resumed:
            self._set_deadline(request, self._times.deadline_of(request))
        else:
            return False
        self._resumed = False
        self._requested.set()
        return True

    def _make_final(self, first: StopRequest, final: StopRequest) -> None:
        """Make a drain final, by the earlier deadline: a signal's sender kills after a timeout."""
        deadline = min(self._times.deadline_of(first), self._times.deadline_of(final))
        self._request = first.ending_at(deadline, final=final)
        self._past_return = True
        if self._phase.deadline is not None:
            self._phase.deadline = deadline
        self._parts.tracker.poke()

    def extend(self, by_s: float) -> float:
        """Move the deadline of a drain later, and with it the hard limit.

        Returns:
            Seconds until the deadline now.

        Raises:
            GracekitError: there is no drain that may be extended, or not by so much.
        """
        request = self._request
        if request is None or self._resumed:
            raise GracekitError(
                f"the service is {self._phase.state.value}, and no drain is under way that could "
                "be extended: `gracekit drain --timeout 5m` begins one with that time"
            )
        self._times.check_extension(request, by_s, wait_over=self._wait_over)
        deadline = self._times.deadline_of(request) + by_s
        self._set_deadline(request, deadline)
        left_s = round(deadline - self._times.now, 1)
        self._telemetry.emit("drain.extended", more_s=by_s, left_s=left_s)
        return left_s

    def _set_deadline(self, request: StopRequest, deadline: float) -> None:
        self._request = request.ending_at(deadline)
        if self._phase.deadline is not None:  # None: the drain begins soon, with this deadline
            self._phase.asked_at, self._phase.deadline = request.at, deadline
        self._arm_alarm(deadline)
        self._parts.tracker.poke()

    def force(self) -> None:
        """Go on to the hand-over at once, as after a second SIGINT or SIGQUIT."""
        self._report.forced = True
        self._times.is_cut_short = True
        self._parts.tracker.poke()

    def fail(self, reason: str, code: ExitCode | None = None) -> None:
        """Note that the end is not in order: the exit code will be 70, or *code*."""
        self._report.failure = self._report.failure or reason
        self._report.failed_as = code or self._report.failed_as

    def give_up(self, why: str, *, by: str) -> None:
        """Drain and end with exit code 70, because the service cannot go on."""
        self.fail(why)
        at, reason = self._times.now, why[:200]
        self.request_stop(StopRequest(source="error", by=by, reason=reason, final=True, at=at))

    async def wait_requested(self) -> StopRequest:
        """Wait until a stop is asked for."""
        await self._requested.wait()
        assert self._request is not None
        return self._request

    @property
    def stop_request(self) -> StopRequest | None:
        """The stop request in force; None without one."""
        return self._request

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for and not resumed."""
        return self._request is not None

    async def quiet(self) -> None:
        """Close intake and go on with what runs; `resume` undoes it.

        Raises:
            GracekitError: the service does not serve.
        """
        state = self._phase.state
        if state is not ServiceState.SERVING:
            raise GracekitError(f"the service is {state.value}: there is no intake to close")
        self._phase.advance(ServiceState.QUIET)
        self._telemetry.emit("service.quieted")
        self._parts.process.notify.status(self._phase.state.value)
        await self._close_intake()

    async def resume(self) -> None:
        """Undo quiet, or a drain that an operator asked for, even before it has begun.

        Raises:
            GracekitError: the service is not quiet or draining; or the drain is final, has handed
                tasks over, or has cut the start short.
        """
        state, request = self._phase.state, self._request
        is_draining = state is ServiceState.DRAINING
        handed_over = len(self._parts.dispatcher.unfinished.handed_over) if is_draining else 0
        self._times.check_return(request, handed_over, wait_over=self._past_return)
        if not (is_draining or request or state is ServiceState.QUIET):
            raise GracekitError(f"the service is {state.value}: there is nothing to resume")
        if not self._phase.has_served:
            raise GracekitError(
                "the service was still starting when the drain was asked for, and only a part of "
                "it was started: start it again when it has stopped"
            )
        if request is not None:
            self._resumed = True
            self._parts.tracker.poke()
        elif state is ServiceState.QUIET:  # otherwise a drain is being resumed already
            await self._reopen()

    # -- one drain ----------------------------------------------------------------------

    async def drain(self, request: StopRequest, order: PartList) -> DrainReport | None:
        """Stop the service in eight steps, each with a timeout.

        Args:
            request: Who asked for it, and how long it may take.
            order: The parts of the service; those above `RECORD` stop after the stop record.

        Returns:
            The report; None if the drain was resumed and the service goes on.
        """
        await self._insist(partial(self._announce, request))  # 1
        show, name = self._progress.show, "gracekit-progress"
        progress = background.start(show, name, telemetry=self._telemetry, clock=self._clock)
        try:
            await self._insist(self._close_intake)  # 2, and 3: periodic jobs and recovery
            if not await self._insist(partial(self._wait_idle, request)):  # 4
                progress.cancel()  # it is no drain any more, even if reopening takes long
                await self._withdraw()
                return None
            self._wait_over = True
            unfinished = HandOver(
                self._report,
                self._parts,
                self._steps,
                self._times,
                self._settings.now,
                self._telemetry,
            )
            await self._insist(unfinished.hand_over)  # 5
            await self._insist(unfinished.flush)  # 6
            await self._insist(partial(self._stop_service, order))  # 7
            await self._insist(partial(self._record, order))  # 8
            return self._report
        finally:
            progress.cancel()

    async def _insist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Take a step, and take it again if it is cancelled: a drain always goes on to its end.

        When a program tears down its loop, or a handler cancels all tasks of the process, the task
        of the drain is cancelled too. The drain then waits no longer and hands over.
        """
        while True:
            try:
                return await step()
            except asyncio.CancelledError as error:
                self.survive(error)
                self.force()

    def survive(self, error: asyncio.CancelledError) -> None:
        """Go on after something other than gracekit has cancelled gracekit's own task."""
        if self._parts.process.has_ended():
            raise error
        self.fail(f"something in this process cancelled gracekit's own task: {error!r}")
        if (task := asyncio.current_task()) is not None:
            task.uncancel()

    async def _announce(self, request: StopRequest) -> None:
        """Step 1: arm the alarm, record the stop-intent, and then change the state."""
        self._arm_alarm(self._times.deadline_of(self._request or request))
        # Before a handler sees the new state, and may hold the interpreter's lock from then on.
        intending = self._parts.record.intend_stop(
            source=request.source,
            by=request.by,
            reason=request.reason,
            stays_down=request.stays_down,
        )
        await self._steps.bounded("stop-intent", intending, INTENT_TIMEOUT_S)
        request = self._request or request  # a signal may have made it final and shorter meanwhile
        if self._phase.state is not ServiceState.DRAINING:  # `_insist` may repeat the step
            self._phase.advance(ServiceState.DRAINING)
            self._finished_before = self._parts.tracker.finished
        self._phase.asked_at, self._phase.deadline = request.at, self._times.deadline_of(request)
        self._progress = self._new_progress()
        self._progress.tell_started(request)
        self._progress.tell_platform(stopping=request.final)

    def _arm_alarm(self, deadline: float) -> None:
        if self._parts.alarm:
            self._parts.process.arm_alarm(self._times.until_alarm(deadline))

    async def _close_intake(self) -> None:
        """Steps 2 and 3: close the gate, pause jobs and recovery, close the consumers."""
        parts = self._parts
        parts.dispatcher.close_gate(Lane.REQUESTS)
        parts.jobs.pause()
        parts.reconciler.pause()
        timeout_s = self._settings.now.cancel_ok_timeout_s + 1
        # Assign, do not add: the list has all since the gate was opened, so also those of a quiet.
        self._report.not_started = await self._close_lane(Lane.REQUESTS, timeout_s, timeout_s)

    async def _close_lane(self, lane: Lane, timeout_s: float, gate_s: float) -> list[str]:
        """Close a lane's intake, and wait for its requests between acceptance and start.

        Args:
            lane: The lane; its gate is closed already.
            timeout_s: Timeout of the close.
            gate_s: Timeout of the wait.

        Returns:
            Ids of requests that were accepted and will not start.
        """
        dispatcher, times = self._parts.dispatcher, self._times
        # Before the wait, and even if the lane is idle. With a closed gate and open consumers, a
        # delivery would stay unsettled until the connection drops, or be given back for ever.
        closing = self._steps.bounded(
            f"close of the {_INTAKES[lane]} intake",
            self._parts.servers[lane].close_intake(),
            times.within(timeout_s),
            advances=lane is Lane.OPS,  # the other closes before the wait, so it is no progress
        )
        given_back: int = await closing or 0
        dispatcher.unfinished.given_back += given_back
        deadline = times.now + times.within(gate_s)
        not_started = await dispatcher.wait_gate(lane, deadline=deadline)
        self._telemetry.emit(
            "intake.closed",
            lane=lane.value,
            given_back=given_back,
            not_started=len(not_started),
        )
        return not_started

    async def _wait_idle(self, request: StopRequest) -> bool:
        """Step 4: wait for running tasks and holds, then for ops tasks; false if resumed."""
        await self._wait_running()
        await self._wait_ops()
        # An ops request may have started work that holds the drain, or opened a hold, which only
        # another ops request can end. So the ops intake stays open until there is neither.
        tracker = self._parts.tracker
        while not self._idle_wait_over() and (tracker.running or await self._count_holds() != 0):
            await self._wait_running()
            await self._wait_ops()
        if self._resumed:
            return False
        self._past_return = True
        if not request.final:
            self._progress.tell_platform(stopping=True)
        await self._close_ops()
        await self._wait_running(ops=True)
        await self._count_holds()  # they are not counted while a task runs
        self._progress.tell_ended()
        self._report.waited_s = self._times.now - request.at
        return True

    async def _wait_running(self, *, ops: bool = False) -> None:
        """Wait until no task (but, without *ops*, of the ops lane) runs and no hold is open."""
        tracker = self._parts.tracker
        while not self._idle_wait_over():
            running = tracker.running + (tracker.running_ops if ops else 0)
            if running or self._parts.dispatcher.is_entering():
                await tracker.wait_change(deadline=self._times.deadline)
            elif await self._count_holds() != 0:
                poll = min(self._times.deadline, self._times.now + HOLD_POLL_S)
                await tracker.wait_change(deadline=poll)
            else:
                return

    def _idle_wait_over(self) -> bool:
        return self._times.is_cut_short or self._resumed or self._times.now >= self._times.deadline

    async def _count_holds(self) -> int | None:
        """Number of open holds; None if the store does not say, so that the wait goes on."""
        limit_s = self._times.within(INTENT_TIMEOUT_S)
        holds: list[Hold] | None = await self._steps.bounded(
            "count of holds", self._parts.holds.mine(), limit_s, advances=False
        )
        if holds is None:
            return None
        self._report.note_holds(holds)
        self._progress.note_holds(holds)
        return len(holds)

    async def _wait_ops(self) -> None:
        """Wait for the ops tasks that are here, or come within `ops_quiet_timeout`.

        The ops intake is open meanwhile, as one of them may need another ops request. Later ones
        are awaited when it is closed: a steady flow of them would keep it open to the deadline.
        """
        tracker = self._parts.tracker
        until = self._times.now + self._settings.now.ops_quiet_timeout_s
        while not self._idle_wait_over() and tracker.has_ops(came_by=until):
            await tracker.wait_change(deadline=self._times.deadline)

    async def _close_ops(self) -> None:
        """Close the ops gate and consumers; wait for ops requests between accept and start."""
        self._parts.dispatcher.close_gate(Lane.OPS)
        self._report.not_started += await self._close_lane(
            Lane.OPS, self._settings.now.cancel_ok_timeout_s, INTENT_TIMEOUT_S
        )

    async def _stop_service(self, order: PartList) -> None:
        """Step 7: stop all parts that the stop record does not need, from the last part up."""
        self._parts.hooks.end_by = self._times.stop_by - 3 / 8 * self._settings.now.exit_margin_s
        await order.stop(self._stop_one, by=self._times.stop_by, above=RECORD)

    async def _stop_one(self, what: str, stop: Awaitable[Any], by: float) -> None:
        await self._steps.bounded(what, stop, self._times.until(by))

    async def _record(self, order: PartList) -> None:
        """Step 8: write the stop record, with the report's exit code, and then close the store."""
        if self._phase.state is not ServiceState.STOPPED:  # `_insist` may repeat the step
            self._phase.advance(ServiceState.STOPPED)
        self._add_unfinished()
        # The count gets only time that the stop record, which matters more, does not need.
        left = self._times.hard_limit - self._times.now - INTENT_TIMEOUT_S
        limit = max(SHORTEST_STEP_S, min(INTENT_TIMEOUT_S, left))
        counting = self._parts.reconciler.adoption.count_unfinished()
        self._report.unfinished = await self._steps.bounded("count of rows", counting, limit)
        await self._write_record()
        await order.stop(self._stop_one, by=self._times.now + RECORD_TIMEOUT_S)

    async def _write_record(self) -> None:
        report, parts = self._report, self._parts
        code = int(report.exit_code)
        parts.seat.is_kept = report.can_still_act
        dies_by = self._times.alarm_at if parts.alarm else None
        recording = parts.record.end(code, report.as_json(dies_by=dies_by))
        await self._steps.bounded("stop record", recording, RECORD_TIMEOUT_S)
        if parts.ends_process:
            parts.process.exit_within(LAST_STEPS * self._settings.now.exit_margin_s, code)
        self._telemetry.tell_left_out(at_once=True)
        self._progress.tell_finished()
        self._telemetry.emit(
            "service.stopped",
            service=parts.seat.service,
            instance=parts.seat.instance,
            run=parts.seat.run_id,
            exit_code=code,
        )

    def _add_unfinished(self) -> None:
        """Put into the report what became of requests; assigns, as the step may be repeated."""
        unfinished = self._parts.dispatcher.unfinished
        self._report.finished = self._parts.tracker.finished - self._finished_before
        self._report.handed_over = list(unfinished.handed_over)
        self._report.given_back = unfinished.given_back
        self._report.hooks_left = self._parts.hooks.still_running
        for task in unfinished.unrecorded:
            self.fail(f"the hand-over of {task} could not be recorded")

    # -- undo ---------------------------------------------------------------------------

    async def _withdraw(self) -> None:
        self._request = None
        self._requested.clear()
        self._resumed = False
        if self._parts.alarm:
            self._parts.process.disarm_alarm()
        await self._steps.bounded(
            "withdrawal of the stop", self._parts.record.withdraw_stop(), INTENT_TIMEOUT_S
        )
        await self._reopen()

    async def _reopen(self) -> None:
        self._phase.advance(ServiceState.SERVING)
        self._parts.process.notify.status(self._phase.trouble or self._phase.state.value)
        self._phase.asked_at = self._phase.deadline = None
        self._report = DrainReport()
        self._parts.dispatcher.open_gate(Lane.REQUESTS)
        # Before the await: a stop that comes during it pauses them again, and must not be undone.
        self._parts.jobs.resume()
        self._parts.reconciler.resume()
        # If the broker is away, this may wait for longer than a drain may take; a stop ends it.
        opening = self._parts.servers[Lane.REQUESTS].open_intake()
        if await self._steps.unless(self._requested, opening):
            self._telemetry.emit("drain.resumed")
            self._telemetry.emit("intake.opened", lane=Lane.REQUESTS.value)

    # -- the small print ----------------------------------------------------------------

    def _new_progress(self) -> DrainProgress:
        return DrainProgress(
            self._report,
            self._steps,
            self._times,
            self._parts,
            self._telemetry,
            self._clock,
            every_s=self._settings.now.progress_every_s,
        )
