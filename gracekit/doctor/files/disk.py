"""Checks of a database's directory: file system, modes, free space. They do not open the file."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gracekit.doctor.finding import Finding, fail, ok, skip, told, warn
from gracekit.errors import ConfigError, DependencyError
from gracekit.exits import ExitCode
from gracekit.process import network_file_system
from gracekit.store import files

MIB: Final = 1024 * 1024
TOO_LITTLE: Final = 32 * MIB
LITTLE: Final = 256 * MIB
LARGE_WAL: Final = 64 * MIB
LARGER_DISK: Final = "give the file a path on a larger disk; a full disk ends a run"


def check_place(path: Path) -> Iterator[Finding]:
    """Check for a local file system, a safe directory, and files of this user with mode 0600."""
    try:
        real = files.check_place(path)
    except ConfigError as error:
        yield from told("place", error)
        return
    except DependencyError as error:
        yield from told("place", error, ExitCode.DEPENDENCY)
        return
    kind = network_file_system(real.parent) or "a local file system"
    ends = [end for end in files.SUFFIXES if _size(real, end) is not None]
    present = [f"its {end}" if end else "the file" for end in ends]
    modes = f", mode 0600 and ours: {', '.join(present)}" if present else ""
    yield ok("place", f"{real.parent} is on {kind}{modes}")


def check_file(path: Path) -> Finding:
    """Check that the file exists or can be created."""
    size = _size(path, "")
    if size is not None:
        return ok("file", f"{path}, {shown_bytes(size)}")
    if os.access(path.parent, os.W_OK | os.X_OK):
        return ok("file", f"{path} is not there yet; the first start makes it")
    return fail(
        "file",
        f"{path} is not there, and uid {os.geteuid()} may not make it in {path.parent}",
        f"run: install -d -m 700 -o {os.geteuid()} {shlex.quote(str(path.parent))}",
    )


def check_directory(path: Path) -> Finding:
    """Check whether other users can write or list the directory."""
    directory = path.parent
    info, quoted = directory.stat(), shlex.quote(str(directory))
    mode = stat.S_IMODE(info.st_mode)
    if not os.access(directory, os.W_OK | os.X_OK):
        mend = (
            f"run doctor as the user of the service: sudo -u '#{info.st_uid}'; if that is uid "
            f"{os.geteuid()}, give the file a path in a directory of that user"
        )
        return fail(
            "directory",
            f"{directory} cannot be written by uid {os.geteuid()}, and SQLite makes files there",
            mend if os.geteuid() else "have it mounted writable",
        )
    if mode & stat.S_IWOTH:
        return fail(
            "directory",
            f"{directory} has mode {mode:04o}: anybody may be the first to make a file that a "
            "service needs there, and so own and read it",
            "give the file a path in a directory of its own: "
            f"mkdir -m 700 {shlex.quote(str(directory / 'gracekit'))}",
        )
    if mode & stat.S_IWGRP:
        return warn(
            "directory",
            f"{directory} has mode {mode:04o}: members of group {info.st_gid} can take the files "
            "away, and put others in their place",
            f"chmod g-w {quoted}, unless that group is this service's alone, as fsGroup of a pod",
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return warn(
            "directory",
            f"{directory} has mode {mode:04o}: others see the names of instances and locks in it",
            f"chmod 700 {quoted}, or a directory of its own",
        )
    return ok("directory", f"{directory} has mode {mode:04o}")


def check_way(path: Path) -> Iterator[Finding]:
    """Check the parent directories: a user who may rename entries there can move the store away."""
    for above in path.parent.resolve().parents:
        info = above.stat()
        open_to_all = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
        if info.st_uid not in {0, os.geteuid()} or open_to_all:
            who = "everybody" if open_to_all else f"uid {info.st_uid}, its owner,"
            yield warn(
                "way",
                f"{who} can move away what is in {above}, and so the directory of {path.name}",
                "give the file a path below directories of root or of the service's user",
            )


def check_room(path: Path) -> Finding:
    """Check free disk space, as a full disk ends a run."""
    free = files.free_bytes(path)
    shown = f"{shown_bytes(free)} free"
    remedy = f"free some, or {LARGER_DISK}"
    if free < TOO_LITTLE:
        seen = f"{shown}, and {shown_bytes(TOO_LITTLE)} are the least"
        return fail("disk space", seen, remedy, ExitCode.DEPENDENCY)
    if free < LITTLE:
        return warn("disk space", f"{shown}, and {shown_bytes(LITTLE)} are wanted", remedy)
    return ok("disk space", shown)


def check_wal(path: Path) -> Finding:
    """Check for a large WAL: a reader with an old snapshot prevents checkpoints."""
    size = _size(path, "-wal")
    if size is None:
        return skip("WAL", "none: the database was closed in good order, or never opened")
    if size > LARGE_WAL:
        return warn(
            "WAL",
            f"{shown_bytes(size)}, and {shown_bytes(LARGE_WAL)} should be enough: a reader that "
            "stays in one transaction keeps it from being emptied",
            "end long-running readers (sqlite3, backups); it is emptied at the next clean stop",
        )
    return ok("WAL", shown_bytes(size))


def shown_bytes(number: float) -> str:
    """`1.2 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:  # noqa: PLR2004 - the step from unit to unit
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _size(path: Path, suffix: str) -> int | None:
    try:
        return path.with_name(path.name + suffix).lstat().st_size
    except OSError:
        return None
