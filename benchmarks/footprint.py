"""What a service takes when it does no work: to begin, idle, on disk, and to be looked at.

Everything is on `sqlite://`; what a start and an idle process take on RabbitMQ is measured in
`benchmarks.rabbitmq`, beside other libraries. Commands are timed from exec to exit, the file of the
store being in the page cache.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import apsw

from benchmarks.child import ROOT
from benchmarks.first import svc
from benchmarks.history import add_history
from benchmarks.measure import Figure, Goal, Pair, Plan, against, alone
from benchmarks.plain import ARGS
from benchmarks.processes import service
from benchmarks.starts import first_message_s, gracekit_run
from benchmarks.workers import cpu_s
from benchmarks.workload import Site, serving

NAME: Final = "footprint"
FIRST: Final = Goal(0.25, beyond=0.15)
IDLE: Final = Goal(0.5, beyond=0.2)
ON_DISK: Final = Goal(300.0)
STATUS: Final = Goal(0.15)
FLAT: Final = Goal(1.1)
IDLE_S: Final = 30.0
"""Every half minute a run looks for tasks of dead ones."""
ENDED: Final = 20_000
"""Requests whose rows are weighed."""
ROWS: Final = 1_000_000
RUNS: Final = 20_000
AT_ONCE: Final = 32

_RUNS: Final = """
INSERT INTO run ({names})
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
SELECT {values} FROM n, (SELECT * FROM run WHERE adopted_at IS NOT NULL LIMIT 1)"""


def run(plan: Plan) -> Iterator[Figure]:
    """Real processes, but for the rows."""
    directory = plan.directory / "footprint"
    directory.mkdir()
    # Also makes the queue that first messages lie in.
    yield alone(NAME, "idle, sqlite://", _idle(plan, directory), "ms/s", IDLE)
    firsts = [_first_message_s(directory) for _ in range(plan.rounds)]
    yield alone(NAME, "exec to the first message, sqlite://", firsts, "s", FIRST)
    number = plan.size(ENDED, 50)
    weight = asyncio.run(_bytes_of_a_row(directory, number))
    yield alone(NAME, "disk for an ended row", [weight], "bytes", ON_DISK)
    yield from _commands(plan, directory)


def _idle(plan: Plan, directory: Path) -> list[float]:
    """Milliseconds of processor time in each second."""
    seconds, found = IDLE_S if not plan.quick else 0.2, []
    with service(directory, "benchmarks.first:svc") as process:
        process.serving()
        time.sleep(seconds / 10)  # what begins with serving has begun
        for _ in range(plan.few(3)):
            before = cpu_s(process.pid)
            time.sleep(seconds)
            found.append(1e3 * (cpu_s(process.pid) - before) / seconds)
        process.terminate()
    return found


def _first_message_s(directory: Path) -> float:
    asyncio.run(_cast(directory))
    return first_message_s(gracekit_run, directory)


async def _cast(directory: Path) -> None:
    async with svc.client(f"sqlite:///{directory / 'transport.db'}") as client:
        await client.cast("work", **ARGS)


async def _bytes_of_a_row(directory: Path, number: int) -> float:
    """What the file of a store has grown by for each request that has ended."""
    sizes = []
    for some in (1, number):
        new_id = lambda: uuid.uuid4().hex  # noqa: E731 - as clients make them
        async with serving(Site(), directory, "weighed", new_id=new_id) as (_, sender):
            await sender.repeat("work", at_once=AT_ONCE, number=some)
        connection = apsw.Connection(str(directory / "weighed.db"))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        sizes.append((directory / "weighed.db").stat().st_size)
    return (sizes[1] - sizes[0]) / number


# -- commands -----------------------------------------------------------------------------


def _commands(plan: Plan, directory: Path) -> Iterator[Figure]:
    """`gracekit status` and `gracekit tasks` beside many rows, and beside many runs."""
    rows, runs = plan.size(ROWS, 20), plan.size(RUNS, 20)
    none, many, older = (directory / f"{name}.db" for name in ("none", "many", "older"))
    for store in (none, many, older):
        asyncio.run(_make(store))
    add_history(many, rows)
    _add_runs(older, runs)
    for verb, goal in (("status", STATUS), ("tasks", None)):
        for store in (none, many, older):
            _command_s(verb, store)  # brings the file into the page cache
        taken = [
            {store: _command_s(verb, store) for store in _turned((none, many, older), turn)}
            for turn in range(plan.rounds)
        ]
        case = f"gracekit {verb}, {rows:,} rows"
        yield alone(NAME, case, [one[many] for one in taken], "s", goal)
        beside_rows: list[Pair] = [(one[many], one[none]) for one in taken]
        yield against(NAME, f"{case} / 0", beside_rows, "s")
        beside_runs: list[Pair] = [(one[older], one[none]) for one in taken]
        yield against(NAME, f"gracekit {verb}, {runs:,} runs / 2", beside_runs, "s", FLAT)


def _turned(stores: tuple[Path, ...], turn: int) -> tuple[Path, ...]:
    """Another one is first."""
    first = turn % len(stores)
    return stores[first:] + stores[:first]


async def _make(store: Path) -> None:
    """A store with two runs that have ended; the second has seen the end of the first."""
    for _ in range(2):
        async with serving(Site(), store.parent, store.stem):
            pass


def _add_runs(store: Path, number: int) -> None:
    """More like the first one, of other instances."""
    connection = apsw.Connection(str(store))
    names = [row[1] for row in connection.execute("PRAGMA table_info(run)")]
    new = {"run_id": "lower(hex(randomblob(16)))", "instance": "'bench-' || (i + 1)"}
    values = ", ".join(new.get(name, name) for name in names)
    connection.execute(_RUNS.format(names=", ".join(names), values=values), (number,))
    connection.close()


def _command_s(verb: str, store: Path) -> float:
    command = (sys.executable, "-m", "gracekit", verb, "--store", f"sqlite:///{store}")
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)  # noqa: S603 - ours
    return time.perf_counter() - began
