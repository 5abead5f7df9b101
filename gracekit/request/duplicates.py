"""Duplicates: a request id that is in flight here, or on record.

Which copy came first does not matter: one of them runs, and every caller gets its answer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit import backoff
from gracekit.errors import ConflictingRequestError
from gracekit.journal.rows import Address, TaskRow
from gracekit.journal.tasks import Journal
from gracekit.request.answers import Answers
from gracekit.request.arrivals import Arrivals
from gracekit.request.heartbeats import Heartbeats
from gracekit.request.lanes import Job
from gracekit.request.outcomes import outcome_of
from gracekit.request.settlement import settle
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import TaskState
from gracekit.tracker.tracker import Tracker

_MOVES: Final = 5
"""A task may end and be run again so often while a copy of its request is answered."""


class Duplicates:
    """What the further copies of a request get."""

    def __init__(
        self,
        journal: Journal,
        tracker: Tracker,
        arrivals: Arrivals,
        answers: Answers,
        heartbeats: Heartbeats,
        telemetry: Telemetry,
    ) -> None:
        self._journal = journal
        self._tracker = tracker
        self._arrivals = arrivals
        self._answers = answers
        self._heartbeats = heartbeats
        self._telemetry = telemetry

    async def meet(self, copy: Job, other: Job | None) -> None:
        """The id of *copy* is in flight here.

        Args:
            copy: What has come.
            other: The request in flight; None if it is no request, but work beside them.
        """
        if other is None or other.task.journaled:
            await self.answer(copy)
        elif _asked(other) != _asked(copy):
            await self._refuse(copy)
        else:
            # A redelivery, whose first handle is void, or a second copy with a caller of its
            # own: until the end no copy is acked, so that a crash loses none of them.
            other.copies.append(copy)
            self._heartbeats.begin(other.task, copy.reply)

    async def answer(self, job: Job) -> None:
        """The id of *job* is known: count it, ack it, and answer it once there is an answer."""
        delivery, request, task = job.delivery, job.request, job.task
        assert delivery is not None
        row = await self._journal.known(task.request_id, task.recipient)
        if row is None or request is None:
            await asyncio.sleep(backoff.GIVE_BACK_S)
            # Its first delivery is not yet accepted, or was not.
            await settle(delivery.give_back(), self._telemetry)
            return
        # Ours and open, and yet this copy is what the tracker knows: its entry was in doubt.
        job.in_doubt = row.owner == self._journal.run_id and row.finished_at is None
        # An id belongs to the store, and another service may have used it.
        if row.service != self._journal.service or not request.repeats(row):
            await self._refuse(job)
            return
        await self._journal.tally(
            "duplicate", request_id=task.request_id, method=task.method, detail=row.state.value
        )
        if job.reply is not None:
            await self._answer_caller(job, job.reply, row)
        await settle(delivery.ack(), self._telemetry)

    async def _answer_caller(self, job: Job, reply: Address, row: TaskRow) -> None:
        """Answer at once if the task has ended or waits for capacity, else when it does."""
        for _ in range(_MOVES):
            if row.finished_at is None and await self._journal.add_reply_address(row, reply):
                self._beat_too(job, reply)
                return
            row = await self._journal.known(job.task.request_id, job.task.recipient) or row
            if row.finished_at is not None or row.state is TaskState.PENDING:
                break  # else it runs again since
        await self._answers.send(reply, outcome_of(row))

    def _beat_too(self, job: Job, reply: Address) -> None:
        """A second caller of a task in flight here; elsewhere it has heartbeats after a restart."""
        known = self._tracker.get(job.task.request_id, job.task.recipient)
        if known is not None and known is not job.task and known.journaled:
            self._heartbeats.begin(known, reply)

    async def _refuse(self, job: Job) -> None:
        # Not which: it may be another caller's.
        conflict = ConflictingRequestError(
            f"request id {job.task.request_id} is known with other content, or from another "
            "caller; draw a new id for a new request"
        )
        await self._arrivals.refuse(job, "conflicting_id", conflict)


def _asked(job: Job) -> tuple[object, ...]:
    """What of two requests of one id must be the same."""
    return job.method, job.args, job.caller_hash
