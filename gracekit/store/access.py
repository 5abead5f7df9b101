"""Whether this user may read a file, and whose it is otherwise; loads no SQLite."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from gracekit.errors import ConfigError


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
