"""A pytest plugin: tests of a played machine keep its store in a real PostgreSQL.

`pytest -p tests.postgres.on_postgres tests/journal tests/leases tests/service`

Time stays virtual, as each statement is done at once, in the loop's thread. Tests that need SQLite
itself are left out, each with its reason.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg
import pytest

from gracekit.errors import StoreError
from gracekit.store.migrate import load_migrations
from gracekit.store.postgres.postgres_engine import PostgresWriter
from gracekit.store.postgres.postgres_group import lock_of
from gracekit.store.postgres.postgres_link import PostgresLink, rows
from gracekit.store.postgres.postgres_migrate import POSTGRES_MIGRATIONS, migrate_store
from gracekit.store.postgres.postgres_server import Origins
from gracekit.store.postgres.postgres_texts import numbered
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.testing import machine, ports
from tests.store.postgres import Postgres

_NUMBERS: Final = itertools.count()
_DISKS: Final[list[Disk]] = []


class Cursor:
    """What the tests use of apsw's."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._names: list[str] = []
        self._rows: Iterator[Any] = iter(())

    def execute(self, sql: str, params: Sequence[Any] = ()) -> Cursor:
        self._names, rows = self._disk.ask(sql, params)
        self._rows = iter(rows)
        return self

    def __iter__(self) -> Iterator[Any]:
        return self._rows

    def fetchall(self) -> list[Any]:
        return list(self._rows)

    def fetchone(self) -> Any:
        return next(self._rows, None)

    @property
    def get(self) -> Any:
        rows = self.fetchall()
        return rows[0][0] if rows and len(rows[0]) == 1 else (rows or None)

    def get_description(self) -> list[tuple[str, ...]]:
        return [(name, "") for name in self._names]


class Disk:
    """One schema of the server, as the tests use a database of apsw."""

    def __init__(self, server: Postgres) -> None:
        self.schema = f"played_{next(_NUMBERS)}"
        self.url = server.url()
        self.lock = lock_of(self.schema)
        self.link = PostgresLink(self.url, self.schema)
        self.links: list[PostgresLink] = [self.link]
        texts = load_migrations(POSTGRES_MIGRATIONS)
        migrate_store(self.link, texts, lock=self.lock, schema=self.schema, where=self.schema)
        self._server = server
        self._changes = 0
        _DISKS.append(self)

    def connect(self) -> PostgresLink:
        made = PostgresLink(self.url, self.schema)
        self.links.append(made)
        return made

    def ask(self, sql: str, params: Sequence[Any]) -> tuple[list[str], list[Any]]:
        """The names and the rows that a statement returns."""
        self.link.clear()
        place = self.link.send(numbered(sql), params)
        self.link.read()
        result = self.link.results[place]
        names = [(result.fname(n) or b"").decode() for n in range(result.nfields)]
        return names, rows(result)

    def execute(self, sql: str, params: Sequence[Any] = ()) -> Cursor:
        return self.cursor().execute(sql, params)

    def cursor(self) -> Cursor:
        return Cursor(self)

    def total_changes(self) -> int:
        self._changes += 1  # nobody knows what other connections have changed
        return self._changes

    def close(self) -> None:
        """Kept until the test has ended, and read after that."""


def _read(disk: Any, query: tuple[str, Sequence[Any]], on_broken: Any) -> Any:
    try:
        return disk.execute(*query).fetchall()
    except (psycopg.Error, TypeError, ValueError) as error:
        return StoreError(str(error))


async def _start(self: MemoryEngine) -> None:
    disk: Any = self._shared
    if self._connection is not None:
        return
    self._loop = asyncio.get_running_loop()
    self.guarded = None
    self._group = PostgresWriter(  # type: ignore[assignment]  # it has `run`
        disk.connect, disk.lock, self._process, source=self, origins=Origins()
    )
    self._connection = disk


@pytest.fixture(scope="session")
def _played_server() -> Iterator[Postgres]:
    with Postgres().running() as server:
        yield server


@pytest.fixture(autouse=True)
def _on_postgres(
    request: pytest.FixtureRequest, _played_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    is_played = hasattr(request.module, "InMemoryService")  # its tests bring a loop of their own
    if request.node.get_closest_marker("looptime") is None and not is_played:
        pytest.skip("its time is not played")
    plain, asks = MemoryEngine.start, MemoryEngine.query

    async def start(self: MemoryEngine) -> None:
        await (_start(self) if isinstance(self._shared, Disk) else plain(self))

    async def query(self: MemoryEngine, sql: str, *params: Any) -> list[Any]:
        if not isinstance(self._shared, Disk):
            return await asks(self, sql, *params)
        found = _read(self._shared, (sql, params), None)
        if isinstance(found, StoreError):
            raise found
        return list(found)

    monkeypatch.setattr(MemoryEngine, "start", start)
    monkeypatch.setattr(MemoryEngine, "query", query)
    monkeypatch.setattr(machine, "open_memory", lambda: Disk(_played_server))
    monkeypatch.setattr(ports, "read", _read)
    yield
    while _DISKS:
        for link in _DISKS.pop().links:
            link.close()
