"""The statement of `lookups`."""

from __future__ import annotations

from typing import Final

NAMES: Final = (
    "request_id", "caller_hash", "namespace", "method", "version", "state", "reason", "detail",
    "attempts", "failures", "accepted_at", "started_at", "due_at", "finished_at", "progress",
    "owner", "result", "failure",
)  # fmt: skip
AT_ONCE: Final = 100
_SHOWN: Final = ", ".join(NAMES[:-2])
# What was accepted comes first: the recipient of a refused request is a word, and its sender may
# have sent it many times. What tasks have returned is read as far as ?1 characters go.
LOOK: Final = f"""
SELECT {_SHOWN}, CASE WHEN size <= ?1 THEN result END, CASE WHEN size <= ?1 THEN failure END
FROM (SELECT *, sum(coalesce(length(result), 0) + coalesce(length(failure), 0))
        OVER (ORDER BY id) AS size
    FROM task WHERE service = ?2 AND (recipient = '' OR state = 'rejected')
        AND (caller_hash = ?3 OR ?3 = '*')
        AND request_id IN ({", ".join(f"?{n}" for n in range(4, 4 + AT_ONCE))})) AS looked
ORDER BY recipient, id LIMIT 1000"""
