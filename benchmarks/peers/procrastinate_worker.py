"""procrastinate: a worker in one process, its jobs and their records in one database.

- PostgreSQL notifies it of new jobs (LISTEN), and it keeps the rows of ended jobs, as by default.
- It fetches one job at a time. A pool of 4 or of 60 connections did not change its rate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from procrastinate import App, PsycopgConnector

from benchmarks.child import Measure, Prepare
from benchmarks.plain import ARGS, SENDER, Count, url_of

KIND: Final = "procrastinate"
CONNECTIONS: Final = 20
BATCH: Final = 500


@contextlib.asynccontextmanager
async def _application(directory: Path, count: Count) -> AsyncIterator[tuple[App, Any]]:
    connector = PsycopgConnector(conninfo=url_of(directory), max_size=CONNECTIONS)
    app = App(connector=connector)
    work = app.task(name="work")(count.work)
    async with app.open_async():
        yield app, work


@contextlib.asynccontextmanager
async def _worker(at_once: int, directory: Path) -> AsyncIterator[Measure]:
    count = Count()
    async with _application(directory, count) as (app, _):
        if not await app.check_connection_async():  # it looks for its tables
            await app.schema_manager.apply_schema_async()
        working = app.run_worker_async(concurrency=at_once, install_signal_handlers=False)
        worker = asyncio.create_task(working)
        yield count.more
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker


@contextlib.asynccontextmanager
async def _sender(_size: int, directory: Path) -> AsyncIterator[Measure]:
    async with _application(directory, Count()) as (_, work):

        async def send(number: int) -> list[float]:
            for begin in range(0, number, BATCH):
                await work.batch_defer_async(*[dict(ARGS)] * min(BATCH, number - begin))
            return []

        yield send


PREPARE: Final[dict[str, Prepare]] = {KIND: _worker, SENDER: _sender}
