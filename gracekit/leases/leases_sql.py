"""The statements of `leases`."""

from __future__ import annotations

from typing import Final

from gracekit.journal.tasks_sql import IS_OPEN

PATIENCE_S: Final = 3.0
"""A waiting request that has not asked for so long no longer keeps younger ones from the lease: its
process may be dead, frozen, or without a free slot."""
# In wall time: if the clock is set, a younger request may be served first once.
_WAITS: Final = (
    f"state = 'accepted' AND waiting_since > {{now}} - {PATIENCE_S} AND waiting_since <= {{now}}"
)
# Not granted while an older task of the resource is interrupted: recovery settles that first. Only
# while an older one is, so that two never wait for each other; and not for one that only another
# host may settle, as that may be down for long. Not granted either while an older request of
# another run waits for the lease.
TAKE: Final = f"""
INSERT INTO lease (kind, id, lver, owner, request_id, acquired_at)
SELECT ?1, ?2, floor + 1, ?3, ?4, ?5 FROM epoch WHERE 1 = 1
ON CONFLICT (kind, id) DO UPDATE SET
    lver = CASE WHEN lease.lver + 1 > excluded.lver THEN lease.lver + 1 ELSE excluded.lver END,
    owner = excluded.owner, request_id = excluded.request_id,
    acquired_at = excluded.acquired_at, released_at = NULL, release_reason = NULL, settle_s = 0,
    forced_by = NULL, forced_reason = NULL
WHERE lease.owner IS NULL AND lease.not_before <= excluded.acquired_at AND NOT EXISTS (
    SELECT 1 FROM task WHERE task.resource_kind = excluded.kind AND task.resource_id = excluded.id
        AND task.{IS_OPEN} AND task.request_id <> excluded.request_id
        AND (task.state = 'handed_over' AND task.cut <> 'safe_point'
            AND task.service = (SELECT service FROM run WHERE run_id = excluded.owner)
            AND (task.target = '' OR task.owner IS NOT NULL)
            OR task.{_WAITS.format(now="excluded.acquired_at")}
            AND task.owner <> excluded.owner)
        AND task.id < coalesce(?6, (
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
# Not while the task runs here, as its attempt needs the lease. An operator's retry may start it
# while recovery is still settling it.
DROP: Final = f"""
UPDATE lease SET owner = NULL, released_at = ?, release_reason = 'clean'
WHERE kind = ? AND id = ? AND owner = ? AND request_id = ? AND NOT EXISTS (
    SELECT 1 FROM task WHERE task.owner = lease.owner AND task.state = 'running'
        AND task.{IS_OPEN} AND task.request_id = lease.request_id
        AND task.resource_kind = lease.kind AND task.resource_id = lease.id)"""
# A dead owner may have left a last request to a backend under way. So the lease is not granted for
# the longest settle time of the rows that acted on the resource, or of its rule.
TAKE_AWAY: Final = f"""
UPDATE lease SET owner = NULL, released_at = ?, release_reason = 'taken', not_before = ? + coalesce(
    (SELECT max(task.settle_s) FROM task WHERE task.owner = lease.owner
        AND (task.request_id = lease.request_id
            OR task.resource_kind = lease.kind AND task.resource_id = lease.id)
        AND task.state IN ('running', 'handed_over') AND task.{IS_OPEN}),
    (SELECT max(finding.settle_s) FROM finding WHERE finding.owner = lease.owner
        AND finding.kind = lease.kind AND finding.name = lease.id), settle_s)
WHERE owner = ?"""
# ?1 is now, ?2 the end of the settle time.
TAKE_AWAY_ONE: Final = """
UPDATE lease SET owner = NULL, released_at = ?1, release_reason = 'taken',
    not_before = CASE WHEN not_before > ?2 THEN not_before ELSE ?2 END
WHERE owner = ?3 AND request_id = ?4"""
# As TAKE_AWAY_ONE, by token.
GIVE_UP: Final = """
UPDATE lease SET owner = NULL, released_at = ?1, release_reason = 'taken',
    not_before = CASE WHEN not_before > ?2 THEN not_before ELSE ?2 END
WHERE kind = ?3 AND id = ?4 AND owner = ?5 AND lver = ?6"""
# A free row is kept only for its token. Every new token is above `floor`: the highest one of rows
# that were removed, or of what a newer copy of the store can have granted.
REMOVE_AT_ONCE: Final = 500
_IS_OLD: Final = f"""
owner IS NULL AND declared_at IS NULL AND released_at < ?1 AND not_before < ?1
AND NOT EXISTS (SELECT 1 FROM task WHERE task.resource_kind = lease.kind
    AND task.resource_id = lease.id AND task.{IS_OPEN})"""
PAGE: Final = f"""
SELECT kind, id, lver, CASE WHEN {_IS_OLD} THEN 1 ELSE 0 END FROM lease WHERE (kind, id) > (?2, ?3)
ORDER BY kind, id LIMIT {REMOVE_AT_ONCE}"""
RAISE_FLOOR: Final = "UPDATE epoch SET floor = CASE WHEN floor > ?1 THEN floor ELSE ?1 END"
REMOVE: Final = f"""
DELETE FROM lease WHERE kind = ?2 AND id = ?3 AND lver = ?4 AND {_IS_OLD}"""
# A lease that is held but not to be granted yet, or was released in the future, is from before the
# clock was set back.
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
