"""Where the store of a cell is: in a file, or in a schema of a PostgreSQL.

Both keep what concerns the host alone in the same directory, so that a test finds it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import psycopg

from tests.crash.queues import Database
from tests.store.postgres import Postgres

RUNS: Final = "store.db-runs"


class Store(Protocol):
    """See the module.

    Attributes:
        settings: By which the service finds it.
    """

    settings: Mapping[str, str]

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """What it answers; nothing if there is no such table yet."""
        ...

    def close(self) -> None: ...


class FileStore(Database):
    """A file of SQLite."""

    settings: Mapping[str, str] = {"STORE_URL": "sqlite:///store.db"}

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "store.db")


class PostgresStore:
    """A schema that no other cell uses."""

    def __init__(self, server: Postgres, schema: str) -> None:
        url = f"{server.url()}&schema={schema}"
        self.settings: Mapping[str, str] = {"STORE_URL": url, "RUN_DIRECTORY": RUNS}
        self._connection = server.connect()
        self._connection.execute(f"SET search_path = {schema}")

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        try:
            cursor = self._connection.execute(sql.replace("?", "%s").encode(), params)
        except psycopg.errors.UndefinedTable:
            return []
        return cursor.fetchall()

    def close(self) -> None:
        self._connection.close()
