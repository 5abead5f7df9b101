"""Carries out orders that a run had taken and that it did not live to carry out.

A run records an order about a task of its own before it cancels the handler. If the process ends
before the handler has returned, the row is handed over with the order. Nobody claims such a row:
the order ends it here, as the command line would, whatever the policy of its method is.
"""

from __future__ import annotations

from typing import Final

from gracekit.errors import StoreError
from gracekit.journal.order_rows import OrderTarget, order_of, state_of, targets_ordered
from gracekit.recovery.shared import Shared
from gracekit.request.outcomes import ordered
from gracekit.request.row_orders import RowOrders
from gracekit.tracker.task import Reason, TaskState

AT_ONCE: Final = 50


class LeftOrders:
    """Carries out the orders on rows of the service that no run owns; each run does so."""

    def __init__(self, shared: Shared) -> None:
        self._journal = shared.journal
        self._rows = RowOrders.of_run(shared.journal)
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry

    async def carry_out(self) -> None:
        """End every ownerless row that has an order, until there are none or recovery is paused."""
        journal = self._journal
        while not self._trigger.is_paused:
            targets = await targets_ordered(journal.engine, journal.service, limit=AT_ONCE)
            ended = [await self._end(target) for target in targets]
            if not any(ended):
                return  # there are none, or siblings end them, or the store refused
            self._trigger.poke()  # their replies and errored hooks are due; requests may go on

    async def _end(self, target: OrderTarget) -> bool:
        """End one row; false if it has changed meanwhile, or cannot be ended now."""
        try:
            order = order_of(target)
            outcome = ordered(str(target), order, target.state)
            why = order.reason or "no reason given"
            detail = f"{order.verb.value} of {order.by}: {why} (it was {state_of(target)})"
            if not await self._rows.end(target, outcome, what="order_carried_out", detail=detail):
                return False
        except StoreError as error:
            self._telemetry.emit("store.error", what="orders", error=str(error))
            return False
        self._tell(target, outcome.state)
        return True

    def _tell(self, target: OrderTarget, end: TaskState) -> None:
        self._telemetry.emit(
            "task.settled",
            **target.event_fields,
            decision=end.value,
            reason=Reason.OPERATOR.value,
        )
        if end is TaskState.ERRORED:
            self._telemetry.emit(
                "task.errored",
                **target.event_fields,
                reason=Reason.OPERATOR.value,
            )
