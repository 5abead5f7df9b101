"""A start after a crash that left 100,000 rows: time until ready, and of settling a row.

And what a program pays to load gracekit.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import apsw

from benchmarks.measure import Figure, Plan, alone
from benchmarks.workload import Site, serving
from gracekit.life import read_identity

NAME: Final = "start"
ROWS: Final = 100_000
_PROGRAMS: Final = {
    "Python alone": ("-c", "pass"),
    "import gracekit": ("-c", "import gracekit"),
    "gracekit --version": ("-m", "gracekit", "--version"),
}
PATIENCE_S: Final = 120.0
"""What is settled until then is enough to tell what a row takes."""


# A run whose process is proven dead: a child of this program that has ended. One row in three is
# judged (`error`), one is run again (`retry`), and one begins for the first time.
_RUN: Final = """
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, pid,
    start_ticks, lock_path, phase, topic, ops_topic, transport, started_at, beat_at,
    methods, kinds, schema)
VALUES ('dead', 'bench', 'bench', 'bench-0', 1000, '0', ?, ?, ?, 1, '/nowhere', 'serving',
    'bench', 'bench-ops', 'memory://', unixepoch(), unixepoch(), '[]', '[]', 1)"""
_ROWS: Final = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, resource_kind, resource_id, state, owner,
    attempts, accepted_at, started_at)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
SELECT lower(hex(randomblob(16))), '', 'bench', 'requests', 'bench', 'shared', '',
    iif(?2 AND i % 3, 'work_on', 'work'), '1.0',
    lower(hex(randomblob(16))),
    iif(i % 3 = 1, 'error', 'retry'), 0.0,
    iif(?2 AND i % 3, 'vm', NULL), iif(?2 AND i % 3, 'vm-' || i, NULL),
    iif(i % 3, 'running', 'accepted'), 'dead', iif(i % 3, 1, 0), unixepoch(),
    iif(i % 3, unixepoch(), NULL)
FROM n"""
_CONTENT: Final = """
INSERT INTO content
SELECT id, json_object('vm', coalesce(resource_id, 'vm-1'), 'note', hex(zeroblob(85))), '{}'
FROM task"""
_OPEN: Final = """
SELECT count(*) FROM task WHERE state IN ('accepted', 'running', 'handed_over')"""


def run(plan: Plan) -> Iterator[Figure]:
    """Without resources, then with one that each started row names."""
    rows = plan.size(ROWS, 60)
    for case, named in (("", False), (" of resources", True)):
        times = [
            asyncio.run(_start(plan.directory, f"start-{int(named)}-{turn}", rows, named=named))
            for turn in range(plan.few(1))
        ]
        ready, a_row = zip(*times, strict=True)
        yield alone(NAME, f"{rows:,} rows{case}: ready", ready, "s")
        yield alone(NAME, f"{rows:,} rows{case}: settled", a_row, "us a row")
    for name, words in _PROGRAMS.items():
        yield alone(NAME, f"{name}: processor time", [_processor_s(*words) for _ in range(5)], "s")


def _processor_s(*words: str) -> float:
    """Processor time of a Python with these words, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = (sys.executable, *words)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own Python
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _start(directory: Path, name: str, rows: int, *, named: bool) -> tuple[float, float]:
    """Seconds until it takes requests, then microseconds of settling a row."""
    async with serving(Site(), directory, name):
        pass  # makes the store
    connection = apsw.Connection(str(directory / f"{name}.db"))
    mine = read_identity()
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    run = (mine.boot_id, mine.pid_ns, gone.pid)
    for sql, values in ((_RUN, run), (_ROWS, (rows, int(named))), (_CONTENT, ())):
        connection.execute(sql, values)
    begun = time.perf_counter()
    async with serving(Site(), directory, name, max_accepted=1000, max_running=100):
        ready = time.perf_counter() - begun
        deadline = begun + PATIENCE_S
        # Seen from outside, as an operator would.
        while (left := connection.execute(_OPEN).get) and time.perf_counter() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        settling = time.perf_counter() - begun - ready
    connection.close()
    if left == rows:
        raise RuntimeError(f"none of {rows} rows was settled within {PATIENCE_S:g} s")
    return ready, 1e6 * settling / (rows - left)
