"""Ends parked tasks whose deadline has passed: nobody has made room for them in time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gracekit import backoff
from gracekit.errors import ConflictError, StoreError, UnknownCommitError
from gracekit.journal.order_rows import OrderIncident, OrderTarget
from gracekit.journal.outbox import News, utc_text
from gracekit.journal.pending import add_end
from gracekit.process import Point
from gracekit.recovery.shared import Shared
from gracekit.request.outcomes import expired
from gracekit.store.batch import Batch
from gracekit.tracker.task import Reason, TaskState

AT_ONCE: Final = 50


class Overdue:
    """The sweep over the parked tasks of a service; each run of it makes it."""

    def __init__(self, shared: Shared) -> None:
        self._journal = shared.journal
        self._rows = shared.pending
        self._outbox = shared.outbox
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry
        self._clock = shared.clock

    async def end_all(self) -> None:
        """End every task whose deadline has passed."""
        while targets := await self._rows.overdue(limit=AT_ONCE):
            ended = await asyncio.gather(*map(self._end, targets))
            if not any(ended):
                return  # siblings are at it, or the store did not take it: the next pass looks
            self._outbox.poke()
            self._trigger.go_on()  # their errored hooks are due

    async def next_in_s(self, longest: float) -> float:
        """Seconds until a parked task is overdue; *longest* if that is later, or not known."""
        with contextlib.suppress(StoreError):
            if (moment := await self._rows.next_deadline()) is not None:
                left_s = moment - self._clock.wall()
                # What `end_all` has not ended, it could not: the store refuses, perhaps.
                return min(longest, max(0.05, left_s) if left_s > 0 else backoff.OVERDUE_S)
        return longest

    async def _end(self, target: OrderTarget) -> bool:
        """Whether it was ended here; not if somebody was quicker."""
        journal = self._journal
        news = News.of(self._clock, sender=journal.run_id)
        deadline = utc_text(target.pending_deadline or 0.0)
        outcome = expired(str(target), deadline, target.detail or "")
        incident = OrderIncident(
            at=news.at,
            run_id=journal.run_id,
            what="pending_expired",
            request_id=target.request_id,
            method=target.method,
            detail=f"version {target.parkings}, deadline {deadline}",
        )
        batch = Batch(Point.UNPARK)
        add_end(batch, target, outcome, news)
        incident.add(batch)
        try:
            await journal.commit(batch)
        except ConflictError:
            return False
        except UnknownCommitError:
            if not await incident.stands(journal.engine):
                return False
        self._tell(target)
        return True

    def _tell(self, target: OrderTarget) -> None:
        self._telemetry.tracing.decided(
            target.request_id, TaskState.ERRORED.value, Reason.EXPIRED.value
        )
        self._telemetry.emit(
            "task.errored",
            task_id=target.request_id,
            method=target.method,
            resource=target.resource,
            attempt=target.attempts,
            reason=Reason.EXPIRED.value,
        )
