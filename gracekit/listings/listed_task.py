"""One listed task: its row, joined with the report of its process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gracekit.clock import age_s
from gracekit.listings.store_view import RunAnswer
from gracekit.telemetry.safe_text import escape
from gracekit.tracker.task import TRANSIENT, TaskState

_SHORT_ID: Final = 16
_LONGEST_ID: Final = 40
_HEX_ID: Final = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")


class ListedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task in the list.

    Attributes:
        columns: From the journal; for a task without a row, from its process's report.
        owner: Instance that owns it; None without an owner.
        orphaned: Whether its owner is proven dead.
        doubtful: Whether its owner is neither proven dead nor alive.
        live: The report of its process; None if it reports nothing or does not answer.
        now: Wall time at which the store was read.
        journaled: Whether it has a row.
        apart: Why it runs alone, or waits for a task that does; otherwise empty.
        waits_for: What it waits for, if that is known; otherwise None.
        why_listed: Why it counts as stuck; None if it does not, or the query did not check.
    """

    columns: Mapping[str, Any]
    owner: str | None
    orphaned: bool
    doubtful: bool
    live: RunAnswer | None
    now: float
    journaled: bool = True
    apart: str = ""
    waits_for: str | None = None
    why_listed: str | None = None

    @property
    def shown_id(self) -> str:
        """Its request id; for a hook the id of the task that it is called for."""
        return str(self.said("about") or self.columns["request_id"])

    @property
    def age_s(self) -> float:
        """Seconds since it ended or was parked; otherwise since its last start or acceptance."""
        if self.live is not None and (not self.journaled or self.runs_here):
            return float(self.live.get("age_s") or 0.0)
        column = self.columns
        since = column["finished_at"] or column["started_at"] or column["accepted_at"]
        if self.is_parked:
            since = column["parked_at"]
        return age_s(self.now, since)

    @property
    def runs_here(self) -> bool:
        """Whether the process that reports it is running its handler.

        A task that only waits there may have been accepted by an earlier process; so its age comes
        from its row.
        """
        return self.live is not None and self.live.get("state") == TaskState.RUNNING.value

    @property
    def safe_point_age_s(self) -> float | None:
        """Seconds since its last safe point; None without one."""
        said = self.said("safe_point_age_s")
        if said is not None:
            return float(said)
        at = self.columns.get("cursor_at")
        return None if at is None else round(age_s(self.now, at), 1)

    def said(self, name: str) -> Any:
        """The field *name* of the process's report; None if it is missing."""
        return None if self.live is None else self.live.get(name)

    @property
    def resource(self) -> str | None:
        """`kind:id`."""
        return resource_in(self.columns)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            **self.columns,
            "resource": self.resource,
            "owner_run": self.columns.get("owner"),
            "owner": self.owner,
            "orphaned": self.orphaned,
            "owner_not_proven": self.doubtful,
            "ownerless": self.is_ownerless,
            "journaled": self.journaled,
            "age_s": round(self.age_s, 1),
            "live": self.live is not None,
            "expected_s": self.said("expected_s"),
            "p95_s": self.said("p95_s"),
            "safe_point_age_s": self.safe_point_age_s,
            "waits_for": self.waits_for,
            "about": self.said("about"),
            "apart": self.apart,
            "why_listed": self.why_listed,
        }

    @property
    def waits_on_record(self) -> bool:
        """Whether it has a resource, and no process reports that it runs."""
        has_resource = self.columns.get("resource_kind") is not None
        is_open = self.is_transient and not self.is_parked
        return self.journaled and has_resource and is_open and not self.runs_here

    @property
    def is_parked(self) -> bool:
        """Whether it is parked: it waits for a resolver, not for a run."""
        return bool(self.columns["state"] == TaskState.PENDING.value)

    @property
    def is_ownerless(self) -> bool:
        """Whether it waits for a run to claim it."""
        is_open = self.is_transient and not self.is_parked
        return self.journaled and is_open and self.owner is None

    @property
    def is_transient(self) -> bool:
        """Whether it has not ended."""
        return TaskState(self.columns["state"]) in TRANSIENT


def resource_in(columns: Mapping[str, Any]) -> str | None:
    """`kind:id` of what a task acts on or, as an ops method without a lease, names."""
    for name in ("resource", "ops"):
        if columns[f"{name}_kind"] is not None:
            return f"{columns[f'{name}_kind']}:{columns[f'{name}_id']}"
    return None


def short_id(request_id: str) -> str:
    """An id for display: a random one is shortened, one that a caller chose is shown in full."""
    if _HEX_ID.fullmatch(request_id):
        return request_id[:_SHORT_ID]
    return escape(request_id, longest=_LONGEST_ID)
