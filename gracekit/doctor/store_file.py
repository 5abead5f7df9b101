"""Checks of a database file: its place, what is inside, and what the retention keeps in it.

They only read, and are bounded in time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import apsw

from gracekit.clock import Clock
from gracekit.config.settings import Settings, variable_name
from gracekit.config.values import duration, format_duration
from gracekit.doctor.finding import Finding, fail, ok, skip, told, warn
from gracekit.errors import ConfigError, DependencyError, GracekitError, StoreError
from gracekit.exits import ExitCode
from gracekit.process import network_file_system
from gracekit.store import files
from gracekit.store.batch import Row, Value

QUICK_CHECK_S: Final = 5.0
BUSY_TIMEOUT_S: Final = 2.0
_STEPS: Final = 10_000  # SQLite steps between two checks of the time
MIB: Final = 1024 * 1024
TOO_LITTLE: Final = 32 * MIB
LITTLE: Final = 256 * MIB
LARGER_DISK: Final = "give the file a path on a larger disk; a full disk ends a run"
LEAST_REQUESTS: Final = 1000
LEAST_S: Final = 3600.0
"""A shorter record, or one of fewer requests, does not tell a rate."""
LONGEST_S: Final = 7 * 86400.0
"""The rate is that of so many seconds at most: a week has busy days and others."""
_DAY_S: Final = 86400.0
_ENDED: Final = "SELECT count(*), min(finished_at) FROM task WHERE finished_at >= ?"
_SIZE: Final = """
SELECT (SELECT count(*) FROM task), page_count * page_size,
    (page_count - freelist_count) * page_size
FROM pragma_page_count, pragma_page_size, pragma_freelist_count"""


class ReadOnlyDatabase:
    """A read-only connection, for one pass of `doctor`; a context manager.

    Raises:
        GracekitError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self._connection: apsw.Connection

    def __enter__(self) -> Self:
        real = self.path.parent.resolve() / self.path.name
        self._connection = files.connect_reader(real, busy_timeout_s=BUSY_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(apsw.Error):
            self._connection.close()

    def read(self, sql: str, *params: Value) -> list[Row]:
        """The rows of a query.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            return self._connection.execute(sql, params).fetchall()
        except apsw.Error as error:
            raise StoreError(f"{self.path} cannot be read: {error}") from error

    def tables(self) -> set[str]:
        """Names of its tables."""
        return {str(name) for (name,) in self.read("SELECT name FROM sqlite_master")}

    def schema(self) -> int:
        """Version of its schema; 0 for a new database, or another program's."""
        return int(str(self.read("PRAGMA user_version")[0][0]))

    def damage(self, within_s: float) -> list[str] | None:
        """The errors that `PRAGMA quick_check` finds; None if it was not done in time."""
        limit = time.monotonic() + within_s
        self._connection.set_progress_handler(lambda: time.monotonic() > limit, _STEPS)
        try:
            found = self._connection.execute("PRAGMA quick_check(10)").fetchall()
        except (apsw.InterruptError, apsw.BusyError):
            return None
        except apsw.Error as error:
            return [str(error)]
        finally:
            self._connection.set_progress_handler(None)
        lines = [str(line) for (line,) in found]
        return [] if lines == ["ok"] else lines


def check_library() -> Iterator[Finding]:
    """Check the version of SQLite in apsw."""
    version = apsw.sqlite_lib_version()
    try:
        files.check_library(version)
    except ConfigError as error:
        yield from told("SQLite", error)
    else:
        yield ok("SQLite", f"{version}, with apsw {apsw.apsw_version()}")


def check_schema(
    look: ReadOnlyDatabase, migrations: Sequence[str], tables: Sequence[str]
) -> Finding:
    """Check that the database has *tables*, and has had these *migrations* and no others."""
    version, known = look.schema(), len(migrations)
    present = look.tables()
    if not present and version == 0:
        return _judge_empty(look.path)
    if present and not set(tables) <= present:
        return fail(
            "schema",
            f"{look.path} is another program's database, or the transport's for the store's",
            "name the right files with GRACEKIT_STORE_URL and GRACEKIT_TRANSPORT_URL",
        )
    if version > known:
        return fail(
            "schema",
            f"version {version}, and this gracekit knows up to {known}",
            "upgrade gracekit here, or use another file; to stay with this version: "
            "docs/releases.md, Go back",
        )
    if version < known:
        return warn(
            "schema",
            f"version {version} (this gracekit writes {known}); to migrate it takes up to "
            f"{shown_bytes(3 * look.path.stat().st_size)} of disk, and "
            f"{shown_bytes(files.free_bytes(look.path))} are free",
            "nothing to do; the next start migrates it; older processes must not be started after "
            "that",
        )
    return ok("schema", f"version {version}, the newest known")


def _judge_empty(path: Path) -> Finding:
    beside = [path.with_name(path.name + suffix) for suffix in files.DIRECTORIES]
    if any(directory.exists() for directory in beside):
        return fail(
            "schema",
            f"{path} is empty, and services have used it: what was in it is lost, or stood in its "
            "-wal, which is gone",
            "stop the service and restore a backup; without one, requests that were accepted are "
            "forgotten at the next start (docs/backup.md)",
        )
    return warn("schema", f"{path} is empty", "nothing: the first start makes its tables")


def check_integrity(look: ReadOnlyDatabase, within_s: float = QUICK_CHECK_S) -> Finding:
    """Run SQLite's quick check."""
    found = look.damage(within_s)
    if found is None:
        return skip(
            "integrity",
            f"quick_check was not done within {format_duration(within_s)}",
            f"run: sqlite3 {look.path} 'PRAGMA quick_check', while the service is down",
        )
    if found:
        return fail(
            "integrity",
            f"{look.path} is damaged: {'; '.join(found[:3])}",
            "stop the service, keep a copy of the file and its -wal, and restore a backup",
            ExitCode.DEPENDENCY,
        )
    return ok("integrity", "quick_check finds nothing wrong")


def unreadable(error: GracekitError) -> Finding:
    """The finding for a file that cannot be opened."""
    return fail("database", str(error), "see the lines above", ExitCode.DEPENDENCY)


# -- the place of the file -------------------------------------------------------------


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
    """Check whether we can write the directory, and its group; `check_place` says who else may."""
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


# -- what the retention keeps ----------------------------------------------------------


def check_retention(look: ReadOnlyDatabase, settings: Settings) -> Finding:
    """Check that the disk has room for what the retention keeps at the present rate."""
    now, check = Clock().wall(), "retention"
    ((ended, first),) = look.read(_ENDED, now - LONGEST_S)
    requests = int(str(ended))
    seconds = 0.0 if first is None else max(0.0, now - float(str(first)))
    seen = f"{requests:,} requests ended in the last {duration(seconds)}"
    if requests < LEAST_REQUESTS or seconds < LEAST_S:
        return ok(check, f"{seen}, which is too little to tell a rate")
    ((rows, size, used),) = (tuple(map(int, map(str, row))) for row in look.read(_SIZE))
    keeps = requests / seconds * settings.retention_s * used / rows
    free = files.free_bytes(look.path)
    seen = (
        f"at the {requests / seconds * _DAY_S:,.0f} requests a day of the last "
        f"{duration(seconds)}, the retention of {format_duration(settings.retention_s)} keeps "
        f"about {shown_bytes(keeps)}; the file has {shown_bytes(size)}, and the file system "
        f"{shown_bytes(free)} free"
    )
    if keeps <= size + free - LITTLE:
        return ok(check, seen)
    return warn(check, seen, f"lower {variable_name('retention_s')}, or {LARGER_DISK}")
