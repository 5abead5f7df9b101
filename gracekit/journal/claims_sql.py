"""The statements of `claims`: to take over rows of dead runs, to claim rows, to release them."""

from __future__ import annotations

from typing import Final

from gracekit.config.choices import NOT_TWICE
from gracekit.journal.tasks_sql import IS_OPEN, ROW_COLUMNS

# -- adoption of a dead run -----------------------------------------------------------

# A crash is counted only for a handler or probe that was under way. A row that was only claimed
# keeps `cut`: if its handler stopped at a safe point, a later crash of the claimer does not count.
# `alone` is 1 while a row runs alone, and becomes 2 if it did so at a crash.
NOTE_ADOPTED: Final = f"""
INSERT INTO incident (at, run_id, what, request_id, method, detail)
SELECT ?2, ?1, 'adopted', request_id, method, state || ' of '
    || coalesce((SELECT instance || ' (run ' || ?3 || ')' FROM run WHERE run_id = ?3), 'run ' || ?3)
FROM task
WHERE owner = ?3 AND state IN ('running', 'handed_over', 'accepted') AND {IS_OPEN}"""
# Ops requests may run beside a suspect. If one did at the crash, the suspect was not alone.
WAS_NOT_ALONE: Final = f"""
UPDATE task SET alone = 0 WHERE alone = 1 AND owner = ?1
    AND id IN (SELECT id FROM task WHERE owner = ?1 AND {IS_OPEN}
        UNION SELECT id FROM task WHERE errored_due = 1)
    AND EXISTS (SELECT 1 FROM task AS other WHERE other.owner = ?1 AND other.{IS_OPEN}
        AND (other.state = 'running' OR other.probing = 1) AND other.id <> task.id)"""
HOLDS_WERE_NOT_ALONE: Final = f"""
UPDATE hold SET alone = 0 WHERE asker = ?1
    AND EXISTS (SELECT 1 FROM task WHERE owner = ?1 AND {IS_OPEN}
        AND (state = 'running' OR probing = 1))"""
CUT: Final = f"""
UPDATE task SET owner = NULL,
    alone = CASE WHEN (?2 = 1 AND state = 'running') OR (?1 = 1 AND probing = 1)
        THEN CASE WHEN alone = 1 THEN 2 ELSE 0 END WHEN alone = 1 THEN 0 ELSE alone END,
    crashes = crashes + CASE
        WHEN (?2 = 1 AND state = 'running') OR (?1 = 1 AND probing = 1) THEN 1 ELSE 0 END,
    probing = 0,
    not_before = CASE WHEN state = 'running' OR cut = 'unclean' THEN ?3 + settle_s END,
    cut = CASE WHEN state = 'running' THEN 'unclean' ELSE cut END, state = 'handed_over'
WHERE owner = ?4 AND state IN ('running', 'handed_over') AND {IS_OPEN} RETURNING id"""
FREE_ACCEPTED: Final = f"""
UPDATE task SET owner = NULL WHERE owner = ? AND state = 'accepted' AND {IS_OPEN} RETURNING id"""
FREE_HOLDS: Final = """
UPDATE hold SET owner = NULL, next_check = NULL WHERE owner = ? AND ended_at IS NULL"""
FREE_ASKED: Final = """
UPDATE hold SET crashes = crashes + ?2, alone = CASE WHEN ?2 = 1 AND alone = 1 THEN 2 ELSE 0 END,
    asker = NULL
WHERE asker = ?1"""
# Selects by the tables of what is due; otherwise the planner would scan all finished rows.
TAKE_DUTIES_OF_THE_DEAD: Final = """
UPDATE task SET owner = ?1,
    alone = CASE WHEN ?3 = 1 AND calling = 1 AND alone = 1 THEN 2 ELSE 0 END,
    hook_crashes = hook_crashes + CASE WHEN ?3 = 1 AND calling = 1 THEN 1 ELSE 0 END, calling = 0
WHERE owner = ?2 AND finished_at IS NOT NULL AND id IN (
    SELECT row_id FROM reply WHERE due_at IS NOT NULL
    UNION SELECT id FROM task WHERE errored_due = 1)"""
TAKE_REPLIES_OF_THE_DEAD: Final = "UPDATE reply SET owner = ?1 WHERE owner = ?2"
# A row that was running at a crash has a settle time. Rows that were not running could be claimed
# at once: suspects among them would begin first, and the task that caused the crash would later
# begin beside them. So all rows with crashes wait for the last settle time of such rows. An `error`
# row never begins again, so no row waits for it.
# ?1 is now, ?2 the latest moment, ?3 the service.
_LAST_TO_SETTLE: Final = f"""
(SELECT CASE WHEN max(other.not_before) < ?2 THEN max(other.not_before) ELSE ?2 END
    FROM task AS other WHERE other.owner IS NULL AND other.{IS_OPEN}
    AND other.service = ?3 AND other.state = 'handed_over' AND other.cut = 'unclean'
    AND other.on_interrupt <> 'error' AND other.crashes > 0)"""
WAIT_FOR_SETTLING: Final = f"""
UPDATE task SET not_before = CASE WHEN coalesce(not_before, 0) > {_LAST_TO_SETTLE}
    THEN not_before ELSE {_LAST_TO_SETTLE} END
WHERE owner IS NULL AND {IS_OPEN} AND state <> 'pending' AND service = ?3 AND crashes > 0
    AND on_interrupt <> 'error'
    AND EXISTS (SELECT 1 FROM task AS other WHERE other.owner IS NULL AND other.{IS_OPEN}
        AND other.service = ?3 AND other.state = 'handed_over' AND other.cut = 'unclean'
        AND other.on_interrupt <> 'error' AND other.crashes > 0
        AND other.not_before > ?1)"""

# Owners that may not act: what they own is found by no adoption. There are none, as the store takes
# no commit of a run that was adopted.
STRANDED: Final = f"""
SELECT owner FROM (SELECT owner FROM task WHERE owner IS NOT NULL AND {IS_OPEN}
    UNION SELECT owner FROM lease WHERE owner IS NOT NULL
    UNION SELECT owner FROM hold WHERE owner IS NOT NULL AND ended_at IS NULL
    UNION SELECT owner FROM finding WHERE owner IS NOT NULL) AS owners
WHERE NOT EXISTS (SELECT 1 FROM run WHERE run.run_id = owners.owner AND adopted_at IS NULL)"""

# -- rows of an older store, see `leases.epoch` ---------------------------------------

# A task that is accepted in the older store may have begun, and even ended, in the newer one.
# The `repr` of a tuple of texts is valid SQL.
# A run that has lived on since the copy knows what became of its requests.
_RESTORED: Final = f"""
{IS_OPEN} AND state = 'accepted' AND on_interrupt IN {NOT_TWICE!r} AND NOT EXISTS (
    SELECT 1 FROM run, epoch WHERE run_id = owner AND beat_at > copied_at AND adopted_at IS NULL)"""
NOTE_RESTORED: Final = f"""
INSERT INTO incident (at, run_id, what, request_id, method, detail)
SELECT ?, '', 'restored', request_id, method, 'accepted in an older store: it may have begun since'
FROM task WHERE {_RESTORED}"""
# It is not known whether a parked task has run since; the incident says so to those who retry it.
NOTE_RESTORED_PARKED: Final = f"""
INSERT INTO incident (at, run_id, what, request_id, method, detail)
SELECT ?, '', 'restored', request_id, method, 'parked in an older store: it may have run since'
FROM task WHERE {IS_OPEN} AND state = 'pending'"""
CUT_RESTORED: Final = f"""
UPDATE task SET state = 'handed_over', cut = 'unclean', owner = NULL, due_at = NULL,
    not_before = ? + settle_s WHERE {_RESTORED}"""

# -- claims ---------------------------------------------------------------------------

# What may not begin yet has no owner, and `due_at`. No statement that claims rows sees it, until
# RIPEN removes a time that has come.
_DUE: Final = f"""
FROM task WHERE owner IS NULL AND state = 'accepted' AND {IS_OPEN} AND service = ?
    AND target IN ('', ?, ?)"""
NEXT_DUE: Final = f"SELECT min(due_at) {_DUE} AND due_at IS NOT NULL"
RIPEN: Final = f"""
UPDATE task SET due_at = NULL WHERE id IN (SELECT id {_DUE} AND due_at <= ? ORDER BY due_at LIMIT ?)
    AND owner IS NULL AND state = 'accepted'"""
# ?1 is wall time minus loop time now, ?3 and ?4 the lesser and the greater of before and now. Each
# run does this; `due_ahead_s` shows how far a sibling has shifted the row already.
FOLLOW_DUE: Final = f"""
UPDATE task SET due_at = due_at + ?1 - due_ahead_s, due_ahead_s = ?1
WHERE owner IS NULL AND state = 'accepted' AND {IS_OPEN} AND due_at IS NOT NULL AND service = ?2
    AND abs(due_ahead_s - ?1) >= 1 AND due_ahead_s BETWEEN ?3 - 1 AND ?4 + 1"""
# Callers of accepted tasks that no run has, who asked for heartbeats and still wait.
WAITING_CALLERS: Final = f"""
SELECT task.id, reply.queue, msg_id, reply.expires_at, monitor_s, knows_pending
FROM reply JOIN task ON task.id = reply.row_id
WHERE monitor_s IS NOT NULL AND task.owner IS NULL AND task.state = 'accepted' AND {IS_OPEN}
    AND service = ?"""
# An `error` row is ended without asking its backend, so it need not wait for its settle time. A row
# with an order is not claimed: the order ends it.
CLAIMABLE: Final = f"""
SELECT id FROM task WHERE owner IS NULL AND state = ? AND {IS_OPEN} AND service = ?
    AND target IN ('', ?, ?) AND lane IN (?, ?) AND coalesce(next_check, 0) <= ?
    AND (on_interrupt = 'error' OR coalesce(not_before, 0) <= ?) AND ordered IS NULL
    AND due_at IS NULL AND id NOT IN (0{{others}})
ORDER BY id LIMIT ?"""
COUNT_CLAIMABLE: Final = f"SELECT count(*) FROM ({CLAIMABLE}) AS claimable"
CLAIM: Final = f"""
UPDATE task SET owner = ? WHERE id IN ({CLAIMABLE})
AND owner IS NULL AND state = ? RETURNING {ROW_COLUMNS}"""
CLAIM_ONE: Final = f"""
UPDATE task SET owner = ? WHERE id = ? AND owner IS NULL AND state = 'accepted' AND {IS_OPEN}
    AND target IN ('', ?, ?) RETURNING {ROW_COLUMNS}"""
# `waiting_since` is the time of the first Wait of its probe.
AGAIN: Final = """
UPDATE task SET state = 'accepted', cut = NULL, next_check = NULL, waiting_since = NULL,
    not_before = NULL, probing = 0 WHERE id = ? AND owner = ? AND state = 'handed_over'"""
WAIT: Final = """
UPDATE task SET owner = NULL, next_check = ?, probing = 0,
    waiting_since = coalesce(waiting_since, CASE WHEN ? = 1 THEN CAST(? AS double precision) END)
WHERE id = ? AND owner = ? AND state = 'handed_over'"""
PROBING: Final = """
UPDATE task SET probing = 1, alone = ? WHERE id = ? AND owner = ? AND state = 'handed_over'"""
DISOWN: Final = """
UPDATE task SET owner = NULL, state = 'handed_over', cut = 'unclean', crashes = crashes + 1,
    alone = 0 WHERE id = ? AND owner = ? AND state = 'running'"""
TAKE_OVER: Final = """
UPDATE task SET owner = ?, due_at = NULL WHERE id = ? AND owner IS NULL AND state = ?"""
POSTPONE: Final = """
UPDATE task SET owner = NULL, next_check = ?, probing = 0
WHERE id = ? AND owner = ? AND state IN ('accepted', 'handed_over')"""
# Its probe has ended, perhaps with a refused commit. Reset `probing`, or a crash of a later owner
# would be counted for the probe.
LET_GO: Final = """
UPDATE task SET owner = NULL, probing = 0
WHERE id = ? AND owner = ? AND state IN ('accepted', 'handed_over')"""
# After one change of the clock, several runs may each shift the same row. That never shortens a
# settle time. At worst a probe is called early, or a wait is counted from now. ?1 is by how many
# seconds the clock was set back (0 or below), ?2 is now, and ?5 is by how many seconds the clock
# was set forward (0 or above). ?5 changes only `waiting_since`.
FOLLOW_CLOCK: Final = f"""
UPDATE task SET
    not_before = CASE WHEN not_before <= ?2 + settle_s THEN not_before
        WHEN not_before + ?1 < ?2 + settle_s THEN ?2 + settle_s ELSE not_before + ?1 END,
    next_check = CASE WHEN next_check <= ?2 THEN next_check
        WHEN next_check + ?1 < ?2 THEN ?2 ELSE next_check + ?1 END,
    waiting_since = CASE WHEN waiting_since + ?5 > ?2 THEN ?2 ELSE waiting_since + ?5 END
WHERE (owner IS NULL OR owner = ?4) AND state IN ('accepted', 'handed_over') AND {IS_OPEN}
    AND service = ?3"""
NEXT_LOOK: Final = f"""
SELECT min(CASE WHEN on_interrupt <> 'error' AND coalesce(not_before, 0) > coalesce(next_check, 0)
    THEN not_before ELSE coalesce(next_check, 0) END)
FROM task
WHERE owner IS NULL AND state = 'handed_over' AND {IS_OPEN} AND service = ?
    AND target IN ('', ?, ?) AND ordered IS NULL AND id NOT IN (0{{others}})"""
# One statement, so that all counts are of the same moment.
UNFINISHED: Final = f"""
SELECT (SELECT count(*) FROM task WHERE {IS_OPEN} AND service = ? AND target IN ('', ?, ?)
        AND state <> 'pending' AND due_at IS NULL AND (owner IS NULL OR owner IN ({{owners}})))
    + (SELECT count(*) FROM hold WHERE ended_at IS NULL AND service = ? AND target = ?
        AND lapses_at > ? AND (owner IS NULL OR owner IN ({{owners}})))
    + (SELECT count(*) FROM task WHERE errored_due = 1 AND service = ?
        AND (owner IS NULL OR owner IN ({{owners}})))
    + (SELECT count(*) FROM hold WHERE errored_due = 1 AND service = ? AND target = ?)"""
UNFINISHED_RESOURCES: Final = f"""
SELECT id, resource_kind, resource_id FROM task WHERE owner IS NULL
    AND state = 'handed_over' AND {IS_OPEN} AND resource_kind IS NOT NULL
    AND service = ? AND target IN ('', ?, ?) ORDER BY id"""
_MINE: Final = f"""
FROM task WHERE owner = ? AND {IS_OPEN} AND state IN ('accepted', 'running', 'handed_over')"""
# An index covers the ids. Reading whole rows, most of them not needed, would be slow.
MINE: Final = f"SELECT id {_MINE}"
MY_ROWS: Final = f"SELECT {ROW_COLUMNS} {_MINE}"

# -- duties of ended rows -------------------------------------------------------------

# An operator has ended a row without an owner: any run may do what is due for it.
_OWING: Final = """
owner IS NULL AND finished_at IS NOT NULL AND service = ? AND id IN (
    SELECT row_id FROM reply WHERE due_at IS NOT NULL
    UNION SELECT id FROM task WHERE errored_due = 1)"""
OWING: Final = f"SELECT 1 FROM task WHERE {_OWING} LIMIT 1"
TAKE_DUTIES: Final = f"UPDATE task SET owner = ? WHERE {_OWING}"
# See `outbox_sql.LEFT`.
_IS_LEFT_REPLY: Final = """
owner IS NOT NULL AND owner <> ?1 AND NOT EXISTS (
    SELECT 1 FROM run WHERE run.run_id = reply.owner AND run.adopted_at IS NULL)
AND row_id IN (SELECT id FROM task WHERE service = ?2)"""
LEFT_REPLIES: Final = f"SELECT 1 FROM reply WHERE {_IS_LEFT_REPLY} LIMIT 1"
TAKE_LEFT_REPLIES: Final = f"UPDATE reply SET owner = ?1 WHERE {_IS_LEFT_REPLY}"
# A parked task has no owner, but its due replies have one.
DUE_REPLIES: Final = """
SELECT task.id, reply.queue, reply.msg_id, reply.expires_at, reply.monitor_s, reply.knows_pending,
    task.accepted_at
FROM reply JOIN task ON task.id = reply.row_id
WHERE reply.due_at IS NOT NULL AND (reply.owner = ? OR task.owner = ? AND reply.owner IS NULL)"""
ERRORED_DUE: Final = f"""
SELECT {ROW_COLUMNS} FROM task WHERE errored_due = 1 AND owner = ? AND id > ?
ORDER BY id LIMIT ?"""
BEGIN_ERRORED: Final = """
UPDATE task SET calling = 1, alone = ? WHERE id = ? AND owner = ? AND errored_due = 1"""
