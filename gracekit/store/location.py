"""From the URL of a store to its engine, its reader, its backup and its wake-up pipes."""

from __future__ import annotations

from pathlib import Path

from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.store.engine import Engine
from gracekit.store.files import identity_of
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.place import StorePlace
from gracekit.store.sqlite.backup import Backup, back_up
from gracekit.store.sqlite.reader import StoreReader
from gracekit.store.sqlite.sqlite_engine import MemoryEngine, SqliteEngine
from gracekit.store.wakeup import Wakeups

ReadOnlyStore = StoreReader
"""A read-only view of a store, as its location makes it."""


class StoreLocation(StorePlace):
    """Where a store is, and how to open, read and copy it."""

    @property
    def schema(self) -> int:
        """Schema version of this gracekit."""
        return len(load_migrations(MIGRATIONS))

    def engine(self, process: Process) -> Engine:
        """A new engine for the store, not started."""
        migrations = load_migrations(MIGRATIONS)
        if self.path is None:
            return MemoryEngine(migrations, process=process)
        return SqliteEngine(self.path, migrations, process=process)

    def reader(self) -> StoreReader | None:
        """A new read-only view of the store, not started; None for a store in memory."""
        if self.path is None:
            return None
        return StoreReader(self.path, schema=self.schema)

    def back_up(self, target: Path, *, now: float) -> Backup:
        """Copy the store to the new file *target*, see `store.backup.back_up`.

        Raises:
            ConfigError: the store is in memory, or *target* exists or cannot be created.
            DependencyError: the copy failed, or it is damaged.
        """
        if self.path is None:
            raise ConfigError(f"{self.url} is the memory of one process, and cannot be copied")
        return back_up(self.path, target, now=now)

    def wakeups(self, run_id: str | None = None) -> Wakeups:
        """The wake-up pipes of the store's runs; *run_id* names the run that listens, if any."""
        return Wakeups(self.run_directory, run_id)

    def identity(self) -> str | None:
        """A string that identifies the store's file on this machine, see `files.identity_of`.

        None for a store in memory, and for one that does not exist yet.
        """
        return None if self.path is None else identity_of(self.path)
