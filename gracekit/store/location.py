"""From the URL of a store to its engine, its reader, its backup and its wake-up pipes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.store.batch import Row, Value
from gracekit.store.engine import Engine, Queries
from gracekit.store.files import identity_of
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.place import StorePlace
from gracekit.store.sqlite.backup import Backup, back_up
from gracekit.store.sqlite.reader import StoreReader
from gracekit.store.sqlite.sqlite_engine import MemoryEngine, SqliteEngine
from gracekit.store.wakeup import Wakeups


class ReadOnlyStore(Queries, Protocol):
    """A read-only view of a store, as its location makes it."""

    def open(self, *, given_up: Callable[[], bool] | None = None) -> None:
        """Connect to a store of this schema version; change nothing.

        Args:
            given_up: Called from time to time while a query runs; if it returns True, the query is
                aborted and fails.

        Raises:
            ConfigError: there is no such store, or it has another schema version.
            DependencyError: it cannot be opened.
        """

    def close(self) -> None:
        """Close the connection; may be called twice or before `open`."""

    def read(self, sql: str, *params: Value) -> list[Row]:
        """As `query`, outside a loop; only in the thread that called `open`."""
        ...


class StoreLocation(StorePlace):
    """Where a store is, and how to open, read and copy it."""

    @property
    def schema(self) -> int:
        """Schema version of this gracekit."""
        return len(load_migrations(MIGRATIONS))

    def engine(self, process: Process) -> Engine:
        """A new engine for the store, not started."""
        if self.postgres is not None:
            made: Engine = _in_postgres("postgres_engine").PostgresEngine(
                self.postgres.libpq, self.postgres.schema, process=process
            )
            return made
        migrations = load_migrations(MIGRATIONS)
        if self.path is None:
            return MemoryEngine(migrations, process=process)
        return SqliteEngine(self.path, migrations, process=process)

    def reader(self) -> ReadOnlyStore | None:
        """A new read-only view of the store, not started; None for a store in memory."""
        if self.postgres is not None:
            made: ReadOnlyStore = _in_postgres("postgres_reader").PostgresReader(
                self.postgres.libpq, self.postgres.schema
            )
            return made
        return None if self.path is None else StoreReader(self.path, schema=self.schema)

    def back_up(self, target: Path, *, now: float) -> Backup:
        """Copy the store to the new file *target*, see `store.backup.back_up`.

        Raises:
            ConfigError: the store is no file, or *target* exists or cannot be created.
            DependencyError: the copy failed, or it is damaged.
        """
        if self.postgres is not None:
            raise ConfigError(
                f"{self.name} is copied with the tools of PostgreSQL: pg_dump --schema="
                f"{self.postgres.schema} for the store, pg_basebackup for the whole server"
            )
        if self.path is None:
            raise ConfigError(f"{self.url} is the memory of one process, and cannot be copied")
        return back_up(self.path, target, now=now)

    def sql_text(self) -> str:
        """The script that makes the store, for a user who may do that.

        Raises:
            ConfigError: a service makes such a store by itself.
        """
        if self.postgres is None:
            raise ConfigError(f"{self.url} is made by the first start of its service, without SQL")
        made: str = _in_postgres("postgres_migrate").sql_text(
            self.postgres.libpq, self.postgres.schema
        )
        return made

    def wakeups(self, run_id: str | None = None) -> Wakeups:
        """The wake-up pipes of the store's runs; *run_id* names the run that listens, if any."""
        return Wakeups(self.run_directory, run_id)

    def identity(self) -> str | None:
        """A string that identifies the store's file on this machine, see `files.identity_of`.

        None for a store that is in no file, and for one that does not exist yet.
        """
        return None if self.path is None else identity_of(self.path)


def _in_postgres(module: str) -> Any:
    """The *module* of the engine for PostgreSQL, which an extra brings.

    Raises:
        ConfigError: its packages are not installed.
    """
    try:
        return importlib.import_module(f"gracekit.store.postgres.{module}")
    except ImportError as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"a store in PostgreSQL needs a package that is not installed ({why}): "
            "pip install 'gracekit[postgres]' 'psycopg[binary]'"
        ) from error
