"""The outbox: rows of notifications about parked tasks, from the commit of a step until sent.

A notification is sent at least once, always with the same message id. The run
that wrote it sends it; if that run dies, the run that adopts its rows does.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from gracekit.clock import Clock
from gracekit.journal import outbox_sql as sql
from gracekit.journal.rows import from_json, to_json
from gracekit.journal.tasks import Journal
from gracekit.journal.tasks_sql import COUNT
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.tracker.task import TaskState, TrackedTask

UPDATE: Final = "task.update"
NO_CAPACITY: Final = "task.no_capacity"
LEAST_KEPT_S: Final = 600.0
"""Seconds for which a notification is kept at least, even if the task's deadline has passed."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """When a step was made, and which run sends the notification of it.

    Attributes:
        sender: Id of the run; None for any run of the service.
    """

    message_id: str
    at: float
    sender: str | None

    @staticmethod
    def of(clock: Clock, *, sender: str | None) -> News:
        """News of a step that is made now."""
        message_id = str(uuid.UUID(hex=clock.new_id()))
        return News(message_id=message_id, at=clock.wall(), sender=sender)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The task that a notification is about.

    Attributes:
        version: How often it was parked.
        deadline: Wall time until which it may be PENDING; 0 if an operator has run it again.
    """

    task_id: str
    service: str
    method: str
    resource: tuple[str, str] | None
    version: int
    deadline: float

    @property
    def shown_resource(self) -> str | None:
        """`kind:id`."""
        return None if self.resource is None else ":".join(self.resource)


def subject_of_task(task: TrackedTask, service: str, version: int, deadline: float) -> Subject:
    """A task in flight as its notifications name it."""
    return Subject(
        task_id=task.request_id,
        service=service,
        method=task.method,
        resource=task.shown_resource,
        version=version,
        deadline=deadline,
    )


def utc_text(wall: float) -> str:
    """A wall time as notifications and answers show it: `2026-11-25T03:54:31.123456Z`."""
    moment = dt.datetime.fromtimestamp(wall, dt.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def add_update(
    batch: Batch,
    subject: Subject,
    news: News,
    old: TaskState,
    new: TaskState,
    *,
    reason: str = "",
) -> None:
    """Add a notification that a task became PENDING, left that state, or has ended after it."""
    more = {"old_state": old.word, "new_state": new.word, "reason": reason}
    _add(batch, subject, news, UPDATE, "INFO", more)


def add_no_capacity(
    batch: Batch,
    subject: Subject,
    news: News,
    *,
    reason: str,
    requested: Mapping[str, Any],
    attempt: int,
    context: Mapping[str, Any],
) -> None:
    """Add a notification that asks resolvers for what a parked task needs."""
    more = {
        "reason": reason,
        "requested": dict(requested),
        "attempt": attempt,
        "context": dict(context),
    }
    _add(batch, subject, news, NO_CAPACITY, "ERROR", more)


def _add(
    batch: Batch,
    subject: Subject,
    news: News,
    event_type: str,
    priority: str,
    more: Mapping[str, Any],
) -> None:
    payload = {
        "task_id": subject.task_id,
        "service": subject.service,
        "method": subject.method,
        "resource": subject.shown_resource,
        **more,
        "version": subject.version,
        "deadline": utc_text(subject.deadline) if subject.deadline else None,
        "at": utc_text(news.at),
    }
    batch.add(
        sql.ADD,
        *(news.message_id, subject.service, news.sender, event_type, priority),
        *(to_json(payload), news.at, max(subject.deadline, news.at + LEAST_KEPT_S)),
    )


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One notification that is to be sent.

    Attributes:
        at: Wall time of the step.
        expires_at: Wall time after which it is not sent any more.
    """

    id: int
    message_id: str
    event_type: str
    priority: str
    payload: dict[str, Any]
    at: float
    expires_at: float


class OutboxRows:
    """The notifications that one run has to send."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._struck = set[int]()  # ids whose removal is not committed yet

    async def due(self, *, after: int, limit: int) -> list[OutboxRow]:
        """The oldest notifications to send with an id above *after*, at most *limit*."""
        me = self._journal.run_id
        while rows := await self._journal.engine.query(sql.DUE, me, after, limit):
            found: list[dict[str, Any]] = [dict(zip(sql.NAMES, row, strict=True)) for row in rows]
            if due := [one for one in found if one["id"] not in self._struck]:
                return [OutboxRow(**one | {"payload": from_json(one["payload"])}) for one in due]
            after = found[-1]["id"]
        return []

    def forget(
        self, sent: Sequence[int], *, expired: Sequence[int], unsendable: Sequence[int]
    ) -> None:
        """Remove notifications that were sent, that have expired, or that cannot be encoded.

        The latter two are counted. The removal is written with the next commit, and not synced: if
        the process dies before, or after a power cut, a notification may be sent twice.
        """
        batch = Batch(Point.OUTBOX_SENT, durable=False)
        ids = [*sent, *expired, *unsendable]
        batch.add(sql.DONE.format(marks=",".join("?" * len(ids))), *ids)
        for what, struck in (
            ("notification_expired", expired),
            ("notification_unsendable", unsendable),
        ):
            if struck:
                batch.add_up(COUNT, what, len(struck))
        self._struck.update(ids)
        self._journal.ride(batch, partial(self._struck.difference_update, ids))

    def write_strokes(self) -> None:
        """Write the removals of `forget` now, without waiting for another commit."""
        self._journal.submit_riders()

    def add_follow_clock(self, batch: Batch, by_s: float) -> None:
        """After the wall clock was set by *by_s*, shift the expiry of this run's notifications."""
        batch.add(sql.FOLLOW_CLOCK, by_s, self._journal.run_id)

    async def take_ownerless(self, *, look_around: bool) -> bool:
        """Take over notifications that no run sends; returns whether there were any.

        Those that a command of an operator has written have no owner.

        Args:
            look_around: Take over those of runs that were adopted before, too.
        """
        engine, me, service = self._journal.engine, self._journal.run_id, self._journal.service
        batch = Batch(Point.CLAIM)
        if await engine.query(sql.OWNERLESS, service):
            batch.add(sql.TAKE, me, service)
        if look_around and await engine.query(sql.LEFT, me, service):
            batch.add(sql.TAKE_LEFT, me, service)
        if batch.statements:
            await self._journal.commit(batch)
        return bool(batch.statements)
