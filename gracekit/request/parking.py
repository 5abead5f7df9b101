"""Parking: the end of an attempt whose handler found no capacity.

One commit makes the row PENDING, releases the lease and writes the
notifications. From then on no run owns the task, until a resolver or an
operator retries or ends it, or its deadline ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

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
from gracekit.journal.rows import Address, Outcome, Parking, TaskRow, address_of
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import REPLIES
from gracekit.process import Point
from gracekit.request.custody import Custody
from gracekit.request.lanes import Job
from gracekit.request.outbox_sender import Outbox
from gracekit.request.outcomes import not_parked, ordered, parked
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.store.batch import Batch
from gracekit.tracker.task import Awaited, TaskState

Ended = tuple[Outcome, list[Address]]
"""What to answer, and where."""


def _shown_context(caller: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The keys of a caller's context that notifications show; large or deep values are left out."""
    shown: dict[str, Any] = {}
    for key in keys:
        with contextlib.suppress(InvalidArgumentsError):
            shown |= checked_request({key: caller[key]}) if key in caller else {}
    return shown


class ParkingPlace:
    """Parks the tasks of one run.

    Args:
        custody: Records the end of a task that cannot be parked.
        outbox: Sends the notifications.
        trigger: Asks recovery to look when the deadline of a parked task is reached.
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

    async def end(self, job: Job, outcome: Outcome, requested: Mapping[str, Any] | None) -> Ended:
        """Record how an attempt ended, or that its task is parked.

        Args:
            job: The job of the attempt.
            outcome: The outcome if the task is not parked.
            requested: The capacity that the handler missed; None if the task may not be parked.
        """
        if requested is None:
            return await self._finish(job, outcome)
        return await self._park(job, outcome, requested)

    async def _park(self, job: Job, failed: Outcome, requested: Mapping[str, Any]) -> Ended:
        """Record that the task is parked, or that it failed because too many are parked.

        This must not be lost, so a refused commit is tried again until the store takes it.
        """
        task, clock = job.task, self._journal.clock
        pauses = backoff.OUTCOME.pauses(clock)
        asked = self._asked(job, failed, requested, await self._deadline(job))
        parking = Parking(
            task_id=task.request_id, deadline=asked.deadline, version=asked.parkings + 1
        )
        outcome = parked(failed, parking)
        while True:
            batch = Batch(Point.PARK)
            room = self._rows.add_has_room(batch, self._most)
            replies = batch.ask(REPLIES, task.row_id)
            self._rows.add_park(batch, task, asked)
            self._custody.add_release(batch, task, "clean")
            try:
                rows = (await self._journal.commit(batch))[replies]
            except StoreError as error:
                if isinstance(error, ConflictError) and error.statement == room:
                    return await self._refuse(job, failed)
                ended = await self._ended_after(error, job, failed, outcome)
                if ended is not None:
                    return ended
                task.waits_for = Awaited.STORE
                await asyncio.sleep(next(pauses))
                if task.order is not None:  # an operator has ended it meanwhile, on record
                    return await self._finish(job, ordered(str(task), task.order, task.state))
            else:
                self._note(job, asked.deadline)
                return outcome, [address_of(row) for row in rows]

    async def _ended_after(
        self, error: StoreError, job: Job, failed: Outcome, outcome: Outcome
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
        if row.parkings <= job.parkings:
            return outcome, []  # another run owns the row now
        self._note(job, row.pending_deadline or 0.0)  # it was parked, and may run again since
        return outcome, await self._journal.replies_due(row.id)

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
        job.task.waits_for = None
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
