"""Requests of `requeue` methods, which have no row: the transport keeps them until they end.

A delivery is acked when its handler has ended, and given back when a drain cuts it. A copy that
comes meanwhile is settled and answered with it. A copy that comes later is acked as long as this
process remembers the request.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gracekit import backoff
from gracekit.journal.rows import Outcome
from gracekit.journal.tasks import Journal
from gracekit.request.answers import Answers
from gracekit.request.attempt import Attempts
from gracekit.request.events import TaskEvents
from gracekit.request.heartbeats import Heartbeats
from gracekit.request.lanes import Job, Scheduler, Unfinished
from gracekit.request.outcomes import ordered
from gracekit.rpc.failures import words_of
from gracekit.rpc.transport import Delivery, settle
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Interruption, TaskState
from gracekit.tracker.tracker import Tracker

REMEMBERED: Final = 10_000
"""Ended requests without a row that are remembered. After a broken connection a broker delivers
again what it has read no ack of, which is at most the prefetch of each queue."""

_Known = tuple[str, str, int]


class EndedRequests:
    """Requests without a row that have ended in this process, so that it runs none of them again.

    If a connection breaks after an ack was written, the broker may not have read the ack, and
    delivers the message again. A message is recognised by its request id, its queue and its
    bytes: another call with the same id has another caller, and runs.
    """

    def __init__(self) -> None:
        self._ended: dict[_Known, None] = {}  # oldest first

    def add(self, request_id: str, delivery: Delivery) -> None:
        """Note a request that has ended."""
        self._ended[_known(request_id, delivery)] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def knows(self, request_id: str, delivery: Delivery) -> bool:
        """Whether the request has ended here, and this is the same message."""
        return _known(request_id, delivery) in self._ended


def _known(request_id: str, delivery: Delivery) -> _Known:
    return request_id, delivery.queue.name, hash(delivery.body)


class Unjournaled:
    """Carries requests without a row through their life.

    Args:
        attempts: Runs their handlers.
        unfinished: Counts the deliveries that are given back.
    """

    def __init__(
        self,
        attempts: Attempts,
        scheduler: Scheduler,
        answers: Answers,
        heartbeats: Heartbeats,
        events: TaskEvents,
        *,
        journal: Journal,
        tracker: Tracker,
        unfinished: Unfinished,
        telemetry: Telemetry,
    ) -> None:
        self._attempts = attempts
        self._scheduler = scheduler
        self._answers = answers
        self._heartbeats = heartbeats
        self._events = events
        self._journal = journal
        self._tracker = tracker
        self._unfinished = unfinished
        self._telemetry = telemetry
        self._ended = EndedRequests()

    def has_ended(self, job: Job, delivery: Delivery) -> bool:
        """Whether this message ended here, and came again as the broker did not read its ack."""
        is_kept = job.method.options.on_interrupt == "requeue"
        return is_kept and self._ended.knows(job.task.request_id, delivery)

    async def live(self, job: Job) -> None:
        """Carry a request from its delivery to its ack: turn, run, reply."""
        assert job.delivery is not None
        job.gate.entering[job] = None
        self._heartbeats.begin(job.task, job.reply)
        if not await self._scheduler.wait(job):
            self._scheduler.leave(job)
            await self.give_back(job)
            return
        job.task.attempt = 1
        if job.gate.is_shut:
            await self.give_back(job)
            return
        self._attempts.mark_running(job)
        try:
            end = await self._attempts.run(job)
        except Exception as error:  # noqa: BLE001 - after a redelivery it is journaled, and capped
            self._telemetry.emit("dispatch.failed", error=words_of(error))
            await asyncio.sleep(backoff.GIVE_BACK_S)
            await self.give_back(job)
            return
        self._scheduler.leave(job)
        # The state before the tracker: a drain that finds nothing left to wait for takes a task
        # that is still RUNNING for stuck.
        job.task.advance(end.outcome.state if end.outcome else TaskState.HANDED_OVER)
        job.task.cut = job.task.cut or end.cut
        self._tracker.ended(job.task)
        if job.stuck:
            return  # the drain has given it back
        if end.outcome is None:
            await self.give_back(job)
            return
        try:
            self._attempts.note_end(job, end, end.outcome)
        finally:  # the application's logging may raise
            await self._end(job, end.outcome)

    # -- the end ------------------------------------------------------------------------

    async def _end(self, job: Job, outcome: Outcome) -> None:
        """Answer and ack all deliveries of a request."""
        self._heartbeats.end(job.task)
        await self._end_one(job, outcome)
        for copy in job.copies:  # the list may grow meanwhile
            copy.answered = copy.reply == job.reply
            await self._end_one(copy, outcome)

    async def _end_one(self, job: Job, outcome: Outcome) -> None:
        """Answer and ack one delivery."""
        if job.reply is not None and not job.answered:
            await self._answers.send(job.reply, outcome)
        if job.delivery is not None:
            self._ended.add(job.task.request_id, job.delivery)
            await settle(job.delivery.ack(), self._telemetry)

    async def end_again(self, job: Job, delivery: Delivery) -> None:
        """Settle a delivery of an ended request, whose first ack the broker has not read."""
        try:
            await self._settle_again(job, delivery)
        finally:  # further copies may have come meanwhile
            for copy in job.copies:
                if copy.delivery is not None and not copy.delivery.settled:
                    await self._settle_copy_again(copy, copy.delivery)

    async def _settle_copy_again(self, copy: Job, delivery: Delivery) -> None:
        """Settle a copy; a different message with the same id is given back, to be read anew."""
        if self._ended.knows(copy.task.request_id, delivery):
            await self._settle_again(copy, delivery)
        else:
            await settle(delivery.give_back(), self._telemetry)

    async def _settle_again(self, job: Job, delivery: Delivery) -> None:
        task = job.task
        await settle(delivery.ack(), self._telemetry)
        await self._journal.tally(
            "duplicate", request_id=task.request_id, method=task.method, detail="ended here"
        )

    # -- cut short ----------------------------------------------------------------------

    async def hand_over_stuck(self, job: Job) -> None:
        """Give back a request whose handler did not return in time: another process may run it."""
        job.task.cut = Interruption.UNCLEAN
        await self.give_back(job)

    async def give_back(self, job: Job) -> None:
        """Give back all deliveries of a request that was cut, or did not start.

        If an operator has ended it, it is answered and acked instead, as it must not run again.
        """
        if job.task.order is not None:
            await self._end(job, ordered(str(job.task), job.task.order, job.task.state))
            return
        await self._give_back_one(job)
        for copy in job.copies:  # the list may grow meanwhile
            await self._give_back_one(copy)
        if job.task.cut is not None:
            self._events.cut(job, job.task.cut)

    async def _give_back_one(self, job: Job) -> None:
        if job.delivery is not None:
            self._unfinished.given_back += 1
            await settle(job.delivery.give_back(), self._telemetry)
