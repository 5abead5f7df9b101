"""One request's whole life, from the delivery to the reply.

`dispatch` reads top to bottom as ARCHITECTURE.md tells it: read, track, accept,
ack, turn, begin, run, finish, reply, untrack. rpc, tracker and leases do not
import each other; they meet here. gracekit cancels handlers, and waits for a
turn when the gate closes; it never cancels its own steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.errors import StoreError
from gracekit.journal.rows import Address, Outcome, TaskRow
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.attempt import AttemptEnd, Attempts
from gracekit.request.context import Services
from gracekit.request.custody import Admission, Custody
from gracekit.request.duplicates import Duplicates
from gracekit.request.events import TaskEvents
from gracekit.request.heartbeats import Heartbeats
from gracekit.request.lanes import Job, LaneGate, Scheduler, Unfinished
from gracekit.request.outcomes import errored, ordered
from gracekit.request.parking import ParkingPlace
from gracekit.request.unjournaled import Unjournaled
from gracekit.request.waits import LeaseWaits
from gracekit.rpc.failures import words_of
from gracekit.rpc.transport import Delivery, settle
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import (
    Awaited,
    History,
    Interruption,
    Lane,
    Order,
    Reason,
    TaskState,
    TrackedTask,
)


class Dispatcher:
    """Carries each request through its life; a recovered one joins after its acceptance.

    Args:
        gates: Intake, slots and threads of each lane.
        history: Records how long each attempt took.
    """

    def __init__(
        self,
        services: Services,
        arrivals: Arrivals,
        custody: Custody,
        scheduler: Scheduler,
        waits: LeaseWaits,
        answers: Answers,
        parking: ParkingPlace,
        telemetry: Telemetry,
        *,
        gates: Mapping[Lane, LaneGate],
        history: History,
    ) -> None:
        self._services = services
        self._journal = services.journal
        self._tracker = services.tracker
        self._clock: Clock = services.clock
        self._arrivals = arrivals
        self._custody = custody
        self._scheduler = scheduler
        self._waits = waits
        self._answers = answers
        self._parking = parking
        self._telemetry = telemetry
        self._gates = gates
        self.heartbeats = heartbeats = Heartbeats(answers, services.clock, telemetry)
        self._events = events = TaskEvents(telemetry, services.phase, services.clock)
        self.unfinished, self.leases = Unfinished(), services.leases
        self._duplicates = Duplicates(
            self._journal, self._tracker, arrivals, answers, heartbeats, telemetry
        )
        self._attempts = Attempts(
            services, answers, heartbeats, events, scheduler, telemetry, history=history
        )
        self._unjournaled = Unjournaled(
            self._attempts,
            scheduler,
            answers,
            heartbeats,
            events,
            journal=self._journal,
            tracker=self._tracker,
            unfinished=self.unfinished,
            telemetry=telemetry,
        )
        self._jobs: dict[TrackedTask, Job] = {}
        self._work: set[asyncio.Task[Any]] = set()
        self._when_ended = {
            lane: partial(self._life_ended, gate.capacity.give) for lane, gate in gates.items()
        }
        self._when_row_ended = {
            lane: partial(self._life_ended, gate.claim_limit.leave) for lane, gate in gates.items()
        }

    # -- the ways in --------------------------------------------------------------------

    def take(self, delivery: Delivery, lane: Lane) -> None:
        """Begin to process a delivery; the caller has taken a place of the lane for it."""
        self._spawn(self.dispatch(delivery, self._gates[lane]), self._when_ended[lane])

    def resume(self, row: TaskRow, *, inside: tuple[str, str] | None) -> None:
        """Run an ACCEPTED row to its end; the caller has claimed it within the claim limit.

        Args:
            row: As claimed.
            inside: Resource in whose line the caller has already taken a place for the row.
        """
        self._spawn(self._dispatch_row(row, inside), self._when_row_ended[row.lane])

    def _spawn(
        self, life: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]
    ) -> None:
        task = asyncio.create_task(life)
        self._work.add(task)
        task.add_done_callback(ended)

    def _life_ended(self, give_back: Callable[[], None], done: asyncio.Task[None]) -> None:
        """A request is done: give back its place in the lane, or its room in the claim limit."""
        self._work.discard(done)
        give_back()
        if not done.cancelled() and (error := done.exception()) is not None:
            self._telemetry.emit("dispatch.failed", error=words_of(error))

    # -- one request --------------------------------------------------------------------

    async def dispatch(self, delivery: Delivery, gate: LaneGate) -> None:
        """Carry one delivery through its life."""
        try:
            job = await self._arrivals.read(delivery, gate)
            if job is None or not await self._track(job):
                return
        except Exception as error:  # noqa: BLE001 - a delivery that nobody settles waits for ever
            await self._give_back_after(error, delivery)
            return
        except asyncio.CancelledError:
            self._put_back(delivery)
            raise
        try:
            if self._unjournaled.has_ended(job, delivery):
                await self._unjournaled.end_again(job, delivery)
            elif not job.task.journaled:
                delivery.taken()
                await self._unjournaled.live(job)
            elif (job.task.resource or job.method.reads_early) and await self._refuse(job):
                return
            elif await self._accept(job):
                await settle(delivery.ack(), self._telemetry)
                await self._live(job)
        except Exception as error:  # noqa: BLE001 - as above
            job.in_doubt |= not isinstance(error, StoreError)
            await self._give_back_after(error, delivery)
        except asyncio.CancelledError:
            job.in_doubt = True  # the row decides what was done
            self._put_back(delivery)
            raise
        finally:
            self._untrack(job)

    async def _give_back_after(self, error: Exception, delivery: Delivery) -> None:
        """A step before the request was accepted failed: give the delivery back."""
        if isinstance(error, StoreError):
            self._telemetry.emit("store.error", what="dispatch", error=str(error))
        else:
            self._telemetry.emit("dispatch.failed", error=words_of(error))
        await asyncio.sleep(backoff.GIVE_BACK_S)
        self._put_back(delivery)

    def _put_back(self, delivery: Delivery) -> None:
        """Give a delivery back, unless it is settled."""
        if not delivery.settled:
            self._spawn(settle(delivery.give_back(), self._telemetry), self._work.discard)

    async def _dispatch_row(self, row: TaskRow, inside: tuple[str, str] | None) -> None:
        """Carry an accepted row, of this run or an earlier one, through the rest of its life."""
        job = self._arrivals.job_of(row, self._gates[row.lane])
        job.claimed_ahead = True
        if inside is not None:
            job.inside.append(inside)
        job.gate.entering[job] = None
        if not await self._track_row(job):
            await self._give_up_row(job)
            return
        try:
            if row.expires_at is not None and row.expires_at > self._clock.wall():
                await self._resume_heartbeats(job, row.id)
            await self._live(job)
        except asyncio.CancelledError:
            job.in_doubt = True  # the row decides what was done
            raise
        finally:
            self._untrack(job)

    async def _track_row(self, job: Job) -> bool:
        """Add the task to the tracker once no attempt or copy of it is left there; false if the
        gate closed meanwhile.
        """
        task = job.task
        if self._tracker.add(task) is not None and not await self._track_later(job):
            return False
        self._jobs[task] = job
        return True

    async def _track_later(self, job: Job) -> bool:
        if not job.gate.is_open:
            return False
        job.begin_claimed()
        self._scheduler.leave(job)  # the attempt in flight may need the row's place
        job.task.handler = asyncio.current_task()
        job.waiting = True
        job.task.waits_for = Awaited.SAME_ID
        try:
            await self._tracker.add_after(job.task, self._clock)
        except asyncio.CancelledError:
            return False
        finally:
            job.waiting = False
            job.task.waits_for = None
        return True

    async def _give_up_row(self, job: Job) -> None:
        """Release a row that could not enter the tracker: any run may claim it then."""
        self._scheduler.leave(job)
        try:
            await self._custody.give_up_start(job.task)
        finally:
            self._note_not_started(job)
            job.gate.entering.pop(job, None)
            self._tracker.poke()  # a drain may wait for the entry alone
            job.begin_claimed()
            self._custody.left()

    async def _resume_heartbeats(self, job: Job, row_id: int) -> None:
        """Send heartbeats again to callers that asked for them and waited through a restart."""
        self.heartbeats.end(row_id)
        try:
            for address in await self._journal.monitored(row_id):
                self.heartbeats.begin(job.task, address, at_once=True)
        except StoreError as error:
            self._telemetry.emit("store.error", what="heartbeats", error=str(error))

    async def _live(self, job: Job) -> None:
        """From acceptance to the reply: turn, begin, run, finish, reply; later if it is delayed."""
        if job.is_delayed:
            return
        if not job.task.running and not await self._begin_in_turn(job):
            return
        if job.gate.is_shut:
            await self._hand_over(job, Interruption.SAFE_POINT)  # its handler has not begun
            return
        try:
            end = await self._attempts.run(job)
        except Exception as error:  # noqa: BLE001 - charged: it must not be retried for ever
            await self._charge(job, error)
            return
        if job.stuck:
            return  # the drain recorded it as unclean; recovery finds out what it did since
        if end.outcome is None:
            await self._hand_over(job, end.cut or Interruption.CANCELLED, rests=end.is_put_off)
            return
        await self._finish(job, end, end.outcome)

    # -- track and accept: custody ------------------------------------------------------

    async def _track(self, job: Job) -> bool:
        """Add the task to the tracker before any commit; false if its id is in flight here."""
        known = self._tracker.add(job.task)
        if known is None:
            self._jobs[job.task] = job
            return True
        await self._duplicates.meet(job, self._jobs.get(known))
        return False

    async def _accept(self, job: Job) -> bool:
        """Dedupe and accept in a group commit, which also records the start if a slot is free."""
        job.gate.entering[job] = None
        # Before the commit, which may take longer than the caller waits without a heartbeat.
        self.heartbeats.begin(job.task, job.reply)
        at_once = not job.is_delayed and self._scheduler.enter_nowait(job)
        while job.gate.is_open:
            match await self._custody.accept(job, begin=at_once):
                case Admission.DONE:
                    if job.is_delayed:
                        self._custody.note_due(job)
                    job.request = None  # its row has all of it now
                    if at_once:
                        self._attempts.mark_running(job)
                    return True
                case Admission.LEASE_ELSEWHERE:
                    self._scheduler.leave_for_lease(job)
                    at_once = False
                case Admission.KNOWN:
                    self._scheduler.leave(job)
                    await self._duplicates.answer(job)
                    return False
                case Admission.FAILED:
                    job.in_doubt = True
                    await asyncio.sleep(backoff.GIVE_BACK_S)
                    break
        self._scheduler.leave(job)
        if job.delivery is not None:
            self.unfinished.given_back += 1
            await settle(job.delivery.give_back(), self._telemetry)
        return False

    async def _refuse(self, job: Job) -> bool:
        self.heartbeats.begin(job.task, job.reply)
        wrong = await self._arrivals.read_early(job, self._events)
        if error := wrong or await self._waits.refusal(job):
            await self._arrivals.refuse(job, "arguments" if wrong else "lease_held", error)
        return bool(error)

    # -- turn and begin -----------------------------------------------------------------

    async def _begin_in_turn(self, job: Job) -> bool:
        """Wait for the task's turn, then record the attempt; false if it does not start here."""
        while await self._scheduler.wait(job):
            if job.expires_at is not None and self._clock.loop() >= job.expires_at:
                self._scheduler.leave(job)
                self._events.errored(job, Reason.EXPIRED.value)
                await self._end_unstarted(job, errored(str(job.task), Reason.EXPIRED))
                return False
            match await self._custody.begin(job):
                case Admission.DONE:
                    self._attempts.mark_running(job)
                    return True
                case Admission.LEASE_ELSEWHERE:
                    self._scheduler.leave_for_lease(job)
                    await self._waits.wait(job)
                case _:
                    self._scheduler.leave(job)
                    job.in_doubt = True
                    return False  # this run still owns the row: the reconciler releases it
        self._scheduler.leave(job)
        if job.task.order is not None:
            await self._end_unstarted(job, ordered(str(job.task), job.task.order, job.task.state))
        else:
            await self._custody.give_up_start(job.task)
            self._note_not_started(job)
        return False

    def _note_not_started(self, job: Job) -> None:
        job.gate.not_started.append(job.task.request_id)
        self._events.not_started(job)

    async def _end_unstarted(self, job: Job, outcome: Outcome) -> None:
        outcome, addresses = await self._custody.finish(job, outcome, expected=TaskState.ACCEPTED)
        for address in addresses:
            await self._reply(job, address, outcome)

    # -- run and finish -----------------------------------------------------------------

    async def _charge(self, job: Job, error: Exception) -> None:
        """Count an error in gracekit's steps around the handler as a crash of the task.

        Code of the application runs there too: its logging, tracing and exception classes. So the
        task is recovered like one whose process crashed, and `max_attempts` ends it.
        """
        self._telemetry.emit("dispatch.failed", error=words_of(error))
        await self._custody.charge(job)
        self._note_handed_over(job, recorded=not job.in_doubt)
        self._end_turn(job)
        self._custody.left()

    async def _finish(self, job: Job, end: AttemptEnd, outcome: Outcome) -> None:
        """Commit outcome, release of the lease and due replies together; then send the replies."""
        self._scheduler.leave_slots(job)
        outcome, addresses = await self._parking.end(job, outcome, end)
        if outcome.state is TaskState.ACCEPTED:
            self.heartbeats.hand_on(job.task)
        self._journal.forget_cursor(job.task)
        self._end_turn(job)
        if job.refused:
            await self._waits.pass_on(job)
        self._attempts.note_end(job, end, outcome)
        for address in addresses:
            await self._reply(job, address, outcome)

    def _end_turn(self, job: Job) -> None:
        self._scheduler.leave(job)
        self._waits.wake()
        self._tracker.ended(job.task)

    async def _reply(self, job: Job, address: Address, outcome: Outcome) -> None:
        row_id = job.task.row_id or 0
        self.heartbeats.end(job.task)
        if job.answered and address == job.reply:
            self._journal.forget_reply(row_id, address, sent=True)
        else:
            await self._answers.send_due(row_id, address, outcome)

    def obey(self, task: TrackedTask, order: Order) -> None:
        """End a task in flight as ordered: cancel its handler, or its wait for a turn."""
        self._attempts.obey(self._jobs[task], order)

    # -- cut short ----------------------------------------------------------------------

    async def _hand_over(self, job: Job, cut: Interruption, *, rests: bool = False) -> None:
        """Record a started, unfinished task for recovery; its handler does not run any more."""
        pause_s = backoff.NO_THREAD.after(job.task.attempt) if rests and job.gate.is_open else 0.0
        recorded = await self._custody.hand_over(job, cut, rest_s=pause_s)
        self._note_handed_over(job, recorded=recorded)
        job.in_doubt = True  # recovery looks for its row, here or at the next start
        if rests:
            await self._scheduler.rest(job, pause_s)
        self._end_turn(job)
        self._events.cut(job, cut)

    def _note_handed_over(self, job: Job, *, recorded: bool) -> None:
        # A drain's report lists only what the drain cut. Otherwise the application cancelled the
        # handler or a step of gracekit failed, and this run's own recovery settles the task.
        if self._services.phase.draining:
            self.unfinished.hand_over(job.task, recorded=recorded)

    async def hand_over_stuck(self, tasks: Sequence[TrackedTask]) -> None:
        """Record tasks whose handlers have not returned; this process keeps their leases."""
        jobs = [self._jobs[task] for task in tasks if task in self._jobs]
        await asyncio.gather(*map(self._hand_over_stuck, jobs))

    async def _hand_over_stuck(self, job: Job) -> None:
        job.stuck = True
        self.heartbeats.end(job.task)
        try:
            if job.task.journaled:
                await self._custody.hand_over(job, Interruption.UNCLEAN, returned=False)
            else:
                await self._unjournaled.hand_over_stuck(job)
        finally:  # also if there is no time to record it
            if job.task.running:  # else it ended meanwhile
                self._events.cut(job, Interruption.UNCLEAN)

    def abandon_threads(self) -> None:
        """Stop waiting for plain handlers that the drain recorded as unclean.

        A program that embeds the service can then exit, which ends their threads.
        """
        for job in self._jobs.values():
            in_threads = not job.method.is_async or job.task.children
            if job.stuck and in_threads and job.task.handler is not None:
                job.task.handler.cancel()

    def _untrack(self, job: Job) -> None:
        self.heartbeats.end(job.task)
        job.gate.entering.pop(job, None)
        if job.claimed_ahead:
            job.begin_claimed()
        self._scheduler.leave(job)
        self._jobs.pop(job.task, None)
        self._tracker.remove(job.task)
        if job.in_doubt:
            self._custody.left()
        if job.unended:  # it was charged, or the application cancelled a step of gracekit
            self._events.cut(job, job.task.cut or Interruption.UNCLEAN)

    # -- the gate, for the drain --------------------------------------------------------

    def open_gate(self, lane: Lane) -> None:
        """Accept and start requests of the lane again."""
        gate = self._gates[lane]
        gate.is_open, gate.is_shut = True, False
        gate.not_started = []
        self.unfinished.forget()

    def close_gate(self, lane: Lane) -> None:
        """Submit no more commits that accept or start requests of the lane; end waits for turns."""
        gate = self._gates[lane]
        gate.is_open = False
        for job in gate.entering:
            if job.waiting and job.task.handler is not None:
                job.task.handler.cancel("gate closed")

    async def wait_gate(self, lane: Lane, *, deadline: float) -> list[str]:
        """Wait until no request is between acceptance and start; returns ids of those not started.

        A request that is still between them at the deadline does not start.
        """
        gate = self._gates[lane]
        while gate.entering and await self._tracker.wait_change(deadline=deadline):
            pass
        gate.is_shut = not gate.is_open  # a resume may have opened it again
        return list(gate.not_started)

    async def wait_flushed(self, *, deadline: float) -> None:
        """Wait until all jobs but the stuck ones have ended; each reply is tried only once now."""
        self._answers.stop()
        while self.left_behind() and await self._tracker.wait_change(deadline=deadline):
            pass

    def is_entering(self) -> bool:
        """Whether a request is between the submission of its acceptance and its start."""
        return any(gate.entering for gate in self._gates.values() if not gate.is_open)

    def seal(self) -> None:
        """Let no handler of any lane start any more."""
        for gate in self._gates.values():
            gate.is_shut = True

    def left_behind(self) -> int:
        """How many requests gracekit has not finished, without those stuck in a handler."""
        return sum(not job.stuck for job in self._jobs.values())
