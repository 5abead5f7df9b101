"""One request's whole life, from the delivery to the reply.

`dispatch` reads top to bottom as ARCHITECTURE.md tells it: read, track, accept,
ack, turn, begin, run, finish, reply, untrack. Here rpc, tracker and leases
meet; nothing below knows of the other two. gracekit's own steps are never
cancelled: only a handler is, and a wait for a turn when the gate closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.errors import ConflictingRequestError, LeaseHeld, StoreError
from gracekit.request.answers import Answers, Ended, Sent
from gracekit.request.arrivals import Arrivals
from gracekit.request.attempt import (
    End,
    error_type_of,
    errored,
    failed,
    failure_from,
    has_left_out,
    ordered,
    outcome_of,
    run_attempt,
    timeout_error,
)
from gracekit.request.context import Context, Services, lease_in
from gracekit.request.custody import Custody, Entry
from gracekit.request.heartbeats import Heartbeats
from gracekit.request.lanes import GIVE_BACK_PAUSE_S, Job, LaneGate, Turns
from gracekit.request.refusals import settle
from gracekit.request.waits import LeaseWaits
from gracekit.rpc.failures import words_of
from gracekit.rpc.message import Failure
from gracekit.rpc.transport import Delivery
from gracekit.telemetry import Telemetry, masked
from gracekit.tracker.history import History
from gracekit.tracker.journal import Address, Outcome, TaskRow
from gracekit.tracker.task import CancelCause, Cut, Lane, Order, Reason, TaskState, TrackedTask

_NO_END: Final = End()


class Dispatcher:
    """Carries requests through their life; recovered ones join in the middle.

    Args:
        gates: The lanes that requests come by.
        history: Learns how long each attempt took.
        on_hand_over: Told of each task that was handed over with its handler returned, and
            whether that is on record.
        on_give_back: Told of each delivery given back.
    """

    def __init__(
        self,
        services: Services,
        arrivals: Arrivals,
        custody: Custody,
        turns: Turns,
        waits: LeaseWaits,
        answers: Answers,
        telemetry: Telemetry,
        *,
        gates: Mapping[Lane, LaneGate],
        history: History,
        on_hand_over: Callable[[TrackedTask, bool], None],
        on_give_back: Callable[[], None],
    ) -> None:
        self._services = services
        self._journal = services.journal
        self._tracker = services.tracker
        self._clock: Clock = services.clock
        self._arrivals = arrivals
        self._custody = custody
        self._turns = turns
        self._waits = waits
        self._answers = answers
        self._ended = Ended()
        self._heartbeats = Heartbeats(answers, services.clock, telemetry)
        self._telemetry = telemetry
        self._gates = gates
        self._history = history
        self._on_hand_over = on_hand_over
        self._on_give_back = on_give_back
        self._jobs: dict[TrackedTask, Job] = {}
        self._work: set[asyncio.Task[Any]] = set()
        self._when_ended = {
            lane: partial(self._life_ended, gate.places.give) for lane, gate in gates.items()
        }
        self._when_row_ended = {
            lane: partial(self._life_ended, gate.seats.leave) for lane, gate in gates.items()
        }

    # -- the ways in --------------------------------------------------------------------

    def take(self, delivery: Delivery, lane: Lane) -> None:
        """Start the life of a delivery; the caller took a place of the lane for it."""
        self._spawn(self.dispatch(delivery, self._gates[lane]), self._when_ended[lane])

    def resume(self, row: TaskRow, *, inside: tuple[str, str] | None) -> None:
        """Start the rest of the life of an ACCEPTED row of ours; a seat was taken for it.

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
            if _is_kept_by_transport(job) and self._ended.knows(job.task.request_id, delivery):
                await self._end_again(job, delivery)
            elif not job.task.journaled:
                delivery.taken()
                await self._live_on_the_transport(job)
            elif job.task.resource is not None and await self._waits_for_itself(job):
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
        await asyncio.sleep(GIVE_BACK_PAUSE_S)
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
        job.seated = True
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
        job.leave_seat()
        self._turns.leave(job)  # the one in flight may need the place that was handed to us
        job.task.handler = asyncio.current_task()
        job.waiting = True
        try:
            await self._tracker.add_after(job.task, self._clock)
        except asyncio.CancelledError:
            return False
        finally:
            job.waiting = False
        return True

    async def _give_up_row(self, job: Job) -> None:
        """A row that could not enter the tracker: anyone may claim it."""
        self._turns.leave(job)
        try:
            await self._custody.give_up_start(job.task)
        finally:
            self._note_not_started(job)
            job.gate.entering.pop(job, None)
            job.leave_seat()
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
            await self._hand_over(job, Cut.SAFE_POINT)  # begun too late, and nothing was done
            return
        try:
            end = await self._run(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, the task must not go round for ever
            await self._charge(job, error)
            return
        if job.stuck:
            return  # the drain has recorded it; what it did after that is for recovery to find
        if end.outcome is None:
            await self._hand_over(job, end.cut or Cut.CANCELLED)
            return
        addresses = await self._finish(job, end, end.outcome)
        for address in addresses:
            await self._reply(job, address, end.outcome)

    async def _live_on_the_transport(self, job: Job) -> None:
        """A `requeue` method: no row, acked at its end, given back when cut."""
        assert job.delivery is not None
        job.gate.entering[job] = None
        self._heartbeats.begin(job.task, job.reply)
        if not await self._turns.wait(job):
            self._turns.leave(job)
            if job.task.order is None:
                await self._give_back(job)
            else:
                await self._end_copies(job, ordered(str(job.task), job.task.order, job.task.state))
            return
        job.task.attempt = 1
        if job.gate.is_shut:
            await self._give_back(job)
            return
        self._mark_running(job)
        try:
            end = await self._run(job)
        except Exception as error:  # noqa: BLE001 - as above
            await self._charge(job, error)
            return
        self._turns.leave(job)
        # The state first: with nothing left to wait for, a drain takes what is RUNNING for stuck.
        job.task.advance(end.outcome.state if end.outcome else TaskState.HANDED_OVER)
        job.task.cut = job.task.cut or end.cut
        self._tracker.ended(job.task)
        if job.stuck:
            return  # the drain has given it back
        if end.outcome is None:
            await self._give_back(job)
            return
        try:
            self._note_end(job, end, end.outcome)
        finally:  # the application's logging may raise
            await self._end_copies(job, end.outcome)

    async def _end_copies(self, job: Job, outcome: Outcome) -> None:
        """Answer and ack every delivery of a request without a row."""
        self._heartbeats.end(job.task)
        await self._end_copy(job, outcome)
        for copy in job.copies:  # a list that may still grow while one is settled
            copy.answered = copy.reply == job.reply
            await self._end_copy(copy, outcome)

    async def _end_copy(self, job: Job, outcome: Outcome) -> None:
        """Answer and ack one delivery of a request without a row."""
        is_owed = job.reply is not None and not job.answered
        if job.reply is not None and is_owed:
            is_owed = await self._answers.send(job.reply, outcome) is not Sent.YES
        if job.delivery is not None:
            owed = outcome if is_owed else None
            self._ended.add(job.task.request_id, job.delivery, owed)
            await settle(job.delivery.ack(), self._telemetry)

    async def _end_again(self, job: Job, delivery: Delivery) -> None:
        """A delivery whose request has ended here, and whose ack the broker has not read."""
        try:
            await self._settle_again(job, delivery)
        finally:  # copies come together, and the last may come while another one is counted
            for copy in job.copies:
                if copy.delivery is not None and not copy.delivery.settled:
                    await self._settle_copy_again(copy, copy.delivery)

    async def _settle_copy_again(self, copy: Job, delivery: Delivery) -> None:
        """Another message under its id asks for itself, once the tracker knows this one no more."""
        if self._ended.knows(copy.task.request_id, delivery):
            await self._settle_again(copy, delivery)
        else:
            await settle(delivery.give_back(), self._telemetry)

    async def _settle_again(self, job: Job, delivery: Delivery) -> None:
        task = job.task
        owed = self._ended.owed(task.request_id, delivery)
        if job.reply is not None and owed is not None:
            sent = await self._answers.send(job.reply, owed)
            self._ended.add(task.request_id, delivery, None if sent is Sent.YES else owed)
        await settle(delivery.ack(), self._telemetry)
        await self._journal.tally(
            "duplicate", request_id=task.request_id, method=task.method, detail="ended here"
        )

    # -- track and accept: custody ------------------------------------------------------

    async def _track(self, job: Job) -> bool:
        """Enter the tracker before anything is submitted; false for what is in flight here."""
        known = self._tracker.add(job.task)
        if known is None:
            self._jobs[job.task] = job
            return True
        other = self._jobs.get(known)
        if other is None or known.journaled:
            await self._answer_duplicate(job)
        elif _asked(other) != _asked(job):
            await self._refuse_conflict(job)
        else:
            # A redelivery, whose first handle is void, or a second copy with a caller of its
            # own: until the end no copy is acked, so that a crash loses none of them.
            other.copies.append(job)
            self._heartbeats.begin(known, job.reply)
        return False

    async def _accept(self, job: Job) -> bool:
        """Dedupe and accept in a group commit, begun in the same one when its turn is at once."""
        job.gate.entering[job] = None
        # A sign of life from us, and none of a commit, which may take longer than a caller bears.
        self._heartbeats.begin(job.task, job.reply)
        at_once = self._turns.enter_nowait(job)
        while job.gate.is_open:
            match await self._custody.accept(job, begin=at_once):
                case Entry.DONE:
                    job.request = None  # its place is on record now
                    if at_once:
                        self._mark_running(job)
                    return True
                case Entry.LEASE_ELSEWHERE:
                    self._turns.leave_for_lease(job)
                    at_once = False
                case Entry.KNOWN:
                    self._turns.leave(job)
                    await self._answer_duplicate(job)
                    return False
                case Entry.FAILED:
                    job.in_doubt = True
                    await asyncio.sleep(GIVE_BACK_PAUSE_S)
                    break
        self._turns.leave(job)
        await self._give_back(job)
        return False

    async def _waits_for_itself(self, job: Job) -> bool:
        """A call from the very task that holds the resource would wait for its own end."""
        lease = lease_in(job.caller)
        resource = job.task.resource
        if lease is None or resource is None or job.reply is None:
            return False
        if resource != (lease["kind"], lease["id"]):
            return False
        row = await self._services.leases.look(resource)
        if row is None or row.owner is None or row.token != lease["token"]:
            return False
        held = LeaseHeld(
            # Not which task: a token is a small number, and may be a guess.
            f"{job.task} wants {':'.join(resource)}, which its own caller holds and would wait "
            f"with for ever: make {job.method.name} an ops method, call it as a plain function, "
            "or cast it"
        )
        await self._arrivals.refuse(job, "lease_held", held)
        return True

    async def _answer_duplicate(self, job: Job) -> None:
        """A known id: counted, acked, and answered from the record once there is an answer."""
        delivery, request, task = job.delivery, job.request, job.task
        assert delivery is not None
        row = await self._journal.known(task.request_id, task.recipient)
        if row is None or request is None:
            await asyncio.sleep(GIVE_BACK_PAUSE_S)
            # Its first delivery is not yet accepted, or was not.
            await settle(delivery.give_back(), self._telemetry)
            return
        # Ours and open, and yet this copy is what the tracker knows: its entry was in doubt.
        job.in_doubt = row.owner == self._journal.run_id and row.finished_at is None
        # An id belongs to the store, and another service may have used it.
        if row.service != self._journal.service or not request.repeats(row):
            await self._refuse_conflict(job)
            return
        await self._journal.tally(
            "duplicate", request_id=task.request_id, method=task.method, detail=row.state.value
        )
        if job.reply is not None:
            if row.finished_at is None and await self._journal.add_reply_address(row, job.reply):
                self._beat_too(job, job.reply)
            else:
                row = await self._journal.known(task.request_id, task.recipient) or row
                await self._answers.send(job.reply, outcome_of(row))
        await settle(delivery.ack(), self._telemetry)

    def _beat_too(self, job: Job, reply: Address) -> None:
        """A second caller of a task in flight here; elsewhere it has heartbeats after a restart."""
        known = self._tracker.get(job.task.request_id, job.task.recipient)
        if known is not None and known is not job.task and known in self._jobs:
            self._heartbeats.begin(known, reply)

    async def _refuse_conflict(self, job: Job) -> None:
        # Not which: it may be another caller's.
        conflict = ConflictingRequestError(
            f"request id {job.task.request_id} is known with other content, or from another "
            "caller; draw a new id for a new request"
        )
        await self._arrivals.refuse(job, "conflicting_id", conflict)

    # -- turn and begin -----------------------------------------------------------------

    async def _begin_in_turn(self, job: Job) -> bool:
        """Wait for the turn, then record the attempt; false if it does not start here."""
        while await self._turns.wait(job):
            if job.expires_at is not None and self._clock.loop() >= job.expires_at:
                self._turns.leave(job)
                await self._end_unstarted(job, errored(str(job.task), Reason.EXPIRED))
                return False
            match await self._custody.begin(job):
                case Entry.DONE:
                    self._mark_running(job)
                    return True
                case Entry.LEASE_ELSEWHERE:
                    self._turns.leave_for_lease(job)
                    await self._waits.wait(job)
                case _:
                    self._turns.leave(job)
                    job.in_doubt = True
                    return False  # still ours on record: the reconciler finds and frees it
        self._turns.leave(job)
        if job.task.order is not None:
            await self._end_unstarted(job, ordered(str(job.task), job.task.order, job.task.state))
        else:
            await self._custody.give_up_start(job.task)
            self._note_not_started(job)
        return False

    def _note_not_started(self, job: Job) -> None:
        task = job.task
        job.gate.not_started.append(task.request_id)
        self._telemetry.emit(
            "task.not_started",
            task_id=task.request_id,
            method=task.method,
            channel=task.lane.word,
            resource=task.resource,
            attempt=task.attempt,
        )

    async def _end_unstarted(self, job: Job, outcome: Outcome) -> None:
        addresses = await self._custody.finish(job, outcome, expected=TaskState.ACCEPTED)
        for address in addresses:
            await self._reply(job, address, outcome)

    # -- run and finish -----------------------------------------------------------------

    def _mark_running(self, job: Job) -> None:
        task = job.task
        if job.delivery is not None and task.journaled:
            job.delivery.body = b""  # it was read, and others may run for hours too
        task.advance(TaskState.RUNNING)
        task.started_at = self._clock.loop()
        task.handler = asyncio.current_task()
        timeout = job.method.options.timeout_s
        task.deadline = None if timeout is None else task.started_at + timeout
        task.history = self._history.of(job.method.namespace, task.method)
        job.gate.entering.pop(job, None)
        if job.seated:  # asked here, too: a delivery never has a seat
            job.leave_seat()
        self._tracker.started(task)

    async def _charge(self, job: Job, error: Exception) -> None:
        """A fault of gracekit's own steps around the handler counts as a crash.

        Code of the application runs there too: of its logging, its tracing, its exceptions. The
        task goes the way of one whose process has crashed, so that its attempts are capped; a
        `requeue` delivery comes back as a redelivered one, which is journaled.
        """
        self._telemetry.emit("dispatch.failed", error=words_of(error))
        if job.task.journaled:
            await self._custody.charge(job)
            if self._services.phase.draining:
                self._on_hand_over(job.task, not job.in_doubt)
            self._end_turn(job)
            self._custody.left()
        else:
            await asyncio.sleep(GIVE_BACK_PAUSE_S)
            await self._give_back(job)

    async def _run(self, job: Job) -> End:
        task, method = job.task, job.method
        timer = None
        if task.deadline is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_at(task.deadline, self._time_out, job)
        traced = self._telemetry.tracing.begin(
            job.caller,
            method=task.method,
            operation=_operation_of(job),
            message_id=task.request_id,
            attempt=task.attempt,
        )
        if job.suspicion is not None:
            self._telemetry.emit(
                "task.apart",
                task_id=task.request_id,
                method=task.method,
                channel=task.lane.word,
                resource=task.resource,
                attempt=task.attempt,
                alone=job.alone,
                crashes=job.suspicion.crashes,
                for_s=job.suspicion.apart_s,
            )
        if self._telemetry.hears("task.started", level := self._level_of(task)):
            self._telemetry.emit(
                "task.started",
                level=level,
                task_id=task.request_id,
                method=task.method,
                channel=task.lane.word,
                resource=task.resource,
                attempt=task.attempt,
            )
        job.unended = True
        ctx = Context(
            task,
            self._services,
            args=job.args,
            caller=job.caller,
            method=(method.namespace, method.name, method.version),
            expires_at=job.expires_at,
            monitor_s=None if job.reply is None else job.reply.monitor_s,
        )
        end = _NO_END
        try:
            end = await run_attempt(method, ctx, task, job.args, job.gate.threads)
            if end.interrupted_by:
                self._telemetry.emit(
                    "task.interrupted",
                    task_id=task.request_id,
                    method=task.method,
                    channel=task.lane.word,
                    resource=task.resource,
                    attempt=task.attempt,
                    error=_masked(job, end.interrupted_by),
                )
            elif end.outcome is not None and has_left_out(end.outcome):
                self._telemetry.emit(
                    "task.result_left_out",
                    task_id=task.request_id,
                    method=task.method,
                    channel=task.lane.word,
                    resource=task.resource,
                    attempt=task.attempt,
                    error=_masked(job, end.outcome.detail or ""),
                )
            return end
        finally:
            if timer is not None:
                timer.cancel()
            if traced is not None:
                traced.end(error_type=error_type_of(end), cut=end.cut and end.cut.value)

    async def _finish(self, job: Job, end: End, outcome: Outcome) -> list[Address]:
        """Outcome, end of the lease and replies due, in one commit; then the turn is over."""
        task = job.task
        self._turns.leave_slots(job)
        addresses = await self._custody.finish(job, outcome, expected=TaskState.RUNNING)
        self._journal.forget_cursor(task)
        self._end_turn(job)
        if job.refused:
            await self._waits.pass_on(job)
        self._note_end(job, end, outcome)
        return addresses

    def _note_end(self, job: Job, end: End, outcome: Outcome) -> None:
        """An attempt has ended and was not cut: its method's history and the log are told."""
        task = job.task
        seconds = self._clock.loop() - (task.started_at or 0.0)
        if outcome.state is TaskState.SUCCEEDED and task.attempt == 1 and task.history is not None:
            task.history.add(seconds)
        if not job.unended:
            return  # the drain has told of it: it returned in the same moment
        job.unended = False
        ran_s = round(seconds, 3)
        if self._telemetry.hears("task.finished", level := self._level_of(task)):
            self._telemetry.emit(
                "task.finished",
                level=level,
                task_id=task.request_id,
                method=task.method,
                channel=task.lane.word,
                resource=task.resource,
                attempt=task.attempt,
                outcome=outcome.state.word,
                ran_s=ran_s,
            )
        if outcome.state is TaskState.FAILED and outcome.failure is not None:
            failure = failure_from(outcome.failure)
            with_trace = self._telemetry.log_failures == "traceback"
            self._telemetry.emit(
                "task.failed",
                level=logging.DEBUG if end.expected else None,
                trace=_masked(job, "".join(failure.tb)) if with_trace else "",
                task_id=task.request_id,
                method=task.method,
                channel=task.lane.word,
                resource=task.resource,
                attempt=task.attempt,
                error=_words_of_failure(job, failure),
                ran_s=ran_s,
            )

    def _end_turn(self, job: Job) -> None:
        self._turns.leave(job)
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
        job = self._jobs[task]
        task.order = order
        task.cancel(CancelCause.OPERATOR)
        if job.waiting and task.handler is not None:
            task.handler.cancel(CancelCause.OPERATOR.value)
        elif task.running:
            self._answer_early(job, ordered(str(task), order, task.state))

    def _time_out(self, job: Job) -> None:
        job.task.cancel(CancelCause.TIMEOUT)
        self._answer_early(job, failed(timeout_error(job.method)))

    def _answer_early(self, job: Job, outcome: Outcome) -> None:
        """The caller hears at once; the task keeps place and lease until its handler returned."""
        if not job.task.cancellable or job.answered or job.reply is None:
            return
        job.answered = True
        self._heartbeats.end(job.task, job.reply)
        self._do_beside(self._answers.send(job.reply, outcome))

    # -- cut short ----------------------------------------------------------------------

    async def _hand_over(self, job: Job, cut: Cut) -> None:
        """Record a started, unfinished task for recovery; its handler has returned."""
        task = job.task
        recorded = await self._custody.hand_over(job, cut)
        self._on_hand_over(task, recorded)
        job.in_doubt = True  # recovery looks for its row, here or at the next start
        self._end_turn(job)
        self._tell_cut(job, cut)

    def _tell_cut(self, job: Job, cut: Cut) -> None:
        """An attempt is over without an outcome: the row, or the queue, has the task."""
        if not job.unended:
            return
        job.unended = False
        task, now = job.task, self._clock.loop()
        if not task.journaled:
            self._telemetry.emit(
                "task.given_back",
                task_id=task.request_id,
                method=task.method,
                channel=task.lane.word,
                resource=task.resource,
                attempt=task.attempt,
                cut=cut.value,
                running_s=_since(task.started_at, now),
                safe_point_s=_since(task.safe_point_at, now),
            )
            return
        self._telemetry.emit(
            "task.handed_over",
            task_id=task.request_id,
            method=task.method,
            channel=task.lane.word,
            resource=task.resource,
            attempt=task.attempt,
            cut=cut.value,
            running_s=_since(task.started_at, now),
            safe_point_s=_since(task.safe_point_at, now),
            cursor=None if task.safe_point_at is None else _masked(job, words_of(task.cursor)),
        )

    def _level_of(self, task: TrackedTask) -> int | None:
        """Of the lines of its start and end: for whoever reads a drain they are news."""
        return logging.INFO if task.holds_drain and self._services.phase.draining else None

    async def hand_over_stuck(self, tasks: Sequence[TrackedTask]) -> None:
        """Record tasks whose handler did not return; their leases stay with this process."""
        jobs = [self._jobs[task] for task in tasks if task in self._jobs]
        await asyncio.gather(*map(self._hand_over_stuck, jobs))

    async def _hand_over_stuck(self, job: Job) -> None:
        job.stuck = True
        self._heartbeats.end(job.task)
        if job.task.journaled:
            await self._custody.hand_over(job, Cut.UNCLEAN, returned=False)
        else:
            job.task.cut = Cut.UNCLEAN
            await self._give_back(job)
        if job.task.running:  # else it has ended in the last moment
            self._tell_cut(job, Cut.UNCLEAN)

    def abandon_threads(self) -> None:
        """Wait no longer for plain handlers that were recorded as unclean.

        An embedding program may then end, and with it their threads.
        """
        for job in self._jobs.values():
            if job.stuck and not job.method.is_async and job.task.handler is not None:
                job.task.handler.cancel()

    async def _give_back(self, job: Job) -> None:
        """Put a delivery back that was not accepted, or whose `requeue` task was cut."""
        await self._give_back_one(job)
        for copy in job.copies:  # a list that may still grow while one is settled
            await self._give_back_one(copy)
        if job.task.cut is not None:
            self._tell_cut(job, job.task.cut)

    async def _give_back_one(self, job: Job) -> None:
        if job.delivery is not None:
            self._on_give_back()
            await settle(job.delivery.give_back(), self._telemetry)

    def _untrack(self, job: Job) -> None:
        self._heartbeats.end(job.task)
        job.gate.entering.pop(job, None)
        if job.seated:
            job.leave_seat()
        self._turns.leave(job)
        self._jobs.pop(job.task, None)
        self._tracker.remove(job.task)
        if job.in_doubt:
            self._custody.left()
        if job.unended:  # charged, or a step of gracekit's own was cancelled
            self._tell_cut(job, job.task.cut or Cut.UNCLEAN)

    # -- the gate, for the drain --------------------------------------------------------

    def open_gate(self, lane: Lane) -> None:
        """Accept and begin again."""
        gate = self._gates[lane]
        gate.is_open, gate.is_shut = True, False
        gate.not_started = []

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
        await self._tracker.wait_until(lambda: not gate.entering, deadline=deadline)
        gate.is_shut = not gate.is_open  # else it was opened again meanwhile
        return list(gate.not_started)

    async def wait_flushed(self, *, deadline: float) -> None:
        """Wait until every job but the stuck ones has left; no reply is tried twice any more."""
        self._answers.stop()
        await self._tracker.wait_until(
            lambda: all(job.stuck for job in self._jobs.values()), deadline=deadline
        )

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


def _since(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(now - moment, 1)


def _words_of_failure(job: Job, failure: Failure) -> str:
    """Class and message, without what the request has sent."""
    return f"{failure.exc_class}: {_masked(job, failure.message)}".removesuffix(": ")


def _masked(job: Job, text: str) -> str:
    """What the application says of a request, as a log may show it."""
    known = "" if job.task.resource is None else job.task.resource[1]
    return masked(text, job.caller, job.args, known=known)


def _is_kept_by_transport(job: Job) -> bool:
    """Whether the first delivery of its request had no row."""
    return job.method.options.on_interrupt == "requeue"


def _asked(job: Job) -> tuple[object, ...]:
    """What of two requests of one id must be the same."""
    return job.method, job.args, job.caller_hash


def _operation_of(job: Job) -> str | None:
    """How its sender has sent it; None for a task from the record."""
    if job.delivery is None:
        return None
    if job.reply is not None:
        return "call"
    return "fanout" if job.task.recipient else "cast"
