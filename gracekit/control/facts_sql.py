"""The queries of a run's store for probes and metrics."""

from __future__ import annotations

from typing import Final

from gracekit.listings.listings_sql import OWNED, OWNERLESS

# Parked tasks are counted by their index and not read, because there may be 100,000. They have a
# deadline of their own, so they have no age here. Once one runs again, its age is counted from when
# it was last parked.
UNFINISHED: Final = f"""
SELECT state, count(*), min(since) FROM (
    SELECT state, coalesce(parked_at, accepted_at) AS since FROM task
    WHERE {OWNED} AND service = ?1 AND state <> 'pending' UNION ALL
    SELECT state, coalesce(parked_at, accepted_at) FROM task
    WHERE {OWNERLESS} AND service = ?1) AS unfinished
GROUP BY state UNION ALL
SELECT 'pending', count(*), NULL FROM task WHERE state = 'pending' AND service = ?1"""
# Selects by sender, as the index is by sender. Adopted runs have no notifications left to send.
NOTIFICATIONS_DUE: Final = """
SELECT count(*) FROM outbox
WHERE owner IN (SELECT run_id FROM run WHERE service = ? AND adopted_at IS NULL)"""
OPEN_HOLDS: Final = """
SELECT count(*) FROM hold WHERE ended_at IS NULL AND service = ? AND lapses_at > ?"""
