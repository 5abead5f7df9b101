"""The full record of one task, and the report of its process.

Of arguments, context and result only the sizes are included, because they may hold secrets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gracekit.errors import GracekitError
from gracekit.journal.rows import from_json
from gracekit.listings import listings_sql as sql
from gracekit.listings.chosen_task import ChosenTask
from gracekit.listings.store_view import API_VERSION, RunReport, StoreView
from gracekit.request.outcomes import failure_from
from gracekit.runs.run import Run

Hear = Callable[[Run], Awaitable[RunReport]]
"""Asks a living run for its report on the task."""


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one task.

    Attributes:
        columns: Of its row; JSON as plain data.
        kept: Bytes of arguments, context and result; None for those that are purged.
        replies: By caller: the queue, until when it waits, and since when its answer is due.
        lease: The lease of its resource; None without one.
        incidents: Time, kind and sentence of each incident.
        owner: Instance of the run that owns it, and whether that is alive; empty without one.
        orphaned: Whether that run is proven dead.
        reports: The report of that run.
    """

    columns: dict[str, Any]
    kept: dict[str, int | None]
    replies: list[dict[str, Any]]
    lease: dict[str, Any] | None
    incidents: list[dict[str, Any]]
    owner: str
    reports: RunReport
    orphaned: bool = False

    @property
    def live(self) -> dict[str, Any] | None:
        """The report on the task; None if there is none."""
        return next(iter(self.reports.tasks), None)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "api_version": API_VERSION,
            "task": self.columns,
            "kept_bytes": self.kept,
            "replies": self.replies,
            "lease": self.lease,
            "incidents": self.incidents,
            "owner": self.owner or None,
            "live": self.live,
            "not_heard": self.reports.why or self.reports.brief or None,
        }


async def read_task(view: StoreView, subject: ChosenTask, hear: Hear) -> TaskRecord:
    """Read the full record of *subject*.

    Args:
        view: The store.
        subject: The task.
        hear: Asks the run that owns the task, if it is alive.

    Raises:
        GracekitError: its row was deleted meanwhile.
    """
    if subject.row_id is None:
        return await _without_row(subject, hear)
    rows = await view.engine.query(sql.ROW, subject.row_id)
    if not rows:
        raise GracekitError(f"{subject} was removed meanwhile")
    columns: dict[str, Any] = dict(zip(sql.ROW_NAMES, rows[0], strict=False))
    columns["failure"] = _failure_of(columns["failure"])
    columns["requested"] = from_json(columns["requested"])
    columns["ordered"] = from_json(columns["ordered"])
    columns["progress"] = from_json(columns["progress"])
    columns["shown_context"] = from_json(columns["shown_context"])
    owner = str(columns["owner"] or "")
    run = (await view.runs_of({owner})).get(owner)
    key = (columns["resource_kind"], columns["resource_id"])
    leases = await _all(view, sql.LEASE, "token owner request_id acquired_at not_before", *key)
    accepted, request_id = columns["accepted_at"], columns["request_id"]
    return TaskRecord(
        columns=columns,
        kept=dict(zip(sql.KEPT_NAMES, rows[0][-3:], strict=True)),  # type: ignore[arg-type]  # lengths
        replies=await _all(view, sql.REPLIES, "queue expires_at due_at", subject.row_id),
        lease=next(iter(leases), None),
        incidents=await _all(view, sql.INCIDENTS, "at what detail", accepted, request_id),
        owner=_owner(view, columns["owner"], run),
        reports=await hear(run) if run and view.judge(run).is_alive else RunReport(),
        orphaned=run is not None and view.judge(run).is_dead,
    )


def _failure_of(text: Any) -> Any:
    """Class, module, message and traceback; not the exception's arguments, which may be secret."""
    if text is None:
        return None
    failure = failure_from(str(text))
    return {name: getattr(failure, name) for name in ("exc_class", "module", "message", "tb")}


async def _all(view: StoreView, sql: str, names: str, *params: Any) -> list[dict[str, Any]]:
    rows = await view.engine.query(sql, *params)
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


async def _without_row(subject: ChosenTask, hear: Hear) -> TaskRecord:
    where = subject.run.instance if subject.run else ""
    columns = dict.fromkeys(sql.ROW_NAMES) | {
        "request_id": subject.request_id,
        "method": subject.method,
        "state": subject.state,
    }
    none = dict.fromkeys(sql.KEPT_NAMES)
    return TaskRecord(
        columns=columns,
        kept=none,
        replies=[],
        lease=None,
        incidents=[],
        owner=where,
        reports=await hear(subject.run) if subject.run else RunReport(),
    )


def _owner(view: StoreView, run_id: Any, run: Run | None) -> str:
    if run is None:
        return "" if run_id is None else f"run {run_id}, which is not on record"
    return f"{run.instance} (run {run.run_id}, {view.judge(run)})"
