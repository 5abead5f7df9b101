"""The statements about runs: of `run` and `members`."""

from __future__ import annotations

from typing import Final

COLUMNS: Final = (
    "run_id, service, host, instance, generation, boot_id, pid_ns, time_ns, pid, start_ticks, "
    "lock_path, lock_file, phase, topic, ops_topic, transport, started_at, beat_at, "
    "stop_at, stop_source, stop_by, stop_reason, ended_at, exit_code, report, verdict, adopted_at, "
    "gone_by, gone_reason, invocation, host_stop, rebooted, kernel, crash"
)
_RUNS: Final = f"SELECT {COLUMNS} FROM run WHERE"

# -- of all services ------------------------------------------------------------------

ALL: Final = f"SELECT {COLUMNS} FROM run ORDER BY started_at DESC, generation DESC LIMIT ?"
# One that has ended keeps its beat if something of it may still act.
OPEN: Final = f"""
{_RUNS} service = ? AND adopted_at IS NULL AND (ended_at IS NULL OR EXISTS (
    SELECT 1 FROM beat WHERE beat.run_id = run.run_id))"""
COUNT: Final = "SELECT count(*) FROM run"
# A conflict if the run was adopted, or an operator said so before.
GONE: Final = """
UPDATE run SET gone_at = ?, gone_by = ?, gone_reason = ?
WHERE run_id = ? AND adopted_at IS NULL AND gone_at IS NULL"""
# No run of that host may act; or else it touches no row.
HOST_GONE: Final = """
INSERT INTO gone_host (host, at, by, reason) SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS (
    SELECT 1 FROM beat JOIN run ON run.run_id = beat.run_id WHERE run.host = ?1)
ON CONFLICT (host) DO UPDATE SET at = excluded.at, by = excluded.by, reason = excluded.reason"""
HOST_BACK: Final = "DELETE FROM gone_host WHERE host = ?"

# -- pages of runs; `{where}` is a condition of `pages.named` -----------------------------

OF_ANY: Final = "1 = 1"
OF_INSTANCE: Final = "instance = ?"
OF_SERVICE_INSTANCE: Final = "(service = ? AND instance = ?)"
# The expression of the indexes `run_ended` and `run_of_instance`.
_END: Final = "coalesce(ended_at, adopted_at)"
BY_ID: Final = f"{_RUNS} run_id IN ({{marks}})"
ALL_NOT_ADOPTED: Final = f"{_RUNS} adopted_at IS NULL ORDER BY started_at DESC, generation DESC"
LAST_ENDED: Final = f"""
{_RUNS} adopted_at IS NOT NULL AND {{where}} ORDER BY {_END} DESC, generation DESC LIMIT ?"""
# No run was adopted before its last beat, so the second condition implies the first one, which lets
# SQLite use an index.
LAST_OF_INSTANCES: Final = f"""
{_RUNS} adopted_at IS NOT NULL AND {_END} >= ? AND coalesce(ended_at, beat_at) >= ? AND {{where}}
    AND NOT EXISTS (
        SELECT 1 FROM run AS later WHERE later.service = run.service
            AND later.instance = run.instance AND later.generation > run.generation
            AND later.adopted_at IS NOT NULL)
ORDER BY {_END} DESC LIMIT ?"""
IS_KNOWN: Final = "SELECT 1 FROM run WHERE {where} LIMIT 1"
SERVICES: Final = "SELECT DISTINCT service FROM run WHERE {where} ORDER BY service"
NEWEST_INSTANCES: Final = """
SELECT instance FROM run GROUP BY instance ORDER BY max(started_at) DESC, instance LIMIT ?"""
# Not of members that hold leases and read no queues.
PLACES: Final = (
    "SELECT DISTINCT service, topic, ops_topic, host, instance FROM run WHERE topic <> ''"
)
NAMES_SEEN_SINCE: Final = """
SELECT DISTINCT host, instance FROM run
WHERE adopted_at IS NOT NULL AND coalesce(ended_at, beat_at) > ?"""

# -- of one run, and of its siblings --------------------------------------------------

JOIN: Final = """
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, time_ns,
    pid, start_ticks, lock_path, lock_file, phase, topic, ops_topic, transport, methods, kinds,
    started_at, beat_at, schema, invocation)
VALUES (?1, ?2, ?3, ?4, 1 + coalesce(
    (SELECT max(generation) FROM run WHERE service = ?2 AND instance = ?4), 0),
    ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 'starting', ?13, ?14, ?15, ?16, ?17, ?18, ?18, ?19, ?20)
RETURNING generation"""
# None if the instance has a living run already.
JOIN_BEAT: Final = """
INSERT INTO beat (run_id, service, instance, number, fail_s, dead_s) VALUES (?, ?, ?, 0, ?, ?)
ON CONFLICT DO NOTHING"""
MAY_ACT: Final = "SELECT 1 FROM beat WHERE run_id = ?"
END_BEAT: Final = "DELETE FROM beat WHERE run_id = ?"
STANDING: Final = "SELECT gone_by, gone_reason, adopted_by FROM run WHERE run_id = ?"
# Of earlier runs of that host that have recorded no end, and whose death nobody had proven before:
# no sibling, and no start in the same boot.
REBOOTED: Final = """
UPDATE run SET rebooted = 1
WHERE host = ? AND boot_id <> ? AND ended_at IS NULL AND rebooted IS NULL
    AND (adopted_at IS NULL OR gone_at IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM run AS later WHERE later.host = run.host
        AND later.boot_id = run.boot_id AND later.started_at > run.beat_at)"""
SHOW: Final = "UPDATE run SET beat_at = ?, phase = ? WHERE run_id = ?"
STOP_INTENT: Final = """
UPDATE run SET stop_at = ?, stop_source = ?, stop_by = ?, stop_reason = ?, phase = 'draining'
WHERE run_id = ? AND stop_at IS NULL"""
HOST_STOP: Final = "UPDATE run SET host_stop = 1 WHERE run_id = ?"
WITHDRAW_STOP: Final = """
UPDATE run SET stop_at = NULL, stop_source = NULL, stop_by = NULL, stop_reason = NULL
WHERE run_id = ?"""
STOP_RECORD: Final = """
UPDATE run SET ended_at = ?, exit_code = ?, report = ?, phase = 'stopped' WHERE run_id = ?"""
SIBLINGS: Final = f"""
SELECT {COLUMNS}, methods FROM run WHERE service = ?
    AND (coalesce(ended_at, adopted_at) IS NULL OR coalesce(ended_at, adopted_at) >= ?)
ORDER BY generation DESC"""
WITH_KINDS: Final = f"""
SELECT {COLUMNS}, kinds FROM run WHERE service <> ? AND ended_at IS NULL AND adopted_at IS NULL"""
OFFERS: Final = """
SELECT methods FROM run WHERE service = ?
GROUP BY methods ORDER BY max(started_at) DESC LIMIT ?"""
NOT_ADOPTED: Final = f"""
{_RUNS} service IN (?, ?) AND adopted_at IS NULL AND run_id <> ? ORDER BY started_at"""
ENDED_BADLY: Final = f"{_RUNS} service = ? AND adopted_at >= ? AND verdict <> ?"
# Succeeds once; the batch of a second adopter is rolled back. The exit code may have been noted in
# the lock file alone, because the store could not record the end.
ADOPT: Final = """
UPDATE run SET adopted_at = ?, adopted_by = ?, verdict = ?, exit_code = coalesce(exit_code, ?),
    kernel = ?, crash = ?
WHERE run_id = ? AND adopted_at IS NULL"""
# What was learnt of a process after its run was adopted.
OF_PROCESS: Final = f"""
{_RUNS} adopted_at IS NOT NULL
    AND (boot_id = ? AND pid = ? AND start_ticks = ? OR invocation = ?)"""
KERNEL: Final = "UPDATE run SET kernel = ? WHERE run_id = ? AND kernel IS NULL"

END_ALL_BEATS: Final = "DELETE FROM beat"

# -- beats, in a store that hosts share -------------------------------------------------

BEAT_ON: Final = "UPDATE beat SET number = ? WHERE run_id = ? AND number = ? RETURNING number"
BEAT_OF: Final = "SELECT number FROM beat WHERE run_id = ?"
BEATS: Final = "SELECT run_id, number, fail_s, dead_s FROM beat"
# Misses if it has beaten since.
DECLARE_DEAD: Final = "DELETE FROM beat WHERE run_id = ? AND number = ?"

# -- wishes -----------------------------------------------------------------------------

WISH: Final = """
INSERT INTO wish (service, instance, source, wished_by, reason, at) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (service, instance) DO UPDATE SET source = excluded.source,
    wished_by = excluded.wished_by, reason = excluded.reason, at = excluded.at"""
UNWISH: Final = "DELETE FROM wish WHERE service = ? AND instance = ?"
UNWISH_OF_RUN: Final = """
DELETE FROM wish WHERE source = 'user' AND (service, instance) IN (
    SELECT service, instance FROM run WHERE run_id = ?)"""
WISHES: Final = "SELECT service, instance, source, wished_by, reason, at FROM wish"
