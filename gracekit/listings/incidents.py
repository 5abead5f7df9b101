"""Lists recorded incidents: operators' orders, and unusual events in a request's life."""

from __future__ import annotations

from typing import Any

from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import StoreView


async def list_incidents(view: StoreView, kind: str, *, limit: int) -> list[dict[str, Any]]:
    """The last incidents, newest first, as plain data.

    Args:
        view: The store.
        kind: Only kinds that begin with this text, such as `operator`; empty for all.
        limit: How many at most.
    """
    rows = await view.engine.query(sql.LAST_INCIDENTS, kind, limit)
    return [dict(zip(sql.INCIDENT_NAMES, row, strict=True)) for row in rows]
