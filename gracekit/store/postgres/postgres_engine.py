"""The engine of PostgreSQL: one thread that commits, one that reads, a connection for each.

A lost connection is replaced at once. If the server cannot be reached, the store is UNREACHABLE:
all commits fail at once, and the writing thread goes on trying. The store is reachable again when
the lock was granted on a new connection. Then no transaction of a lost one is under way any more,
so whatever is read now is what became of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import psycopg

from gracekit import backoff
from gracekit.errors import (
    StoreBrokenError,
    StoreError,
    StoreFencedError,
    StoreLockedError,
    StoreUnreachableError,
    UnknownCommitError,
)
from gracekit.process import Process
from gracekit.store.batch import Batch, BatchOutcome, Row, Value, caused
from gracekit.store.engine import Aside
from gracekit.store.migrate import load_migrations
from gracekit.store.postgres.postgres_aside import PostgresAside, keep_aside
from gracekit.store.postgres.postgres_group import (
    PostgresGroup,
    ServerClock,
    end_frozen,
    lock_of,
    take_over,
)
from gracekit.store.postgres.postgres_link import PostgresLink, shown
from gracekit.store.postgres.postgres_migrate import POSTGRES_MIGRATIONS, migrate_store
from gracekit.store.postgres.postgres_server import Origins, check_server
from gracekit.store.postgres.sqlstates import ErrorKind, error_kind, start_error, text_of
from gracekit.store.state import StatusSource, StoreState
from gracekit.store.threaded import Query, ThreadedEngine

PATIENCE_S: Final = 10.0
"""From its submission a batch waits so long for locks of others."""

IDENTITY: Final = """
SELECT store_id, (SELECT system_identifier FROM pg_control_system()), current_database(),
    current_schema() FROM meta"""


class PostgresEngine(ThreadedEngine):
    """A schema in a database of PostgreSQL, which runs of several hosts may share.

    Args:
        url: Of the database, as libpq takes it.
        schema: In which the tables are.
        process: Its `reach` is called before and after each commit.
        migrations: SQL texts in order, see `load_migrations`; None for those of gracekit.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        *,
        process: Process,
        migrations: Sequence[str] | None = None,
    ) -> None:
        super().__init__(shown(url, schema), schema, patience_s=PATIENCE_S)
        self._url = url
        self._schema = schema
        self._process = process
        self._clock = ServerClock()
        self._origins = Origins()
        self._migrations = (
            load_migrations(POSTGRES_MIGRATIONS) if migrations is None else tuple(migrations)
        )

    def look_at_files(self) -> None:
        """See `Engine.look_at_files`; there are no files, and the engine does not know."""

    def wall(self) -> float:
        """Seconds since the epoch, by the clock of the server; from any thread, once started."""
        return self._clock.wall()

    def keep_aside(self, work: Callable[[Aside], float], *, within_s: float) -> Callable[[], None]:
        """See `Engine.keep_aside`."""

        def opened() -> PostgresAside:
            return PostgresAside(self._url, self._schema, self._origins, within_s=within_s)

        return keep_aside(opened, work, name=f"{self._schema}-aside")

    async def identity(self) -> str | None:
        """See `Engine.identity`: a copy of the database elsewhere is another store."""
        (row,) = await self.query(IDENTITY)
        return " ".join(map(str, row))

    def _open_writer(self) -> PostgresWriter:
        lock = lock_of(self._schema)
        writer = PostgresWriter(
            lambda: PostgresLink(self._url, self._schema),
            lock,
            self._process,
            source=self,
            origins=self._origins,
        )
        try:
            link = writer.open()
            check_server(link)
            migrate_store(link, self._migrations, lock=lock, schema=self._schema, where=self._where)
            take_over(link, lock, self, writer.clock, self._origins)
        except BaseException as error:
            writer.close()
            if isinstance(error, psycopg.Error):
                raise start_error(error, self._where) from error
            raise
        self._clock = writer.clock
        return writer

    def _open_reader(self) -> PostgresQueries:
        return PostgresQueries(
            lambda: PostgresLink(self._url, self._schema, read_only=True), source=self
        )


class _Connected:
    """What both threads do: open a connection when they need one."""

    def __init__(self, connect: Callable[[], PostgresLink], source: StatusSource) -> None:
        self._connect = connect
        self._source = source
        self._link: PostgresLink | None = None

    def await_turn(self) -> None:
        """The lock of the store is asked for in each transaction."""

    @property
    def pause_s(self) -> float | None:
        """See `Handler.pause_s`."""
        return None

    def mend(self) -> None:
        """See `Handler.mend`."""

    def open(self) -> PostgresLink:
        """The connection; a new one if it is lost, or was never made."""
        if self._link is None or self._link.is_lost:
            self._link = self._connect()
        return self._link

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            self._link.close()


class PostgresWriter(_Connected):
    """Commits groups, and finds the way back to a server that was away."""

    def __init__(
        self,
        connect: Callable[[], PostgresLink],
        lock: int,
        process: Process,
        source: StatusSource,
        origins: Origins,
    ) -> None:
        super().__init__(connect, source)
        self._origins = origins
        self._lock = lock
        self._process = process
        self.clock: Final = ServerClock()
        self._lost_at: float | None = None

    @property
    def pause_s(self) -> float | None:
        """Seconds to the next try to reach the server."""
        if self._lost_at is None or self._source.status.is_final:
            return None
        return backoff.REACH.after(time.monotonic() - self._lost_at)

    def mend(self) -> None:
        """Try to reach the server; the status says whether that succeeded."""
        try:
            self._reopen()
        except psycopg.Error as error:
            self._note_lost(error)
        except StoreFencedError:
            pass  # the status says it

    def run(self, batches: Sequence[Batch], /) -> Sequence[BatchOutcome]:
        """Commit the group; once more on a new connection if the old one is lost before COMMIT."""
        if (refusal := self._source.status.error) is not None:
            return [type(refusal)(str(refusal)) for _ in batches]
        try:
            try:
                return self._commit(batches)
            except psycopg.Error as error:
                if error_kind(error) is not ErrorKind.UNREACHABLE:
                    raise
                self._reopen()
                return self._commit(batches)
        except psycopg.Error as error:
            return [caused(one, error) for one in self._refused(error, len(batches))]
        except UnknownCommitError as error:
            self._note_lost(error)
            self.mend()  # waits until the lost transaction has ended: its rows can be read then
            return [caused(UnknownCommitError(str(error)), error) for _ in batches]
        except StoreFencedError as error:
            self._roll_back()
            return [StoreFencedError(str(error)) for _ in batches]
        except BaseException:
            # A test raises this to simulate a crash: it must leave the store as a real one does.
            self.close()
            raise

    def _commit(self, batches: Sequence[Batch]) -> list[BatchOutcome]:
        if self._link is None or self._link.is_lost:
            self._reopen()
        group = PostgresGroup(self.open(), self._lock, self._process, self._source, self.clock)
        return group.run(batches)

    def _refused(self, error: psycopg.Error, count: int) -> list[StoreError]:
        """Undo a group of which nothing was committed; return the outcomes."""
        self._roll_back()
        text = text_of(error)
        match error_kind(error):
            case ErrorKind.UNREACHABLE:
                lost = self._note_lost(error)
                return [StoreUnreachableError(str(lost)) for _ in range(count)]
            case ErrorKind.BROKEN:
                broken = f"the server of the store cannot write ({text}); mend it, start again"
                self._source.break_(StoreBrokenError(broken))
                return [StoreBrokenError(broken) for _ in range(count)]
            case ErrorKind.AGAIN:
                time.sleep(backoff.REACH.first_s)
                locked = f"nothing was committed: {text}; try again"
                return [StoreLockedError(locked) for _ in range(count)]
        return [StoreError(f"nothing was committed: {text}") for _ in range(count)]

    def _roll_back(self) -> None:
        """End the transaction; on a lost connection the server does it."""
        if self._link is None or self._link.is_lost:
            return
        try:
            self._link.roll_back()
            end_frozen(self._link, self._lock)
        except psycopg.Error:
            self._link.close()

    def _reopen(self) -> None:
        """Reach the server on a new connection, when no transaction of an old one goes on.

        Raises:
            psycopg.Error: that failed.
            StoreFencedError: this run may not act any more.
        """
        self.close()
        link = self.open()
        try:
            take_over(link, self._lock, self._source, self.clock, self._origins)
        except psycopg.Error:
            self._roll_back()
            raise
        self._lost_at = None
        self._source._become(StoreState.REACHABLE)  # noqa: SLF001 - its writer

    def _note_lost(self, error: Exception) -> StoreUnreachableError:
        """The store is unreachable from now on; returns the error for what is refused."""
        self.close()
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        text = text_of(error) if isinstance(error, psycopg.Error) else str(error)
        lost = StoreUnreachableError(
            f"there is no connection to the store ({text}); it is tried again"
        )
        self._source._become(StoreState.UNREACHABLE, lost)  # noqa: SLF001 - its writer
        return lost


class PostgresQueries(_Connected):
    """Answers queries, each of which sees all commits that were made before it."""

    def run(self, queries: Sequence[Query], /) -> Sequence[list[Row] | StoreError]:
        """See `Handler.run`."""
        return [self._answer(sql, params) for sql, params in queries]

    def _answer(self, sql: str, params: Sequence[Value]) -> list[Row] | StoreError:
        # What is read while a lost COMMIT may be under way can be wrong a moment later.
        status = self._source.status
        if status.state is StoreState.UNREACHABLE:
            return StoreUnreachableError(str(status.error))
        try:
            return read(self.open, sql, params)
        except StoreError as error:
            return error


def read(open_link: Callable[[], PostgresLink], sql: str, params: Sequence[Value]) -> list[Row]:
    """Run one query, once more on a new connection if the old one is lost.

    Raises:
        StoreUnreachableError: there is no connection.
        StoreError: the query is refused.
    """
    for is_last in (False, True):
        try:
            return open_link().ask(sql, *params)
        except psycopg.Error as error:
            is_lost = error_kind(error) is ErrorKind.UNREACHABLE and error.sqlstate != _READ_ONLY
            if is_lost and not is_last:
                continue
            kind = StoreUnreachableError if is_lost else StoreError
            raise kind(f"the query was refused: {text_of(error)}: {sql}") from error
        except (ValueError, TypeError) as error:
            raise StoreError(f"the query was refused: {error}: {sql}") from error
    raise AssertionError(sql)


_READ_ONLY: Final = "25006"  # it writes
