"""The statements of `leases`."""

from __future__ import annotations

from typing import Final

from gracekit.store.open_rows import IS_OPEN

PATIENCE_S: Final = 3.0
"""A waiting request that has not asked for so long keeps nobody from a lease any more: its process
may be dead, frozen, or without a free slot."""
# Wall time: where it steps, somebody younger is served first for once.
_WAITS: Final = (
    f"state = 'accepted' AND waiting_since > {{now}} - {PATIENCE_S} AND waiting_since <= {{now}}"
)
# Not while an older task's truth about the resource is unknown: it is settled first, by any run.
# Older only, so that two of them do not wait for each other; and not those that only one host
# may settle, which may be away for long. And not while an older one of another run waits for it.
TAKE: Final = f"""
INSERT INTO lease (kind, id, lver, owner, request_id, acquired_at)
SELECT ?1, ?2, CASE WHEN floor > ?3 THEN floor ELSE ?3 END + 1, ?4, ?5, ?6 FROM epoch WHERE 1 = 1
ON CONFLICT (kind, id) DO UPDATE SET
    lver = CASE WHEN lease.lver + 1 > excluded.lver THEN lease.lver + 1 ELSE excluded.lver END,
    owner = excluded.owner, request_id = excluded.request_id,
    acquired_at = excluded.acquired_at, released_at = NULL, release_reason = NULL
WHERE lease.owner IS NULL AND lease.not_before <= excluded.acquired_at AND NOT EXISTS (
    SELECT 1 FROM task WHERE task.resource_kind = excluded.kind AND task.resource_id = excluded.id
        AND task.{IS_OPEN} AND task.request_id <> excluded.request_id
        AND (task.state = 'handed_over' AND task.cut <> 'safe_point'
            AND task.service = (SELECT service FROM run WHERE run_id = excluded.owner)
            AND (task.target = '' OR task.owner IS NOT NULL)
            OR task.{_WAITS.format(now="excluded.acquired_at")}
            AND task.owner <> excluded.owner)
        AND task.id < coalesce(?7, (
            SELECT max(id) FROM task WHERE task.request_id = excluded.request_id), task.id + 1))
RETURNING lver"""
RIVALS: Final = f"""
SELECT (SELECT owner FROM lease WHERE kind = ?1 AND id = ?2),
    (SELECT count(*) FROM lease
        WHERE kind = ?1 AND id = ?2 AND (owner IS NOT NULL OR not_before > ?3)),
    (SELECT owner FROM task WHERE resource_kind = ?1 AND resource_id = ?2 AND {IS_OPEN}
        AND owner IS NOT NULL AND {_WAITS.format(now="?3")} ORDER BY id LIMIT 1)"""
RELEASE: Final = """
UPDATE lease SET owner = NULL, released_at = ?, release_reason = ?
WHERE kind = ? AND id = ? AND owner = ? AND lver = ?"""
# Not while the request runs here: the lease is its attempt's. An operator's retry may begin it
# while recovery still settles it.
DROP: Final = f"""
UPDATE lease SET owner = NULL, released_at = ?, release_reason = 'clean'
WHERE kind = ? AND id = ? AND owner = ? AND request_id = ? AND NOT EXISTS (
    SELECT 1 FROM task WHERE task.owner = lease.owner AND task.state = 'running'
        AND task.{IS_OPEN} AND task.request_id = lease.request_id
        AND task.resource_kind = lease.kind AND task.resource_id = lease.id)"""
# An owner that died unclean may have left a last request in flight to a backend: the resource
# waits as long as the longest settle time of the rows that acted on it; or of its rule.
TAKE_AWAY: Final = f"""
UPDATE lease SET owner = NULL, released_at = ?, release_reason = 'taken', not_before = ? + coalesce(
    (SELECT max(task.settle_s) FROM task WHERE task.owner = lease.owner
        AND (task.request_id = lease.request_id
            OR task.resource_kind = lease.kind AND task.resource_id = lease.id)
        AND task.state IN ('running', 'handed_over') AND task.{IS_OPEN}),
    (SELECT max(finding.settle_s) FROM finding WHERE finding.owner = lease.owner
        AND finding.kind = lease.kind AND finding.name = lease.id), 0)
WHERE owner = ?"""
# ?1 is now, ?2 the end of the settle time.
TAKE_AWAY_ONE: Final = """
UPDATE lease SET owner = NULL, released_at = ?1, release_reason = 'taken',
    not_before = CASE WHEN not_before > ?2 THEN not_before ELSE ?2 END
WHERE owner = ?3 AND request_id = ?4"""
# A free row is needed for its token alone, and the floor keeps the highest token of the rows that
# were removed. A run of an older gracekit would begin below the floor.
REMOVE_AT_ONCE: Final = 500
_IS_OLD: Final = f"""
owner IS NULL AND released_at < ?1 AND not_before < ?1
AND NOT EXISTS (SELECT 1 FROM run WHERE schema IS NULL AND adopted_at IS NULL AND ended_at IS NULL)
AND NOT EXISTS (SELECT 1 FROM task WHERE task.resource_kind = lease.kind
    AND task.resource_id = lease.id AND task.{IS_OPEN})"""
PAGE: Final = f"""
SELECT kind, id, lver, CASE WHEN {_IS_OLD} THEN 1 ELSE 0 END FROM lease WHERE (kind, id) > (?2, ?3)
ORDER BY kind, id LIMIT {REMOVE_AT_ONCE}"""
RAISE_FLOOR: Final = "UPDATE epoch SET floor = CASE WHEN floor > ?1 THEN floor ELSE ?1 END"
REMOVE: Final = f"""
DELETE FROM lease WHERE kind = ?2 AND id = ?3 AND lver = ?4 AND {_IS_OLD}"""
# One that is held, or was given back in the future, was so before the clock was set back.
FOLLOW_CLOCK: Final = """
UPDATE lease SET
    not_before = CASE WHEN owner IS NULL AND not_before > released_at
        THEN ?1 + (not_before - released_at) ELSE ?1 END,
    released_at = CASE WHEN owner IS NULL THEN ?1 END
WHERE not_before > ?1 AND (owner IS NOT NULL OR released_at > ?1)"""
UNSETTLED: Final = f"""
SELECT request_id FROM task WHERE resource_kind = ? AND resource_id = ? AND {IS_OPEN}
    AND state = 'handed_over' AND cut <> 'safe_point' AND owner IS NULL AND target = ''
    AND service = (SELECT service FROM run WHERE run_id = ?) ORDER BY id LIMIT 1"""
LOOK: Final = "SELECT lver, owner, request_id, not_before FROM lease WHERE kind = ? AND id = ?"
