"""Carries orders out on rows that no handler is working on.

Each is one commit. It has the order, as a compare-and-set on the row as it was read, and the
incident that says who has given it and why. After a commit of unknown end, the incident shows
whether it took effect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from gracekit.clock import Clock
from gracekit.journal.order_rows import (
    OrderIncident,
    OrderTarget,
    add_drop_hook,
    add_order,
    add_taken,
    incident_of,
    state_of,
)
from gracekit.journal.outbox import News
from gracekit.journal.pending import add_parked_order
from gracekit.journal.rows import Outcome
from gracekit.journal.tasks import Journal
from gracekit.process import Point
from gracekit.request.outcomes import ordered
from gracekit.store.batch import Batch
from gracekit.store.engine import Queries
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import RETRIED, Order, TaskState, TrackedTask, Verb

Commit = Callable[[Batch], Awaitable[object]]


def emit_ordered(
    telemetry: Telemetry, task: TrackedTask | OrderTarget, order: Order, state: TaskState
) -> None:
    """Emit that an order was carried out, or taken by the run that has the task in flight."""
    telemetry.emit(
        "task.ordered",
        task_id=task.request_id,
        method=task.method,
        context=task.shown_context,
        verb=order.verb.value,
        by=order.by,
        reason=order.reason,
        state=state.value,
    )


class RowOrders:
    """The orders that one run carries out, or the command line.

    Args:
        engine: Is asked after a commit of unknown end.
        clock: Gives the time of an order.
        run_id: Id of the run, for incidents; or a word that stands for it.
        commit: Commits a batch.
        sends: Whether that run sends the notifications about parked tasks; otherwise any run does.
    """

    def __init__(
        self, engine: Queries, clock: Clock, run_id: str, commit: Commit, *, sends: bool = False
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._run_id = run_id
        self._commit = commit
        self._sends = sends

    @classmethod
    def of_run(cls, journal: Journal) -> Self:
        """The orders that the run of *journal* carries out."""
        return cls(journal.engine, journal.clock, journal.run_id, journal.commit, sends=True)

    async def carry_out(
        self,
        target: OrderTarget,
        order: Order,
        *,
        dead: bool = False,
        note: str = "",
        args: Mapping[str, Any] | None = None,
        also: Callable[[Batch], None] | None = None,
        commit: Commit | None = None,
    ) -> TaskState | None:
        """Carry out an order that `refusal_of` does not refuse.

        Args:
            target: The row as it was read.
            order: What to do.
            dead: Whether its owner is proven dead, so that the row counts as ownerless.
            note: For the incident, beside the state before.
            args: All arguments of a parked task, if some are replaced before a retry.
            also: Adds statements to the commit, before those of the order.
            commit: Commits this batch, in place of the usual way.

        Returns:
            The new state; None if the row has changed since it was read.
        """
        is_cut = dead and target.state is TaskState.RUNNING
        state = TaskState.HANDED_OVER if is_cut else target.state
        is_retry = order.verb is Verb.RETRY
        outcome = None if is_retry else ordered(str(target), order, state)
        gone = f" of run {target.owner}, gone" if dead and state not in RETRIED else ""
        incident = self._incident_of(target, order, f"{state_of(target)}{gone}{note}")
        batch = self._batch(target, outcome, incident, also=also, dead=dead, args=args)
        if not await incident.is_committed((commit or self._commit)(batch), self._engine):
            return None
        return TaskState.ACCEPTED if outcome is None else outcome.state

    async def leave(self, target: OrderTarget, order: Order) -> bool:
        """Leave an order to the run on another host that has the task in flight.

        Returns:
            False if the row has changed since it was read.
        """
        assert target.owner is not None
        batch = Batch(Point.TALLY)
        add_taken(batch, target.id, target.owner, target.state, order)
        incident = self._incident_of(target, order, state_of(target))
        incident.add(batch)
        return await incident.is_committed(self._commit(batch), self._engine)

    async def end(self, target: OrderTarget, outcome: Outcome, *, what: str, detail: str) -> bool:
        """End a task without a new order, and note why as the incident *what*.

        Returns:
            False if the row has changed since it was read.
        """
        incident = OrderIncident(
            at=self._clock.wall(),
            run_id=self._run_id,
            what=what,
            request_id=target.request_id,
            method=target.method,
            detail=detail[:1000],
        )
        batch = self._batch(target, outcome, incident)
        return await incident.is_committed(self._commit(batch), self._engine)

    async def drop_hook(self, target: OrderTarget, order: Order, *, keep: bool) -> bool:
        """Cancel the errored hook of an ended task; *keep* says whether its arguments stay.

        Returns:
            False if the hook was called since the row was read.
        """
        was = f"{target.state.value}, its errored hook due"
        incident = self._incident_of(target, order, was)
        batch = Batch(Point.ERRORED_DONE)
        add_drop_hook(batch, target, incident, keep=keep)
        return await incident.is_committed(self._commit(batch), self._engine)

    def _incident_of(self, target: OrderTarget, order: Order, was: str) -> OrderIncident:
        at = self._clock.wall()
        return incident_of(order, target.request_id, target.method, was, at=at, run=self._run_id)

    def _batch(
        self,
        target: OrderTarget,
        outcome: Outcome | None,
        incident: OrderIncident,
        *,
        also: Callable[[Batch], None] | None = None,
        dead: bool = False,
        args: Mapping[str, Any] | None = None,
    ) -> Batch:
        is_parked = target.state is TaskState.PENDING
        sends = self._sends and is_parked
        batch = Batch(Point.UNPARK if sends else Point.SETTLE)
        if also is not None:
            also(batch)
        news = News.of(self._clock, sender=self._run_id if sends else None)
        if is_parked:
            add_parked_order(batch, target, outcome, incident, news, args=args)
        else:
            add_order(batch, target, outcome, incident, news, dead=dead)
        return batch
