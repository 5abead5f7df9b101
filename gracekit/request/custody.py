"""The commits of a task's life: each writes to the journal and the leases at once.

If it is unknown whether a commit took effect, the row is read again, and what
it says counts. Only this module writes to a task what a commit gave it: row,
attempt, token, state.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from typing import Final

from gracekit import backoff
from gracekit.errors import (
    ConflictError,
    StoreClosedError,
    StoreError,
    StoreFinalError,
    TaskInterruptedError,
    UnknownCommitError,
)
from gracekit.journal.outbox import News, add_update, subject_of_task
from gracekit.journal.rows import Address, Outcome, TaskRow, address_of
from gracekit.journal.tasks import Journal
from gracekit.leases.leases import Guard, RunLeases
from gracekit.process import Point
from gracekit.request.lanes import Job
from gracekit.request.outbox_sender import Outbox
from gracekit.request.outcomes import failed
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.store.batch import Batch, Row
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracing.carrier import stamped
from gracekit.tracker.task import Awaited, CancelCause, Interruption, TaskState, TrackedTask

TRIES: Final = 3


class Admission(enum.Enum):
    """The result of a commit that accepts or starts a task."""

    DONE = "done"
    KNOWN = "known"  # the id is on record
    LEASE_ELSEWHERE = "lease_elsewhere"  # held, or waiting for its settle time
    FAILED = "failed"  # nothing was written


class Custody:
    """The commits of one run's tasks.

    Args:
        trigger: Asks recovery to compare the rows with the tracker when a commit failed, and to
            call an errored hook that is due.
        outbox: Sends the notification of the end of a task that was parked before.
    """

    def __init__(
        self,
        journal: Journal,
        leases: RunLeases,
        telemetry: Telemetry,
        trigger: RecoveryTrigger,
        outbox: Outbox,
    ) -> None:
        self._journal = journal
        self._leases = leases
        self._telemetry = telemetry
        self._trigger = trigger
        self._outbox = outbox

    # -- in ------------------------------------------------------------------------------

    async def accept(self, job: Job, *, begin: bool) -> Admission:
        """Accept a request; with *begin* take its lease and record its attempt too."""
        assert job.request is not None
        batch = Batch(Point.ACCEPT_AND_BEGIN if begin else Point.ACCEPT)
        lease = self._add_lease(batch, job.task) if begin else None
        index = self._journal.add_accept(batch, job.request, begin=begin)
        try:
            rows = await self._journal.commit(batch)
        except ConflictError as conflict:
            return Admission.LEASE_ELSEWHERE if conflict.statement == lease else Admission.KNOWN
        except StoreError as error:
            state = TaskState.RUNNING if begin else TaskState.ACCEPTED
            return await self._enter_after(error, job, "acceptance", state=state)
        job.task.row_id = int(rows[index][0][0] or 0)
        job.task.attempt = int(begin)
        self._take_token(job.task, rows, lease)
        return Admission.DONE

    async def begin(self, job: Job) -> Admission:
        """Take the lease of an accepted task and record its attempt."""
        batch = Batch(Point.BEGIN)
        lease = self._add_lease(batch, job.task)
        self._journal.add_begin(batch, job.task, alone=job.alone)
        try:
            rows = await self._journal.commit(batch)
        except ConflictError as conflict:
            return Admission.LEASE_ELSEWHERE if conflict.statement == lease else Admission.FAILED
        except StoreError as error:
            return await self._enter_after(error, job, "begin", state=TaskState.RUNNING)
        job.task.attempt += 1
        self._take_token(job.task, rows, lease)
        return Admission.DONE

    async def _enter_after(
        self, error: StoreError, job: Job, what: str, *, state: TaskState
    ) -> Admission:
        """After a commit that was not confirmed, read the row to see whether it was written.

        The owner alone proves nothing: an ended row of an earlier request keeps its owner.
        """
        rows = await self.rows_after(error, job.task, what)
        row = rows[0] if rows else None
        if row is None or row.owner != self._journal.run_id or row.state is not state:
            return Admission.FAILED
        job.task.row_id, job.task.attempt, job.task.token = row.id, row.attempts, row.token
        return Admission.DONE

    async def stand_in_line(self, task: TrackedTask) -> None:
        """Record that *task* waits for its lease, so that no younger request gets it first."""
        batch = Batch(Point.TAKE_LEASE, durable=False)  # if it is lost, only the order suffers
        self._journal.add_waits(batch, task)
        try:
            await self._journal.commit(batch)
        except StoreError as error:
            self.tell(error, "wait for a lease")

    def _add_lease(self, batch: Batch, task: TrackedTask) -> int | None:
        if task.resource is None:
            return None
        return self._leases.add_take(batch, task.resource, task.request_id, task.row_id)

    def _take_token(self, task: TrackedTask, rows: list[list[Row]], lease: int | None) -> None:
        if lease is not None:
            task.token = int(rows[lease][0][0] or 0)

    # -- out -----------------------------------------------------------------------------

    async def finish(
        self, job: Job, outcome: Outcome, *, expected: TaskState
    ) -> tuple[Outcome, list[Address]]:
        """Record an outcome, end the lease, and make replies due; returns what to answer where.

        An outcome must not be lost, so a refused commit is tried again until the store takes it.
        Nothing is to be answered if another run has taken the row, or if the store is closed or
        refuses writes for good: the row then stays as it is for the next start. If the store has
        lost the row, the outcome can never be recorded, and the caller gets that error.
        """
        task = job.task
        hook = outcome.state is TaskState.ERRORED and job.method.errored_hook is not None
        pauses = backoff.OUTCOME.pauses(self._journal.clock)
        # A cast owes no reply, unless a client has called with its id meanwhile: then the commit
        # is refused and repeated. A recovered row may owe replies to any number of callers.
        owing = job.reply is not None or job.delivery is None
        while True:
            batch = Batch(Point.FINISH)
            index = self._journal.add_finish(
                batch, task.row_id or 0, outcome, expected=expected, errored_hook=hook, owing=owing
            )
            self.add_release(batch, task, "clean")
            self._add_update(batch, job, expected, outcome)
            try:
                rows = (await self._journal.commit(batch))[index]
            except (StoreFinalError, StoreClosedError) as error:
                self.tell(error, "outcome")
                return outcome, []
            except StoreError as error:
                if not owing and isinstance(error, ConflictError):
                    owing = True
                    continue
                found = await self.rows_after(error, task, "outcome")
                if found == []:
                    return self._lost(job, outcome, expected)
                row = found[0] if found else None
                if row is None or (row.state is expected and row.owner == self._journal.run_id):
                    task.waits_for = Awaited.STORE
                    await asyncio.sleep(next(pauses))
                    continue
                if row.state is outcome.state and row.owner == self._journal.run_id:
                    task.advance(outcome.state)
                    return outcome, await self._journal.replies_due(row.id)
                return outcome, []  # another run owns the row now
            task.advance(outcome.state)
            task.waits_for = None
            if hook:
                self._trigger.poke()
            if job.parkings:
                self._outbox.poke()
            return outcome, [address_of(row) for row in rows]

    def _add_update(self, batch: Batch, job: Job, old: TaskState, outcome: Outcome) -> None:
        """Let resolvers know how a task has ended, if it was parked before."""
        if not job.parkings:
            return
        task, journal = job.task, self._journal
        deadline = job.pending_deadline or 0.0
        subject = subject_of_task(task, journal.service, job.parkings, deadline)
        news, reason = News.of(journal.clock, sender=journal.run_id), outcome.reason or ""
        add_update(batch, subject, news, old, outcome.state, reason=reason)

    def _lost(
        self, job: Job, outcome: Outcome, expected: TaskState
    ) -> tuple[Outcome, list[Address]]:
        task = job.task
        if task.token is not None and task.resource is not None:
            guard = Guard(resource=task.resource, token=task.token)
            self._leases.owe(guard, task.request_id)
        self._telemetry.emit("task.row_lost", **task.event_fields)
        state = TaskState.FAILED if expected is TaskState.RUNNING else outcome.state
        task.advance(state)
        sentence = f"{task} has ended, but the store has lost its row and cannot record the outcome"
        answer = failed(TaskInterruptedError(sentence), state)
        return answer, [] if job.reply is None else [job.reply]

    async def hand_over(
        self, job: Job, cut: Interruption, *, returned: bool = True, rest_s: float = 0.0
    ) -> bool:
        """Record a started, unfinished task for recovery; false if that failed.

        Args:
            job: The job of the task.
            cut: How it was cut.
            returned: Whether its handler has returned. If not, this process keeps row and lease
                until it is proven dead.
            rest_s: Seconds after which it may be tried again, if nothing else makes it wait.
        """
        task, clock = job.task, self._journal.clock
        task.cut = cut
        if cut is not Interruption.SAFE_POINT and task.token is not None:
            self._leases.kept += not (cut is Interruption.UNCLEAN and returned)
        is_fenced, pauses = task.cancel_cause is CancelCause.FENCED, backoff.OUTCOME.pauses(clock)
        for tries in itertools.count(1):
            batch = Batch(Point.HAND_OVER)
            self._add_hand_over(batch, job, cut, returned=returned, rest_s=rest_s)
            try:
                await self._journal.commit(batch)
            except ConflictError:
                return True  # the row says already that it has ended, or was handed over
            except (StoreFinalError, StoreClosedError) as error:
                self.tell(error, "hand-over")
                return False
            except StoreError as error:
                self.tell(error, "hand-over")
                if is_fenced:  # the store is away; nothing else would find out what became of it
                    await asyncio.sleep(next(pauses))
                elif tries == TRIES:
                    return False
                continue
            if returned:
                task.advance(TaskState.HANDED_OVER)
            return True
        raise AssertionError(task)

    def _add_hand_over(
        self, batch: Batch, job: Job, cut: Interruption, *, returned: bool, rest_s: float
    ) -> None:
        task = job.task
        self.add_trace(batch, job)
        self._journal.add_hand_over(
            batch, task, cut, settle_s=job.settle_s, rest_s=rest_s, returned=returned
        )
        if cut is Interruption.SAFE_POINT:
            self.add_release(batch, task, "handoff")
        elif cut is Interruption.UNCLEAN and returned:  # also the leases that it took by itself
            run = self._journal.run_id
            self._leases.add_take_away_one(batch, run, task.request_id, settle_s=job.settle_s)

    async def charge(self, job: Job) -> None:
        """Hand over a task that an error in gracekit's own steps cut; its handler has returned.

        As this process goes on, the lease is released. The error counts as a crash of the task. If
        the commit fails, recovery finds that the row has an owner but no task in the tracker.
        """
        task = job.task
        batch = Batch(Point.HAND_OVER)
        self.add_trace(batch, job)
        self._journal.add_hand_over(batch, task, Interruption.CANCELLED, charged=True)
        self.add_release(batch, task, "handoff")
        try:
            await self._journal.commit(batch)
        except StoreError as error:
            job.in_doubt = True
            self.tell(error, "hand-over")
        else:
            task.cut = Interruption.CANCELLED
            task.advance(TaskState.HANDED_OVER)

    async def give_up_start(self, task: TrackedTask) -> None:
        """Release an accepted row that does not start here: any run may claim it then."""
        for _ in range(TRIES):
            batch = Batch(Point.NOT_STARTED)
            self._journal.add_not_started(batch, task)
            try:
                await self._journal.commit(batch)
            except (ConflictError, StoreFinalError) as error:
                # No further try: the row has changed meanwhile, or the next start finds it.
                self.tell(error, "not started")
                return
            except StoreError as error:
                self.tell(error, "not started")
            else:
                return

    def add_trace(self, batch: Batch, job: Job) -> None:
        """Record this attempt's trace keys, so that the next attempt can be linked to it."""
        keys = None if job.traced is None else job.traced.keys()
        if keys:
            self._journal.add_context(batch, job.task, stamped(job.caller, keys))

    def add_release(self, batch: Batch, task: TrackedTask, reason: str) -> None:
        """Add to *batch* that the task's lease is released; nothing if it has no lease."""
        if task.token is not None and task.resource is not None:
            guard = Guard(resource=task.resource, token=task.token)
            self._leases.add_release(batch, guard, reason=reason)

    def note_due(self, job: Job) -> None:
        """After a request was accepted that may not begin yet: let recovery begin it in time."""
        if job.request is not None and job.request.due is not None:
            clock = self._journal.clock
            self._trigger.note_due(clock.loop() + job.request.due.at - clock.wall())

    # -- in doubt ------------------------------------------------------------------------

    def left(self) -> None:
        """After a task in doubt has left the tracker: let recovery look for its row."""
        self._trigger.poke()

    async def rows_after(
        self, error: StoreError, task: TrackedTask, what: str
    ) -> list[TaskRow] | None:
        """The row of *task* after one of its commits has failed, which is logged.

        Returns:
            The row in a list, which is empty if there is none. None if the store cannot be read,
            or if the error says that nothing was changed.
        """
        try:
            if not isinstance(error, UnknownCommitError | ConflictError):
                return None
            row = await self._journal.known(task.request_id, task.recipient)
        except StoreError:
            return None
        finally:
            self.tell(error, what)
        return [] if row is None else [row]

    def tell(self, error: StoreError, what: str) -> None:
        """Log that a commit has failed, and let recovery compare rows with the tracker."""
        self._telemetry.emit("store.error", what=what, error=str(error))
        self._trigger.poke()
