"""The statements of `order_rows`."""

from __future__ import annotations

from typing import Final

from gracekit.journal.tasks_sql import HAS_CONTENT, HOOK_DONE

NAMES: Final = (
    "id", "request_id", "recipient", "service", "method", "resource_kind", "resource_id", "state",
    "reason", "detail", "failure", "owner", "cut", "attempts", "probing", "settle_s", "finished_at",
    "errored_due", "calling", "parkings", "pending_deadline", "lane", "ordered", "ops_kind",
    "ops_id", "shown_context", "due_at",
    "has_arguments", "owes_replies",
)  # fmt: skip
_TARGETS: Final = f"""
SELECT {", ".join(NAMES[:-2])}, {HAS_CONTENT},
    EXISTS (SELECT 1 FROM reply WHERE reply.row_id = task.id) FROM task WHERE """
TARGET_OF_ID: Final = f"{_TARGETS} id = ?"
TARGET_OF_KEY: Final = f"{_TARGETS} request_id = ? AND recipient = ?"
TARGETS_OF_REQUEST: Final = f"{_TARGETS} request_id = ? ORDER BY id DESC"
TARGETS_BETWEEN: Final = f"""
{_TARGETS} request_id >= ? AND request_id < ? ORDER BY id DESC LIMIT 100"""
TARGETS_OVERDUE: Final = f"""
{_TARGETS} state = 'pending' AND service = ? AND pending_deadline <= ?
ORDER BY pending_deadline LIMIT ?"""
# Of the rows that no run owns. A parked one has no order: what was taken before ends it first.
TARGETS_ORDERED: Final = f"""
{_TARGETS} ordered IS NOT NULL AND finished_at IS NULL AND service = ? AND owner IS NULL
    AND state IN ('accepted', 'handed_over') ORDER BY id LIMIT ?"""
# A command on another host wrote the order there, or this run has taken it.
TARGETS_IN_FLIGHT: Final = f"""
{_TARGETS} ordered IS NOT NULL AND finished_at IS NULL AND service = ? AND owner = ?
    AND state IN ('accepted', 'running')"""
TARGETS_PENDING: Final = f"""
{_TARGETS} resource_kind = ? AND resource_id = ? AND finished_at IS NULL AND state = 'pending'
    AND service = ? ORDER BY id"""
# Its handler may end meanwhile, or the row change hands: then the order is decided anew.
TAKE: Final = """
UPDATE task SET ordered = ? WHERE id = ? AND owner = ? AND state IN (?, 'running')"""
# As adoption does it: a row on which a dead process was at work is handed over, unclean.
CUT: Final = """
UPDATE task SET owner = NULL, state = 'handed_over', cut = 'unclean', crashes = crashes + 1,
    probing = 0, not_before = ? + settle_s
WHERE id = ? AND owner IS NOT DISTINCT FROM ? AND state = 'running'"""
END: Final = """
UPDATE task SET state = ?1, failure = ?2, reason = ?3, detail = ?4, finished_at = ?5, probing = 0,
    errored_due = ?6
WHERE id = ?7 AND owner IS NOT DISTINCT FROM ?8 AND state = ?9"""
REPLY_DUE: Final = "UPDATE reply SET due_at = ? WHERE row_id = ?"
# The count of crashes is reset: an operator who retries a task knows what it does. A row whose
# probe is running in a living run is not retried: the probe's answer decides.
RETRY: Final = """
UPDATE task SET state = 'accepted', owner = NULL, cut = NULL, next_check = NULL,
    waiting_since = NULL, not_before = NULL, crashes = 0, alone = 0, probing = 0, ordered = NULL,
    failures = 0
WHERE id = ? AND owner IS NOT DISTINCT FROM ? AND state = 'handed_over'
    AND (owner IS NULL OR probing = 0)"""
BEGIN_NOW: Final = """
UPDATE task SET due_at = NULL, crashes = 0, alone = 0
WHERE id = ? AND state = ? AND due_at IS NOT NULL"""
# Its replies were sent, its hook was called, its lease is free. So the row is open again as if just
# accepted, but keeps its cursor, its attempts and, until the next end, its last failure. It has no
# expiry any more, as its caller was answered.
RUN_AGAIN: Final = f"""
UPDATE task SET state = 'accepted', owner = NULL, finished_at = NULL, expires_at = NULL,
    result = NULL, reason = NULL, detail = NULL, cut = NULL, next_check = NULL,
    waiting_since = NULL, not_before = NULL, crashes = 0, alone = 0, probing = 0, calling = 0,
    hook_crashes = 0, pending_deadline = NULL, ordered = NULL, due_at = NULL,
    failures = 0
WHERE id = ? AND state = ? AND finished_at = ? AND errored_due = 0 AND {HAS_CONTENT}
    AND NOT EXISTS (SELECT 1 FROM reply WHERE reply.row_id = task.id)"""
# It was not called since the row was read, here or by a run that has adopted the row.
DROP_HOOK: Final = f"""{HOOK_DONE}
    AND errored_due = 1 AND calling = ? AND owner IS NOT DISTINCT FROM ?"""
STANDS: Final = """
SELECT 1 FROM incident WHERE at = ? AND run_id = ? AND what = ? AND request_id = ? AND detail = ?"""
FREE_OF_THE_DEAD: Final = "UPDATE task SET owner = NULL WHERE id = ? AND owner = ? AND state = ?"
