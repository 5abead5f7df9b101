"""Carries out the orders of operators about tasks of this run.

A task that runs or waits for its turn is cancelled with a cause, and ends when
its handler has returned. A row that recovery has claimed is changed by
compare-and-set, even while recovery works on it. Rows of other runs are not
changed here: the answer is then `moved`, and the caller reads the row again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakValueDictionary

from gracekit.dispatcher import Dispatcher
from gracekit.errors import GracekitError, StoreError
from gracekit.journal.order_rows import (
    OrderTarget,
    add_taken,
    incident_of,
    order_of,
    refusal,
    refusal_of,
    target_named,
    target_of,
    targets_in_flight,
)
from gracekit.journal.tasks import Journal
from gracekit.process import Point
from gracekit.request.parked_tasks import ParkedTasks
from gracekit.request.recovery_trigger import RecoveryTrigger
from gracekit.request.row_orders import RowOrders, emit_ordered
from gracekit.store.batch import Batch
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import RETRIED, CancelCause, Lane, Order, TaskState, TrackedTask, Verb
from gracekit.tracker.tracker import Tracker

LOOKS: Final = 50
BETWEEN_LOOKS_S: Final = 0.02
"""Seconds between two looks at a task that is in a step of gracekit, such as a commit."""
LOOK_EVERY_S: Final = 1.0
"""Seconds between two looks for orders that were given on another host."""

VerbAnswer = dict[str, Any]


class Orders:
    """Carries out orders in one run.

    Args:
        dispatcher: Cancels a task in flight.
        parked_tasks: Carries out orders about parked tasks.
        trigger: Asks recovery to look, because a reply or a hook may be due.
    """

    def __init__(
        self,
        journal: Journal,
        tracker: Tracker,
        dispatcher: Dispatcher,
        parked_tasks: ParkedTasks,
        telemetry: Telemetry,
        *,
        trigger: RecoveryTrigger,
    ) -> None:
        self._journal = journal
        self._rows = RowOrders.of_run(journal)
        self._parked_tasks = parked_tasks
        self._tracker = tracker
        self._telemetry = telemetry
        self._dispatcher = dispatcher
        self._trigger = trigger
        self._one_at_a_time = WeakValueDictionary[tuple[str, str], asyncio.Lock]()

    async def carry_out(
        self,
        request_id: str,
        recipient: str,
        order: Order,
        args: Mapping[str, Any] | None = None,
    ) -> VerbAnswer:
        """Carry out one order; orders about the same task are carried out one after the other.

        Args:
            request_id: Request id of the task.
            recipient: As in its row.
            order: What to do.
            args: Arguments to replace before a parked task is retried; other tasks are `moved`.

        Returns:
            `{"state": …}`, the state now. With `"asked": True` if the task ends later, when its
            handler has returned; with `"moved": True` if another run owns the task.

        Raises:
            GracekitError: the order cannot be carried out; the message says why.
            StoreError: the order could not be recorded, and was not carried out.
        """
        # Without the lock, two orders at a time would both be recorded, although one is refused.
        lock = self._one_at_a_time.setdefault((request_id, recipient), asyncio.Lock())
        async with lock:
            if args:
                return await self._retry_with(args, request_id, recipient, order)
            return await self._carry_out(request_id, recipient, order)

    async def carry_out_anywhere(self, request_id: str, order: Order) -> None:
        """Carry out one order about a task of any run of the store.

        A run that has it in flight takes the order at its next look; if it has died, recovery
        carries it out.

        Raises:
            GracekitError: as `carry_out`.
        """
        for _ in range(LOOKS):
            answer = await self.carry_out(request_id, "", order)
            if "moved" not in answer:
                return
            target = await target_named(self._journal.engine, request_id, "")
            if target is None:
                return
            if (why := refusal_of(target, order.verb)) is not None:
                raise GracekitError(why)
            if target.ordered is not None:
                return
            if target.owner is None and target.state is not TaskState.RUNNING:
                if await self._change(target, order) is not None:
                    return
            elif target.owner != self._journal.run_id and await self._rows.leave(target, order):
                return
            await asyncio.sleep(BETWEEN_LOOKS_S)
        raise GracekitError(f"task {request_id} keeps changing its state: try again")

    async def _carry_out(self, request_id: str, recipient: str, order: Order) -> VerbAnswer:
        noted = False
        for _ in range(LOOKS):
            task = self._tracker.get(request_id, recipient)
            if task is not None and task.journaled and task.row_id is None:
                pass  # its acceptance is not committed yet, and may fail
            elif task is not None and task.state in {TaskState.ACCEPTED, TaskState.RUNNING}:
                self._check(task, order)
                if noted or task.order is not None:  # a repeated order is recorded once
                    return self._order(task, order)
                # Record it first: a reader of the outcome must also find who ordered it, and the
                # order must stand if this process ends before the handler has returned.
                if noted := await self._note(task, order):
                    continue  # it may have ended meanwhile
            elif answer := await self._order_row(request_id, recipient, order):
                return answer
            await asyncio.sleep(BETWEEN_LOOKS_S)
        raise GracekitError(f"task {request_id} keeps changing its state: try again")

    async def _retry_with(
        self, args: Mapping[str, Any], request_id: str, recipient: str, order: Order
    ) -> VerbAnswer:
        target = await target_named(self._journal.engine, request_id, recipient)
        if target is None or not self._is_parked_here(target):
            return {"moved": True, "state": None if target is None else target.state.value}
        end = await self._parked_tasks.carry_out(target, order, args)
        return {"moved": True, "state": None} if end is None else {"state": end.value}

    async def keep_left(self) -> None:
        """Each second, carry out what commands on other hosts have left, until cancelled."""
        while True:
            await self._journal.clock.wait_tick(LOOK_EVERY_S)
            with contextlib.suppress(StoreError):  # the next look finds them
                await self._carry_out_left()

    async def _carry_out_left(self) -> None:
        journal = self._journal
        for target in await targets_in_flight(journal.engine, journal.service, journal.run_id):
            task = self._tracker.get(target.request_id, target.recipient)
            if task is None or task.row_id != target.id or task.cancel_cause is not None:
                continue  # the row goes another way, or the handler is cancelled already
            if task.state in {TaskState.ACCEPTED, TaskState.RUNNING}:
                self._order(task, order_of(target))

    # -- in flight ----------------------------------------------------------------------

    def _check(self, task: TrackedTask, order: Order) -> None:
        if task.lane is Lane.PERIODIC:
            raise GracekitError(
                f"{task.method} is a periodic job and no request: it takes no orders; it ends by "
                "itself, or with a drain"
            )
        if task.lane is Lane.BACKGROUND:
            raise GracekitError(
                f"{task} is background work and no request: it ends with the code that started it"
            )
        if (why := refusal(task, order.verb, task.state)) is not None:
            raise GracekitError(why)
        if task.cancel_cause not in {None, CancelCause.OPERATOR}:
            raise GracekitError(
                f"{task} is being cancelled already ({task.cancel_cause.value}): "
                "its handler has not returned yet"
            )
        if task.order is not None and task.order.verb is not order.verb:
            raise GracekitError(
                f"{task} has an order already, {task.order.verb.value} by {task.order.by}: "
                "its handler has not returned yet"
            )

    async def _note(self, task: TrackedTask, order: Order) -> bool:
        """Record that this run has taken the order.

        Returns:
            False if it is not on record: the row has changed meanwhile, or the commit was lost.
        """
        journal = self._journal
        at, was = journal.clock.wall(), task.state.value
        incident = incident_of(order, task.request_id, task.method, was, at=at, run=journal.run_id)
        batch = Batch(Point.TALLY)
        # A `requeue` task has no row, and the store may have lost one.
        if task.row_id is not None and await target_of(journal.engine, task.row_id) is not None:
            add_taken(batch, task.row_id, journal.run_id, task.state, order)
        incident.add(batch)
        return await incident.is_committed(journal.commit(batch), journal.engine)

    def _order(self, task: TrackedTask, order: Order) -> VerbAnswer:
        if task.order is None:  # a repeated order must not cancel the handler's clean-up
            self._dispatcher.obey(task, order)
            emit_ordered(self._telemetry, task, order, task.state)
        return {"state": task.state.value, "asked": True}

    # -- on record ----------------------------------------------------------------------

    async def _order_row(self, request_id: str, recipient: str, order: Order) -> VerbAnswer | None:
        """Carry the order out on a row that is not in flight here; None to look at it again."""
        target = await target_named(self._journal.engine, request_id, recipient)
        if target is None:
            return {"moved": True, "state": None}
        if (why := refusal_of(target, order.verb)) is not None:
            raise GracekitError(why)
        if target.state in RETRIED:  # no run works on it, even if it has an owner
            return await self._change(target, order)
        if self._is_parked_here(target):
            end = await self._parked_tasks.carry_out(target, order)
            return None if end is None else {"state": end.value}
        if target.owner != self._journal.run_id:
            return {"moved": True, "state": target.state.value}
        if target.state is not TaskState.HANDED_OVER:
            return None  # between two steps of gracekit, or left by a commit of unknown end
        if self._tracker.get(request_id, recipient) is not None:
            raise GracekitError(
                f"{target} was cut and its handler has not returned: once its process is gone it "
                f"can be {'retried' if order.verb is Verb.RETRY else 'ended'}"
            )
        if order.verb is Verb.RETRY and target.probing:
            raise GracekitError(f"{target} is being settled: its probe is running; try again")
        return await self._change(target, order)

    def _is_parked_here(self, target: OrderTarget) -> bool:
        """Whether it is a parked task of this service."""
        return target.state is TaskState.PENDING and target.service == self._journal.service

    async def _change(self, target: OrderTarget, order: Order) -> VerbAnswer | None:
        state = await self._rows.carry_out(target, order)
        if state is None:
            return None
        self._trigger.poke()
        emit_ordered(self._telemetry, target, order, state)
        return {"state": state.value}
