"""Where a store is, and whether this user may read it; `store.location` opens it.

It loads no SQLite.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import Final

from gracekit.config.urls import UrlKind, absolute, file_of, kind_of, shown_url
from gracekit.errors import ConfigError


class StorePlace:
    """Where a store is. This class imports no engine.

    Attributes:
        url: Its URL without secrets, for messages.
        name: Its absolute path as text; None for a store in memory. The transport keeps a mark of
            the store's epoch under this name, which shows when an older copy is put back.
        path: Its absolute path; None for a store in memory.
        run_directory: The directory of its runs' locks, doors and wake-up pipes; None for a store
            in memory, which no other process can open.
    """

    def __init__(self, url: str) -> None:
        self.url: Final = shown_url(url)
        self.path: Final[Path | None] = (
            None if kind_of(url) is UrlKind.MEMORY else absolute(file_of(url))
        )
        self.name: Final = None if self.path is None else str(self.path)
        self.run_directory: Final[Path | None] = (
            None if self.path is None else self.path.with_name(f"{self.path.name}-runs")
        )


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
