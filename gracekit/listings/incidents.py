"""Incidents on record: operators' orders, and what happened to requests beside their states."""

from __future__ import annotations

from typing import Any

from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import StoreView


async def list_incidents(view: StoreView, kind: str, *, limit: int) -> list[dict[str, Any]]:
    """The last incidents, newest first, as plain data.

    Args:
        view: The store.
        kind: The kinds that begin so, as `operator`; empty for all.
        limit: So many at most.
    """
    rows = await view.engine.query(sql.LAST_INCIDENTS, kind, limit)
    return [dict(zip(sql.INCIDENT_NAMES, row, strict=True)) for row in rows]
