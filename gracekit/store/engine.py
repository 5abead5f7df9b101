"""`Engine`, the contract of all engines; and two of them: a SQLite file, and the same in memory.

The file has one writer thread and one reader thread per process; a commit is
answered after its COMMIT. The engine in memory does the same inline on the
loop's thread, so that virtual time and simulations see no threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from gracekit.errors import StoreBrokenError, StoreClosedError, StoreError, UnknownCommitError
from gracekit.process import Process
from gracekit.store import files
from gracekit.store.batch import Batch, Row, Value
from gracekit.store.commit_times import CommitTimes
from gracekit.store.files import Synchronous
from gracekit.store.group import BatchOutcome, GroupCommit
from gracekit.store.migrate import migrate
from gracekit.store.status import OnStatus, StatusSource, StoreStatus
from gracekit.store.threads import (
    Query,
    ReadHandler,
    WriteHandler,
    limit_pages,
    open_reader,
    open_writer,
    read,
)
from gracekit.store.worker import Worker

Rows = list[list[Row]]


class Queries(Protocol):
    """What answers queries: an `Engine`, or a `StoreReader`."""

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`."""
        ...


class Engine(Protocol):
    """Where rows are kept."""

    @property
    def status(self) -> StoreStatus:
        """Whether the store can be used; a file is never unreachable, and nobody fences its runs.

        While it cannot be used, every commit fails at once with the same words.
        """
        ...

    def on_status(self, callback: OnStatus) -> None:
        """Call *callback* once on the loop for each change, in their order.

        A store that is not reachable now counts as changed: the first call comes soon.
        """

    @property
    def commits(self) -> CommitTimes:
        """How long commits take; the same object for as long as the engine lives."""
        ...

    async def start(self) -> None:
        """Open and migrate.

        Raises:
            ConfigError: the place, the file or its schema cannot be used.
            DependencyError: the disk did not do it.
        """

    async def stop(self) -> None:
        """Answer what was submitted, then close; may be called twice or before `start`."""

    async def commit(self, batch: Batch) -> Rows:
        """Commit *batch*, and return what each statement returned, in their order.

        Raises:
            ConflictError: an `expect` was missed; nothing of the batch was done.
            UnknownCommitError: it may or may not have been done.
            StoreUnreachableError: nothing of the batch was done, and later it may be.
            StoreFinalError: broken or fenced; nothing of the batch was done, or ever will be.
            StoreError: refused, or the database stayed locked; nothing was done.
        """

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        """As `commit`, and already in line, in the order of calls, when it returns.

        Who cancels the future loses the answer; the commit goes on.
        """

    def commit_from_thread(self, batch: Batch, *, timeout_s: float) -> Rows:
        """As `commit`, for a thread that cannot wait for the loop.

        Raises:
            UnknownCommitError: also after *timeout_s* seconds.
        """

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """Read what is committed.

        Raises:
            StoreError: the SQL is wrong, or writes.
        """

    def look_at_files(self) -> None:
        """Break if the files are not those any more that `start` has opened."""


class _Current:
    """Which process this is: to ask the kernel twice a request is 1.5 % of it."""

    pid = os.getpid()

    @classmethod
    def look(cls) -> None:
        """In a forked child, before its code goes on."""
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Current.look)


class SqliteEngine(StatusSource):
    """Rows in a file of this machine, which several processes may share.

    Args:
        path: The database; beside it live `-wal`, `-shm` and `-turn`.
        migrations: SQL texts in order, see `load_migrations`.
        process: Passes the points around each commit.
        synchronous: Level of durable commits; NORMAL lets a power cut take the last ones.
        busy_timeout_s: How long a lock of another program is waited for.
        max_page_count: Pages of 4096 bytes after which the disk counts as full.
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
        self._started = False  # there are threads
        self._open = False  # they take jobs
        self._changing = asyncio.Lock()
        self._files: dict[Path, str] = {}  # those that are open, and what tells each from others
        self._ending: list[Worker[Any, Any]] = []
        self._writer: Worker[Batch, Rows]  # both from start to start
        self._reader: Worker[Query, list[Row]]

    async def start(self) -> None:
        """See `Engine.start`; a second call does nothing."""
        async with self._changing:
            if self._started:
                return
            self._loop = asyncio.get_running_loop()
            self._pid = _Current.pid
            name = self.path.name
            self._writer = Worker(f"{name}-writer", self._open_writer, self.commits)
            self._reader = Worker(f"{name}-reader", self._open_reader)
            try:
                await self._writer.start()
                await self._reader.start()
            except BaseException:
                self._ending += [worker for worker in (self._reader, self._writer) if worker.begun]
                for worker in self._ending:
                    worker.end()
                raise
            self._files = self._open_files()
            self._started = self._open = True

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if _Current.pid != self._pid:
            return  # the threads stayed in the parent
        async with self._changing:
            self._open = False
            if self._started:
                # The writer last: it empties the WAL, which an open reader would prevent.
                self._ending += [self._reader, self._writer]
                self._started = False
            while self._ending:  # also those of a start that was cancelled
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
        """See `Engine.query`; on a connection of its own that can only read."""
        if (refusal := self._closed()) is not None:
            raise refusal
        return await self._reader.ask((sql, params))

    def look_at_files(self) -> None:
        """See `Engine.look_at_files`; by name, as opening them would drop SQLite's locks."""
        found = self._open_files()
        for path, identity in self._files.items():
            if self._open and found.get(path) != identity:
                how = "replaced" if path in found else "removed"
                self._break(
                    StoreBrokenError(
                        f"{path} was {how} while this process had it open: nobody else sees what "
                        "is written to the old file"
                    )
                )
        self._files = found

    def _open_files(self) -> dict[Path, str]:
        named = (self.path.with_name(f"{self.path.name}{suffix}") for suffix in files.OPEN_SUFFIXES)
        return {path: one for path in named if (one := files.identity_of(path)) is not None}

    def _open_writer(self) -> WriteHandler:
        return open_writer(
            self.path,
            self._migrations,
            self._process,
            synchronous=self._synchronous,
            busy_timeout_s=self._busy_timeout_s,
            max_page_count=self._max_page_count,
            on_broken=self._break,
        )

    def _open_reader(self) -> ReadHandler:
        return open_reader(self.path, busy_timeout_s=self._busy_timeout_s, on_broken=self._break)

    def _refusal(self) -> StoreError | None:
        """Why nothing can be committed now; None if it can."""
        return self.status.refusal() or self._closed()

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
    """Rows in memory, changed inline on the loop's thread.

    A commit is done, and its future answered, when `submit` returns; awaiting
    it does not let other tasks run.

    Args:
        migrations: SQL texts in order, see `load_migrations`.
        process: Passes the points around each commit; what it raises there comes
            out of `submit`.
        synchronous: Accepted for likeness; memory has nothing to sync.
        max_page_count: Pages of 4096 bytes after which the memory counts as full.
        connection: A database to share with other engines and to outlive this one,
            as a disk outlives a process; None for a database of its own.
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
        self._lock = threading.Lock()  # commit_from_thread may meet the loop here

    async def start(self) -> None:
        """See `Engine.start`; a second call does nothing."""
        if self._connection is not None:
            return
        self._loop = asyncio.get_running_loop()
        connection = files.open_memory() if self._shared is None else self._shared
        files.set_common(connection)
        migrate(connection, self._migrations, path="the database in memory")
        limit_pages(connection, self._max_page_count)
        self._group = GroupCommit(
            connection, self._process, synchronous=self._synchronous, on_broken=self._break
        )
        self._connection = connection

    async def stop(self) -> None:
        """See `Engine.stop`; a database of its own is gone after it."""
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

    def look_at_files(self) -> None:
        """See `Engine.look_at_files`; there are none."""

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`."""
        with self._lock:
            connection = self._connection
            if connection is None:
                raise StoreClosedError(_NOT_OPEN)
            connection.execute("PRAGMA query_only=ON")
            try:
                outcome = read(connection, (sql, params), self._break)
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
    # The engine's own loop where it has one: in a forked child none is running.
    future: asyncio.Future[Rows] = (loop or asyncio.get_running_loop()).create_future()
    if isinstance(outcome, StoreError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future
