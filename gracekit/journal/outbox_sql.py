"""The statements of `outbox`; `{marks}` stands for one `?` for each id."""

from __future__ import annotations

from typing import Final

ADD: Final = """
INSERT INTO outbox (message_id, service, owner, event_type, priority, payload, at, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
NAMES: Final = ("id", "message_id", "event_type", "priority", "payload", "at", "expires_at")
DUE: Final = f"SELECT {', '.join(NAMES)} FROM outbox WHERE owner = ? ORDER BY id LIMIT ?"
DONE: Final = "DELETE FROM outbox WHERE id IN ({marks})"
ADOPT: Final = "UPDATE outbox SET owner = ?1 WHERE owner = ?2"
OWNERLESS: Final = "SELECT 1 FROM outbox WHERE owner IS NULL AND service = ? LIMIT 1"
TAKE: Final = "UPDATE outbox SET owner = ? WHERE owner IS NULL AND service = ?"
