"""Parking: the end of an attempt that found no capacity.

The row becomes PENDING in one commit with the end of its lease and the
notifications. From that commit on no run owns the task: a resolver, an operator
or its deadline gets it out.
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
from gracekit.journal.rows import Address, Outcome, Parking, address_of
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import REPLIES
from gracekit.process import Point
from gracekit.request.custody import Custody
from gracekit.request.lanes import Job
from gracekit.request.outbox import Outbox
from gracekit.request.outcomes import not_parked, ordered, parked
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.store.batch import Batch
from gracekit.tracker.task import Awaited, TaskState

Ended = tuple[Outcome, list[Address]]
"""What is answered, and where."""


def _shown_context(caller: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What notifications show of a caller's context: no value that is large, or deeply nested."""
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
        trigger: Recovery is asked to look at the deadline.
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
        """Record how an attempt ended, or that its task waits for capacity.

        Args:
            job: Whose attempt it was.
            outcome: As it is without the state PENDING.
            requested: What its handler said is missing; None if its task may not wait.
        """
        if requested is None:
            return await self._finish(job, outcome)
        return await self._park(job, outcome, requested)

    async def _park(self, job: Job, failed: Outcome, requested: Mapping[str, Any]) -> Ended:
        """Record that it waits; where too many do, that it has failed.

        As an outcome, the record is worth waiting for: a refused commit is tried again.
        """
        task, clock = job.task, self._journal.clock
        pauses = backoff.OUTCOME.pauses(clock)
        asked = self._asked(job, failed, requested, await self._deadline(job))
        outcome = parked(failed, self._parking(job, asked))
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
                if task.order is not None:  # meanwhile, and on record
                    return await self._finish(job, ordered(str(task), task.order, task.state))
            else:
                self._note(job, asked.deadline)
                return outcome, [address_of(row) for row in rows]

    async def _ended_after(
        self, error: StoreError, job: Job, failed: Outcome, outcome: Outcome
    ) -> Ended | None:
        """What a commit that has failed leaves to answer; None if it is to be tried again."""
        if isinstance(error, StoreFinalError | StoreClosedError):
            self._custody.tell(error, "parking")
            return outcome, []
        found = await self._custody.rows_after(error, job.task, "parking")
        if found == []:
            return await self._finish(job, failed)
        row = found[0] if found else None
        if row is None or (row.state is TaskState.RUNNING and row.owner == self._journal.run_id):
            return None
        if row.parkings <= job.parkings:
            return outcome, []  # not ours any more
        self._note(job, row.pending_deadline or 0.0)  # it was done, and may have gone on since
        return outcome, await self._journal.replies_due(row.id)

    async def _deadline(self, job: Job) -> float:
        """Wall time until which it may wait: the first parking's stands."""
        deadline = job.pending_deadline
        if deadline is not None:
            with contextlib.suppress(StoreError):  # else the clock was set since, perhaps
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

    def _parking(self, job: Job, asked: ParkRequest) -> Parking:
        return Parking(
            task_id=job.task.request_id, deadline=asked.deadline, version=asked.parkings + 1
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
            f"GRACEKIT_PENDING_MAX allows {self._most} parked tasks of the service, and so many "
            "are",
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
