"""The SQL of listings, for the command line and for a service's own endpoint."""

from __future__ import annotations

from typing import Final

from gracekit.journal.pending_sql import SHOWN_COLUMNS
from gracekit.journal.tasks_sql import IS_OPEN, IS_UNSUCCESSFUL, SHOWN_RESOURCE
from gracekit.tracker.task import TRANSIENT, TaskState

# -- listings of tasks ----------------------------------------------------------------

TASK_NAMES: Final = (
    "request_id", "recipient", "service", "lane", "method", "resource_kind", "resource_id", "state",
    "reason", "detail", "owner", "cut", "attempts", "crashes", "cursor", "cursor_at", "accepted_at",
    "started_at", "finished_at", "not_before", "next_check", "alone", "ordered", "parkings",
    "parked_at", "pending_deadline", "ops_kind", "ops_id", "shown_context", "due_at", "failures",
    "progress",
)  # fmt: skip
_TASKS: Final = f"SELECT {', '.join(TASK_NAMES)} FROM task WHERE"
TASKS: Final = f"{_TASKS} {{where}} ORDER BY id DESC LIMIT ?"
# Without the plus SQLite reads all rows, as they have this order already, instead of using the
# index of open rows.
OPEN_TASKS: Final = f"{_TASKS} {IS_OPEN} AND {{where}} ORDER BY +id DESC LIMIT ?"
# The newest tasks in some states: `{ids}` stands for one of the next two for each state, joined by
# UNION ALL. In the index of rows that did not succeed, those of one state are in the order of ids.
TASKS_OF_IDS: Final = f"{_TASKS} id IN ({{ids}}) ORDER BY id DESC LIMIT ?"
OPEN_IDS: Final = f"""
SELECT id FROM (SELECT id FROM task WHERE {IS_OPEN} AND state = ? AND {{where}}
    ORDER BY +id DESC LIMIT ?) AS newest"""
UNSUCCESSFUL_IDS: Final = f"""
SELECT id FROM (SELECT id FROM task WHERE {IS_UNSUCCESSFUL} AND state = ? AND {{where}}
    ORDER BY id DESC LIMIT ?) AS newest"""
OWNED_BY: Final = "owner IN (SELECT run_id FROM run WHERE {where})"
APART: Final = f"SELECT owner, request_id FROM task WHERE alone = 1 AND {IS_OPEN}"
SUBJECT: Final = f"SELECT method, {SHOWN_RESOURCE} FROM task WHERE request_id = ?"
HOOKS_DUE: Final = "SELECT request_id FROM task WHERE errored_due = 1 AND owner = ? ORDER BY id"
# Uses the index on `at`.
HANDED_OVER_SINCE: Final = "SELECT request_id FROM incident WHERE at >= ? AND what = 'handed_over'"

# -- one task -------------------------------------------------------------------------

ROW_NAMES: Final = (
    "id", "request_id", "recipient", "service", "lane", "queue", "route", "target", "namespace",
    "method", "version", "on_interrupt", "settle_s", "resource_kind", "resource_id", "state",
    "reason", "detail", "owner", "cut", "not_before", "attempts", "crashes", "hook_crashes",
    "alone", "probing", "calling", "token", "cursor", "cursor_at", "accepted_at", "started_at",
    "finished_at", "expires_at", "next_check", "waiting_since", "errored_due", "failure", "ordered",
    "parkings", "parked_at", "pending_deadline", "requested", "ops_kind", "ops_id",
    "shown_context", "due_at", "failures", "progress",
)  # fmt: skip
KEPT_NAMES: Final = ("args", "context", "result")
ROW: Final = f"""
SELECT {", ".join(ROW_NAMES)}, {", ".join(f"octet_length({name})" for name in KEPT_NAMES)}
FROM task LEFT JOIN content ON content.row_id = task.id WHERE id = ?"""
REPLIES: Final = "SELECT queue, expires_at, due_at FROM reply WHERE row_id = ?"
LEASE: Final = """
SELECT lver, owner, request_id, acquired_at, not_before FROM lease WHERE kind = ? AND id = ?"""
# Uses the index on `at`, because of the plus: a task has no incidents from before its acceptance.
INCIDENTS: Final = """
SELECT at, what, detail FROM incident WHERE at >= ? AND request_id = ? ORDER BY +id"""

# -- incidents ------------------------------------------------------------------------

INCIDENT_NAMES: Final = (
    "at", "what", "run_id", "service", "instance", "request_id", "method", "detail",
)  # fmt: skip
LAST_INCIDENTS: Final = """
SELECT incident.at, incident.what, incident.run_id, run.service, run.instance, incident.request_id,
    incident.method, incident.detail
FROM incident LEFT JOIN run ON run.run_id = incident.run_id
WHERE substr(incident.what, 1, length(CAST(?1 AS TEXT))) = CAST(?1 AS TEXT)
ORDER BY incident.id DESC LIMIT ?2"""

# -- resources ------------------------------------------------------------------------

_WAITS: Final = "(tries > 0 OR next_check IS NOT NULL)"
WAITING_RESOURCES: Final = f"""
SELECT service, host, kind, min(name), count(*) FROM finding WHERE {_WAITS}
GROUP BY service, host, kind ORDER BY kind"""
BROKEN_KINDS: Final = "SELECT service, host, kind, why, since FROM broken_kind ORDER BY kind"
NEWEST_KINDS: Final = """
SELECT kinds FROM run WHERE service = ? AND host = ? ORDER BY started_at DESC LIMIT 1"""
OLDEST_RESOURCE: Final = f"""
SELECT service, host, kind, name, first_seen FROM finding
WHERE service = ? AND host = ? AND {_WAITS}
ORDER BY first_seen, id LIMIT 1"""
PASS_NAMES: Final = (
    "began_at", "finished_at", "settled", "failed", "waiting", "left", "found_only",
)  # fmt: skip
RESOURCE_PASSES: Final = """
SELECT service, host, began_at, finished_at, settled, failed, waiting, left_alone,
    found_only
FROM resource_pass"""

# -- parked tasks, notifications ------------------------------------------------------

# The inner query reads only the index, so that the outer one reads only the rows that are shown.
PARKED: Final = f"""
SELECT {SHOWN_COLUMNS} FROM task WHERE id IN (
    SELECT id FROM task WHERE state = 'pending' ORDER BY pending_deadline, id LIMIT ?)
ORDER BY pending_deadline, id"""
PARKED_OF_SERVICE: Final = f"""
SELECT {SHOWN_COLUMNS} FROM task WHERE id IN (
    SELECT id FROM task WHERE state = 'pending' AND service = ?
    ORDER BY pending_deadline, id LIMIT ?)
ORDER BY pending_deadline, id"""
PARKED_COUNTS: Final = """
SELECT service, count(*), sum(CASE WHEN pending_deadline <= ?1 THEN 1 ELSE 0 END),
    min(CASE WHEN pending_deadline > ?1 THEN pending_deadline END)
FROM task WHERE state = 'pending' GROUP BY service ORDER BY service"""
# The oldest row is the one with the lowest id; there is no index on `at`.
UNSENT: Final = "SELECT count(*), (SELECT at FROM outbox ORDER BY id LIMIT 1) FROM outbox"

# -- runs, accounts, holds ------------------------------------------------------------

# Parked rows are left out: they do not wait for a run, and there may be very many.
_NOT_PARKED: Final = ", ".join(
    f"'{word}'" for word in sorted(state.value for state in TRANSIENT - {TaskState.PENDING})
)
OWNED: Final = f"{IS_OPEN} AND owner IS NOT NULL"
OWNERLESS: Final = f"{IS_OPEN} AND owner IS NULL AND state IN ({_NOT_PARKED})"
UNFINISHED: Final = f"""
SELECT owner, state, count(*) FROM task WHERE {OWNED} GROUP BY owner, state UNION ALL
SELECT NULL, state, count(*) FROM task WHERE {OWNERLESS} AND due_at IS NULL GROUP BY state"""
NOT_DUE: Final = f"""
SELECT count(*), min(due_at) FROM task
WHERE {IS_OPEN} AND owner IS NULL AND state = 'accepted' AND due_at IS NOT NULL"""
# One statement, so that tallies and rows are from the same moment. The rows that are in neither of
# two small indexes are those that succeeded. In a query of its own, a count of all rows adds up the
# numbers that the pages of an index have, and does not step through them.
ACCOUNTS: Final = f"""
SELECT 'tally', what, n FROM tally
UNION ALL SELECT 'state', state, count(*) FROM task WHERE {IS_OPEN} GROUP BY state
UNION ALL SELECT 'state', state, count(*) FROM task WHERE {IS_UNSUCCESSFUL} GROUP BY state
UNION ALL SELECT 'rows', '', (SELECT count(*) FROM task)"""
OPEN_HOLDS: Final = """
SELECT owner, name, key FROM hold
WHERE ended_at IS NULL AND owner IS NOT NULL AND lapses_at > ? ORDER BY id"""
HOLD_NAMES: Final = (
    "service", "name", "key", "method", "target", "owner", "asker", "opened_at", "lapses_at",
    "ended_at", "end_reason", "errored_due", "crashes",
)  # fmt: skip
HOLDS: Final = f"""
SELECT {", ".join(HOLD_NAMES)},
    (SELECT instance FROM run WHERE run_id = hold.owner) FROM hold
WHERE ended_at IS NULL OR errored_due = 1 ORDER BY id DESC LIMIT ?"""
HOLD_ENDED: Final = """
SELECT ended_at FROM hold WHERE name = ? AND key = ? ORDER BY id DESC LIMIT 1"""
WANTED_TARGETS: Final = f"""
SELECT target FROM task WHERE {IS_OPEN} AND target <> ''
UNION SELECT target FROM hold WHERE ended_at IS NULL"""
# `{marks}` stands for the ids of the runs.
OF_RUNS: Final = f"""
SELECT run_id, version, (SELECT count(*) FROM task WHERE {IS_OPEN} AND owner = run_id),
    (SELECT count(*) FROM lease WHERE owner = run_id) FROM run WHERE run_id IN ({{marks}})"""
OF_THE_DEMO: Final = """
SELECT request_id, state, on_interrupt, cursor, pid FROM task LEFT JOIN run ON run_id = owner
ORDER BY task.id"""

# -- one service, for probes and metrics of a run ---------------------------------------

# Parked tasks are counted by their index and not read, because there may be 100,000. They have a
# deadline of their own, so they have no age here. Once one runs again, its age is counted from when
# it was last parked.
UNFINISHED_OF_SERVICE: Final = f"""
SELECT state, count(*), min(since) FROM (
    SELECT state, coalesce(parked_at, accepted_at) AS since FROM task
    WHERE {OWNED} AND service = ?1 AND state <> 'pending' UNION ALL
    SELECT state, CASE WHEN due_at IS NULL THEN coalesce(parked_at, accepted_at) END FROM task
    WHERE {OWNERLESS} AND service = ?1) AS unfinished
GROUP BY state UNION ALL
SELECT 'pending', count(*), NULL FROM task WHERE state = 'pending' AND service = ?1"""
# Selects by sender, as the index is by sender. Adopted runs have no notifications left to send.
NOTIFICATIONS_DUE: Final = """
SELECT count(*) FROM outbox
WHERE owner IN (SELECT run_id FROM run WHERE service = ? AND adopted_at IS NULL)"""
OPEN_HOLDS_OF_SERVICE: Final = """
SELECT count(*) FROM hold WHERE ended_at IS NULL AND service = ? AND lapses_at > ?"""
