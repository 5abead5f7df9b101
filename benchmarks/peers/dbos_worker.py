"""DBOS: a workflow without steps on a queue, in one process; queue and records in one database.

- The worker polls its queue every 10 ms. By default it polls once a second, which limits its rate.
- Its pool has 20 connections, which is the default.
- The workflow is a plain function, which runs in a thread: a coroutine took more processor time.
- Each step would add a row to its workflow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from dbos import DBOS, DBOSClient, DBOSConfig

from benchmarks.child import Measure, Prepare
from benchmarks.plain import ARGS, SENDER, Tally, url_of

KIND: Final = "dbos"
QUEUE: Final = "bench"
VERSION: Final = "1"
CONNECTIONS: Final = 20
POLL_S: Final = 0.01


@contextlib.asynccontextmanager
async def _worker(at_once: int, directory: Path) -> AsyncIterator[Measure]:
    tally = Tally()
    config = DBOSConfig(
        name=KIND,
        system_database_url=url_of(directory),
        sys_db_pool_size=CONNECTIONS,
        application_version=VERSION,
        log_level="WARNING",
    )
    DBOS(config=config)

    def work(vm: str, note: str) -> None:  # noqa: ARG001 - as sent
        tally.one()

    DBOS.workflow(name="work")(work)
    DBOS.launch()
    await DBOS.register_queue_async(QUEUE, worker_concurrency=at_once, polling_interval_sec=POLL_S)
    yield tally.more
    await asyncio.to_thread(DBOS.destroy)


@contextlib.asynccontextmanager
async def _sender(_size: int, directory: Path) -> AsyncIterator[Measure]:
    client = DBOSClient(system_database_url=url_of(directory), application_name=KIND)

    async def send(number: int) -> list[float]:
        def all_of_them() -> None:
            for _ in range(number):
                client.enqueue({"queue_name": QUEUE, "workflow_name": "work"}, **ARGS)

        await asyncio.to_thread(all_of_them)
        return []

    yield send
    client.destroy()


PREPARE: Final[dict[str, Prepare]] = {KIND: _worker, SENDER: _sender}
