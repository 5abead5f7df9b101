"""A read-only view of a store, for the command line; the service may be up or down.

It neither creates nor migrates a database. If the service is down, SQLite creates an
empty `-wal` and a `-shm` beside the store, which the next start of the service uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import apsw

from gracekit.config.urls import file_url
from gracekit.errors import ConfigError, StoreError
from gracekit.store import files
from gracekit.store.batch import Row, Value
from gracekit.store.group import broken_by, is_full
from gracekit.store.migrate import need_version
from gracekit.store.place import check_readable

BUSY_TIMEOUT_S: Final = 5.0
ASK_STEPS: Final = 100_000
"""SQLite steps, about a millisecond's worth, between two calls of `given_up` during a query."""


class StoreReader:
    """Answers queries.

    Args:
        path: The database; it must exist.
        schema: The schema version that it must have.
    """

    def __init__(self, path: Path, *, schema: int) -> None:
        self.path: Final = path.absolute()
        self._schema = schema
        self._connection: apsw.Connection | None = None

    def open(self, *, given_up: Callable[[], bool] | None = None) -> None:
        """Connect; creates and migrates nothing.

        Args:
            given_up: Called about every millisecond while a query runs; if it returns True, the
                query is aborted and fails.

        Raises:
            ConfigError: there is no such file, it is closed to this user, or it is not a store of
                this schema version.
            DependencyError: it cannot be opened.
        """
        if self._connection is not None:
            return
        for suffix in files.OPEN_SUFFIXES:
            check_readable(self.path.with_name(self.path.name + suffix))
        if not self.path.is_file():
            wrong = f"there is no store at {self.path}"
            if self.path.exists():
                wrong = f"{self.path} is no regular file, and a store is one"
            raise ConfigError(
                f"{wrong}: name the service's with --store "
                f"{file_url('/path/to/gracekit-store.db')} or GRACEKIT_STORE_URL"
            )
        real = self.path.parent.resolve() / self.path.name
        connection = files.connect_reader(real, busy_timeout_s=BUSY_TIMEOUT_S)
        try:
            self._check(connection)
            if given_up is not None:
                connection.set_progress_handler(given_up, ASK_STEPS)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _check(self, connection: apsw.Connection) -> None:
        try:
            version = connection.execute("PRAGMA user_version").get
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        except apsw.Error as error:
            if is_full(error, self.path):
                raise broken_by(error, self.path) from error
            raise ConfigError(f"{self.path} cannot be read as a store: {error}") from error
        if not tables and version == 0:
            raise ConfigError(
                f"{self.path} is empty: either its -wal, which holds all data of a new store, was "
                "removed, or no service has started with it yet; see docs/backup.md"
            )
        if not {"run", "task", "tally"} <= tables:
            raise ConfigError(
                f"{self.path} is not a store of gracekit: name the service's store, not its "
                "transport, with --store"
            )
        need_version(version, self._schema, self.path)

    def close(self) -> None:
        """Close the connection; may be called twice or before `open`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(apsw.Error):
                connection.close()

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`; each statement sees its own snapshot."""
        return self.read(sql, *params)

    def read(self, sql: str, *params: Value) -> list[Row]:
        """As `query`, outside a loop; only in the thread that called `open`."""
        if self._connection is None:
            raise StoreError(f"{self.path} is not open; start the reader before using it")
        try:
            return self._connection.execute(sql, params).fetchall()
        except apsw.Error as error:
            raise StoreError(f"{self.path} cannot be read: {error}") from error
