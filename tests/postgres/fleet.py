"""Hosts of a fleet, each a process with its own boot id, run directory, and wires to the servers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from tests.postgres.site import PostgresSite
from tests.process.helpers import ServiceProcess, until
from tests.rabbit.broker import Broker
from tests.rabbit.proxy import Proxy
from tests.store.postgres import Postgres

QUICK: Final = {
    "beat": "1s",
    "fail_after": "6s",
    "hard_after": "8s",
    "dead_after": "11s",
    "handover_grace": "1s",
}
"""Times of a fleet whose tests need not wait for half a minute; a busy machine can keep them."""
DEAD_S: Final = 11.0
HARD_S: Final = 8.0
TAKEN_OVER_S: Final = DEAD_S + 2 * 1.1
"""From the last beat of a run until another one may have its tasks."""


class Host:
    """The wires of one host, each of which can be cut."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.name = name
        self.boot_id = name
        self.store = Proxy(fleet.server.port)
        self.broker = Proxy(fleet.broker.port)
        self._fleet = fleet
        self.store.__enter__()
        self.broker.__enter__()

    def start(self, **settings: object) -> ServiceProcess:
        """Start a process there."""
        fleet = self._fleet
        ours: dict[str, Any] = {
            "host": self.name,
            "run_directory": fleet.root / f"runs-{self.name}",
            "store_url": f"{fleet.server.url(port=self.store.port)}&schema={fleet.schema}",
            "transport_url": fleet.broker.url_of(fleet.vhost, port=self.broker.port),
            "test_boot_id": self.boot_id,
        }
        return fleet.start(**(QUICK | ours | settings))

    def close(self) -> None:
        self.store.__exit__()
        self.broker.__exit__()


class Fleet(PostgresSite):
    """Hosts that share a schema and a virtual host; nobody sees the processes of another one."""

    def __init__(
        self, root: Path, broker: Broker, vhost: str, server: Postgres, schema: str
    ) -> None:
        super().__init__(root, broker, vhost, server, schema)
        self.server = server
        self.schema = schema
        self.hosts: list[Host] = []

    def host(self, name: str) -> Host:
        """A new host."""
        self.hosts.append(made := Host(self, name))
        return made

    def close(self) -> None:
        super().close()
        for host in self.hosts:
            host.close()

    def beats(self) -> dict[str, int]:
        """The number of each run that may act, by its instance."""
        return {row["instance"]: row["number"] for row in self.rows("SELECT * FROM beat")}

    async def gone(self, run_id: str, within_s: float = 60.0) -> dict[str, Any]:
        """Wait until the run was declared dead; its row."""

        def declared() -> list[dict[str, Any]]:
            return self.rows("SELECT * FROM run WHERE run_id = ? AND gone_at IS NOT NULL", run_id)

        return (await until(declared, f"{run_id} declared dead", within_s))[0]


def now() -> float:
    """As the times of effects."""
    return time.monotonic()
