"""The bare things that ours is measured against: as little as does the same."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import apsw

Value = str | bytes | int | float | None
Job = tuple[str, Sequence[Value], asyncio.Future[None]]

# The columns of an accepted row, and of its end; no index but the key.
ACCEPTED: Final = (
    "request_id, recipient, service, lane, queue, route, target, namespace, method, version, "
    "args, context, content_hash, on_interrupt, settle_s, resource_kind, resource_id, owner, "
    "accepted_at, expires_at, state, attempts, started_at"
)
SCHEMA: Final = f"""
CREATE TABLE task (id INTEGER PRIMARY KEY, {ACCEPTED}, result, finished_at);
CREATE UNIQUE INDEX task_key ON task (request_id)"""
INSERT: Final = f"INSERT INTO task (id, {ACCEPTED}) VALUES (?{', ?' * 23})"  # noqa: S608 - constants
FINISH: Final = """
UPDATE task SET state = ?, result = ?, finished_at = ?, args = NULL, context = NULL WHERE id = ?"""


class GroupWriter:
    """A thread with a connection: one durable transaction takes all that waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def submit(self, sql: str, params: Sequence[Value]) -> asyncio.Future[None]:
        """Answered when the statement is on disk."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._jobs.put((sql, params, future))
        return future

    async def stop(self) -> None:
        """Do what waits, and end."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        connection = apsw.Connection(str(self._path))
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(SCHEMA)
        execute = connection.cursor().execute
        while (first := self._jobs.get()) is not None:
            jobs = [first]
            jobs += [
                job for _ in range(self._jobs.qsize()) if (job := self._jobs.get()) is not None
            ]
            execute("BEGIN IMMEDIATE")
            for sql, params, _ in jobs:
                execute(sql, params)
            execute("COMMIT")
            self._loop.call_soon_threadsafe(_answer, jobs)
        connection.close()


def _answer(jobs: list[Job]) -> None:
    for _, _, future in jobs:
        future.set_result(None)
