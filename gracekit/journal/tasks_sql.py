"""The statements of `tasks`: the row of one task."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# The conditions of partial indexes. SQLite uses such an index only for a query that repeats its
# condition word for word. A query that merely implies it reads the whole table, with its history.
IS_OPEN: Final = "finished_at IS NULL"
"""True for rows that are not in a terminal state. It is the condition of the index `task_open`,
and half of that of `task_open_resource`."""
IS_UNSUCCESSFUL: Final = "finished_at IS NOT NULL AND state <> 'succeeded'"
"""True for the ended rows that did not succeed, which are few in a long record. It is the condition
of the index `task_unsuccessful`."""
COLUMNS: Final = (
    "id", "request_id", "recipient", "lane", "queue", "route", "target", "namespace", "method",
    "version", "content_hash", "on_interrupt", "settle_s", "resource_kind", "resource_id", "state",
    "reason", "detail", "owner", "cut", "not_before", "attempts", "crashes", "token", "cursor",
    "accepted_at", "started_at", "finished_at", "expires_at", "next_check", "waiting_since",
    "result", "failure", "errored_due", "alone", "hook_crashes", "caller_hash", "service",
    "parkings", "pending_deadline", "ordered", "ops_kind", "ops_id",
    "shown_context", "due_at", "failures", "progress",
)  # fmt: skip
CONTENT_COLUMNS: Final = ("args", "context")
_CONTENT_OF: Final = "FROM content WHERE content.row_id = task.id"
ROW_COLUMNS: Final = ", ".join(
    (*COLUMNS, *(f"(SELECT {name} {_CONTENT_OF})" for name in CONTENT_COLUMNS))
)
# Only for listings: an ops method has no lease of the resource that it names.
SHOWN_KIND: Final = "coalesce(resource_kind, ops_kind)"
SHOWN_ID: Final = "coalesce(resource_id, ops_id)"
SHOWN_RESOURCE: Final = f"{SHOWN_KIND}, {SHOWN_ID}"
HAS_CONTENT: Final = f"EXISTS (SELECT 1 {_CONTENT_OF})"
# One statement for a task that waits and for one that begins in the same commit, which differ in
# state, attempts and started_at.
ACCEPT: Final = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, namespace, method,
    version, content_hash, on_interrupt, settle_s, resource_kind, resource_id, owner, accepted_at,
    expires_at, caller_hash, state, attempts, started_at, ops_kind, ops_id,
    shown_context, due_at, due_ahead_s, crashes)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)
ON CONFLICT (request_id, recipient) DO NOTHING"""
ACCEPT_CONTENT: Final = "INSERT INTO content (row_id, args, context) VALUES (?, ?, ?)"
ACCEPT_REPLY: Final = """
INSERT INTO reply (row_id, queue, msg_id, expires_at, monitor_s, knows_pending)
VALUES (?, ?, ?, ?, ?, ?)"""
# Arguments stay if an errored hook, or an operator's retry, may need them.
REMOVE_CONTENT: Final = "DELETE FROM content WHERE row_id = ?"
HOOK_DONE: Final = "UPDATE task SET errored_due = 0, calling = 0 WHERE id = ?"
COUNT: Final = """
INSERT INTO tally (what, n) VALUES (?, ?)
ON CONFLICT (what) DO UPDATE SET n = tally.n + excluded.n"""
NOTE: Final = """
INSERT INTO incident (at, run_id, what, request_id, method, detail) VALUES (?, ?, ?, ?, ?, ?)"""
NOTE_OF_ROW: Final = """
INSERT INTO incident (at, run_id, what, request_id, method, detail)
SELECT ?, ?, ?, request_id, method, ? FROM task WHERE id = ?"""
BEGIN: Final = """
UPDATE task SET state = 'running', attempts = attempts + 1, started_at = ?, cut = NULL,
    not_before = NULL, waiting_since = NULL, alone = ?
WHERE id = ? AND owner = ? AND state = 'accepted'"""
# In an accepted row, `waiting_since` is when it last asked for a lease that is held elsewhere.
WAITS: Final = "UPDATE task SET waiting_since = ? WHERE id = ? AND owner = ? AND state = 'accepted'"
TOKEN: Final = """
UPDATE task SET token = (SELECT lver FROM lease WHERE kind = ? AND id = ?)
WHERE request_id = ? AND recipient = ?"""
FINISH: Final = """
UPDATE task SET state = ?, result = ?, failure = ?, reason = ?, detail = ?, finished_at = ?,
    errored_due = ?
WHERE id = ? AND owner = ? AND state = ?"""
FINISH_OWING_NOTHING: Final = (
    f"{FINISH} AND NOT EXISTS (SELECT 1 FROM reply WHERE row_id = task.id AND reply.owner IS NULL)"
)
# Two statements are cheaper than RETURNING, which builds a table. A reply with an owner is of the
# time when the task was parked: the run that ends the task does not send it.
_REPLIES: Final = (
    "SELECT queue, msg_id, expires_at, monitor_s, knows_pending FROM reply WHERE row_id = ?"
)
REPLIES: Final = f"{_REPLIES} AND owner IS NULL"
REPLIES_DUE: Final = "UPDATE reply SET due_at = ? WHERE row_id = ? AND owner IS NULL"
REPLY_DONE: Final = "DELETE FROM reply WHERE row_id = ? AND queue = ? AND msg_id = ?"
# Part of a commit that changes the row of the task.
CONTEXT: Final = "UPDATE content SET context = ? WHERE row_id = ?"
HAND_OVER: Final = """
UPDATE task SET state = 'handed_over', cut = ?1, owner = ?2, cursor = coalesce(?3, cursor),
    crashes = ?8 + CASE WHEN coalesce(?3, cursor) IS DISTINCT FROM cursor THEN 0 ELSE crashes END,
    alone = CASE WHEN ?9 = 1 OR (?8 = 1 AND alone = 1) THEN 2 WHEN ?8 = 1 THEN 0 ELSE alone END,
    cursor_at = CASE WHEN ?3 IS NULL THEN cursor_at ELSE ?7 END,
    not_before = ?4 WHERE id = ?5 AND owner = ?6 AND state = 'running'"""
# The attempt has failed and ended, so no crash is counted, and none is forgotten. A task with an
# order is not tried again: the order ends it.
TRY_LATER: Final = """
UPDATE task SET state = 'accepted', owner = NULL, due_at = ?1, due_ahead_s = ?2,
    failures = failures + 1, failure = ?3, detail = ?4, cursor = coalesce(?5, cursor),
    alone = CASE WHEN alone = 1 THEN 0 ELSE alone END
WHERE id = ?6 AND owner = ?7 AND state = 'running' AND ordered IS NULL"""
NOT_STARTED: Final = (
    "UPDATE task SET owner = NULL WHERE id = ? AND owner = ? AND state = 'accepted'"
)
# A new cursor is progress and resets the count of crashes; a reset to NULL is none and does not.
CURSOR: Final = """
UPDATE task SET cursor = ?1, cursor_at = ?2,
    crashes = CASE WHEN coalesce(?1, cursor) IS DISTINCT FROM cursor THEN 0 ELSE crashes END
WHERE id = ?3 AND owner = ?4 AND state = 'running'"""
PROGRESS: Final = "UPDATE task SET progress = ? WHERE id = ? AND owner = ? AND state = 'running'"
REJECT: Final = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, namespace, method,
    version, content_hash, on_interrupt, settle_s, accepted_at, finished_at, state, reason, detail,
    shown_context, caller_hash)
VALUES (?, ?, ?, ?, ?, ?, '', ?, ?, ?, '', 'error', 0, ?, ?, 'rejected', ?, ?, ?, ?)
ON CONFLICT (request_id, recipient) DO NOTHING"""
# A client can have any number of requests refused, so the oldest are removed, and counted.
_LAST_REJECTED: Final = (
    "(SELECT id FROM task WHERE state = 'rejected' ORDER BY id DESC LIMIT 1 OFFSET ?1)"
)
COUNT_REMOVED: Final = f"""
INSERT INTO tally (what, n) SELECT 'rejected_removed', count(*) FROM task
    WHERE state = 'rejected' AND id <= {_LAST_REJECTED} HAVING count(*) > 0
ON CONFLICT (what) DO UPDATE SET n = tally.n + excluded.n"""
REMOVE_REJECTED: Final = f"DELETE FROM task WHERE state = 'rejected' AND id <= {_LAST_REJECTED}"
REMOVE_NOTES: Final = """
DELETE FROM incident WHERE what = 'rejected' AND id <= (
    SELECT id FROM incident WHERE what = 'rejected' ORDER BY id DESC LIMIT 1 OFFSET ?1)"""
KNOWN: Final = f"SELECT {ROW_COLUMNS} FROM task WHERE request_id = ? AND recipient = ?"
BY_ID: Final = f"SELECT {ROW_COLUMNS} FROM task WHERE id = ?"
# Only first attempts, because a resumed one has done only a part of the work.
LAST_ATTEMPTS: Final = """
SELECT namespace, method, finished_at - started_at FROM (
    SELECT namespace, method, service, state, attempts, started_at, finished_at FROM task
    WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT ?) AS ended
WHERE state = 'succeeded' AND attempts = 1 AND service = ? AND started_at IS NOT NULL
    AND finished_at >= started_at ORDER BY finished_at"""
MONITORED: Final = f"{REPLIES} AND monitor_s IS NOT NULL"
STILL_DUE: Final = f"{_REPLIES} AND due_at IS NOT NULL AND (owner IS NULL OR owner = ?)"
ADD_REPLY: Final = """
INSERT INTO reply (row_id, queue, msg_id, expires_at, monitor_s, knows_pending)
SELECT id, ?, ?, ?, ?, ? FROM task
WHERE id = ? AND finished_at IS NULL AND state <> 'pending' ON CONFLICT DO NOTHING
RETURNING row_id"""
IS_ANSWERED: Final = """
SELECT 1 FROM task WHERE id = ? AND (finished_at IS NOT NULL OR state = 'pending')"""
PAROLES: Final = MappingProxyType(
    {table: f"UPDATE {table} SET alone = 0 WHERE id = ?" for table in ("task", "hold", "finding")}
)
"""The statement by the table of the suspect's row."""
