"""The statements of `declarations`."""

from __future__ import annotations

from typing import Final

CREATE: Final = """
INSERT INTO lease (kind, id, lver, acquired_at, declared_at, payload)
SELECT ?1, ?2, floor, ?3, ?3, ?4 FROM epoch WHERE 1 = 1
ON CONFLICT (kind, id) DO UPDATE SET declared_at = excluded.declared_at, payload = excluded.payload
WHERE lease.declared_at IS NULL"""
# A row that is made again begins above the token of this one.
KEEP_TOKEN: Final = """
UPDATE epoch SET floor = (SELECT CASE WHEN lver > epoch.floor THEN lver ELSE epoch.floor END
    FROM lease WHERE kind = ?1 AND id = ?2)
WHERE EXISTS (SELECT 1 FROM lease WHERE kind = ?1 AND id = ?2)"""
DELETE: Final = """
DELETE FROM lease WHERE kind = ? AND id = ? AND declared_at IS NOT NULL AND owner IS NULL
    AND not_before <= ?"""
IS_DECLARED: Final = """
SELECT 1 FROM lease WHERE kind = ? AND id = ? AND declared_at IS NOT NULL"""
HELD_BY_PEOPLE: Final = "UPDATE lease SET settle_s = ? WHERE kind = ? AND id = ?"
# Not one of a task: an operator cancels the task.
FORCE: Final = """
UPDATE lease SET forced_by = ?1, forced_reason = ?2
WHERE kind = ?3 AND id = ?4 AND lver = ?5 AND owner IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM task WHERE task.request_id = lease.request_id)"""
TAKE_AWAY_NOW: Final = """
UPDATE lease SET owner = NULL, released_at = ?1, release_reason = 'forced', ousted = owner,
    forced_by = ?2, forced_reason = ?3
WHERE kind = ?4 AND id = ?5 AND lver = ?6 AND owner IS NOT NULL"""
# Of one that was freed at once, and that another run has taken since, nobody knows who said so.
FORCED: Final = """
SELECT kind, id, forced_by, forced_reason FROM lease WHERE owner = ?1 AND forced_by IS NOT NULL
UNION ALL SELECT kind, id, coalesce(forced_by, 'an operator'), coalesce(forced_reason, 'at once')
FROM lease WHERE ousted = ?1 AND (owner IS NULL OR owner <> ?1)"""
FREE_ALL: Final = """
UPDATE lease SET owner = NULL, released_at = ?, release_reason = 'clean' WHERE owner = ?"""
COLUMNS: Final = (
    "kind, id, lver, owner, request_id, not_before, acquired_at, released_at, release_reason, "
    "declared_at, payload, forced_by, forced_reason, settle_s"
)
LOOK: Final = f"SELECT {COLUMNS} FROM lease WHERE kind = ? AND id = ?"
PAGE: Final = f"""
SELECT {COLUMNS} FROM lease WHERE declared_at IS NOT NULL AND (kind, id) > (?, ?)
ORDER BY kind, id LIMIT ?"""

# -- what cannot be, see `check` ---------------------------------------------------------

MOST: Final = 1000

_NO_RUN: Final = "NOT EXISTS (SELECT 1 FROM run WHERE run.run_id = lease.owner)"
_ENDED: Final = """
EXISTS (SELECT 1 FROM task WHERE task.request_id = lease.request_id)
AND NOT EXISTS (SELECT 1 FROM task
    WHERE task.request_id = lease.request_id AND task.finished_at IS NULL)"""
NO_SUCH_OWNER: Final = (
    f"SELECT kind, id FROM lease WHERE owner IS NOT NULL AND {_NO_RUN} LIMIT {MOST}"
)
OF_NOTHING: Final = f"""
SELECT kind, id FROM lease WHERE owner IS NOT NULL AND NOT ({_NO_RUN}) AND {_ENDED} LIMIT {MOST}"""
_ROW_OF_TASK: Final = """
FROM task LEFT JOIN lease ON lease.kind = task.resource_kind AND lease.id = task.resource_id
WHERE task.state = 'running' AND task.finished_at IS NULL AND task.token IS NOT NULL"""
MISSING: Final = f"""
SELECT task.resource_kind, task.resource_id {_ROW_OF_TASK}
    AND (lease.kind IS NULL OR lease.owner IS NULL) LIMIT {MOST}"""
TOO_LOW: Final = f"""
SELECT task.resource_kind, task.resource_id {_ROW_OF_TASK} AND lease.lver < task.token
LIMIT {MOST}"""
FREE_DAMAGED: Final = f"""
UPDATE lease SET owner = NULL, released_at = ?, release_reason = 'taken'
WHERE owner IS NOT NULL AND ({_NO_RUN} OR {_ENDED})"""
# A running task whose lease somebody else has now is left: its own token is too low for a backend.
GIVE_AGAIN: Final = """
INSERT INTO lease (kind, id, lver, owner, request_id, acquired_at)
SELECT resource_kind, resource_id, max(token), max(owner), max(request_id), max(started_at)
FROM task WHERE state = 'running' AND finished_at IS NULL AND token IS NOT NULL
GROUP BY resource_kind, resource_id
ON CONFLICT (kind, id) DO UPDATE SET owner = excluded.owner, request_id = excluded.request_id,
    lver = CASE WHEN lease.lver > excluded.lver THEN lease.lver ELSE excluded.lver END
WHERE lease.owner IS NULL"""
