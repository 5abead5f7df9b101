"""The end of an attempt that does not end its task: it is parked, or tried again later.

One commit changes the row, releases the lease and, for a handler that found no capacity, writes the
notifications. From then on no run owns the task: a parked one until a resolver or an operator
retries or ends it, or its deadline ends it; one that failed until it is due.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from gracekit import backoff
from gracekit.config.settings import Settings
from gracekit.config.values import words_in
from gracekit.errors import (
    ConflictError,
    InvalidArgumentsError,
    StoreClosedError,
    StoreError,
    StoreFinalError,
    checked_request,
)
from gracekit.journal.pending import ParkRequest, PendingRows
from gracekit.journal.rows import Address, Due, Outcome, Parking, TaskRow, address_of
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import REPLIES
from gracekit.process import Point
from gracekit.request.attempt import AttemptEnd
from gracekit.request.custody import Custody
from gracekit.request.lanes import Job
from gracekit.request.outbox_sender import Outbox
from gracekit.request.outcomes import not_parked, ordered, parked
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.store.batch import Batch
from gracekit.tracker.task import Awaited, TaskState

Ended = tuple[Outcome, list[Address]]
"""What to answer, and where."""


class _Leaving(NamedTuple):
    """A commit after which no run owns the task; where it fails without room; who is answered."""

    batch: Batch
    room: int | None = None
    replies: int | None = None


def _shown_context(caller: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The keys of a caller's context that notifications show; large or deep values are left out."""
    shown: dict[str, Any] = {}
    for key in keys:
        with contextlib.suppress(InvalidArgumentsError):
            shown |= checked_request({key: caller[key]}) if key in caller else {}
    return shown


class ParkingPlace:
    """Parks the tasks of one run, or lets them wait for their next try.

    Args:
        custody: Records the end of a task that cannot be parked.
        outbox: Sends the notifications.
        trigger: Asks recovery to look when the deadline of a parked task is reached, or a task is
            due.
    """

    def __init__(
        self,
        journal: Journal,
        rows: PendingRows,
        custody: Custody,
        outbox: Outbox,
        settings: Settings,
        *,
        trigger: RecoveryTrigger,
    ) -> None:
        self._journal = journal
        self._rows = rows
        self._custody = custody
        self._outbox = outbox
        self._trigger = trigger
        self._timeout_s = settings.pending_timeout_s
        self._most = settings.pending_max
        self._context = words_in(settings.notification_context)

    async def end(self, job: Job, outcome: Outcome, end: AttemptEnd) -> Ended:
        """Record how an attempt ended, with *outcome* unless its task is parked or tried again."""
        if end.again_s is not None:
            return await self._try_later(job, outcome, end.again_s)
        if end.requested is None:
            return await self._finish(job, outcome)
        return await self._park(job, outcome, end.requested)

    async def _try_later(self, job: Job, failed: Outcome, again_s: float) -> Ended:
        """Record that the task is tried again; it keeps its callers, who get the last outcome."""
        due = Due.after(again_s, self._journal.clock)

        def make() -> _Leaving:
            batch = Batch(Point.TRY_LATER)
            self._journal.add_try_later(batch, job.task, failed, due)
            self._custody.add_trace(batch, job)
            return _Leaving(batch)

        def note(row: TaskRow | None) -> bool:
            if row is None or row.failures > job.task.failures:
                job.task.advance(TaskState.ACCEPTED)
                self._trigger.note_due(self._journal.clock.loop() + again_s)
            return False  # nobody is answered yet

        outcome = structs.replace(failed, state=TaskState.ACCEPTED, again_s=again_s)
        return await self._leave(job, failed, outcome, make, note)

    async def _park(self, job: Job, failed: Outcome, requested: Mapping[str, Any]) -> Ended:
        """Record that the task is parked, or that it failed because too many are parked."""
        task = job.task
        asked = self._asked(job, failed, requested, await self._deadline(job))
        parking = Parking(
            task_id=task.request_id, deadline=asked.deadline, version=asked.parkings + 1
        )

        def make() -> _Leaving:
            batch = Batch(Point.PARK)
            room = self._rows.add_has_room(batch, self._most)
            replies = batch.ask(REPLIES, task.row_id)
            self._rows.add_park(batch, task, asked)
            return _Leaving(batch, room, replies)

        def note(row: TaskRow | None) -> bool:
            is_parked = row is None or row.parkings > job.parkings
            if is_parked:  # it may run again since
                deadline = asked.deadline if row is None else row.pending_deadline or 0.0
                self._note(job, deadline)
            return is_parked

        return await self._leave(job, failed, parked(failed, parking), make, note)

    async def _leave(
        self,
        job: Job,
        failed: Outcome,
        outcome: Outcome,
        make: Callable[[], _Leaving],
        note: Callable[[TaskRow | None], bool],
    ) -> Ended:
        """Commit that no run owns the task any more.

        This must not be lost, so a refused commit is tried again until the store takes it.

        Args:
            job: The job of the attempt.
            failed: The outcome if the task ends after all.
            outcome: The outcome if it does not.
            make: Makes the commit, without the end of the lease.
            note: Called once it is committed, with the row if that was read again; returns whether
                to answer the callers.
        """
        task, pauses = job.task, backoff.OUTCOME.pauses(self._journal.clock)
        while True:
            leaving = make()
            self._custody.add_release(leaving.batch, task, "clean")
            try:
                results = await self._journal.commit(leaving.batch)
            except StoreError as error:
                if isinstance(error, ConflictError) and error.statement == leaving.room:
                    return await self._refuse(job, failed)
                ended = await self._ended_after(error, job, failed, outcome, note)
                if ended is not None:
                    return ended
                task.waits_for = Awaited.STORE
                await asyncio.sleep(next(pauses))
                if task.order is not None:  # an operator has ended it meanwhile, on record
                    return await self._finish(job, ordered(str(task), task.order, task.state))
            else:
                task.waits_for = None
                note(None)
                rows = [] if leaving.replies is None else results[leaving.replies]
                return outcome, [address_of(row) for row in rows]

    async def _ended_after(
        self,
        error: StoreError,
        job: Job,
        failed: Outcome,
        outcome: Outcome,
        note: Callable[[TaskRow | None], bool],
    ) -> Ended | None:
        """What to answer after a failed commit; None if the commit is to be tried again."""
        if isinstance(error, StoreFinalError | StoreClosedError):
            self._custody.tell(error, "parking")
            return outcome, []
        found = await self._custody.rows_after(error, job.task, "parking")
        if found == []:
            return await self._finish(job, failed)
        row = found[0] if found else None
        if row is None:
            return None
        if row.state is TaskState.RUNNING and row.owner == self._journal.run_id:
            return await self._end_ordered(job, row)
        job.task.waits_for = None
        return outcome, await self._journal.replies_due(row.id) if note(row) else []

    async def _end_ordered(self, job: Job, row: TaskRow) -> Ended | None:
        """End a task that is not parked because it has an order; None if it has none."""
        if row.ordered is None:
            return None
        return await self._finish(job, ordered(str(job.task), row.ordered, row.state))

    async def _deadline(self, job: Job) -> float:
        """Wall time until which the task may wait; set when it is parked for the first time."""
        deadline = job.pending_deadline
        if deadline is not None:
            with contextlib.suppress(StoreError):  # the row's was adjusted if the clock was set
                deadline = await self._rows.deadline_of(job.task.row_id or 0) or deadline
            return deadline
        timeout_s = job.method.options.pending_timeout_s
        return self._journal.clock.wall() + (self._timeout_s if timeout_s is None else timeout_s)

    def _asked(
        self, job: Job, failed: Outcome, requested: Mapping[str, Any], deadline: float
    ) -> ParkRequest:
        return ParkRequest(
            failure=failed.failure,
            detail=failed.detail or "",
            requested=requested,
            parkings=job.parkings,
            deadline=deadline,
            context=_shown_context(job.caller, self._context),
        )

    def _note(self, job: Job, deadline: float) -> None:
        job.task.advance(TaskState.PENDING)
        clock = self._journal.clock
        self._trigger.note_deadline(clock.loop() + deadline - clock.wall())
        self._outbox.poke()

    async def _refuse(self, job: Job, failed: Outcome) -> Ended:
        task = job.task
        refused = not_parked(
            failed,
            f"GRACEKIT_PENDING_MAX allows {self._most} parked tasks of the service, and there are "
            "as many already",
        )
        try:
            await self._journal.tally(
                "not_parked",
                request_id=task.request_id,
                method=task.method,
                detail=refused.detail or "",
            )
        except StoreError as error:
            self._custody.tell(error, "count of tasks that were not parked")
        return await self._finish(job, refused)

    async def _finish(self, job: Job, outcome: Outcome) -> Ended:
        return await self._custody.finish(job, outcome, expected=TaskState.RUNNING)
