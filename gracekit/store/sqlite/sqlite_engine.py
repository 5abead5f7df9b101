"""Two engines: SQLite in a file and in memory.

The file engine has one writer thread and one reader thread per process; a commit is
answered after its COMMIT. The memory engine does the same inline on the loop's
thread, so that tests in virtual time and simulations need no threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Final

import apsw

from gracekit.errors import StoreBrokenError, StoreClosedError, StoreError
from gracekit.process import Process
from gracekit.store import files
from gracekit.store.batch import Batch, BatchOutcome, Row, Value
from gracekit.store.commit_times import CommitTimes
from gracekit.store.engine import Rows
from gracekit.store.files import Synchronous
from gracekit.store.group import GroupCommit
from gracekit.store.migrate import migrate
from gracekit.store.sqlite.threads import (
    ReadHandler,
    WriteHandler,
    limit_pages,
    open_reader,
    open_writer,
    read,
)
from gracekit.store.sqlite.writer_lock import WriterLock
from gracekit.store.state import StatusSource
from gracekit.store.threaded import ThreadedEngine, answered


class SqliteEngine(ThreadedEngine):
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
        self.path: Final = path.absolute()
        super().__init__(str(self.path), self.path.name, patience_s=busy_timeout_s)
        self._migrations = tuple(migrations)
        self._process = process
        self._synchronous: Synchronous = synchronous
        self._busy_timeout_s = busy_timeout_s
        self._max_page_count = max_page_count
        self._files = files.OpenFiles(self.path, self.commits.now)
        self._writer_lock: WriterLock  # as the writer's thread uses it

    async def identity(self) -> str | None:
        """See `Engine.identity`; until the next boot it is that of the file, under any path."""
        return files.identity_of(self.path)

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

    def _look_once(self) -> None:
        self._files.look()

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


class MemoryEngine(StatusSource):
    """A SQLite database in memory, changed inline on the loop's thread.

    When `submit` returns, the batch is committed and its future is done; awaiting
    the future does not let other tasks run.

    Args:
        migrations: SQL texts in order, see `load_migrations`.
        process: Its `reach` is called before and after each commit; `submit` raises
            what `reach` raises.
        max_page_count: Pages of 4096 bytes after which the memory is treated as full.
        connection: A database that is shared with other engines and stays open after
            `stop`, as a disk outlives a process; None for a private database.
    """

    def __init__(
        self,
        migrations: Sequence[str],
        *,
        process: Process,
        max_page_count: int | None = None,
        connection: apsw.Connection | None = None,
    ) -> None:
        super().__init__()
        self.commits = CommitTimes()
        self._migrations = tuple(migrations)
        self._process = process
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
        self._group = GroupCommit(connection, self._process, synchronous="FULL", source=self)
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
        return answered(self._run(batch), self._loop)

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
