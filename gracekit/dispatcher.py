"""One request's whole life, from the delivery to the reply.

`dispatch` reads top to bottom as ARCHITECTURE.md tells it: read, track, accept,
ack, turn, begin, run, finish, reply, untrack. Here rpc, tracker and leases
meet; nothing below knows of the other two. gracekit's own steps are never
cancelled: only a handler is, and a wait for a turn when the gate closes.
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
from gracekit.request.settlement import settle
from gracekit.request.unjournaled import Unjournaled
from gracekit.request.waits import LeaseWaits
from gracekit.rpc.failures import words_of
from gracekit.rpc.transport import Delivery
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.history import History
from gracekit.tracker.task import Awaited, Interruption, Lane, Order, Reason, TaskState, TrackedTask


class Dispatcher:
    """Carries requests through their life; recovered ones join in the middle.

    Args:
        gates: The lanes that requests come by.
        history: Learns how long each attempt took.
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
        self._heartbeats = heartbeats = Heartbeats(answers, services.clock, telemetry)
        self._events = events = TaskEvents(telemetry, services.phase, services.clock)
        self.unfinished = Unfinished()
        self._duplicates = Duplicates(
            self._journal, self._tracker, arrivals, answers, heartbeats, telemetry
        )
        self._attempts = Attempts(services, answers, heartbeats, events, telemetry, history=history)
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
        """Start the life of a delivery; the caller took a place of the lane for it."""
        self._spawn(self.dispatch(delivery, self._gates[lane]), self._when_ended[lane])

    def resume(self, row: TaskRow, *, inside: tuple[str, str] | None) -> None:
        """Run an ACCEPTED row to its end: this run has claimed it, the claim limit has counted it.

        Args:
            row: As claimed.
            inside: Resource in whose line a place is handed over with it.
        """
        self._spawn(self._dispatch_row(row, inside), self._when_row_ended[row.lane])

    def _spawn(
        self, life: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]
    ) -> None:
        task = asyncio.create_task(life)
        self._work.add(task)
        task.add_done_callback(ended)

    def _life_ended(self, give_back: Callable[[], None], done: asyncio.Task[None]) -> None:
        """A life is over, and what it had of its lane is free: a place, or room for a row."""
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
        except StoreError as error:
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
            elif job.task.resource is not None and await self._refuse_held(job):
                return
            elif await self._accept(job):
                await settle(delivery.ack(), self._telemetry)
                await self._live(job)
        except StoreError as error:
            await self._give_back_after(error, delivery)
        except asyncio.CancelledError:
            job.in_doubt = True  # the row decides what was done
            self._put_back(delivery)
            raise
        finally:
            self._untrack(job)

    async def _give_back_after(self, error: StoreError, delivery: Delivery) -> None:
        """The record cannot be read: what was not accepted goes back."""
        self._telemetry.emit("store.error", what="dispatch", error=str(error))
        await asyncio.sleep(backoff.GIVE_BACK_S)
        await settle(delivery.give_back(), self._telemetry)

    def _put_back(self, delivery: Delivery) -> None:
        """The application cancelled a step of gracekit's own: an unsettled delivery goes back."""
        if not delivery.settled:
            self._do_beside(settle(delivery.give_back(), self._telemetry))

    def _do_beside(self, step: Coroutine[Any, Any, Any]) -> None:
        """Do it in a task of its own, which is kept until it ends."""
        task = asyncio.ensure_future(step)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _dispatch_row(self, row: TaskRow, inside: tuple[str, str] | None) -> None:
        """Carry an accepted row, of an earlier run or ours, through the rest of its life."""
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
        """Enter the tracker once the row's last attempt, or a copy, has left it; false if the gate
        closed meanwhile.
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
        self._scheduler.leave(job)  # the one in flight may need the place that was handed to us
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
        """A row that could not enter the tracker: anyone may claim it."""
        self._scheduler.leave(job)
        try:
            await self._custody.give_up_start(job.task)
        finally:
            self._note_not_started(job)
            job.gate.entering.pop(job, None)
            job.begin_claimed()
            self._custody.left()

    async def _resume_heartbeats(self, job: Job, row_id: int) -> None:
        """Callers that asked for heartbeats have waited through a restart."""
        try:
            for address in await self._journal.monitored(row_id):
                self._heartbeats.begin(job.task, address, at_once=True)
        except StoreError as error:
            self._telemetry.emit("store.error", what="heartbeats", error=str(error))

    async def _live(self, job: Job) -> None:
        """From acceptance to the reply: turn, begin, run, finish, reply."""
        if not job.task.running and not await self._begin_in_turn(job):
            return
        if job.gate.is_shut:
            await self._hand_over(job, Interruption.SAFE_POINT)  # nothing was done
            return
        try:
            end = await self._attempts.run(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, the task must not go round for ever
            await self._charge(job, error)
            return
        if job.stuck:
            return  # the drain has recorded it; what it did after that is for recovery to find
        if end.outcome is None:
            await self._hand_over(job, end.cut or Interruption.CANCELLED)
            return
        await self._finish(job, end, end.outcome)

    # -- track and accept: custody ------------------------------------------------------

    async def _track(self, job: Job) -> bool:
        """Enter the tracker before anything is submitted; false for what is in flight here."""
        known = self._tracker.add(job.task)
        if known is None:
            self._jobs[job.task] = job
            return True
        await self._duplicates.meet(job, self._jobs.get(known))
        return False

    async def _accept(self, job: Job) -> bool:
        """Dedupe and accept in a group commit, begun in the same one when its turn is at once."""
        job.gate.entering[job] = None
        # A sign of life from us, and none of a commit, which may take longer than a caller bears.
        self._heartbeats.begin(job.task, job.reply)
        at_once = self._scheduler.enter_nowait(job)
        while job.gate.is_open:
            match await self._custody.accept(job, begin=at_once):
                case Admission.DONE:
                    job.request = None  # its place is on record now
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

    async def _refuse_held(self, job: Job) -> bool:
        held = await self._waits.refusal(job)
        if held is not None:
            await self._arrivals.refuse(job, "lease_held", held)
        return held is not None

    # -- turn and begin -----------------------------------------------------------------

    async def _begin_in_turn(self, job: Job) -> bool:
        """Wait for the turn, then record the attempt; false if it does not start here."""
        while await self._scheduler.wait(job):
            if job.expires_at is not None and self._clock.loop() >= job.expires_at:
                self._scheduler.leave(job)
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
                    return False  # still ours on record: the reconciler finds and frees it
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
        """A fault of gracekit's own steps around the handler counts as a crash.

        Code of the application runs there too: of its logging, its tracing, its exceptions. The
        task goes the way of one whose process has crashed, so that its attempts are capped.
        """
        self._telemetry.emit("dispatch.failed", error=words_of(error))
        await self._custody.charge(job)
        self._note_handed_over(job, recorded=not job.in_doubt)
        self._end_turn(job)
        self._custody.left()

    async def _finish(self, job: Job, end: AttemptEnd, outcome: Outcome) -> None:
        """Outcome, end of the lease and replies due, in one commit; then turn and replies."""
        self._scheduler.leave_slots(job)
        outcome, addresses = await self._parking.end(job, outcome, end.requested)
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
        self._heartbeats.end(job.task)
        if job.answered and address == job.reply:
            await self._answers.forget(row_id, address, sent=True)
        else:
            await self._answers.send_due(row_id, address, outcome)

    def obey(self, task: TrackedTask, order: Order) -> None:
        """Let a task in flight end as an operator orders: its handler, or its wait for a turn."""
        self._attempts.obey(self._jobs[task], order)

    # -- cut short ----------------------------------------------------------------------

    async def _hand_over(self, job: Job, cut: Interruption) -> None:
        """Record a started, unfinished task for recovery; its handler has returned."""
        recorded = await self._custody.hand_over(job, cut)
        self._note_handed_over(job, recorded=recorded)
        job.in_doubt = True  # recovery looks for its row, here or at the next start
        self._end_turn(job)
        self._events.cut(job, cut)

    def _note_handed_over(self, job: Job, *, recorded: bool) -> None:
        # Outside of a drain the application has cancelled its handler, or a step of gracekit has
        # failed: recovery of this very run settles it.
        if self._services.phase.draining:
            self.unfinished.hand_over(job.task, recorded=recorded)

    async def hand_over_stuck(self, tasks: Sequence[TrackedTask]) -> None:
        """Record tasks whose handler did not return; their leases stay with this process."""
        jobs = [self._jobs[task] for task in tasks if task in self._jobs]
        await asyncio.gather(*map(self._hand_over_stuck, jobs))

    async def _hand_over_stuck(self, job: Job) -> None:
        job.stuck = True
        self._heartbeats.end(job.task)
        if job.task.journaled:
            await self._custody.hand_over(job, Interruption.UNCLEAN, returned=False)
        else:
            await self._unjournaled.hand_over_stuck(job)
        if job.task.running:  # else it has ended in the last moment
            self._events.cut(job, Interruption.UNCLEAN)

    def abandon_threads(self) -> None:
        """Wait no longer for plain handlers that were recorded as unclean.

        An embedding program may then end, and with it their threads.
        """
        for job in self._jobs.values():
            if job.stuck and not job.method.is_async and job.task.handler is not None:
                job.task.handler.cancel()

    def _untrack(self, job: Job) -> None:
        self._heartbeats.end(job.task)
        job.gate.entering.pop(job, None)
        if job.claimed_ahead:
            job.begin_claimed()
        self._scheduler.leave(job)
        self._jobs.pop(job.task, None)
        self._tracker.remove(job.task)
        if job.in_doubt:
            self._custody.left()
        if job.unended:  # charged, or a step of gracekit's own was cancelled
            self._events.cut(job, job.task.cut or Interruption.UNCLEAN)

    # -- the gate, for the drain --------------------------------------------------------

    def open_gate(self, lane: Lane) -> None:
        """Accept and begin again."""
        gate = self._gates[lane]
        gate.is_open, gate.is_shut = True, False
        gate.not_started = []
        self.unfinished.forget()

    def close_gate(self, lane: Lane) -> None:
        """From now on no accepting or RUNNING commit of the lane is submitted."""
        gate = self._gates[lane]
        gate.is_open = False
        for job in gate.entering:
            if job.waiting and job.task.handler is not None:
                job.task.handler.cancel("gate closed")

    async def wait_gate(self, lane: Lane, *, deadline: float) -> list[str]:
        """Wait until nothing is between acceptance and start; ids of those given up.

        What is still on its way at the deadline begins no more.
        """
        gate = self._gates[lane]
        while gate.entering and await self._tracker.wait_change(deadline=deadline):
            pass
        gate.is_shut = not gate.is_open  # else it was opened again meanwhile
        return list(gate.not_started)

    async def wait_flushed(self, *, deadline: float) -> None:
        """Wait until every job but the stuck ones has left; no reply is tried twice any more."""
        self._answers.stop()
        while not self._is_flushed() and await self._tracker.wait_change(deadline=deadline):
            pass

    def _is_flushed(self) -> bool:
        return all(job.stuck for job in self._jobs.values())

    def is_entering(self) -> bool:
        """Whether a request is between the submission of its acceptance and its start."""
        return any(gate.entering for gate in self._gates.values() if not gate.is_open)

    def seal(self) -> None:
        """Start no handler any more, of either lane."""
        for gate in self._gates.values():
            gate.is_shut = True

    def kept_leases(self) -> int:
        """Leases that only the death of this process frees."""
        return self._services.leases.kept

    def left_behind(self) -> int:
        """Requests that are still in gracekit's own hands; a handler that never ended is not."""
        return sum(not job.stuck for job in self._jobs.values())
