"""What a store in PostgreSQL costs, beside a bare pipeline and beside other libraries.

make bench-postgres                             seven rounds on a private server
make bench-postgres ARGS="--quick --rounds 1"   tiny sizes: shows that it runs, measures nothing

The bare writer sends the same statements behind the same lock, all of them with BEGIN and COMMIT in
one round trip, and looks at no count. The server's data are in the directory for temporary files,
with fsync. A *host* is a process that accepts and begins tasks, 32 at a time, on the store that all
hosts share. `benchmarks.journaled` compares whole workers with those of other libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks import journaled
from benchmarks.child import Child
from benchmarks.durable import acceptance
from benchmarks.machine import describe
from benchmarks.measure import (
    Figure,
    Goal,
    Plan,
    against,
    alone,
    command_line,
    latencies,
    numbered,
    quantile,
    turns,
)
from benchmarks.plain import be_quiet
from benchmarks.table import lines
from gracekit.clock import Clock
from gracekit.journal.tasks import Journal
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.postgres.postgres_engine import PostgresEngine
from gracekit.store.postgres.postgres_group import lock_of
from gracekit.store.postgres.postgres_texts import numbered as numbered_text

NAME: Final = "postgres"
SCHEMA: Final = "bench"
GOALS: Final = {1: Goal(1.3), 32: Goal(1.3), 256: Goal(2.0)}
AT_ONCE: Final = 32
URL: Final = "GRACEKIT_BENCH_URL"
SERVER: Final = {"fsync": "on", "max_connections": "100"}
"""Its settings, which are its defaults."""
DELAYS: Final = {"0 ms": {}, "5 ms": {"commit_delay": "5000", "commit_siblings": "0"}}
"""By how much longer a commit takes, and what makes it so."""

# Found at run time: mypy checks no tests.
servers: Any = import_module("tests.store.postgres")


def start_of(request_id: str) -> Batch:
    """The commit that accepts a task and begins it."""
    batch = Batch(Point.ACCEPT_AND_BEGIN)
    _JOURNAL.add_accept(batch, acceptance(request_id), begin=True)
    return batch


_JOURNAL: Final = Journal(None, Clock(), run_id="a" * 32, service="bench")  # type: ignore[arg-type]  # makes batches alone


class BareWriter:
    """A thread with a connection: one transaction in one pipeline takes all that waits."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Batch, asyncio.Future[None]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> asyncio.Future[None]:
        """Answered when the batch is on disk."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._jobs.put((batch, future))
        return future

    async def stop(self) -> None:
        """Do what waits, and end."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(f"SET search_path = {SCHEMA}")
            cursor = psycopg.RawCursor(connection)
            while (first := self._jobs.get()) is not None:
                jobs = [first]
                jobs += [one for _ in range(self._jobs.qsize()) if (one := self._jobs.get())]
                with connection.pipeline():
                    self._send(cursor, [batch for batch, _ in jobs])
                self._loop.call_soon_threadsafe(_answer, [future for _, future in jobs])

    def _send(self, cursor: psycopg.RawCursor[Any], batches: Sequence[Batch]) -> None:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT pg_advisory_xact_lock({lock_of(SCHEMA)})")
        for batch in batches:
            for statement in batch.statements:
                params = statement.params
                text = numbered_text(statement.sql)
                if statement.of is not None:
                    text = "INSERT INTO content VALUES (currval('task_id_seq'), $1, $2)"
                cursor.execute(text, params, prepare=True)
        for sql, key, number in batches[0].sums:
            cursor.execute(numbered_text(sql), (key, number * len(batches)))
        cursor.execute("COMMIT")


def _answer(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        future.set_result(None)


async def commits(plan: Plan, url: str) -> list[Figure]:
    """p50 of one start, with 1, 32 and 256 that wait."""
    engine = PostgresEngine(url, SCHEMA, process=Process())
    await engine.start()
    writer = BareWriter(url)
    figures = []
    try:
        for waiters, goal in GOALS.items():
            repeats = plan.size({1: 300, 32: 60, 256: 20}[waiters], 2)
            mine = _p50(waiters, repeats, engine.commit, f"c{waiters}")
            theirs = _p50(waiters, repeats, writer.submit, f"b{waiters}")
            (p50,) = await turns(plan.rounds, mine, theirs)
            figures.append(against(NAME, f"p50 with {waiters} waiting", p50, "us", goal))
    finally:
        await writer.stop()
        await engine.stop()
    return figures


def _p50(
    waiters: int, repeats: int, commit: Callable[[Batch], Awaitable[object]], prefix: str
) -> Callable[[], Awaitable[list[float]]]:
    ids = numbered(f"{prefix}x{time.time_ns() % 10**6}x")

    async def measure() -> list[float]:
        taken, _ = await latencies(waiters, repeats, lambda: commit(start_of(next(ids))))
        return [1e6 * quantile(taken, 0.5)]

    return measure


@contextlib.asynccontextmanager
async def _host(number: int, _: Path) -> AsyncIterator[Any]:
    engine = PostgresEngine(os.environ[URL], SCHEMA, process=Process())
    await engine.start()
    ids = numbered(f"h{number}x{time.time_ns() % 10**6}x")

    async def measure(many: int) -> list[float]:
        _, all_s = await latencies(
            AT_ONCE, many // AT_ONCE, lambda: engine.commit(start_of(next(ids)))
        )
        return [many / all_s]

    yield measure
    await engine.stop()


PREPARE: Final = {"host": _host}


def fleets(plan: Plan, delay: str) -> list[Figure]:
    """Commits a second of 1, 2 and 4 hosts together."""
    many = plan.size(4000, AT_ONCE)
    figures = []
    for hosts in (1, 2, 4):
        with contextlib.ExitStack() as stack:
            made = [Child("postgres", "host", n, plan.directory) for n in range(hosts)]
            children = [stack.enter_context(one).ready() for one in made]
            rates = []
            for _ in range(plan.rounds):
                begun = time.perf_counter()
                for child in children:
                    child.ask(many)
                for child in children:
                    child.answer()
                rates.append(hosts * many / (time.perf_counter() - begun))
        case = f"{hosts} hosts, commits of {delay} more"
        figures.append(alone(NAME, case, rates, "tasks/s"))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and tell; 0 also when a goal is missed, which the table shows."""
    options = command_line("python -m benchmarks.postgres", __doc__, "-", ()).parse_args(arguments)
    notes = describe(options.dir)
    for kind in journaled.KINDS:
        notes |= kind.versions()
    print("\n".join(f"- {name}: {value}" for name, value in notes.items()), flush=True)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.dir) as directory:
        plan = Plan(rounds=options.rounds, quick=options.quick, directory=Path(directory))
        for delay, settings in DELAYS.items():
            with servers.Postgres(**SERVER, **settings).running() as server:
                os.environ[URL] = server.url()
                if not settings:
                    figures += asyncio.run(commits(plan, server.url()))
                    figures += journaled.figures(plan, server)
                else:
                    asyncio.run(_made(server.url()))
                figures += fleets(plan, delay)
    print("\n" + "\n".join(lines(figures)))
    if options.json is not None:
        told = {"machine": notes, "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


async def _made(url: str) -> None:
    engine = PostgresEngine(url, SCHEMA, process=Process())
    await engine.start()
    await engine.stop()


if __name__ == "__main__":
    be_quiet()
    sys.exit(main())
