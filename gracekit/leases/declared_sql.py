"""The statements of `declared`."""

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
DELETE FROM lease WHERE kind = ? AND id = ? AND declared_at IS NOT NULL AND owner IS NULL"""
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
    "declared_at, payload, forced_by, forced_reason"
)
LOOK: Final = f"SELECT {COLUMNS} FROM lease WHERE kind = ? AND id = ?"
PAGE: Final = f"""
SELECT {COLUMNS} FROM lease WHERE declared_at IS NOT NULL AND (kind, id) > (?, ?)
ORDER BY kind, id LIMIT ?"""
