"""The statements about runs: of `run` and `members`."""

from __future__ import annotations

from typing import Final

COLUMNS: Final = (
    "run_id, service, host, instance, generation, boot_id, pid_ns, time_ns, pid, start_ticks, "
    "lock_path, lock_file, phase, topic, ops_topic, transport, started_at, beat_at, "
    "stop_at, stop_source, stop_by, stop_reason, ended_at, exit_code, report, verdict, adopted_at, "
    "gone_by, gone_reason"
)
_RUNS: Final = f"SELECT {COLUMNS} FROM run WHERE"

# -- of all services ------------------------------------------------------------------

ALL: Final = f"SELECT {COLUMNS} FROM run ORDER BY started_at DESC, generation DESC LIMIT ?"
OF_SERVICE: Final = f"{_RUNS} service = ? ORDER BY started_at DESC, generation DESC LIMIT ?"
OPEN: Final = f"{_RUNS} service = ? AND ended_at IS NULL AND adopted_at IS NULL"
# A conflict if the run was adopted, or an operator said so before.
GONE: Final = """
UPDATE run SET gone_at = ?, gone_by = ?, gone_reason = ?
WHERE run_id = ? AND adopted_at IS NULL AND gone_at IS NULL"""

# -- of one run, and of its siblings --------------------------------------------------

JOIN: Final = """
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, time_ns,
    pid, start_ticks, lock_path, lock_file, phase, topic, ops_topic, transport, methods, kinds,
    started_at, beat_at, schema)
VALUES (?1, ?2, ?3, ?4, 1 + coalesce(
    (SELECT max(generation) FROM run WHERE service = ?2 AND instance = ?4), 0),
    ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 'starting', ?13, ?14, ?15, ?16, ?17, ?18, ?18, ?19)
RETURNING generation"""
STANDING: Final = "SELECT gone_by, gone_reason, adopted_by FROM run WHERE run_id = ?"
BEAT: Final = "UPDATE run SET beat_at = ?, phase = ? WHERE run_id = ?"
STOP_INTENT: Final = """
UPDATE run SET stop_at = ?, stop_source = ?, stop_by = ?, stop_reason = ?, phase = 'draining'
WHERE run_id = ? AND stop_at IS NULL"""
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
SELECT {COLUMNS}, kinds FROM run WHERE service <> ? AND ended_at IS NULL AND adopted_at IS NULL
    AND kinds IS NOT NULL"""
OFFERS: Final = """
SELECT methods FROM run WHERE service = ? AND methods IS NOT NULL
GROUP BY methods ORDER BY max(started_at) DESC LIMIT ?"""
NOT_ADOPTED: Final = f"""
{_RUNS} service = ? AND adopted_at IS NULL AND run_id <> ? ORDER BY started_at"""
ENDED_BADLY: Final = f"{_RUNS} service = ? AND adopted_at >= ? AND verdict <> ?"
# Succeeds once; the batch of a second adopter is rolled back. The exit code may have been noted in
# the lock file alone, because the store could not record the end.
ADOPT: Final = """
UPDATE run SET adopted_at = ?, adopted_by = ?, verdict = ?, exit_code = coalesce(exit_code, ?)
WHERE run_id = ? AND adopted_at IS NULL"""
