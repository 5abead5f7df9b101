"""Checks of a database: library, schema, integrity. They only read, and are bounded in time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import apsw

from gracekit.config.values import format_duration
from gracekit.doctor.files import disk
from gracekit.doctor.finding import Finding, fail, ok, skip, told, warn
from gracekit.errors import ConfigError, GracekitError, StoreError
from gracekit.exits import ExitCode
from gracekit.store import files
from gracekit.store.batch import Row, Value
from gracekit.store.migrate import is_alone, living_beside, named

QUICK_CHECK_S: Final = 5.0
BUSY_TIMEOUT_S: Final = 2.0
_STEPS: Final = 10_000  # SQLite steps between two checks of the time


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

    def rows(self, sql: str, *params: Value) -> list[Row]:
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
        return {str(name) for (name,) in self.rows("SELECT name FROM sqlite_master")}

    def schema(self) -> int:
        """Version of its schema; 0 for a new database, or another program's."""
        return int(str(self.rows("PRAGMA user_version")[0][0]))

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
        return _judge_older(look.path, version, migrations)
    return ok("schema", f"version {version}, the newest known")


def _judge_older(path: Path, version: int, migrations: Sequence[str]) -> Finding:
    seen = f"version {version} (this gracekit writes {len(migrations)})"
    remedy = "nothing to do"
    if living := living_beside(path):
        seen += f", and is in use by {named(living)}"
        if is_alone(migrations, version):
            remedy = "stop all of them, for example by SIGTERM; until then a start is refused"
    seen += (
        f"; to migrate it takes up to {disk.shown_bytes(3 * path.stat().st_size)} of disk, and "
        f"{disk.shown_bytes(files.free_bytes(path))} are free"
    )
    return warn(
        "schema",
        seen,
        f"{remedy}; the next start migrates it; older processes must not be started after that",
    )


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
