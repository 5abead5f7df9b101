"""The statements of `retention`: `{marks}` stands for one `?` for each id."""

from __future__ import annotations

from typing import Final

from gracekit.journal.tasks_sql import IS_OPEN, ROW_COLUMNS

OLD: Final = """
SELECT id FROM task WHERE finished_at < ? AND errored_due = 0
    AND id NOT IN (SELECT row_id FROM reply) ORDER BY finished_at LIMIT ?"""
COUNT_REMOVED: Final = """
INSERT INTO tally (what, n) SELECT 'removed', count(*) FROM task
    WHERE id IN ({marks}) AND finished_at IS NOT NULL AND state <> 'rejected'
ON CONFLICT (what) DO UPDATE SET n = tally.n + excluded.n"""
REMOVE: Final = "DELETE FROM task WHERE id IN ({marks}) AND finished_at IS NOT NULL RETURNING id"
REMOVE_CONTENT: Final = """
DELETE FROM content WHERE row_id IN ({marks})
    AND NOT EXISTS (SELECT 1 FROM task WHERE task.id = content.row_id)"""
OLD_RUNS: Final = "SELECT run_id FROM run WHERE adopted_at < ? LIMIT ?"
REMOVE_RUNS: Final = """
DELETE FROM run WHERE run_id IN ({marks}) AND adopted_at IS NOT NULL RETURNING run_id"""
OLD_HOLDS: Final = "SELECT id FROM hold WHERE ended_at < ? AND errored_due = 0 LIMIT ?"
REMOVE_HOLDS: Final = """
DELETE FROM hold WHERE id IN ({marks}) AND ended_at IS NOT NULL AND errored_due = 0 RETURNING id"""
OLD_INCIDENTS: Final = "SELECT id FROM incident WHERE at < ? LIMIT ?"
REMOVE_INCIDENTS: Final = "DELETE FROM incident WHERE id IN ({marks}) RETURNING id"
PAST: Final = (
    (OLD_RUNS, REMOVE_RUNS),
    (OLD_HOLDS, REMOVE_HOLDS),
    (OLD_INCIDENTS, REMOVE_INCIDENTS),
)
"""For other tables: the query for old rows, and the statement that removes them."""
FORGET_FUTURE: Final = "DELETE FROM consumed WHERE at > ?"
SINCE: Final = """
SELECT max(at) FROM (
    SELECT at, sum(seconds) OVER (ORDER BY at DESC) AS total FROM consumed) AS summed
WHERE total >= ?"""
FORGET_BEFORE: Final = f"DELETE FROM consumed WHERE at < ({SINCE})"
# ?1 is the beginning, ?2 the end. Time that another run has noted already is not noted again.
NOTE_CONSUMED: Final = """
INSERT INTO consumed SELECT begun, ?2 - begun FROM (
    SELECT CASE WHEN noted > ?1 THEN noted ELSE ?1 END AS begun FROM (
        SELECT coalesce(max(at + seconds), 0) AS noted FROM consumed) AS until) AS since
WHERE begun < ?2"""
# For a host, or for an instance whose last run was there.
_IS_FOR: Final = """(task.target IN ({hosts}) OR (
    SELECT run.host FROM run WHERE run.service = task.service AND run.instance = task.target
    ORDER BY run.generation DESC LIMIT 1) IN ({hosts}))"""
_IS_FOR_GONE: Final = _IS_FOR.format(hosts="SELECT host FROM gone_host")
COUNT_FOR_HOST: Final = f"""
SELECT count(*) FROM task WHERE {IS_OPEN} AND target <> '' AND {_IS_FOR.format(hosts="?1")}"""
ABANDONED: Final = f"""
SELECT {ROW_COLUMNS} FROM task
WHERE owner IS NULL AND state IN ('accepted', 'handed_over') AND {IS_OPEN} AND service = ?
    AND target <> '' AND route = ? AND ({_IS_FOR_GONE} OR NOT EXISTS (
        SELECT 1 FROM run WHERE run.service = task.service
            AND (run.host = task.target OR run.instance = task.target) AND run.beat_at > ?))
ORDER BY id LIMIT ?"""
