"""An engine's two threads, and what they do: one writes, one only reads.

A thread takes all waiting jobs, passes them to its handler as one group, and answers them with a
single wake-up of the loop. A lone job is done at once: the thread does not wait for more to come.
Jobs that another program's lock refuses are retried.

Only the threads refer to the handlers and their connections. So a forked child, which
has no such threads, never closes a connection, which could checkpoint a database that
its parent is writing. The writer lock is an exception: its engine asks whether it is held.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import apsw

from gracekit.errors import (
    DependencyError,
    StoreBrokenError,
    StoreError,
    StoreLockedError,
    UnknownCommitError,
)
from gracekit.process import Process
from gracekit.store import files
from gracekit.store.batch import Batch, Row, Value
from gracekit.store.commit_times import CommitTimes
from gracekit.store.files import Synchronous
from gracekit.store.group import DISK_ERRORS, BatchOutcome, GroupCommit, broken_by
from gracekit.store.migrate import check_alone, migrate
from gracekit.store.sqlite.writer_lock import WriterLock
from gracekit.store.state import StatusSource, StoreState

J = TypeVar("J")
A = TypeVar("A")
_Job_contra = TypeVar("_Job_contra", contravariant=True)
_Answer_co = TypeVar("_Answer_co", covariant=True)


class Handler(Protocol[_Job_contra, _Answer_co]):
    """Does a worker's jobs; it is made, used and closed on the worker's thread."""

    def await_turn(self) -> None:
        """Wait until work may begin; called before the waiting jobs are collected."""

    def run(self, jobs: Sequence[_Job_contra], /) -> Sequence[_Answer_co | StoreError]:
        """Do *jobs*; return one outcome for each, in order."""

    def close(self) -> None:
        """Release all resources; must not raise."""


class Worker(Generic[J, A]):
    """One thread and its queue of jobs; can be started and stopped once.

    Args:
        name: Of the thread.
        open_handler: Called on the thread; `start` raises what it raises.
        times: Records how long each group of jobs took; None to record nothing.
        patience_s: Seconds from the submission of a job for which it is tried again.

    Attributes:
        begun: Whether the thread was ever started.
    """

    def __init__(
        self,
        name: str,
        open_handler: Callable[[], Handler[J, A]],
        times: CommitTimes | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._open_handler = open_handler
        self._patience_s = patience_s
        self._times = times
        self._queue: queue.SimpleQueue[_Job[J, A] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.begun = False

    async def start(self) -> None:
        """Start the thread, and wait until its handler is open.

        If this is cancelled, call `stop` nevertheless: the thread runs on.
        """
        self._thread.start()
        self.begun = True
        await self._opened

    def end(self) -> None:
        """Ask the thread to finish the queued jobs and end; does not wait for it."""
        self._queue.put(None)

    async def stop(self) -> None:
        """As `end`, and wait until all jobs are answered and the handler is closed.

        May be called twice.
        """
        self.end()
        await asyncio.wait([self._ended])

    def ask(self, job: J) -> asyncio.Future[A]:
        """Queue a job, from the loop's thread."""
        waiter: asyncio.Future[A] = self._loop.create_future()
        self._queue.put((job, waiter, self._now()))
        return waiter

    def put(self, job: J, waiter: concurrent.futures.Future[A]) -> None:
        """Queue a job from any thread; *waiter* is answered directly from the worker's thread."""
        self._queue.put((job, waiter, self._now()))

    def _now(self) -> float:
        return 0.0 if self._times is None else self._times.now()

    def _main(self) -> None:
        try:
            handler = self._open_handler()
        except BaseException as error:  # noqa: BLE001 - raised again by start()
            self._post(_settle, self._opened, error)
        else:
            self._post(_settle, self._opened, None)
            self._serve(handler)
        self._post(_settle, self._ended, None)

    def _serve(self, handler: Handler[J, A]) -> None:
        jobs: list[_Job[J, A]] = []  # the oldest first
        last = False
        while jobs or not last:
            if not jobs:
                if (first := self._queue.get()) is None:
                    break
                jobs = [first]
            if self._times is not None:
                self._times.begin(jobs[0][2])
            try:
                handler.await_turn()
            except OSError as error:
                lost = f"the store has no -writer file: {error}"
                jobs = self._answer(jobs, [StoreError(lost) for _ in jobs])
                continue
            last = self._take(jobs) or last
            jobs = self._answer(jobs, _run(handler, [job[0] for job in jobs]))
        handler.close()

    def _take(self, jobs: list[_Job[J, A]]) -> bool:
        """Add all waiting jobs to *jobs*; returns whether a stop was queued too."""
        for _ in range(self._queue.qsize()):
            item = self._queue.get_nowait()
            if item is None:
                return True
            jobs.append(item)
        return False

    def _answer(
        self, jobs: list[_Job[J, A]], outcomes: Sequence[A | StoreError]
    ) -> list[_Job[J, A]]:
        """Answer the jobs, except those to try again, which are returned."""
        ended, again, refused = list[tuple[_Waiter[A], A | StoreError]](), list[_Job[J, A]](), True
        for job, outcome in zip(jobs, outcomes, strict=True):
            is_locked = isinstance(outcome, StoreLockedError)
            if is_locked and self._now() - job[2] < self._patience_s:
                again.append(job)
                continue
            ended.append((job[1], outcome))
            refused &= is_locked
        if ended and self._times is not None:
            self._times.end(locked=refused)
        for waiter, outcome in ended:
            # Directly, not through the loop: the loop's own thread may be blocked on this waiter.
            if isinstance(waiter, concurrent.futures.Future):
                _settle(waiter, outcome)
        self._post(_settle_all, ended)
        return again

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        # If the loop is closed, nothing waits for the answer; the commit is done nevertheless.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


_Waiter = asyncio.Future[A] | concurrent.futures.Future[A]
_Job = tuple[J, _Waiter[A], float]
"""A job, the waiter for its answer, and the time of its submission."""


def _run(handler: Handler[J, A], jobs: Sequence[J]) -> Sequence[A | StoreError]:
    try:
        return handler.run(jobs)
    except BaseException as error:  # noqa: BLE001 - the thread must go on answering
        return [
            UnknownCommitError(f"the store's thread failed ({error!r}); read the rows again")
            for _ in jobs
        ]


def _settle_all(answers: list[tuple[_Waiter[A], A | StoreError]]) -> None:
    for waiter, outcome in answers:
        _settle(waiter, outcome)


def _settle(waiter: _Waiter[A], outcome: A | BaseException) -> None:
    if waiter.done():  # the waiting code cancelled it, or it was answered from the thread
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)


Query = tuple[str, Sequence[Value]]
OnBroken = Callable[[StoreBrokenError], None]

_CLOSING_TIMEOUT_MS: Final = 1000
_TRY_MS: Final = 250
"""Longest wait for a lock; then another process has its turn, later batches join, and we retry."""


class WriteHandler:
    """Opens, migrates and writes; see `open_writer`."""

    def __init__(
        self,
        connection: apsw.Connection,
        writer_lock: WriterLock,
        group: GroupCommit,
        source: StatusSource,
    ) -> None:
        self._connection = connection
        self.writer_lock = writer_lock
        self._group = group
        self._source = source

    def await_turn(self) -> None:
        """Wait until no other process is committing; batches submitted meanwhile join the group."""
        self.writer_lock.take()

    def run(self, batches: Sequence[Batch], /) -> Sequence[BatchOutcome]:
        """Commit the group and let the next process write."""
        try:
            return self._group.run(batches)
        finally:
            self.writer_lock.give()

    def close(self) -> None:
        """Empty the WAL, unless another connection prevents it for 1 s; then close."""
        with contextlib.suppress(apsw.Error):
            if self._source.status.state is not StoreState.BROKEN:
                _empty_wal(self._connection)
            else:
                # After a disk error pages may be bad: leave them in the WAL, where the next start
                # verifies their checksums.
                self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        with contextlib.suppress(apsw.Error):
            self._connection.close()
        self.writer_lock.close()


def open_writer(
    path: Path,
    migrations: Sequence[str],
    process: Process,
    *,
    synchronous: Synchronous,
    busy_timeout_s: float,
    max_page_count: int | None,
    source: StatusSource,
) -> WriteHandler:
    """Check or create the file, connect and migrate, holding the writer lock.

    Without the lock several processes that start at once would get in each other's way.

    Raises:
        ConfigError: the path, the file or its schema cannot be used.
        DependencyError: it cannot be opened, for example by an I/O error.
        StoreError: it is locked, or a migration failed.
    """
    files.check_library(apsw.sqlite_lib_version())
    real = files.prepare_file(path)
    with contextlib.ExitStack() as undo, _translated(real, source.break_):
        writer_lock = files.open_writer_lock(real)
        undo.callback(writer_lock.close)
        writer_lock.take()
        undo.callback(writer_lock.give)
        connection = files.connect_writer(
            real, synchronous=synchronous, busy_timeout_s=busy_timeout_s
        )
        undo.callback(connection.close)
        with _room_for_migration(connection, migrations, real):
            check_room = partial(_check_room, connection, real)
            migrate(connection, migrations, path=real, before_commit=check_room)
        limit_pages(connection, max_page_count)
        group = GroupCommit(connection, process, synchronous=synchronous, source=source)
        connection.set_busy_timeout(min(_TRY_MS, int(busy_timeout_s * 1000)))
        undo.pop_all()
        writer_lock.give()
    return WriteHandler(connection, writer_lock, group, source)


@contextlib.contextmanager
def _room_for_migration(
    connection: apsw.Connection, migrations: Sequence[str], path: Path
) -> Iterator[None]:
    """Empty the WAL before and after a migration, which may write several times what the store has.

    Before, because what is in it could not be moved to the file on a disk that is full then. After,
    also of one for which there was no room, because it would keep its size.
    """
    version: int = connection.execute("PRAGMA user_version").get
    if not 0 < version < len(migrations):
        yield
        return
    check_alone(migrations, version, path)
    _empty_wal(connection)
    try:
        yield
    except apsw.FullError as error:
        _empty_wal(connection)
        raise StoreBrokenError(
            f"{path} could not be migrated to schema version {len(migrations)}: the disk is full, "
            f"and a migration may need up to three times the size of the file "
            f"({path.stat().st_size:,} bytes); nothing was changed: make room, then start again"
        ) from error
    except DISK_ERRORS:
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # see `WriteHandler.close`
        raise
    _empty_wal(connection)


def _empty_wal(connection: apsw.Connection) -> None:
    """Move what is in the WAL to the file, unless a reader prevents it for 1 s, or a full disk."""
    usual_ms: int = connection.execute("PRAGMA busy_timeout").get
    connection.set_busy_timeout(_CLOSING_TIMEOUT_MS)
    with contextlib.suppress(apsw.BusyError, apsw.FullError):
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    connection.set_busy_timeout(usual_ms)


def _check_room(connection: apsw.Connection, path: Path) -> None:
    """Refuse to commit what the file could not take from the WAL; as a full disk does."""
    pages = connection.execute("PRAGMA page_count").get * connection.execute("PRAGMA page_size").get
    if pages - path.stat().st_size > files.free_bytes(path):
        raise apsw.FullError(f"{path} would grow to {pages} bytes")


class ReadHandler:
    """Answers queries; see `open_reader`."""

    def __init__(self, connection: apsw.Connection, on_broken: OnBroken) -> None:
        self._connection = connection
        self._on_broken = on_broken

    def await_turn(self) -> None:
        """Readers never wait: WAL lets them read beside a writer."""

    def run(self, queries: Sequence[Query], /) -> Sequence[list[Row] | StoreError]:
        """Run the queries; each sees all commits that were made before it."""
        return [read(self._connection, query, self._on_broken) for query in queries]

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(apsw.Error):
            self._connection.close()


def open_reader(path: Path, *, busy_timeout_s: float, on_broken: OnBroken) -> ReadHandler:
    """Connect to a file that this process's writer has opened already."""
    real = path.parent.resolve() / path.name
    with _translated(real, on_broken):
        return ReadHandler(files.connect_reader(real, busy_timeout_s=busy_timeout_s), on_broken)


def read(connection: apsw.Connection, query: Query, on_broken: OnBroken) -> list[Row] | StoreError:
    """Run one query; return its rows, or the error, which is not raised."""
    sql, params = query
    try:
        return connection.execute(sql, params).fetchall()
    except (apsw.Error, TypeError, ValueError, OverflowError) as error:
        # ReadOnlyError here means that the SQL writes, not that the disk is read-only.
        if isinstance(error, DISK_ERRORS) and not isinstance(error, apsw.ReadOnlyError):
            broken = broken_by(error, connection)
            on_broken(broken)
            return StoreBrokenError(str(broken))
        refused = StoreError(f"the query was refused: {error}: {sql}")
        refused.__cause__ = error
        return refused


def limit_pages(connection: apsw.Connection, max_page_count: int | None) -> None:
    """Have SQLite report a full disk above so many pages, or above the present size if larger."""
    if max_page_count is not None:
        connection.execute(f"PRAGMA max_page_count={max_page_count}")


@contextlib.contextmanager
def _translated(path: Path, on_broken: OnBroken) -> Iterator[None]:
    """Turn SQLite's errors while opening into gracekit's."""
    try:
        yield
    except DISK_ERRORS as error:
        broken = broken_by(error, path)
        on_broken(broken)
        raise StoreBrokenError(str(broken)) from error
    except apsw.BusyError as error:
        raise StoreLockedError(
            f"{path} stayed locked; end the program that holds a transaction open on it"
        ) from error
    except apsw.Error as error:
        raise DependencyError(f"SQLite cannot open {path}: {error}") from error
