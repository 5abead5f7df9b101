"""A read-only view of a store in PostgreSQL, for the command line; services may be up or down.

It makes and migrates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import psycopg

from gracekit.errors import ConfigError, StoreError
from gracekit.store.batch import Row, Value
from gracekit.store.migrate import load_migrations, need_version
from gracekit.store.postgres.postgres_engine import read
from gracekit.store.postgres.postgres_link import PostgresLink, shown
from gracekit.store.postgres.postgres_migrate import POSTGRES_MIGRATIONS, version_of
from gracekit.store.postgres.sqlstates import start_error


class PostgresReader:
    """Answers queries in the thread that opened it.

    Args:
        url: Of the database, as libpq takes it.
        schema: In which the tables are.
    """

    def __init__(self, url: str, schema: str) -> None:
        self._url = url
        self._schema = schema
        self._where: Final = shown(url, schema)
        self._link: PostgresLink | None = None
        self._given_up: Callable[[], bool] | None = None

    def open(self, *, given_up: Callable[[], bool] | None = None) -> None:
        """Connect, and check that there is a store of this schema version.

        Args:
            given_up: Called twenty times a second while a query runs; if it returns True, the query
                is aborted and fails.

        Raises:
            ConfigError: there is no such store, it has another version, or login is refused.
            DependencyError: the server cannot be reached.
        """
        if self._link is not None:
            return
        self._given_up = given_up
        try:
            self._link = self._connect()
            self._check(version_of(self._link), len(load_migrations(POSTGRES_MIGRATIONS)))
        except BaseException as error:
            self.close()
            if isinstance(error, psycopg.Error):
                raise start_error(error, self._where) from error
            raise

    def _connect(self) -> PostgresLink:
        return PostgresLink(self._url, self._schema, read_only=True, given_up=self._given_up)

    def _check(self, version: int, known: int) -> None:
        if not version:
            raise ConfigError(
                f"there is no store at {self._where} that this user may use: name the service's in "
                "GRACEKIT_STORE_URL or with --store; the first start of a service makes it"
            )
        need_version(version, known, self._where)

    def close(self) -> None:
        """Close the connection; may be called twice or before `open`."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`; each statement sees its own snapshot."""
        return self.read(sql, *params)

    def read(self, sql: str, *params: Value) -> list[Row]:
        """As `query`, outside a loop."""
        if self._link is None:
            raise StoreError(f"{self._where} is not open; start the reader before using it")
        return read(self._again, sql, params)

    def _again(self) -> PostgresLink:
        """The connection; a new one if it is lost."""
        assert self._link is not None
        if self._link.is_lost:
            self._link = self._connect()
        return self._link
