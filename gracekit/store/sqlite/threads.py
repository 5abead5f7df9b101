"""What an engine's two threads do: one writes, one only reads.

Closing a connection could checkpoint a database that another process is writing, so only the
threads refer to the connections (`store.worker`), and a forked child closes its copies (`InForks`).
The writer lock is an exception: its engine asks whether it is held.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final
from weakref import WeakSet

import apsw

from gracekit.errors import DependencyError, StoreBrokenError, StoreError, StoreLockedError
from gracekit.process import Process
from gracekit.store import files
from gracekit.store.batch import Batch, BatchOutcome, Row
from gracekit.store.files import Synchronous
from gracekit.store.group import DISK_ERRORS, GroupCommit, broken_by
from gracekit.store.migrate import migrate
from gracekit.store.sqlite.writer_lock import WriterLock
from gracekit.store.state import StatusSource, StoreState
from gracekit.store.threaded import Query

OnBroken = Callable[[StoreBrokenError], None]

_CLOSING_TIMEOUT_MS: Final = 1000
_TRY_MS: Final = 250
"""Longest wait for a lock; then another process has its turn, later batches join, and we retry."""

_BEFORE_FORK_S: Final = 1.0


class InForks:
    """A connection, of which a forked child closes its copy before it can open the file itself.

    SQLite notes for each file which locks its process has on it. A child has the note, and not the
    locks: beside the copy, its own connection would lock nothing, and other processes would remove
    the WAL that it writes.
    """

    _all: ClassVar[WeakSet[InForks]] = WeakSet()
    _at_rest: ClassVar[threading.local] = threading.local()

    def __init__(self) -> None:
        self.connection: apsw.Connection | None = None
        self.using = threading.Lock()  # while its thread is inside of SQLite
        self._all.add(self)

    @classmethod
    def wait_rest(cls) -> None:
        """Before a fork: what a thread is using could not be closed in the child."""
        cls._at_rest.all = [one for one in [*cls._all] if one.using.acquire(timeout=_BEFORE_FORK_S)]

    @classmethod
    def go_on(cls) -> None:
        """After it, in the parent."""
        for one in cls._at_rest.all:
            one.using.release()

    @classmethod
    def leave_child(cls) -> None:
        """After it, in the child: without a checkpoint, which it could not lock."""
        for one in getattr(cls._at_rest, "all", ()):  # some servers call no hook before a fork
            if one.connection is not None:
                with contextlib.suppress(apsw.Error):  # its thread has closed it
                    one.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                    one.connection.close()


os.register_at_fork(
    before=InForks.wait_rest, after_in_parent=InForks.go_on, after_in_child=InForks.leave_child
)


class FileHandler:
    """A file is never unreachable: there is nothing to mend."""

    pause_s: Final = None

    def mend(self) -> None:
        """See `Handler.mend`."""


class WriteHandler(FileHandler):
    """Opens, migrates and writes; see `open_writer`."""

    def __init__(
        self,
        connection: apsw.Connection,
        writer_lock: WriterLock,
        group: GroupCommit,
        source: StatusSource,
        in_forks: InForks,
    ) -> None:
        self._connection = connection
        self._in_forks = in_forks
        self.writer_lock = writer_lock
        self._group = group
        self._source = source

    def await_turn(self) -> None:
        """Wait until no other process is committing; batches submitted meanwhile join the group."""
        self.writer_lock.take()

    def run(self, batches: Sequence[Batch], /) -> Sequence[BatchOutcome]:
        """Commit the group and let the next process write."""
        try:
            with self._in_forks.using:
                return self._group.run(batches)
        finally:
            self.writer_lock.give()

    def close(self) -> None:
        """Empty the WAL, unless another connection prevents it for 1 s; then close."""
        with self._in_forks.using, contextlib.suppress(apsw.Error):
            if self._source.status.state is not StoreState.BROKEN:
                _empty_wal(self._connection)
            else:
                # After a disk error pages may be bad: leave them in the WAL, where the next start
                # verifies their checksums.
                self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        with self._in_forks.using, contextlib.suppress(apsw.Error):
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
    in_forks = InForks()
    with in_forks.using, contextlib.ExitStack() as undo, _translated(real, source.break_):
        writer_lock = files.open_writer_lock(real)
        undo.callback(writer_lock.close)
        writer_lock.take()
        undo.callback(writer_lock.give)
        connection = files.connect_writer(
            real, synchronous=synchronous, busy_timeout_s=busy_timeout_s
        )
        in_forks.connection = connection
        undo.callback(connection.close)
        with _room_for_migration(connection, migrations, real):
            check_room = partial(_check_room, connection, real)
            migrate(connection, migrations, path=real, before_commit=check_room)
        limit_pages(connection, max_page_count)
        group = GroupCommit(connection, process, synchronous=synchronous, source=source)
        connection.set_busy_timeout(min(_TRY_MS, int(busy_timeout_s * 1000)))
        undo.pop_all()
        writer_lock.give()
    return WriteHandler(connection, writer_lock, group, source, in_forks)


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


class ReadHandler(FileHandler):
    """Answers queries; see `open_reader`."""

    def __init__(self, connection: apsw.Connection, on_broken: OnBroken, in_forks: InForks) -> None:
        self._connection = connection
        self._in_forks = in_forks
        self._on_broken = on_broken

    def await_turn(self) -> None:
        """Readers never wait: WAL lets them read beside a writer."""

    def run(self, queries: Sequence[Query], /) -> Sequence[list[Row] | StoreError]:
        """Run the queries; each sees all commits that were made before it."""
        with self._in_forks.using:
            return [read(self._connection, query, self._on_broken) for query in queries]

    def close(self) -> None:
        """Close the connection."""
        with self._in_forks.using, contextlib.suppress(apsw.Error):
            self._connection.close()


def open_reader(path: Path, *, busy_timeout_s: float, on_broken: OnBroken) -> ReadHandler:
    """Connect to a file that this process's writer has opened already."""
    real = path.parent.resolve() / path.name
    in_forks = InForks()
    with in_forks.using, _translated(real, on_broken):
        in_forks.connection = files.connect_reader(real, busy_timeout_s=busy_timeout_s)
        return ReadHandler(in_forks.connection, on_broken, in_forks)


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
