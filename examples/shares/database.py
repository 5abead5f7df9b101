"""The application's own database: one SQLite file with a record of each thing that users see.

The statements that matter are two. `page` reads the records that say that
somebody works on them, a page at a time, in the order of their ids. `write`
changes a status only if the record still has the status that was seen, and only
if no later owner has written to it. Both conditions stand in the WHERE clause of
one UPDATE, so nothing can happen between the comparison and the change.

A connection is opened for each statement. The functions may therefore be called
in any thread.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

TRANSIENT: Final[Mapping[str, frozenset[str]]] = {
    "share_server": frozenset({
        "creating", "deleting", "managing", "unmanaging",
        "server_network_change", "server_migrating", "server_migrating_to",
    }),
    "share": frozenset({
        "creating", "creating_from_snapshot", "extending", "shrinking",
        "deleting", "deferred_deleting", "manage_starting", "unmanage_starting",
        "restoring", "reverting", "replication_change", "backup_creating", "backup_restoring",
        "server_migrating", "server_migrating_to",
    }),
    "replica": frozenset({"creating", "deleting"}),
    "snapshot": frozenset({
        "creating", "deleting", "manage_starting", "unmanage_starting", "restoring",
    }),
    "share_group": frozenset({"creating", "deleting"}),
    "share_group_snapshot": frozenset({"creating", "deleting"}),
    "backup": frozenset({"creating", "deleting", "restoring"}),
}  # fmt: skip
"""By kind, the statuses that say that somebody works on it; `ensuring` is not among them."""

SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS resource (
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        host TEXT NOT NULL,                 -- whose manager looks after it
        status TEXT NOT NULL,
        updated_at REAL NOT NULL,           -- when the status last changed
        task_state TEXT,                    -- step of a longer work; NULL for none
        fence INTEGER NOT NULL DEFAULT 0,   -- the highest token that has written here
        parent TEXT,                        -- what it needs: of a share its server, and so on
        size INTEGER NOT NULL DEFAULT 0,
        export_locations TEXT NOT NULL DEFAULT '[]',
        PRIMARY KEY (kind, id)
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS resource_of_host ON resource (kind, host, id, status);
"""

INSERT: Final = """
    INSERT INTO resource
    VALUES (:kind, :id, :host, :status, :updated_at, :task_state, :fence, :parent, :size,
            :export_locations)
"""

PAGE: Final = """
    SELECT * FROM resource
    WHERE kind = :kind AND host = :host AND id > :after
      AND status IN (SELECT value FROM json_each(:statuses))
    ORDER BY id LIMIT :limit
"""

WRITE: Final = """
    UPDATE resource
    SET status = :status,
        updated_at = CASE status WHEN :status THEN updated_at ELSE :now END,
        fence = coalesce(:fence, fence),
        size = coalesce(:size, size),
        export_locations = coalesce(:export_locations, export_locations)
    WHERE kind = :kind AND id = :id AND status = :seen AND fence <= coalesce(:fence, fence)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the database has of one thing; the columns are explained in `SCHEMA`."""

    kind: str
    id: str
    host: str
    status: str
    updated_at: float = field(default_factory=time.time)
    task_state: str | None = None
    fence: int = 0
    parent: str | None = None
    size: int = 0
    export_locations: Sequence[str] = ()


class Database:
    """The records, in the file *path*."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        """Make the file and its tables where they are missing."""
        with self._connected() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)

    # -- reading ------------------------------------------------------------------------

    def get(self, kind: str, id_: str) -> Record | None:
        """One record; None if there is none."""
        rows = self._read("SELECT * FROM resource WHERE kind = ? AND id = ?", (kind, id_))
        return rows[0] if rows else None

    def all(self) -> list[Record]:
        """Every record, by kind and id."""
        return self._read("SELECT * FROM resource ORDER BY kind, id", ())

    def page(
        self, kind: str, host: str, statuses: frozenset[str], after: str | None, limit: int
    ) -> list[Record]:
        """A page of the records of *host* in one of *statuses*, in the order of ids.

        *after* is the last id of the page before, None for the first page.
        """
        given = {"kind": kind, "host": host, "after": after or "", "limit": limit}
        return self._read(PAGE, given | {"statuses": json.dumps(sorted(statuses))})

    # -- writing ------------------------------------------------------------------------

    def insert(self, record: Record) -> None:
        """Add a new record."""
        exports = {"export_locations": json.dumps(record.export_locations)}
        with self._connected() as connection:
            connection.execute(INSERT, asdict(record) | exports)

    def write(
        self,
        kind: str,
        id_: str,
        *,
        seen: str,
        status: str,
        fence: int | None = None,
        facts: Mapping[str, object] = MappingProxyType({}),
    ) -> bool:
        """Write *status* if the record still says *seen*, and no later owner has written to it.

        Args:
            kind: As in the record.
            id_: As in the record.
            seen: The status that the caller has acted upon.
            status: The new one. The same as *seen* claims the record: from then on a lower token
                is refused.
            fence: The fencing token of the process that writes; None for a user's request, which
                has no lease, and which the comparison of the status protects.
            facts: Further columns, `size` and `export_locations`; those that are missing stay.

        Returns:
            Whether it was written.
        """
        exports = facts.get("export_locations")
        given = {
            "kind": kind,
            "id": id_,
            "seen": seen,
            "status": status,
            "fence": fence,
            "now": time.time(),
            "size": facts.get("size"),
            "export_locations": None if exports is None else json.dumps(exports),
        }
        with self._connected() as connection:
            return connection.execute(WRITE, given).rowcount == 1

    # -- connections --------------------------------------------------------------------

    def _read(self, sql: str, given: Sequence[object] | Mapping[str, object]) -> list[Record]:
        with self._connected() as connection:
            connection.row_factory = sqlite3.Row
            return [_record(row) for row in connection.execute(sql, given)]

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that commits each statement by itself."""
        connection = sqlite3.connect(self.path, timeout=10, isolation_level=None)
        try:
            yield connection
        finally:
            connection.close()


def _record(row: sqlite3.Row) -> Record:
    columns = {name: row[name] for name in row.keys()}  # noqa: SIM118 - a Row iterates over values
    return Record(**columns | {"export_locations": tuple(json.loads(row["export_locations"]))})
