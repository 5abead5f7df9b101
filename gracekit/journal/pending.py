"""Rows of parked tasks, which are PENDING and have no owner.

Each statement is a compare-and-set on the state and on the version, which is how
often the task was parked and which orders name. The notifications about a step
are written in its commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gracekit.journal import outbox
from gracekit.journal import pending_sql as sql
from gracekit.journal.order_rows import OrderIncident, OrderTarget, subject_of
from gracekit.journal.outbox import News, utc_text
from gracekit.journal.rows import Outcome, from_json, to_json
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import COUNT, REMOVE_CONTENT
from gracekit.store.batch import Batch
from gracekit.tracker.task import NO_CAPACITY, TaskState, TrackedTask


class ParkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to record of a task that is parked.

    Attributes:
        failure: The handler's NoCapacity, as the journal keeps failures.
        detail: The text of that.
        requested: The capacity that the handler missed.
        parkings: How often the task was parked before.
        deadline: Wall time until which it may be PENDING.
        context: The part of the caller's context that the notification shows.
    """

    failure: str | None
    detail: str
    requested: Mapping[str, Any]
    parkings: int
    deadline: float
    context: Mapping[str, Any]


class PendingRows:
    """The parked tasks of one service."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    # -- in -----------------------------------------------------------------------------

    def add_has_room(self, batch: Batch, most: int) -> int:
        """Let the batch fail with a conflict if *most* tasks of the service are parked already.

        Returns:
            Index of the statement; the ConflictError names it.
        """
        return batch.ask(sql.HAS_ROOM, self._journal.service, most, expect=1)

    def add_park(self, batch: Batch, task: TrackedTask, asked: ParkRequest) -> None:
        """Park a running task of this run, which then owes its due replies."""
        clock, me = self._journal.clock, self._journal.run_id
        now = clock.wall()
        batch.add(sql.REPLIES_DUE, now, me, task.row_id)
        batch.add(
            sql.PARK,
            *(asked.failure, NO_CAPACITY, asked.detail, to_json(dict(asked.requested))),
            None if task.cursor is None else to_json(task.cursor),
            *(now, now - clock.loop(), asked.deadline),
            *(task.row_id, me, asked.parkings),
            expect=1,
        )
        batch.add_up(COUNT, "parked", 1)
        self._journal.add_note(batch, "parked", task.request_id, task.method, asked.detail)
        self._add_news(batch, task, asked)

    def _add_news(self, batch: Batch, task: TrackedTask, asked: ParkRequest) -> None:
        clock, service = self._journal.clock, self._journal.service
        news = News.of(clock, sender=self._journal.run_id)
        subject = outbox.subject_of_task(task, service, asked.parkings + 1, asked.deadline)
        outbox.add_update(
            batch, subject, news, TaskState.RUNNING, TaskState.PENDING, reason=NO_CAPACITY
        )
        outbox.add_no_capacity(
            batch,
            subject,
            News.of(clock, sender=self._journal.run_id),
            reason=asked.detail,
            requested=asked.requested,
            attempt=task.attempt,
            context=asked.context,
        )

    async def deadline_of(self, row_id: int) -> float | None:
        """Wall time until which a task may be PENDING; None if it was never parked."""
        rows = await self._journal.engine.query(sql.DEADLINE, row_id)
        return None if not rows or rows[0][0] is None else float(rows[0][0])

    # -- looks --------------------------------------------------------------------------

    async def next_deadline(self) -> float | None:
        """Wall time of the next deadline; None if nothing is parked."""
        rows = await self._journal.engine.query(sql.NEXT_DEADLINE, self._journal.service)
        return None if rows[0][0] is None else float(rows[0][0])

    async def page(self, *, after: int, limit: int) -> list[dict[str, Any]]:
        """Parked tasks with a row id above *after*, as columns, in the order of acceptance."""
        service = self._journal.service
        rows = await self._journal.engine.query(sql.SHOWN_PAGE, service, after, limit)
        return [shown_columns(row) for row in rows]

    async def one(self, task_id: str) -> dict[str, Any] | None:
        """The task of that id in any state, as columns; None if there is none.

        Of a FAILED task, `failure` is what its handler raised, as the journal keeps it.
        """
        service = self._journal.service
        rows = await self._journal.engine.query(sql.SHOWN_ONE, task_id, service)
        if not rows:
            return None
        *columns, failure = rows[0]
        return shown_columns(tuple(columns)) | {"failure": from_json(failure)}

    # -- the clock ----------------------------------------------------------------------

    def add_follow_clock(self, batch: Batch, before_s: float, *, ahead_s: float) -> None:
        """After the wall clock was set, shift the times of parked tasks.

        *before_s* and *ahead_s* are wall time minus loop time, before and now.
        """
        least_s, most_s = sorted((before_s, ahead_s))
        batch.add(sql.FOLLOW_CLOCK, ahead_s, self._journal.service, least_s, most_s)


def shown_columns(row: tuple[Any, ...]) -> dict[str, Any]:
    """A row of the columns `SHOWN` as plain data; `requested` as an object."""
    columns = dict(zip(sql.SHOWN, row, strict=True))
    return columns | {"requested": from_json(columns["requested"])}


def as_shown(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A task as resolvers see it: without arguments and context, which may be secret."""
    kind = columns["resource_kind"]
    state = TaskState(columns["state"])
    is_pending = state is TaskState.PENDING
    return {
        "task_id": columns["request_id"],
        "service": columns["service"],
        "method": columns["method"],
        "resource": None if kind is None else f"{kind}:{columns['resource_id']}",
        "state": columns["state"],
        "reason": columns["reason"],
        "detail": columns["detail"] if may_show(state, columns["detail"]) else None,
        "attempts": columns["attempts"],
        "version": columns["parkings"],
        "requested": columns["requested"] if is_pending else None,
        "parked_at": _text_of(columns["parked_at"]) if is_pending else None,
        "deadline": _text_of(columns["pending_deadline"]) if is_pending else None,
        "accepted_at": _text_of(columns["accepted_at"]),
        "finished_at": _text_of(columns["finished_at"]),
    }


def may_show(state: TaskState, detail: str | None) -> bool:
    """Whether resolvers may see *detail*; what a handler raised is for its caller alone."""
    return bool(detail) and state is not TaskState.FAILED


def _text_of(wall: float | None) -> str | None:
    return None if wall is None else utc_text(wall)


# -- out ------------------------------------------------------------------------------------


def add_run_again(
    batch: Batch, target: OrderTarget, news: News, *, args: Mapping[str, Any] | None = None
) -> None:
    """Make a PENDING row ACCEPTED, so that any run that may run the task can claim it.

    Args:
        batch: Gets the statements.
        target: The row as it was read; a conflict if it has changed since.
        news: For the notification.
        args: All arguments of the task, if some were replaced.
    """
    if args is not None:
        text = to_json(dict(args))
        batch.add(sql.RESET_CURSOR, target.id, text)
        batch.add(sql.ARGS, text, target.id)
    batch.add(sql.RUN_AGAIN, target.id, target.parkings, expect=1)
    outbox.add_update(batch, subject_of(target), news, TaskState.PENDING, TaskState.ACCEPTED)


def add_end(batch: Batch, target: OrderTarget, outcome: Outcome, news: News) -> None:
    """Make a PENDING row ERRORED or CANCELLED.

    Any run of the service calls the `errored` hook. The callers are answered by the run that
    parked the task, if they were not already.

    Args:
        batch: Gets the statements.
        target: The row as it was read; a conflict if it has changed since.
        outcome: How it ends.
        news: For the notification.
    """
    batch.add(
        sql.END,
        *(outcome.state.value, outcome.failure, outcome.reason, outcome.detail, news.at),
        *(int(outcome.state is TaskState.ERRORED), target.id, target.parkings),
        expect=1,
    )
    if outcome.state is not TaskState.ERRORED:
        batch.add(REMOVE_CONTENT, target.id)
    outbox.add_update(
        batch,
        subject_of(target),
        news,
        TaskState.PENDING,
        outcome.state,
        reason=outcome.reason or "",
    )


def add_parked_order(
    batch: Batch,
    target: OrderTarget,
    outcome: Outcome | None,
    incident: OrderIncident,
    news: News,
    *,
    args: Mapping[str, Any] | None = None,
) -> None:
    """Carry an order out on a PENDING row, and add its incident; see `add_order`.

    Args:
        batch: Gets the statements.
        target: The row as it was read.
        outcome: How the task ends; None for a retry.
        incident: The record of the order.
        news: For the notification.
        args: As in `add_run_again`.
    """
    if outcome is None:
        add_run_again(batch, target, news, args=args)
    else:
        add_end(batch, target, outcome, news)
    incident.add(batch)
