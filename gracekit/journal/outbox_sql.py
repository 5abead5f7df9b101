"""The statements of `outbox`; `{marks}` stands for one `?` for each id."""

from __future__ import annotations

from typing import Final

ADD: Final = """
INSERT INTO outbox (message_id, service, owner, event_type, priority, payload, at, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
NAMES: Final = ("id", "message_id", "event_type", "priority", "payload", "at", "expires_at")
DUE: Final = f"""
SELECT {", ".join(NAMES)} FROM outbox WHERE owner = ? AND id > ? ORDER BY id LIMIT ?"""
DONE: Final = "DELETE FROM outbox WHERE id IN ({marks})"
FOLLOW_CLOCK: Final = "UPDATE outbox SET expires_at = expires_at + ? WHERE owner = ?"
ADOPT: Final = "UPDATE outbox SET owner = ?1 WHERE owner = ?2"
OWNERLESS: Final = "SELECT 1 FROM outbox WHERE owner IS NULL AND service = ? LIMIT 1"
TAKE: Final = "UPDATE outbox SET owner = ? WHERE owner IS NULL AND service = ?"
# A run that was adopted sends nothing any more. But it may have written a row after that, before it
# noticed.
_IS_LEFT: Final = """
service = ?2 AND owner <> ?1 AND NOT EXISTS (
    SELECT 1 FROM run WHERE run.run_id = outbox.owner AND run.adopted_at IS NULL)"""
LEFT: Final = f"SELECT 1 FROM outbox WHERE {_IS_LEFT} LIMIT 1"
TAKE_LEFT: Final = f"UPDATE outbox SET owner = ?1 WHERE {_IS_LEFT}"
