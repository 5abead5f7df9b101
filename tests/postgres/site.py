"""Processes of several hosts on one store in PostgreSQL, with a broker for their requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from tests.process.helpers import ServiceProcess, Site
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite
from tests.store.postgres import Postgres


class InPostgres(Site):
    """A site whose store is a schema of a server."""

    def keep_in(self, server: Postgres, schema: str) -> None:
        """Have all its processes use that store."""
        self._server = server
        self._schema = schema
        self.settings["store_url"] = f"{server.url()}&schema={schema}"

    def rows(self, sql: str, *params: object) -> list[dict[str, Any]]:
        """Rows of the store, as committed by now."""
        with self.connect() as connection:
            return list(connection.execute(sql.replace("?", "%s").encode(), params))

    def connect(self) -> psycopg.Connection[dict[str, Any]]:
        """A connection to the store that has nothing to do with gracekit."""
        connection = self._server.connect(row_factory=dict_row)
        connection.execute(f"SET search_path = {self._schema}")
        return connection


class PostgresSite(InPostgres, RabbitSite):
    """Hosts that share a schema and a virtual host; each has a run directory of its own."""

    def __init__(
        self, root: Path, broker: Broker, vhost: str, server: Postgres, schema: str
    ) -> None:
        super().__init__(root, broker, vhost)
        self.keep_in(server, schema)

    def start_on(self, host: str, **settings: object) -> ServiceProcess:
        """Start a process on *host*."""
        directory = self.root / f"runs-{host}"
        return self.start(host=host, run_directory=directory, **settings)
