"""The orders of operators about one task, as changes of its row: cancel, fail, retry.

For rows that no handler is working on. Each statement is a compare-and-set on
the owner and state that were read. The same commit writes an incident that says
who ordered it and why; so after a commit of unknown end, the incident shows
whether it took effect.
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gracekit.errors import ConflictError, StoreError, UnknownCommitError
from gracekit.journal import order_rows_sql as sql
from gracekit.journal.outbox import News, Subject, add_update
from gracekit.journal.rows import Outcome, RowOfTask, from_json, order_from, taken_pair, to_json
from gracekit.journal.tasks_sql import COUNT, NOTE, REMOVE_CONTENT
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Queries
from gracekit.tracker.task import (
    DONE,
    ENDS,
    RETRIED,
    TERMINAL,
    Lane,
    Order,
    Reason,
    TaskState,
    Verb,
)

_NOT_RETRIED: Final = MappingProxyType(
    {
        TaskState.ACCEPTED: "it has not been started yet, and will be by itself",
        TaskState.RUNNING: "only a task that was handed over, waits for capacity or has failed can "
        "be; cancel it if it should stop",
    }
)
_NOT_GIVEN_UP: Final = "only a task that waits for capacity can be; `gracekit tasks fail` ends it"


class OrderTarget(RowOfTask, frozen=True, kw_only=True):
    """The row that an order is about, without what an operator must not see.

    Attributes:
        failure: Its last failure as JSON; None without one.
        owner: Run that may act on it; None for an ownerless row.
        probing: Whether a probe of it was begun and has not answered.
        settle_s: Seconds between an unclean end and recovery's first look.
        errored_due: Whether it has ended and its errored hook is still to be called, or to return.
        calling: Whether its errored hook was called and has not returned.
        ordered: The order that its run carries out, as JSON; None for none.
        due_at: Wall time before which it does not begin; a retry lets it begin now.
        has_arguments: Whether its arguments are still on record.
        owes_replies: Whether a caller is still to be answered, or may not have got the answer.
    """

    id: int
    recipient: str
    reason: str | None
    detail: str | None
    failure: str | None
    owner: str | None
    cut: str | None
    probing: bool
    settle_s: float
    finished_at: float | None
    errored_due: bool
    calling: bool
    ordered: str | None
    due_at: float | None
    has_arguments: bool
    owes_replies: bool

    @property
    def acted(self) -> bool:
        """Whether its owner may, even when dead, have a last request to a backend under way."""
        return self.state is TaskState.RUNNING or (
            self.state is TaskState.HANDED_OVER and self.owner is not None
        )


def _target(row: Row) -> OrderTarget:
    values: dict[str, Any] = dict(zip(sql.NAMES, row, strict=True))
    values["resource"] = taken_pair(values, "resource")
    values["ops_resource"] = taken_pair(values, "ops")
    return OrderTarget(
        **values
        | {
            "shown_context": from_json(values["shown_context"]),
            "state": TaskState(str(values["state"])),
            "lane": Lane(str(values["lane"])),
            "probing": bool(values["probing"]),
            "errored_due": bool(values["errored_due"]),
            "calling": bool(values["calling"]),
            "has_arguments": bool(values["has_arguments"]),
            "owes_replies": bool(values["owes_replies"]),
        }
    )


async def target_of(engine: Queries, row_id: int) -> OrderTarget | None:
    """The row of that id as it is now; None if there is none."""
    rows = await engine.query(sql.TARGET_OF_ID, row_id)
    return _target(rows[0]) if rows else None


async def target_named(engine: Queries, request_id: str, recipient: str) -> OrderTarget | None:
    """The row of that request as it is now; None if there is none."""
    rows = await engine.query(sql.TARGET_OF_KEY, request_id, recipient)
    return _target(rows[0]) if rows else None


async def targets_of(engine: Queries, request_id: str) -> list[OrderTarget]:
    """Rows of that request, newest first; a fanout has a row for each instance."""
    rows = await engine.query(sql.TARGETS_OF_REQUEST, request_id)
    return list(map(_target, rows))


async def targets_between(engine: Queries, first: str, end: str) -> list[OrderTarget]:
    """Rows with *first* <= request id < *end*, newest first, 100 at most."""
    return list(map(_target, await engine.query(sql.TARGETS_BETWEEN, first, end)))


async def targets_overdue(
    engine: Queries, service: str, now: float, *, limit: int
) -> list[OrderTarget]:
    """Parked tasks of *service* whose deadline has passed, the longest overdue first."""
    rows = await engine.query(sql.TARGETS_OVERDUE, service, now, limit)
    return list(map(_target, rows))


async def targets_ordered(engine: Queries, service: str, *, limit: int) -> list[OrderTarget]:
    """Unfinished rows of *service* that no run owns, with an order that was taken; oldest first."""
    return list(map(_target, await engine.query(sql.TARGETS_ORDERED, service, limit)))


async def targets_in_flight(engine: Queries, service: str, owner: str) -> list[OrderTarget]:
    """Rows that run *owner* has in flight, with an order."""
    return list(map(_target, await engine.query(sql.TARGETS_IN_FLIGHT, service, owner)))


async def targets_pending(
    engine: Queries, resource: tuple[str, str], service: str
) -> list[OrderTarget]:
    """Parked tasks of *service* for that resource, the oldest first."""
    return list(map(_target, await engine.query(sql.TARGETS_PENDING, *resource, service)))


def refusal_of(target: OrderTarget, verb: Verb, state: TaskState | None = None) -> str | None:
    """As `refusal`, for a row; *state* replaces that of the row if its owner is dead."""
    state = state or target.state
    if verb is Verb.RETRY and state is TaskState.ACCEPTED and target.due_at is not None:
        return None
    why = refusal(target, verb, state, target.reason, target.detail)
    if why is None and state in RETRIED:
        why = _not_again(target)
    return why


def _not_again(target: OrderTarget) -> str | None:
    """Why an ended task cannot be run again, now or at all; None if it can be."""
    if target.calling:
        return (
            f"{target} is {target.state.value} and its errored hook runs now: retry it when the "
            "hook has returned"
        )
    if target.errored_due:
        return (
            f"{target} is {target.state.value} and its errored hook has still to be called: retry "
            "it after that, or cancel the hook with `gracekit tasks cancel`"
        )
    if target.owes_replies:
        return (
            f"{target} is {target.state.value} and its caller has still to be answered: retry it "
            "after that; a run of the service sends the answer"
        )
    if not target.has_arguments:
        return (
            f"{target} is {target.state.value} and its arguments are not kept: send it again under "
            "a new id. With GRACEKIT_KEEP_FAILED_ARGUMENTS=true later ones are kept"
        )
    return None


def refusal(
    task: object, verb: Verb, state: TaskState, why: str | None = None, detail: str | None = None
) -> str | None:
    """Why the order cannot be carried out on a task in *state*; None if it can be.

    Args:
        task: Names it in the sentence.
        verb: What is ordered.
        state: Its state now.
        why: The reason that an ended task has on record.
        detail: The sentence on record beside the reason.
    """
    if state in TERMINAL and state not in ENDS[verb]:
        reason = f" ({why})" if why else ""
        words = f": {detail}" if detail else ""
        return f"{task} has ended and cannot be {DONE[verb]}: it is {state.value}{reason}{words}"
    if state not in ENDS[verb]:
        rule = _NOT_GIVEN_UP if verb is Verb.GIVE_UP else _NOT_RETRIED[state]
        return f"{task} is {state.value} and cannot be {DONE[verb]}: {rule}"
    return None


class OrderIncident(msgspec.Struct, frozen=True, kw_only=True):
    """The incident of one order. If it is on record, the commit of the order took effect."""

    at: float
    run_id: str
    what: str
    request_id: str
    method: str
    detail: str

    def add(self, batch: Batch) -> None:
        """Count the order, and list it as an incident."""
        batch.add(COUNT, self.what, 1)
        batch.add(NOTE, self.at, self.run_id, self.what, self.request_id, self.method, self.detail)

    async def is_committed(self, commit: Awaitable[object], engine: Queries) -> bool:
        """Wait for the *commit* of a batch that has this incident; return whether it took effect.

        It did not if a row has changed meanwhile, or if its end is unknown and the incident is not
        on record.
        """
        try:
            await commit
        except ConflictError:
            return False
        except UnknownCommitError:
            return await self.stands(engine)
        return True

    async def stands(self, engine: Queries) -> bool:
        """Whether it is on record, so that the commit that it was part of took effect."""
        return bool(
            await engine.query(
                sql.STANDS,
                *(self.at, self.run_id, self.what, self.request_id, self.detail),
            )
        )


def state_of(target: OrderTarget) -> str:
    """State of a task before an order, for the incident, as its row will be overwritten.

    `handed_over`, `errored (attempts), attempt 3`, or `failed, attempt 1: LookupError: no disk`.
    """
    words = target.state.value + (f" ({target.reason})" if target.reason else "")
    if target.state not in RETRIED:
        return words
    words += f", attempt {target.attempts}"
    failure = from_json(target.failure) if target.state is TaskState.FAILED else None
    return words + (f": {failure['exc_class']}: {failure['message']}" if failure else "")


def incident_of(
    order: Order, request_id: str, method: str, before: str, *, at: float, run: str
) -> OrderIncident:
    """The incident of an order, such as `operator_cancel`: by whom, why, and the state before."""
    who = "caller" if order.source == "caller" else Reason.OPERATOR.value
    return OrderIncident(
        at=at,
        run_id=run,
        what=f"{who}_{order.verb.value}",
        request_id=request_id,
        method=method,
        detail=f"{order.by}: {order.reason or 'no reason given'} (it was {before})"[:1000],
    )


def order_of(target: OrderTarget) -> Order:
    """The order about the row that a run carries out.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return order_from(target.ordered or "")
    except msgspec.DecodeError as error:
        raise StoreError(f"the order on record about {target} is damaged: {error}") from error


def add_taken(batch: Batch, row_id: int, owner: str, state: TaskState, order: Order) -> None:
    """Record an order about a task that run *owner* has in flight, and carries out.

    If that run ends before the task has ended, recovery carries the order out. A conflict if the
    task has ended already or was handed over; or if it runs by *state*, which is what its run
    knows, and by its row waits to be tried again.
    """
    batch.add(sql.TAKE, to_json(order), row_id, owner, state.value, expect=1)


def add_order(
    batch: Batch,
    target: OrderTarget,
    outcome: Outcome | None,
    incident: OrderIncident,
    news: News,
    *,
    dead: bool,
) -> None:
    """Carry an order out on a row; a conflict if the row has changed since it was read.

    For PENDING rows see `journal.pending`.

    The row keeps its owner if that run lives. Otherwise it becomes ownerless, and any
    run of its service sends the due replies and calls the errored hook.

    Args:
        batch: Gets the statements.
        target: The row as it was read.
        incident: The record of the order.
        news: For the notification, if the task was parked before and ends.
        outcome: How the task ends; None for a retry.
        dead: Whether its owner is proven dead, so that the row counts as ownerless.
    """
    owner, state = target.owner, target.state
    if state in RETRIED:  # the owner of an ended row does nothing with it, so it may be taken
        batch.add(sql.RUN_AGAIN, target.id, state.value, target.finished_at, expect=1)
        incident.add(batch)
        return
    if outcome is None and state is TaskState.ACCEPTED:
        batch.add(sql.BEGIN_NOW, target.id, state.value, expect=1)
        incident.add(batch)
        return
    if dead and state is TaskState.RUNNING:
        batch.add(sql.CUT, incident.at, target.id, owner, expect=1)
        owner, state = None, TaskState.HANDED_OVER
    elif dead and owner is not None:
        batch.add(
            sql.FREE_OF_THE_DEAD,
            *(target.id, owner, state.value),
            expect=1,
        )
        owner = None
    if outcome is None:
        batch.add(sql.RETRY, target.id, owner, expect=1)
    else:
        batch.add(
            sql.END,
            *(outcome.state.value, outcome.failure, outcome.reason, outcome.detail, incident.at),
            *(int(outcome.state is TaskState.ERRORED), target.id, owner, state.value),
            expect=1,
        )
        if outcome.state is not TaskState.ERRORED:
            batch.add(REMOVE_CONTENT, target.id)
        batch.add(sql.REPLY_DUE, incident.at, target.id)
        if target.parkings:
            reason = outcome.reason or ""
            add_update(batch, subject_of(target), news, state, outcome.state, reason=reason)
    incident.add(batch)


def subject_of(row: RowOfTask) -> Subject:
    """The task as its notifications name it."""
    return Subject(
        task_id=row.request_id,
        service=row.service,
        method=row.method,
        resource=row.shown_resource,
        version=row.parkings,
        deadline=row.pending_deadline or 0.0,
    )


def add_drop_hook(
    batch: Batch, target: OrderTarget, incident: OrderIncident, *, keep: bool
) -> None:
    """Cancel the errored hook of an ended task, so that its owner does not call it.

    A conflict if it was called since the row was read. With *keep* the arguments of the task stay,
    so that it can be retried.
    """
    batch.add(sql.DROP_HOOK, target.id, int(target.calling), target.owner, expect=1)
    if not keep:
        batch.add(REMOVE_CONTENT, target.id)
    incident.add(batch)
