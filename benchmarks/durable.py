"""A durable start: the accepting commit of the journal against a bare group-commit writer.

Both have a writer thread of their own, write the same values, and answer when
they are on disk (synchronous=FULL). Ours adds what makes a row a promise: a
unique key, the indexes of recovery, the count of the accounts, the turn
between processes, and a check of what each statement did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.bare import INSERT, GroupWriter
from benchmarks.measure import Figure, Goal, Plan, against, latencies, numbered, quantile, turns
from gracekit.clock import Clock
from gracekit.journal.rows import Acceptance, content_hash, to_json
from gracekit.journal.tasks import Journal
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from gracekit.tracker.task import Lane

NAME: Final = "durable"
GOALS: Final = {1: Goal(1.3), 32: Goal(1.3), 256: Goal(2.0)}
ARGS: Final[dict[str, Any]] = {"vm": "vm-1", "note": "x" * 170}  # about 200 bytes of JSON


def run(plan: Plan) -> Iterator[Figure]:
    """p50 and p99 of one start, with 1, 32 and 256 that wait."""
    yield from asyncio.run(_run(plan))


async def _run(plan: Plan) -> list[Figure]:
    engine = SqliteEngine(
        plan.directory / "durable.db", load_migrations(MIGRATIONS), process=Process()
    )
    await engine.start()
    writer = GroupWriter(plan.directory / "durable-bare.db")
    try:
        return [
            figure for waiters in GOALS for figure in await _with(plan, waiters, engine, writer)
        ]
    finally:
        await writer.stop()
        await engine.stop()


async def _with(
    plan: Plan, waiters: int, engine: SqliteEngine, writer: GroupWriter
) -> list[Figure]:
    journal = Journal(engine, Clock(), run_id="a" * 32, service="bench")
    repeats = plan.size({1: 400, 32: 100, 256: 40}[waiters], 2)
    our_ids, bare_ids = numbered(f"o{waiters}x"), iter(range(waiters * 10**6, 10**12))

    async def start() -> None:
        batch = Batch(Point.ACCEPT_AND_BEGIN)
        journal.add_accept(batch, acceptance(next(our_ids)), begin=True)
        await journal.commit(batch)

    async def write() -> None:
        number = next(bare_ids)
        await writer.submit(INSERT, (number, *bare_row(f"{number:032}")))

    async def ours() -> list[float]:
        return _percentiles((await latencies(waiters, repeats, start))[0])

    async def bare() -> list[float]:
        return _percentiles((await latencies(waiters, repeats, write))[0])

    p50, p99 = await turns(plan.rounds, ours, bare)
    return [
        against(NAME, f"p50 with {waiters} waiting", p50, "us", GOALS[waiters]),
        against(NAME, f"p99 with {waiters} waiting", p99, "us"),
    ]


def _percentiles(taken: list[float]) -> list[float]:
    return [1e6 * quantile(taken, 0.5), 1e6 * quantile(taken, 0.99)]


def acceptance(request_id: str) -> Acceptance:
    """A cast with 200 bytes of arguments."""
    return Acceptance(
        request_id=request_id,
        recipient="",
        lane=Lane.REQUESTS,
        queue="bench",
        route="shared",
        target="",
        namespace=None,
        method="work",
        version="1.0",
        args=ARGS,
        context={},
        on_interrupt="error",
        settle_s=10.0,
        resource=None,
        reply=None,
        expires_at=None,
    )


def bare_row(request_id: str) -> tuple[Any, ...]:
    """The values that the journal writes for `acceptance`, made as it makes them."""
    now = time.time()
    names = (request_id, "", "bench", "requests", "bench", "shared", "", None, "work", "1.0")
    made = (to_json(ARGS), to_json({}), content_hash(None, "work", "1.0", ARGS))
    return (*names, *made, "error", 10.0, None, None, "a" * 32, now, None, "running", 1, now)
