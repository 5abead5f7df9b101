"""From the URL of a store to its engine, its reader, and what stands beside its file."""

from __future__ import annotations

from pathlib import Path

from gracekit.errors import ConfigError
from gracekit.process import Process
from gracekit.store.backup import Backup, back_up
from gracekit.store.engine import Engine, MemoryEngine, SqliteEngine
from gracekit.store.files import identity_of
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.place import StorePlace
from gracekit.store.reader import StoreReader
from gracekit.store.wakeup import Wakeups


class StoreLocation(StorePlace):
    """Where a store is, and how to open, read and copy it."""

    @property
    def schema(self) -> int:
        """Version of the tables that this gracekit works with."""
        return len(load_migrations(MIGRATIONS))

    def engine(self, process: Process) -> Engine:
        """The engine of the store; not started."""
        migrations = load_migrations(MIGRATIONS)
        if self.path is None:
            return MemoryEngine(migrations, process=process)
        return SqliteEngine(self.path, migrations, process=process)

    def reader(self) -> StoreReader | None:
        """One that only looks; None for a store in memory."""
        if self.path is None:
            return None
        return StoreReader(self.path, schema=self.schema)

    def back_up(self, target: Path, *, now: float) -> Backup:
        """Copy the store to the new file *target*, see `store.backup.back_up`.

        Raises:
            ConfigError: it is in memory, or nothing may be made at *target*.
            DependencyError: the disk did not do it, or the copy is damaged.
        """
        if self.path is None:
            raise ConfigError(f"{self.url} is the memory of one process, which nobody can copy")
        return back_up(self.path, target, now=now)

    def wakeups(self, run_id: str | None = None) -> Wakeups:
        """Wakes the store's runs; *run_id* can listen by it."""
        return Wakeups(self.run_directory, run_id)

    def identity(self) -> str | None:
        """What tells the store from others on this machine.

        None for one in memory, or not made yet.
        """
        return None if self.path is None else identity_of(self.path)
