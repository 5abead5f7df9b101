"""Back up a store while services write it, by SQLite's own backup API.

Copying the main file does not work: recent commits are in the `-wal`, and closing the copied
descriptor would drop the locks of a process that has the store open. The copy is a single
file without `-wal`. It is marked as a copy, so that the first start on it grants fencing tokens
above any that the original may have granted since.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

import apsw
import msgspec

from gracekit.errors import ConfigError, DependencyError
from gracekit.store import files

BUSY_TIMEOUT_S: Final = 10.0

# How file systems without a second name for a file refuse it: FAT, many network ones.
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished copy that passed the integrity check.

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
        store: A store of this gracekit's schema; services may keep using it.
        target: Must not exist; it appears once it is complete, with mode 0600.
        now: Wall time in seconds, written into the copy to mark it as one.

    Raises:
        ConfigError: *target* exists, or no file can be created there.
        DependencyError: the copy failed (a full disk, an I/O error), or it is damaged.
    """
    if os.path.lexists(target):
        raise _taken(target)
    part = target.with_name(f"{target.name}.part")
    _create(part)
    try:
        made = _copy(store, part, now)
        publish(part, target)
    except (apsw.Error, OSError) as error:
        # For a full disk SQLite's message describes the last statement; there was none here.
        why = "the disk is full" if isinstance(error, apsw.FullError) else str(error)
        raise DependencyError(f"{store} could not be copied to {target}: {why}") from error
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            part.with_name(part.name + suffix).unlink(missing_ok=True)
    return Backup(path=target, size=target.stat().st_size, tasks=made[0], schema=made[1])


def _create(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)  # left by a backup that was interrupted
        os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(f"{part} cannot be created: {error.strerror}") from error


def _copy(store: Path, part: Path, now: float) -> tuple[int, int]:
    """Copy and check; return the number of requests, and the version of the schema."""
    real = store.parent.resolve() / store.name
    with (
        contextlib.closing(files.connect_reader(real, busy_timeout_s=BUSY_TIMEOUT_S)) as source,
        contextlib.closing(apsw.Connection(str(part))) as copy,
    ):
        with copy.backup("main", source, "main") as copying:
            copying.step()  # all at once: in steps, each write to the store would restart the copy
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, with nothing beside it
        copy.execute("UPDATE epoch SET copied_at = ?", (now,))
        found = [str(line) for (line,) in copy.execute("PRAGMA integrity_check(10)")]
        if found != ["ok"]:
            raise DependencyError(f"{store} is damaged, and so is its copy: {'; '.join(found[:3])}")
        tasks = copy.execute("SELECT count(*) FROM task").get
        return tasks, copy.execute("PRAGMA user_version").get


def publish(part: Path, target: Path) -> None:
    """Rename the copy *part* to *target*, and sync both to the disk.

    Raises:
        ConfigError: *target* was created by another program meanwhile.
    """
    _sync(part)
    try:
        _move(part, target)
    except FileExistsError:
        raise _taken(target) from None
    _sync(part.parent)


def _move(part: Path, target: Path) -> None:
    """Rename without overwriting: `rename` alone would replace an existing file."""
    try:
        os.link(part, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Reserve the name first: another backup to it then finds that the file exists.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            part.rename(target)
        except OSError:
            target.unlink()
            raise
    else:
        part.unlink()


def _taken(target: Path) -> ConfigError:
    if target.is_dir():
        return ConfigError(f"{target} is a directory; name a file in it: {target}/gracekit.db")
    return ConfigError(f"{target} exists, and is not written over; give another name")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
