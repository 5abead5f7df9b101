"""Ends parked tasks whose deadline has passed before a resolver has retried or ended them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from gracekit import backoff
from gracekit.errors import StoreError
from gracekit.journal.order_rows import OrderTarget
from gracekit.journal.outbox import utc_text
from gracekit.recovery.shared import Shared
from gracekit.request.outcomes import expired
from gracekit.request.row_orders import RowOrders
from gracekit.tracker.task import Reason, TaskState

AT_ONCE: Final = 50


class Overdue:
    """Ends overdue parked tasks of a service; each run does so, from its start to its end."""

    def __init__(self, shared: Shared) -> None:
        self._orders = RowOrders.of_run(shared.journal)
        self._rows = shared.pending
        self._outbox = shared.outbox
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        own = (method.options.pending_timeout_s for method in shared.methods)
        timeouts_s = (shared.settings.pending_timeout_s, *(one for one in own if one is not None))
        # This run does not learn what siblings park. A deadline is at least the shortest timeout
        # ahead, so a look at that interval finds each deadline before it passes.
        self._look_every_s = min(shared.settings.reconcile_every_s, *timeouts_s)

    async def end_all(self) -> None:
        """End every task whose deadline has passed."""
        while targets := await self._rows.overdue(limit=AT_ONCE):
            ended = await asyncio.gather(*map(self._end, targets))
            if not any(ended):
                return  # siblings end them, or the store refused: the next pass looks again
            self._outbox.poke()
            self._trigger.go_on()  # their errored hooks are due

    async def keep(self, follow_clock: Callable[[], Awaitable[None]]) -> None:
        """End each task at its deadline, until cancelled.

        Args:
            follow_clock: Adjusts the deadlines after the wall clock was set.
        """
        while True:
            try:
                await follow_clock()
                await self.end_all()
                pause_s = await self._pause_s()
            except StoreError as error:
                self._telemetry.emit("store.error", what="deadlines", error=str(error))
                pause_s = backoff.RECOVERY_S
            await self._trigger.wait_deadline(pause_s, self._clock.loop())

    async def _pause_s(self) -> float:
        """Seconds until a task is overdue, or until siblings may have parked one that will be."""
        deadline = await self._rows.next_deadline()
        longest = self._clock.tick(self._look_every_s) - self._clock.loop()
        if deadline is None:
            return longest
        left_s = deadline - self._clock.wall()
        # A task that is overdue already could not be ended; perhaps the store refuses.
        return min(longest, max(0.05, left_s) if left_s > 0 else backoff.OVERDUE_S)

    async def _end(self, target: OrderTarget) -> bool:
        """End one task; false if its row has changed meanwhile."""
        deadline = utc_text(target.pending_deadline or 0.0)
        outcome = expired(str(target), deadline, target.detail or "")
        detail = f"version {target.parkings}, deadline {deadline}"
        if not await self._orders.end(target, outcome, what="pending_expired", detail=detail):
            return False
        self._tell(target)
        return True

    def _tell(self, target: OrderTarget) -> None:
        self._telemetry.tracing.decided(
            target.request_id, TaskState.ERRORED.value, Reason.EXPIRED.value
        )
        self._telemetry.emit("task.errored", **target.event_fields, reason=Reason.EXPIRED.value)
