"""Hosts of a fleet: each has its own boot id, run directory, and wires to the servers."""

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
LOOK_S: Final = 0.2
"""Seconds between two looks into the store, each by a connection of its own."""
DEAD_S: Final = 11.0
HARD_S: Final = 8.0


class Host:
    """One boot of a machine, and its wires, each of which can be cut.

    Args:
        fleet: To which it belongs.
        name: That its processes have.
        machine: Where the files of its processes are; None for one of that name.
    """

    def __init__(self, fleet: Fleet, name: str, machine: str | None = None) -> None:
        self.name = name
        self.boot_id = self._machine = machine or name
        self.store = Proxy(fleet.server.port)
        self.broker = Proxy(fleet.broker.port)
        self._fleet = fleet
        self.store.__enter__()
        self.broker.__enter__()

    def start(self, **settings: object) -> ServiceProcess:
        """Start a process there."""
        return self._fleet.start(**self._with(settings))

    async def start_as_pid_1(self, **settings: object) -> ServiceProcess:
        """The same in a pid namespace of its own."""
        return await self._fleet.start_as_pid_1(**self._with(settings))

    def cut_off(self) -> None:
        """Have nothing reach the store, and the process learn so at once."""
        self.store.refuse()
        self.store.cut()

    def boot(self) -> None:
        """Have the next process find its machine booted again."""
        self.boot_id += "-again"

    def _with(self, settings: dict[str, object]) -> dict[str, Any]:
        fleet = self._fleet
        ours: dict[str, Any] = {
            "host": self.name,
            "run_directory": fleet.root / f"runs-{self._machine}",
            "store_url": f"{fleet.server.url(port=self.store.port)}&schema={fleet.schema}",
            "transport_url": fleet.broker.url_of(fleet.vhost, port=self.broker.port),
            "test_boot_id": self.boot_id,
        }
        return QUICK | ours | settings

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

    def host(self, name: str, machine: str | None = None) -> Host:
        """A new host."""
        self.hosts.append(made := Host(self, name, machine))
        return made

    def move_to(self, server: Postgres) -> None:
        """Have all wires to the store lead to *server*, as an address does that fails over."""
        self.server = server
        self.keep_in(server, self.schema)
        for host in self.hosts:
            host.store.lead_to(server.port)

    def close(self) -> None:
        super().close()
        for host in self.hosts:
            host.close()

    def beats(self) -> dict[str, int]:
        """The number of each run that may act, by its instance."""
        return {row["instance"]: row["number"] for row in self.rows("SELECT * FROM beat")}

    async def beaten(self, instance: str, times: int) -> None:
        """Wait until that run has beaten so often from now on."""
        seen = list[int]()  # the numbers are random

        def has_beaten() -> bool:
            number = self.beats().get(instance)
            assert number is not None, f"{instance} may not act"
            if number not in seen[-1:]:
                seen.append(number)
            return len(seen) > times

        told = f"{times} beats of {instance}"
        await until(has_beaten, told, within_s=60.0 + 3 * times, every_s=LOOK_S)

    def declared(self) -> list[dict[str, Any]]:
        """The runs that were declared dead."""
        return self.rows("SELECT * FROM run WHERE gone_at IS NOT NULL")

    async def gone(self, run_id: str, within_s: float = 60.0) -> dict[str, Any]:
        """Wait until the run was declared dead; its row."""

        def declared() -> list[dict[str, Any]]:
            return self.rows("SELECT * FROM run WHERE run_id = ? AND gone_at IS NOT NULL", run_id)

        found = await until(declared, f"{run_id} declared dead", within_s, every_s=LOOK_S)
        return found[0]

    async def ended(self, casts: int, within_s: float = 240.0) -> None:
        """Wait until so many tasks are on record, all of which have ended."""

        def have_ended() -> bool:
            tasks = self.rows("SELECT count(*) AS n FROM task")[0]["n"]
            return bool(tasks == casts and not self.transient())

        told = lambda: f"the end of {casts}: {self.transient()}"  # noqa: E731 - asked at the end
        await until(have_ended, told, within_s, every_s=LOOK_S)


def now() -> float:
    """As the times of effects."""
    return time.monotonic()


async def passed(since: float, s: float) -> None:
    """Wait until *s* seconds have passed since then, which is what some claims are about."""
    await until(lambda: now() - since >= s, f"{s} s", within_s=s + 60.0, every_s=LOOK_S)
