"""Group commit: one transaction for many batches, each of which may fail alone.

A batch that touches an unexpected number of rows, or that SQLite refuses, is rolled
back to its own savepoint, and the others are committed. After a disk error, or when the
run may not act any more, the whole group fails, and so does each later one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import apsw

from gracekit.errors import (
    ConflictError,
    StoreBrokenError,
    StoreError,
    StoreFencedError,
    StoreLockedError,
    UnknownCommitError,
)
from gracekit.process import Process
from gracekit.store.batch import Batch, BatchOutcome, Row, caused, conflict, passed_of, sums_of
from gracekit.store.files import Synchronous, free_bytes
from gracekit.store.state import StatusSource

# After one of these Linux may have dropped the dirty pages: a second try would report success
# for data that is not on the disk.
DISK_ERRORS: Final = (
    apsw.IOError,
    apsw.FullError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.ReadOnlyError,
)

_LEAST_ROOM: Final = 65536  # bytes, for a -shm and some pages

# Errors of a single batch: its SQL, its rows, or a value that SQLite cannot store.
_BATCH_ERRORS: Final = (apsw.Error, TypeError, ValueError, OverflowError)


class GroupCommit:
    """Commits groups of batches on one connection, from one thread at a time.

    Args:
        connection: Used by this object alone.
        process: Its `reach` is called with each batch's point, before and after the commit.
        synchronous: Level of durable commits; the others are NORMAL.
        source: Has the guard, and gets a final error before its group is answered.
    """

    def __init__(
        self,
        connection: apsw.Connection,
        process: Process,
        *,
        synchronous: Synchronous,
        source: StatusSource,
    ) -> None:
        self._connection = connection
        self._cursor = connection.cursor()
        self._process = process
        self._durable_level: Synchronous = synchronous
        self._level: str | None = None
        self._source = source

    def run(self, batches: Sequence[Batch]) -> list[BatchOutcome]:
        """Commit every batch that can be; return one outcome for each, in order."""
        if (final := self._source.status.error) is not None:
            return [type(final)(str(final)) for _ in batches]
        try:
            outcomes = self._transact(batches)
            passed = passed_of(batches, outcomes)
            for batch in passed:
                self._process.reach(batch.point, "before")
        except apsw.Error as error:
            self._roll_back()
            return self._refuse(batches, error)
        except StoreFencedError as error:
            self._roll_back()
            return [StoreFencedError(str(error)) for _ in batches]
        except BaseException:
            # A test raises this to simulate a crash: it must leave the disk as a real one does.
            self._roll_back()
            raise
        return self._commit(batches, passed, outcomes)

    def _transact(self, batches: Sequence[Batch]) -> list[BatchOutcome]:
        durable = any(batch.durable for batch in batches)
        level = self._durable_level if durable else "NORMAL"
        if level != self._level:
            self._cursor.execute(f"PRAGMA synchronous={level}")
            self._level = level
        self._begin()
        try:
            # First try without savepoints, which would cost a third of the throughput: nearly
            # every batch succeeds.
            outcomes: list[BatchOutcome] = [self._apply(batch) for batch in batches]
            self._add_up(batches)
        except DISK_ERRORS:
            raise
        except (ConflictError, *_BATCH_ERRORS):
            self._roll_back()
        else:
            return outcomes
        self._begin()
        outcomes = [self._attempt(batch) for batch in batches]
        self._add_up(passed_of(batches, outcomes))
        return outcomes

    def _begin(self) -> None:
        """Begin the transaction, and ask first whether this run may act."""
        self._cursor.execute("BEGIN IMMEDIATE")
        guard = self._source.guarded
        if guard is not None and not self._cursor.execute(*guard).fetchall():
            raise self._source.fence()

    def _attempt(self, batch: Batch) -> BatchOutcome:
        execute = self._cursor.execute
        execute("SAVEPOINT batch")
        try:
            rows = self._apply(batch)
        except ConflictError as error:
            outcome: StoreError = error
        except DISK_ERRORS:
            raise
        except _BATCH_ERRORS as error:
            if not self._connection.in_transaction:
                raise
            outcome = StoreError(f"the batch {batch.point.value} was rolled back: {error}")
            outcome.__cause__ = error
        else:
            execute("RELEASE batch")
            return rows
        execute("ROLLBACK TO batch")
        execute("RELEASE batch")
        return outcome

    def _apply(self, batch: Batch) -> list[list[Row]]:
        execute = self._cursor.execute
        results: list[list[Row]] = []
        for index, statement in enumerate(batch.statements):
            sql, params, expect, returns, inserts, after, of = statement
            if after is not None and not results[after]:
                results.append([])
                continue
            if of is not None:
                params = (results[of][0][0], *params)
            cursor = execute(sql, params)
            results.append(
                [(self._connection.last_insert_rowid(),)] if inserts else cursor.fetchall()
            )
            if expect is None:
                continue
            found = len(results[-1]) if returns else self._connection.changes()
            if found != expect:
                raise conflict(batch, index, found)
        return results

    def _add_up(self, batches: Sequence[Batch]) -> None:
        for sql, key, number in sums_of(batches):
            self._cursor.execute(sql, (key, number))

    def _commit(
        self, batches: Sequence[Batch], passed: Sequence[Batch], outcomes: list[BatchOutcome]
    ) -> list[BatchOutcome]:
        if not passed:
            self._roll_back()
            return outcomes
        try:
            self._cursor.execute("COMMIT")
        except apsw.Error as error:
            self._roll_back()
            self._judge(error)
            return [
                caused(
                    UnknownCommitError(
                        f"{error}: it is not known whether the commit holds; "
                        f"read the rows again before acting"
                    ),
                    error,
                )
                for _ in batches
            ]
        for batch in passed:
            self._process.reach(batch.point, "after")
        return outcomes

    def _refuse(self, batches: Sequence[Batch], error: apsw.Error) -> list[BatchOutcome]:
        """Return the outcomes of a group that was rolled back as a whole."""
        broken = self._judge(error)
        if broken is not None:
            return [caused(StoreBrokenError(str(broken)), error) for _ in batches]
        kind = StoreLockedError if isinstance(error, apsw.BusyError) else StoreError
        return [caused(kind(f"nothing was committed: {error}; try again"), error) for _ in batches]

    def _judge(self, error: apsw.Error) -> StoreBrokenError | None:
        """If *error* is a disk error, mark the store as broken; return that error."""
        if not isinstance(error, DISK_ERRORS):
            return None
        broken = broken_by(error, self._connection)
        self._source.break_(broken)
        return broken

    def _roll_back(self) -> None:
        # After some errors SQLite has already ended the transaction.
        if self._connection.in_transaction:
            with contextlib.suppress(apsw.Error):
                self._cursor.execute("ROLLBACK")


def broken_by(error: apsw.Error, file: apsw.Connection | Path) -> StoreBrokenError:
    """The final error to raise for a disk error of *file*, the store or the sqlite transport."""
    name = file.filename or "the database in memory" if isinstance(file, apsw.Connection) else file
    if is_full(error, Path(name)):
        return StoreBrokenError(f"the disk of {name} is full: make room on it, then start again")
    return StoreBrokenError(
        f"{name} cannot be trusted any more ({type(error).__name__}: {error}); check its disk "
        f"and start the service again"
    )


def is_full(error: apsw.Error, file: Path) -> bool:
    """Whether *error* means that the disk is full; of a -shm without room, it is an IOError."""
    may_be = isinstance(error, apsw.IOError | apsw.CantOpenError) and file.exists()
    return isinstance(error, apsw.FullError) or (may_be and free_bytes(file) < _LEAST_ROOM)
