"""The statements of `findings`."""

from __future__ import annotations

from typing import Final

from gracekit.journal.tasks_sql import IS_OPEN

NAMES: Final = (
    "id", "kind", "name", "status", "first_seen", "page", "owner", "tries", "waiting_since",
    "next_check", "detail", "crashes", "alone",
)  # fmt: skip
_ROWS: Final = f"SELECT {', '.join(NAMES)} FROM finding WHERE service = ? AND host = ?"
AT_ONCE: Final = 100
BY_NAME: Final = f"{_ROWS} AND kind = ? AND name IN ({', '.join('?' * AT_ONCE)})"
KINDS: Final = "SELECT DISTINCT kind FROM finding WHERE service = ? AND host = ?"
OF_KIND: Final = f"{_ROWS} AND kind = ? AND owner IS NULL"
DUE: Final = f"{_ROWS} AND owner IS NULL AND next_check <= ? ORDER BY next_check LIMIT ?"
NEXT_CHECK: Final = """
SELECT min(next_check) FROM finding WHERE next_check IS NOT NULL AND service = ? AND host = ?
    AND owner IS NULL"""
_ANEW: Final = "CASE WHEN finding.status = excluded.status THEN finding.{0} ELSE {1} END"
_SAME: Final = ", ".join(
    f"{name} = {_ANEW.format(name, other)}"
    for name, other in (
        ("first_seen", "excluded.first_seen"),
        ("tries", "0"),
        ("waiting_since", "NULL"),
        ("detail", "NULL"),
        ("crashes", "0"),
    )
)
# A task between two tries still works on its resource; one that was sent with a delay does not yet.
_WORKS: Final = f"task.{IS_OPEN} AND (due_at IS NULL OR attempts > 0)"
# A rule begins only if no open task acts on the resource, and no other rule. Its lease is taken in
# the same commit, so no request can begin in between. After another status the counts start anew.
BEGIN: Final = f"""
INSERT INTO finding (service, host, kind, name, status, first_seen, seen_at, page, rule, owner,
    settle_s, alone, ahead_s)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?6, ?7, ?8, ?9, ?10, ?11, ?13 FROM epoch WHERE NOT EXISTS (
    SELECT 1 FROM task WHERE task.resource_kind = ?3 AND task.resource_id = ?4 AND {_WORKS})
ON CONFLICT (service, host, kind, name) DO UPDATE SET {_SAME},
    status = excluded.status, seen_at = excluded.seen_at,
    ahead_s = excluded.ahead_s, page = excluded.page,
    rule = excluded.rule, owner = excluded.owner, settle_s = excluded.settle_s,
    alone = excluded.alone, next_check = NULL
WHERE coalesce(finding.owner, excluded.owner) = excluded.owner
    AND (finding.status <> excluded.status
        OR coalesce(finding.next_check, 0) <= excluded.seen_at OR ?12 = 1)
RETURNING id, waiting_since"""
SEEN: Final = f"""
INSERT INTO finding (service, host, kind, name, status, first_seen, seen_at, page, ahead_s)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?7, ?8)
ON CONFLICT (service, host, kind, name) DO UPDATE SET {_SAME},
    next_check = {_ANEW.format("next_check", "NULL")},
    status = excluded.status, seen_at = excluded.seen_at,
    ahead_s = excluded.ahead_s, page = excluded.page
WHERE finding.owner IS NULL"""
# A rule of an earlier pass may end during a later one, which could not note its row as seen. So
# `seen_at` is set here, or the sweep of the later pass would remove the row.
END: Final = "DELETE FROM finding WHERE id = ? AND owner = ?"
WAIT: Final = """
UPDATE finding SET owner = NULL, tries = tries + 1, waiting_since = coalesce(waiting_since, ?1),
    seen_at = ?1, next_check = ?2, detail = ?3, crashes = 0, alone = 0
WHERE id = ?4 AND owner = ?5"""
LET_GO: Final = """
UPDATE finding SET owner = NULL, next_check = ?, seen_at = ?, alone = 0
WHERE service = ? AND host = ? AND kind = ? AND name = ? AND owner = ?"""
FORGET: Final = "DELETE FROM finding WHERE id = ? AND owner IS NULL"
PUT_OFF: Final = "UPDATE finding SET next_check = ? WHERE id = ? AND owner IS NULL"
NOT_AGAIN: Final = "UPDATE finding SET next_check = NULL WHERE id = ? AND owner IS NULL"
# A whole pass over the kind has not found these any more, so their status has changed.
SWEEP: Final = """
DELETE FROM finding WHERE service = ? AND host = ? AND kind = ? AND owner IS NULL AND seen_at < ?
RETURNING name, status, rule"""
_OF_HOST: Final = "(host = ?1 OR host LIKE ?1 || '/%')"  # with its scopes
FORGET_HOST: Final = f"DELETE FROM finding WHERE {_OF_HOST} RETURNING id"
FORGET_PASSES: Final = f"DELETE FROM resource_pass WHERE {_OF_HOST}"
FORGET_BROKEN_OF_HOST: Final = f"DELETE FROM broken_kind WHERE {_OF_HOST}"

# -- pauses ---------------------------------------------------------------------------------

PAUSE: Final = """
INSERT INTO pause (service, until, paused_by, reason) VALUES (?, ?, ?, ?)
ON CONFLICT (service) DO UPDATE SET until = excluded.until, paused_by = excluded.paused_by,
    reason = excluded.reason"""
PAUSED: Final = "SELECT until FROM pause WHERE service = ?"
PAUSES: Final = "SELECT service, until, paused_by, reason FROM pause WHERE until > ?"

# -- adoption, the clock ----------------------------------------------------------------

WERE_NOT_ALONE: Final = f"""
UPDATE finding SET alone = 0 WHERE owner = ?1
    AND EXISTS (SELECT 1 FROM task WHERE owner = ?1 AND {IS_OPEN}
        AND (state = 'running' OR probing = 1))"""
FREE: Final = """
UPDATE finding SET crashes = crashes + ?2, alone = CASE WHEN ?2 = 1 AND alone = 1 THEN 2 ELSE 0 END,
    owner = NULL, next_check = ?3 + settle_s WHERE owner = ?1"""
# ?1 is by how much the clock was set, ?4 is wall time minus loop time now. Each run of the host
# does this; `ahead_s` shows whether a sibling has shifted the row already.
FOLLOW_CLOCK: Final = """
UPDATE finding SET first_seen = first_seen + ?1, seen_at = seen_at + ?1,
    waiting_since = waiting_since + ?1, next_check = next_check + ?1, ahead_s = ?4
WHERE service = ?2 AND host = ?3 AND abs(ahead_s + ?1 - ?4) < 1"""

# -- the last pass ----------------------------------------------------------------------

_UNASKED: Final = ("unasked_began_at", "unasked_finished_at", "unasked_found_only")
_KEPT: Final = ", ".join(
    f"{name} = coalesce(excluded.{name}, resource_pass.{name})" for name in _UNASKED
)
NOTE_PASS: Final = f"""
INSERT INTO resource_pass (service, host, run_id, began_at, finished_at, settled, failed, waiting,
    left_alone, found_only, {", ".join(_UNASKED)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (service, host) DO UPDATE SET run_id = excluded.run_id, began_at = excluded.began_at,
    finished_at = excluded.finished_at, settled = excluded.settled, failed = excluded.failed,
    waiting = excluded.waiting, left_alone = excluded.left_alone,
    found_only = excluded.found_only, {_KEPT}"""
LAST_UNASKED_PASS: Final = f"""
SELECT {", ".join(_UNASKED)} FROM resource_pass
WHERE service = ? AND host = ? AND unasked_began_at IS NOT NULL"""

BROKEN: Final = "SELECT kind, since FROM broken_kind WHERE service = ? AND host = ?"
FORGET_BROKEN: Final = "DELETE FROM broken_kind WHERE service = ? AND host = ?"
NOTE_BROKEN: Final = """
INSERT INTO broken_kind (service, host, kind, why, since) VALUES (?, ?, ?, ?, ?)"""

# -- the task that works on a resource ----------------------------------------------------

AT_WORK: Final = f"""
SELECT task.request_id, task.method, task.state, run.instance FROM task
LEFT JOIN run ON run.run_id = task.owner
WHERE task.resource_kind = ? AND task.resource_id = ? AND {_WORKS} ORDER BY task.id LIMIT 1"""
