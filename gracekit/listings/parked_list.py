"""Lists and counts parked tasks, and counts unsent notifications.

A parked task has no owner, so all of this comes from the store; no run need be alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gracekit.clock import age_s
from gracekit.config.values import duration
from gracekit.journal.pending import as_shown, shown_columns
from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import API_VERSION, StoreView

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600


class ParkedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One parked task in the list.

    Attributes:
        columns: From the journal; `requested` is an object.
        now: Wall time at which the store was read.
    """

    columns: dict[str, Any]
    now: float

    @property
    def waits_s(self) -> float:
        """Seconds since its request was accepted."""
        return age_s(self.now, self.columns["accepted_at"])

    @property
    def left_s(self) -> float:
        """Seconds until its deadline; negative after it."""
        return float(self.columns["pending_deadline"] or 0.0) - self.now

    def as_json(self) -> dict[str, Any]:
        """As the namespace `gracekit.tasks` shows it, plus `waits_s` and `left_s`."""
        times = {"waits_s": round(self.waits_s, 1), "left_s": round(self.left_s, 1)}
        return as_shown(self.columns) | times


class ParkedList(msgspec.Struct, frozen=True, kw_only=True):
    """Parked tasks, the oldest deadline first.

    Attributes:
        more: Whether there are more than the limit.
    """

    tasks: Sequence[ParkedEntry]
    more: bool

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        tasks = [task.as_json() for task in self.tasks]
        return {"api_version": API_VERSION, "tasks": tasks, "more": self.more}


async def list_parked(view: StoreView, service: str | None = None, *, limit: int) -> ParkedList:
    """The parked tasks of one service, or of all."""
    if service is None:
        rows = await view.engine.query(sql.PARKED, limit + 1)
    else:
        rows = await view.engine.query(sql.PARKED_OF_SERVICE, service, limit + 1)
    now = view.clock.wall()
    tasks = [ParkedEntry(columns=shown_columns(row), now=now) for row in rows[:limit]]
    return ParkedList(tasks=tasks, more=len(rows) > limit)


class PendingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The parked tasks of one service in numbers.

    Attributes:
        parked: How many there are.
        overdue: How many of them have passed their deadline.
        next_deadline: Wall time of the next deadline; None if all have passed.
    """

    service: str
    parked: int
    overdue: int
    next_deadline: float | None


async def count_parked(view: StoreView) -> list[PendingStatus]:
    """The numbers of each service that has parked tasks; reads only an index."""
    rows = await view.engine.query(sql.PARKED_COUNTS, view.clock.wall())
    return [
        PendingStatus(
            service=str(service),
            parked=int(number or 0),
            overdue=int(overdue or 0),
            next_deadline=None if deadline is None else float(deadline),
        )
        for service, number, overdue, deadline in rows
    ]


class UnsentNotifications(msgspec.Struct, frozen=True, kw_only=True):
    """Notifications on record that are not sent yet, of all services of a store.

    Attributes:
        oldest_at: Wall time of the oldest; None if there is none.
    """

    unsent: int
    oldest_at: float | None


async def count_unsent(view: StoreView) -> UnsentNotifications:
    """How many notifications wait; reads an index and one row."""
    ((number, oldest),) = await view.engine.query(sql.UNSENT)
    at = None if oldest is None else float(oldest)
    return UnsentNotifications(unsent=int(number or 0), oldest_at=at)


def deadline_words(left_s: float) -> str:
    """`in 55m`, or `overdue 3m`."""
    return f"in {rough(left_s)}" if left_s > 0 else f"overdue {rough(-left_s)}"


def rough(seconds: float) -> str:
    """`41s`, `55m`, `1h03m`: as `duration`, but without seconds from one minute on."""
    if _MINUTE_S <= seconds < _HOUR_S:
        return f"{int(seconds) // _MINUTE_S}m"
    return duration(seconds)
