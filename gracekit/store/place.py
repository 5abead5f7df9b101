"""Where a store is, and whether this user may read it; `store.location` opens it.

It loads no SQLite.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import Final

from gracekit.config.postgres_url import SCHEMA_OPTION, PostgresUrl, read_postgres_url
from gracekit.config.settings import Settings
from gracekit.config.urls import UrlKind, absolute, file_of, kind_of, shown_url
from gracekit.errors import ConfigError

RUN_DIRECTORY: Final = "gracekit-runs"
"""Default of the run directory where no file is beside it."""


class StorePlace:
    """Where a store is. This class imports no engine.

    Attributes:
        url: Its URL without secrets, for messages.
        is_memory: Whether it is the memory of one process, which no other process can open.
        path: The absolute path of its file; None if it is not in a file.
        postgres: What its URL names; None if it is not in PostgreSQL.
        name: Its path, or server, database and schema, as text; None for a store in memory. The
            transport keeps a mark of the store's epoch under this name, which shows when an older
            copy is put back.
        run_directory: The directory of this host's runs: their locks, doors, wake-up pipes and the
            mark; None for a store in memory.
    """

    def __init__(self, settings: Settings) -> None:
        url = settings.store_url
        kind = kind_of(url)
        self.url: Final = shown_url(url)
        self.is_memory: Final = kind is UrlKind.MEMORY
        self.path: Final[Path | None] = absolute(file_of(url)) if kind is UrlKind.FILE else None
        self.postgres: Final[PostgresUrl | None] = (
            read_postgres_url(url) if kind is UrlKind.DATABASE else None
        )
        self.name: Final[str | None] = None if self.is_memory else self._name()
        self.run_directory: Final[Path | None] = (
            None if self.is_memory else self._run_directory(settings.run_directory)
        )

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may use it, too."""
        return self.postgres is not None

    def _name(self) -> str:
        return str(self.path) if self.postgres is None else self.postgres.name

    def _run_directory(self, named: str | None) -> Path:
        if self.path is not None:
            return self.path.with_name(f"{self.path.name}-runs")
        assert self.postgres is not None
        # A directory for each store: the mark of one would make another one look like a copy.
        store = self.postgres.name.rpartition("/")[2].replace(f"?{SCHEMA_OPTION}=", ".")
        return absolute(Path(named or RUN_DIRECTORY)) / store


def check_readable(path: Path) -> None:
    """Check that this user may read the file or directory at *path*, if it exists.

    Raises:
        ConfigError: it, or a directory above it, is closed to this user; the message names it, its
            owner, and the user to run as.
    """
    real = Path(os.path.realpath(path.parent)) / path.name
    for one in (*reversed(real.parents), real):
        try:
            info = one.stat()
        except (FileNotFoundError, NotADirectoryError):
            return
        is_directory = stat.S_ISDIR(info.st_mode)
        need = (os.X_OK if is_directory else 0) | (os.R_OK if one == real else 0)
        if not os.access(one, need):
            raise _closed(one, info.st_uid, "enter" if is_directory else "read")


def _closed(path: Path, owner: int, step: str) -> ConfigError:
    me = os.geteuid()
    remedy = f"run: chmod u+rX {shlex.quote(str(path))}" if owner == me else run_as(owner)
    return ConfigError(f"{path} belongs to uid {owner}, and uid {me} may not {step} it; {remedy}")


def run_as(uid: int) -> str:
    """Advise the user to run as the file's owner, the remedy that changes no file."""
    return f"run as uid {uid}, for example by: sudo -u '#{uid}'"
