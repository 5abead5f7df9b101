"""The statements of `pending`."""

from __future__ import annotations

from typing import Final

from gracekit.journal.tasks_sql import SHOWN_RESOURCE

_IS_PENDING: Final = "state = 'pending' AND service = ?"
# Part of the commit that parks. On an engine with concurrent commits, some may exceed the number.
HAS_ROOM: Final = """
SELECT 1 FROM epoch WHERE (SELECT count(*) FROM (
    SELECT 1 FROM task WHERE state = 'pending' AND service = ?1 LIMIT ?2) AS parked) < ?2"""
# The attempt ended without a crash, so the count of crashes is reset. The caller is answered, so
# there is no expiry any more. A task with an order is not parked: the order ends it.
PARK: Final = """
UPDATE task SET state = 'pending', owner = NULL, failure = ?1, reason = ?2, detail = ?3,
    requested = ?4, cursor = CAST(?5 AS TEXT),
    cursor_at = CASE WHEN ?5 IS NULL THEN cursor_at ELSE ?6 END,
    crashes = 0, alone = 0, waiting_since = NULL, expires_at = NULL, next_check = NULL,
    not_before = NULL,
    parkings = parkings + 1, parked_at = ?6, parked_ahead_s = ?7,
    pending_deadline = ?8
WHERE id = ?9 AND owner = ?10 AND state = 'running' AND parkings = ?11 AND ordered IS NULL"""
REPLIES_DUE: Final = "UPDATE reply SET due_at = ?, owner = ? WHERE row_id = ?"
# A cursor is valid only with the arguments with which it was reached, so new ones reset it. Part of
# the commit that lets the task run again.
RESET_CURSOR: Final = """
UPDATE task SET cursor = NULL, cursor_at = NULL
WHERE id = ? AND ? <> (SELECT args FROM content WHERE content.row_id = task.id)"""
ARGS: Final = "UPDATE content SET args = ? WHERE row_id = ?"
RUN_AGAIN: Final = """
UPDATE task SET state = 'accepted', reason = NULL, detail = NULL, requested = NULL
WHERE id = ? AND owner IS NULL AND state = 'pending' AND parkings = ?"""
END: Final = """
UPDATE task SET state = ?1, failure = ?2, reason = ?3, detail = ?4, finished_at = ?5,
    requested = NULL, errored_due = ?6
WHERE id = ?7 AND owner IS NULL AND state = 'pending' AND parkings = ?8"""
NEXT_DEADLINE: Final = f"SELECT min(pending_deadline) FROM task WHERE {_IS_PENDING}"
SHOWN: Final = (
    "id", "request_id", "service", "method", "version", "resource_kind", "resource_id", "state",
    "reason", "detail", "attempts", "parkings", "parked_at", "pending_deadline", "requested",
    "accepted_at", "finished_at",
)  # fmt: skip
SHOWN_COLUMNS: Final = ", ".join(SHOWN).replace("resource_kind, resource_id", SHOWN_RESOURCE)
_SHOWN: Final = f"SELECT {SHOWN_COLUMNS} FROM task WHERE"
# Uses the index of open rows, which has those of one owner and state in the order of their ids.
SHOWN_PAGE: Final = f"""
{_SHOWN} owner IS NULL AND finished_at IS NULL AND {_IS_PENDING} AND due_at IS NULL AND id > ?
ORDER BY id LIMIT ?"""
SHOWN_ONE: Final = f"""
SELECT {SHOWN_COLUMNS}, CASE WHEN state = 'failed' THEN failure END FROM task
WHERE request_id = ? AND recipient = '' AND service = ?"""
# ?1 is wall time minus loop time now, ?3 and ?4 the lesser and the greater of before and now. Each
# run does this; `parked_ahead_s` shows how far a sibling has shifted the row already, perhaps for
# one of several changes. Also shifts tasks that run again, as they may be parked again.
FOLLOW_CLOCK: Final = """
UPDATE task SET parked_at = parked_at + ?1 - parked_ahead_s,
    pending_deadline = pending_deadline + ?1 - parked_ahead_s, parked_ahead_s = ?1
WHERE finished_at IS NULL AND pending_deadline IS NOT NULL AND service = ?2
    AND abs(parked_ahead_s - ?1) >= 1 AND parked_ahead_s BETWEEN ?3 - 1 AND ?4 + 1"""
DEADLINE: Final = "SELECT pending_deadline FROM task WHERE id = ?"
