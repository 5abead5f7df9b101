"""Resources that nobody works on: a pass that settles 100,000, and a start that finds none.

Real processes of `gracekit run`, with their log lines. A pass waits two seconds to see that the
queues are empty; they are in its time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.measure import Figure, Goal, Plan, against, alone
from benchmarks.processes import Process, service
from benchmarks.shares import TABLE, make_table, number_of

NAME: Final = "resources"
ROWS: Final = 100_000
STARTS: Final = 3
"""In each round, of each of the two services."""
PASS: Final = Goal(60.0)
MEMORY: Final = Goal(64.0)
START: Final = Goal(1.05)
PATIENCE_S: Final = 600.0
"""For the end of a pass."""


def run(plan: Plan) -> Iterator[Figure]:
    """The pass, its memory; then starts with and without the kind, in turn."""
    rows = plan.size(ROWS, 40)
    passes = [_pass(plan.directory / f"pass-{turn}", rows) for turn in range(plan.few(3))]
    seconds, memory = zip(*passes, strict=True)
    yield alone(NAME, f"{rows:,} settled by one pass", seconds, "s", PASS)
    yield alone(NAME, "rate of that", [rows / one for one in seconds], "resources/s")
    yield alone(NAME, "peak resident above idle", memory, "MiB", MEMORY)
    pairs, through = _starts(plan, rows)
    yield against(NAME, f"none of {rows:,} stuck: ready / no kind", pairs, "s", START)
    yield alone(NAME, "its first pass is over, after exec", through, "s")


def _pass(directory: Path, rows: int) -> tuple[float, float]:
    """Seconds of a pass, and MiB that it takes at most."""
    table = _made(directory, rows, "creating")
    with _service(directory, "svc", table) as process:
        process.serving().logged("reconciliation.started")
        began, idle = time.perf_counter(), process.memory_mib("VmRSS")
        process.logged("reconciliation.finished", PATIENCE_S)
        taken, peak = time.perf_counter() - began, process.memory_mib("VmHWM")
        process.terminate()
    if (settled := number_of(table, "available")) != rows:
        raise RuntimeError(f"{settled} of {rows} resources were settled")
    return taken, peak - idle


def _starts(plan: Plan, rows: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Seconds from exec to ready, with the kind and without, and to the end of the first pass."""
    directories = {name: plan.directory / f"start-{name}" for name in ("svc", "plain")}
    tables = {name: _made(one, rows, "available") for name, one in directories.items()}

    def start(name: str) -> tuple[float, float]:
        began = time.perf_counter()
        with _service(directories[name], name, tables[name]) as process:
            ready = process.serving(every_s=0.001).seen_at - began
            if name == "svc":
                process.logged("reconciliation.finished")
            over = process.seen_at - began
            process.terminate()
        return ready, over

    for name in directories:
        start(name)  # makes the store
    pairs, through = [], []
    for turn in range(plan.rounds * plan.size(STARTS, 1)):
        order = sorted(directories, reverse=bool(turn % 2))
        found = {name: start(name) for name in order}
        pairs.append((found["svc"][0], found["plain"][0]))
        through.append(found["svc"][1])
    return pairs, through


def _made(directory: Path, rows: int, status: str) -> Path:
    directory.mkdir()
    make_table(table := directory / "application.db", rows, status)
    return table


def _service(directory: Path, name: str, table: Path) -> Process:
    return service(
        directory,
        f"benchmarks.shares:{name}",
        startup_reconciliation_wait_seconds=0,
        **{TABLE.removeprefix("GRACEKIT_"): table},
    )
