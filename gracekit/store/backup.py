"""A copy of a store, taken while services write it: SQLite's own backup.

`cp` of the main file is none: what was committed lately is in the `-wal`, and closing the
copied descriptor would drop the locks of a process that has the store open. The copy is one
file without `-wal`; it says of itself that it is a copy, so that its first start gives tokens
above all that the original may have given since.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from gracekit.errors import ConfigError, DependencyError
from gracekit.store import files

BUSY_TIMEOUT_S: Final = 10.0

# How file systems without a second name for a file refuse it: FAT, many network ones.
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A copy that was made and found whole.

    Attributes:
        size: In bytes.
        tasks: Rows of requests in it.
        schema: Version of its schema.
    """

    path: Path
    size: int
    tasks: int
    schema: int


def back_up(store: Path, target: Path, *, now: float) -> Backup:
    """Copy *store*, as of one moment, to the new file *target*, and check it.

    Args:
        store: A store of this gracekit's schema; services may go on with it.
        target: Must not exist; it appears when it is whole, with mode 0600.
        now: Wall time, for the mark of a copy.

    Raises:
        ConfigError: there is something at *target*, or nothing may be made there.
        DependencyError: the disk did not do it, or the copy is damaged.
    """
    if os.path.lexists(target):
        raise _taken(target)
    part = target.with_name(f"{target.name}.part")
    _create(part)
    try:
        made = _copy(store, part, now)
        publish(part, target)
    except (apsw.Error, OSError) as error:
        # SQLite's own text for a full disk is about the last statement, which was none.
        why = "the disk is full" if isinstance(error, apsw.FullError) else str(error)
        raise DependencyError(f"{store} could not be copied to {target}: {why}") from error
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            part.with_name(part.name + suffix).unlink(missing_ok=True)
    return Backup(path=target, size=target.stat().st_size, tasks=made[0], schema=made[1])


def _create(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)  # of one that was cut short
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(f"{part} cannot be created: {error.strerror}") from error


def _copy(store: Path, part: Path, now: float) -> tuple[int, int]:
    """Rows of requests, and version of the schema."""
    real = store.parent.resolve() / store.name
    with (
        contextlib.closing(files.connect_reader(real, busy_timeout_s=BUSY_TIMEOUT_S)) as source,
        contextlib.closing(apsw.Connection(str(part))) as copy,
    ):
        with copy.backup("main", source, "main") as copying:
            copying.step()  # all at once: a store that is written meanwhile would begin it anew
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, with nothing beside it
        copy.execute("UPDATE epoch SET copied_at = ?", (now,))
        found = [str(line) for (line,) in copy.execute("PRAGMA integrity_check(10)")]
        if found != ["ok"]:
            raise DependencyError(f"{store} is damaged, and so is its copy: {'; '.join(found[:3])}")
        tasks = copy.execute("SELECT count(*) FROM task").get
        return tasks, copy.execute("PRAGMA user_version").get


def publish(part: Path, target: Path) -> None:
    """Give the copy *part* its name *target*, on the disk too.

    Raises:
        ConfigError: the name has been taken meanwhile.
    """
    _sync(part)
    try:
        _move(part, target)
    except FileExistsError:
        raise _taken(target) from None
    _sync(part.parent)


def _move(part: Path, target: Path) -> None:
    """Not by a rename alone, which writes over what is there."""
    try:
        os.link(part, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # The name is ours from here on: whoever comes later finds it taken.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            part.rename(target)
        except OSError:
            target.unlink()
            raise
    else:
        part.unlink()


def _taken(target: Path) -> ConfigError:
    return ConfigError(f"{target} exists, and is not written over; give another name")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
