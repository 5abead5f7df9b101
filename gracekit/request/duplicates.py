"""Duplicates: requests with an id that is in flight here, or on record.

Only one copy of a request runs, and each of its callers gets the answer.
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
from gracekit.rpc.transport import settle
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import TaskState
from gracekit.tracker.tracker import Tracker

_MOVES: Final = 5
"""How often a task may end and be run again while a copy of its request is being answered."""


class Duplicates:
    """Answers or refuses the further copies of a request."""

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
        """Treat a request whose id is in flight here.

        Args:
            copy: The request that has come.
            other: The request in flight; None if other work, such as a periodic job, has that id.
        """
        if other is None or other.task.journaled:
            await self.answer(copy)
        elif _asked(other) != _asked(copy):
            await self._refuse(copy)
        else:
            # It is a redelivery, or another caller's copy. No copy is acked before the request
            # has ended, so that a crash loses none of them.
            other.copies.append(copy)
            self._heartbeats.begin(other.task, copy.reply)

    async def answer(self, job: Job) -> None:
        """Treat a request whose id is known: count it, answer it when it can be, and ack it."""
        delivery, request, task = job.delivery, job.request, job.task
        assert delivery is not None
        row = await self._journal.known(task.request_id, task.recipient)
        if row is None or request is None:
            await asyncio.sleep(backoff.GIVE_BACK_S)
            # The first copy is not accepted yet, or its acceptance failed: this one comes again.
            await settle(delivery.give_back(), self._telemetry)
            return
        # If this run owns the open row, no task here works on it: an earlier commit was in doubt.
        job.in_doubt = row.owner == self._journal.run_id and row.finished_at is None
        # All services of a store share its ids, so another service may have used this one.
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
                break  # otherwise it was started again meanwhile
        await self._answers.send(reply, outcome_of(row))

    def _beat_too(self, job: Job, reply: Address) -> None:
        """Send heartbeats to one more caller of a task, if the task is in flight here."""
        known = self._tracker.get(job.task.request_id, job.task.recipient)
        if known is not None and known is not job.task and known.journaled:
            self._heartbeats.begin(known, reply)

    async def _refuse(self, job: Job) -> None:
        # Says nothing about the known request, which may be another caller's.
        conflict = ConflictingRequestError(
            f"request id {job.task.request_id} is known with other content, or from another "
            "caller; draw a new id for a new request"
        )
        await self._arrivals.refuse(job, "conflicting_id", conflict)


def _asked(job: Job) -> tuple[object, ...]:
    """What two requests with the same id must have in common."""
    return job.method, job.args, job.caller_hash
