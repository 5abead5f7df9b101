"""The records of volumes: the application's own database, beside the store of its service."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import apsw

from gracekit import Found

PATIENCE_S = "GRACEKIT_TEST_PATIENCE_S"
RECORDS = Path("records.db")  # in the working directory of the service
BACKEND = Path("backend")  # there too: a file for each volume that was built
TABLE = """
CREATE TABLE IF NOT EXISTS volume (
    id TEXT PRIMARY KEY, status TEXT NOT NULL, since REAL NOT NULL,
    fence INTEGER NOT NULL DEFAULT 0)"""
TRANSIENT = """
SELECT id, status, since FROM volume WHERE status IN ('creating', 'deleting') AND id > ?
ORDER BY id LIMIT ?"""
WRITE = """
UPDATE volume SET status = ?, since = ?, fence = ? WHERE id = ? AND status = ? AND fence <= ?"""


class VolumeRecords:
    """The application's database, opened anew by each who looks."""

    def __init__(self, path: Path = RECORDS) -> None:
        self._path = path

    @contextlib.contextmanager
    def open(self) -> Iterator[apsw.Connection]:
        connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(round(1000 * float(os.environ.get(PATIENCE_S, "10"))))
            connection.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing by it
            yield connection
        finally:
            connection.close()

    def make(self) -> None:
        """Make the database, which nothing else makes."""
        with contextlib.closing(apsw.Connection(str(self._path))) as connection:
            connection.execute(TABLE)

    def add(self, names: Iterable[str], status: str, *, since: float | None = None) -> None:
        """Add records that have had *status* since that wall time; for an hour by default."""
        at = time.time() - 3600 if since is None else since
        with self.open() as connection, connection:
            connection.executemany(
                "INSERT INTO volume (id, status, since) VALUES (?, ?, ?)",
                [(name, status, at) for name in names],
            )

    def page(self, after: str | None, limit: int) -> list[Found]:
        with self.open() as connection:
            rows = connection.execute(TRANSIENT, (after or "", limit)).fetchall()
        return [Found(name, status, since=since) for name, status, since in rows]

    def write(self, name: str, status: str, *, seen: str, fence: int) -> bool:
        with self.open() as connection:
            connection.execute(WRITE, (status, time.time(), fence, name, seen, fence))
            return connection.changes() == 1

    def begin_again(self, name: str, *, fence: int) -> None:
        """Have it created once more, by whoever has the lease now."""
        with self.open() as connection:
            connection.execute(
                "UPDATE volume SET status = 'creating', since = ?, fence = ? WHERE id = ?",
                (time.time(), fence, name),
            )

    def by_name(self) -> dict[str, str]:
        """The status of each."""
        with self.open() as connection:
            rows = connection.execute("SELECT id, status FROM volume").fetchall()
        return {str(name): str(status) for name, status in rows}
