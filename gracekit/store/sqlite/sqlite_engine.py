"""Two engines: SQLite in a file and in memory.

The file engine has one writer thread and one reader thread per process; a commit is
answered after its COMMIT. The memory engine does the same inline on the loop's
thread, so that tests in virtual time and simulations need no threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Final

import apsw

from gracekit.errors import StoreBrokenError, StoreClosedError, StoreError, UnknownCommitError
from gracekit.process import Process
from gracekit.store import files
from gracekit.store.batch import Batch, Row, Value
from gracekit.store.commit_times import CommitTimes
from gracekit.store.engine import Rows
from gracekit.store.files import Synchronous
from gracekit.store.group import BatchOutcome, GroupCommit
from gracekit.store.migrate import migrate
from gracekit.store.sqlite.threads import (
    Query,
    ReadHandler,
    WriteHandler,
    limit_pages,
    open_reader,
    open_writer,
    read,
)
from gracekit.store.sqlite.writer_lock import WriterLock
from gracekit.store.state import StatusSource
from gracekit.store.worker import Worker


class _Current:
    """The id of this process, cached: two calls of `getpid` cost 1.5 % of a request."""

    pid = os.getpid()

    @classmethod
    def look(cls) -> None:
        """Refresh it; called in a forked child before its own code runs."""
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Current.look)


class SqliteEngine(StatusSource):
    """A SQLite file on this machine, which several processes may share.

    Args:
        path: The database file; `-wal`, `-shm` and `-writer` are beside it.
        migrations: SQL texts in order, see `load_migrations`.
        process: Its `reach` is called before and after each commit.
        synchronous: Level of durable commits; with NORMAL a power cut may lose the last ones.
        busy_timeout_s: Seconds from its submission that a batch waits for another program's lock.
        max_page_count: Pages of 4096 bytes after which the disk is treated as full.
    """

    def __init__(
        self,
        path: Path,
        migrations: Sequence[str],
        *,
        process: Process,
        synchronous: Synchronous = "FULL",
        busy_timeout_s: float = 10.0,
        max_page_count: int | None = None,
    ) -> None:
        super().__init__()
        self.path: Final = path.absolute()
        self.commits: Final = CommitTimes()
        self._migrations = tuple(migrations)
        self._process = process
        self._synchronous: Synchronous = synchronous
        self._busy_timeout_s = busy_timeout_s
        self._max_page_count = max_page_count
        self._pid = _Current.pid
        self._started = False  # the threads exist
        self._open = False  # jobs are accepted
        self._changing = asyncio.Lock()
        self._files = files.OpenFiles(self.path, self.commits.now)
        self._writer_lock: WriterLock  # as the writer's thread uses it
        self._ending: list[Worker[Any, Any]] = []
        self._writer: Worker[Batch, Rows]  # both are replaced by each start
        self._reader: Worker[Query, list[Row]]

    async def start(self) -> None:
        """See `Engine.start`; a second call does nothing."""
        async with self._changing:
            if self._started:
                return
            self._loop = asyncio.get_running_loop()
            self._pid = _Current.pid
            self.guarded = None
            name = self.path.name
            self._writer = Worker(
                f"{name}-writer", self._open_writer, self.commits, self._busy_timeout_s
            )
            self._reader = Worker(f"{name}-reader", self._open_reader)
            try:
                await self._writer.start()
                await self._reader.start()
            except BaseException:
                self._ending += [worker for worker in (self._reader, self._writer) if worker.begun]
                for worker in self._ending:
                    worker.end()
                raise
            self._files.look()
            self._started = self._open = True

    async def identity(self) -> str | None:
        """See `Engine.identity`; until the next boot it is that of the file, under any path."""
        return files.identity_of(self.path)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if _Current.pid != self._pid:
            return  # in a forked child: the threads exist only in the parent
        async with self._changing:
            self._open = False
            if self._started:
                # Stop the writer last: it empties the WAL, which an open reader prevents.
                self._ending += [self._reader, self._writer]
                self._started = False
            while self._ending:  # includes the threads of a start that failed
                await self._ending[0].stop()
                del self._ending[0]

    async def commit(self, batch: Batch) -> Rows:
        """See `Engine.commit`."""
        return await self.submit(batch)

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        """See `Engine.submit`."""
        if (refusal := self._refusal()) is not None:
            return _answered(refusal, self._loop)
        return self._writer.ask(batch)

    def commit_from_thread(self, batch: Batch, *, timeout_s: float) -> Rows:
        """See `Engine.commit_from_thread`."""
        if (refusal := self._refusal()) is not None:
            raise refusal
        future: concurrent.futures.Future[Rows] = concurrent.futures.Future()
        self._writer.put(batch, future)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise UnknownCommitError(
                f"the batch {batch.point.value} was not committed within {timeout_s} s and may "
                f"still be; read the rows again before acting"
            ) from error

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`; runs on a separate read-only connection."""
        if (refusal := self._closed()) is not None:
            raise refusal
        return await self._reader.ask((sql, params))

    def look_at_files(self) -> Hashable | None:
        """See `Engine.look_at_files`.

        It compares by `stat`: opening and closing the files would drop SQLite's locks.
        """
        # Asked before the look: what is written now may be committed long after it was written.
        is_written = self._open and self._writer_lock.is_held()
        for what in self._files.look():
            if self._open:
                self.break_(
                    StoreBrokenError(
                        f"{what} while this process had it open: no other process sees what is "
                        "written to the old file"
                    )
                )
        mark = self._files.mark()
        return None if is_written else mark

    def _open_writer(self) -> WriteHandler:
        handler = open_writer(
            self.path,
            self._migrations,
            self._process,
            synchronous=self._synchronous,
            busy_timeout_s=self._busy_timeout_s,
            max_page_count=self._max_page_count,
            source=self,
        )
        self._writer_lock = handler.writer_lock
        return handler

    def _open_reader(self) -> ReadHandler:
        return open_reader(self.path, busy_timeout_s=self._busy_timeout_s, on_broken=self.break_)

    def _refusal(self) -> StoreError | None:
        """The error for a commit at this moment; None if commits are possible."""
        if self._status.error is not None:
            return self._status.refusal()
        return self._closed()

    def _closed(self) -> StoreError | None:
        if not self._open:
            return StoreClosedError(f"{self.path} is not open; start the store before using it")
        if _Current.pid != self._pid:
            return StoreError(
                f"{self.path} was opened by process {self._pid}, of which process {_Current.pid} "
                f"is a fork; open a store after forking"
            )
        return None


class MemoryEngine(StatusSource):
    """A SQLite database in memory, changed inline on the loop's thread.

    When `submit` returns, the batch is committed and its future is done; awaiting
    the future does not let other tasks run.

    Args:
        migrations: SQL texts in order, see `load_migrations`.
        process: Its `reach` is called before and after each commit; `submit` raises
            what `reach` raises.
        synchronous: Accepted as by `SqliteEngine`; it has no effect in memory.
        max_page_count: Pages of 4096 bytes after which the memory is treated as full.
        connection: A database that is shared with other engines and stays open after
            `stop`, as a disk outlives a process; None for a private database.
    """

    def __init__(
        self,
        migrations: Sequence[str],
        *,
        process: Process,
        synchronous: Synchronous = "FULL",
        max_page_count: int | None = None,
        connection: apsw.Connection | None = None,
    ) -> None:
        super().__init__()
        self.commits = CommitTimes()
        self._migrations = tuple(migrations)
        self._process = process
        self._synchronous: Synchronous = synchronous
        self._max_page_count = max_page_count
        self._shared = connection
        self._connection: apsw.Connection | None = None
        self._group: GroupCommit | None = None
        self._lock = threading.Lock()  # commit_from_thread and the loop may commit at once

    async def start(self) -> None:
        """See `Engine.start`; a second call does nothing."""
        if self._connection is not None:
            return
        self._loop = asyncio.get_running_loop()
        self.guarded = None
        connection = files.open_memory() if self._shared is None else self._shared
        files.set_common(connection)
        migrate(connection, self._migrations, path="the database in memory")
        limit_pages(connection, self._max_page_count)
        self._group = GroupCommit(
            connection, self._process, synchronous=self._synchronous, source=self
        )
        self._connection = connection

    async def identity(self) -> None:
        """See `Engine.identity`."""

    async def stop(self) -> None:
        """See `Engine.stop`; a private database is deleted."""
        connection, self._connection = self._connection, None
        if connection is not None and connection is not self._shared:
            connection.close()

    async def commit(self, batch: Batch) -> Rows:
        """See `Engine.commit`."""
        return await self.submit(batch)

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        """See `Engine.submit`."""
        return _answered(self._run(batch), self._loop)

    def commit_from_thread(self, batch: Batch, *, timeout_s: float) -> Rows:  # noqa: ARG002
        """See `Engine.commit_from_thread`; never waits."""
        outcome = self._run(batch)
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def look_at_files(self) -> Hashable | None:
        """See `Engine.look_at_files`; there are no files, and the mark counts all changed rows."""
        return None if self._connection is None else self._connection.total_changes()

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`."""
        with self._lock:
            connection = self._connection
            if connection is None:
                raise StoreClosedError(_NOT_OPEN)
            connection.execute("PRAGMA query_only=ON")
            try:
                outcome = read(connection, (sql, params), self.break_)
            finally:
                connection.execute("PRAGMA query_only=OFF")
        if isinstance(outcome, StoreError):
            raise outcome
        return outcome

    def _run(self, batch: Batch) -> BatchOutcome:
        with self._lock:
            if self._connection is None or self._group is None:
                return StoreClosedError(_NOT_OPEN)
            self.commits.begin(self.commits.now())
            try:
                return self._group.run([batch])[0]
            finally:
                self.commits.end()


_NOT_OPEN: Final = "the database in memory is not open; start the store before using it"


def _answered(
    outcome: BatchOutcome, loop: asyncio.AbstractEventLoop | None
) -> asyncio.Future[Rows]:
    # Prefer the engine's own loop: in a forked child no loop is running.
    future: asyncio.Future[Rows] = (loop or asyncio.get_running_loop()).create_future()
    if isinstance(outcome, StoreError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future
