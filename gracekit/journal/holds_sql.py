"""The statements of `holds`."""

from __future__ import annotations

from typing import Final

OPEN: Final = """
INSERT INTO hold (service, name, key, owner, target, namespace, method, version, args, opened_at,
    lapses_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (service, name, key) WHERE ended_at IS NULL
DO UPDATE SET lapses_at = CASE WHEN hold.lapses_at > excluded.lapses_at
    THEN hold.lapses_at ELSE excluded.lapses_at END, owner = excluded.owner,
    target = excluded.target, next_check = NULL
WHERE hold.owner = excluded.owner OR hold.owner IS NULL OR hold.next_check IS NOT NULL
RETURNING id"""
# A hold that was opened again meanwhile has another owner or lapses later, and stays open.
END: Final = """
UPDATE hold SET ended_at = ?, end_reason = ?, args = CASE WHEN ? = 1 THEN args END, errored_due = ?,
    asker = NULL, crashes = 0, alone = 0
WHERE id = ? AND ended_at IS NULL AND owner IS NOT DISTINCT FROM ? AND lapses_at = ?
    AND next_check IS NOT DISTINCT FROM ? RETURNING id"""
END_BY_ORDER: Final = """
UPDATE hold SET ended_at = coalesce(ended_at, ?1), end_reason = coalesce(end_reason, 'ended'),
    args = NULL, errored_due = 0, asker = NULL
WHERE name = ?2 AND key = ?3 AND (ended_at IS NULL OR errored_due = 1) RETURNING id"""
"""As `end`, by an operator; its errored hook is not called any more either."""
# The answer of the probe does not count if the hold was opened again meanwhile.
WAIT: Final = """
UPDATE hold SET owner = ?, next_check = ?, asker = NULL, crashes = 0, alone = 0
WHERE id = ? AND ended_at IS NULL AND owner IS NOT DISTINCT FROM ?
    AND next_check IS NOT DISTINCT FROM ?"""

FOLLOW_CLOCK: Final = """
UPDATE hold SET lapses_at = lapses_at + ?1, next_check = next_check + ?1
WHERE owner = ?2 AND ended_at IS NULL"""
ASK_NOW: Final = """
UPDATE hold SET next_check = CASE WHEN next_check > ?1 THEN ?1 ELSE next_check END
WHERE owner IS NULL AND ended_at IS NULL AND service = ?2 AND target = ?3"""

NAMES: Final = (
    "id",
    "name",
    "key",
    "owner",
    "target",
    "namespace",
    "method",
    "version",
    "args",
    "lapses_at",
    "next_check",
    "errored_due",
    "crashes",
    "alone",
)
HOLDS: Final = f"SELECT {', '.join(NAMES)} FROM hold WHERE service = ?1"
MINE: Final = f"{HOLDS} AND ended_at IS NULL AND owner = ?2 AND lapses_at > ?3 ORDER BY id"
COUNT_FOR_HOST: Final = """
SELECT count(*) FROM hold WHERE target = ? AND (ended_at IS NULL OR errored_due = 1)"""
# Left-over holds of a host that does not come back are due in each run of the service.
_GONE: Final = "target IN (SELECT host FROM gone_host)"
# One query for all that is due, as each pass of the reconciler makes it and mostly finds nothing.
# Left-over holds come last, because their probes may take long and would delay the others.
DUE: Final = f"""
SELECT * FROM (
    {HOLDS} AND ended_at IS NULL AND (
        (owner IS NULL AND (target = ?2 AND coalesce(next_check, 0) <= ?4 OR {_GONE}))
        OR (owner = ?3 AND (lapses_at <= ?4 OR next_check <= ?4)))
    UNION ALL {HOLDS} AND errored_due = 1 AND (target = ?2 OR {_GONE})) AS due
ORDER BY errored_due DESC, CASE WHEN owner IS NULL OR next_check IS NOT NULL THEN 1 ELSE 0 END,
    id"""

END_BY_NAME: Final = """
UPDATE hold SET ended_at = ?, end_reason = 'ended', args = NULL
WHERE service = ? AND name = ? AND key = ? AND ended_at IS NULL RETURNING id"""
BEGIN: Final = """
UPDATE hold SET asker = ?1, alone = ?2 WHERE id = ?3 AND coalesce(asker, ?1) = ?1
    AND (ended_at IS NULL OR errored_due = 1) RETURNING id"""
ERRORED_DONE: Final = "UPDATE hold SET errored_due = 0, args = NULL, asker = NULL WHERE id = ?"
