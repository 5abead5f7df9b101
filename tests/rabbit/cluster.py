"""Three nodes that are one broker, on one machine."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.rabbit.broker import Broker, Membership
from tests.rabbit.erlang import Epmd
from tests.rabbit.machine import wait_until


class Cluster:
    """Nodes with an epmd, a cookie and a user in common.

    Args:
        directory: Where each gets a directory of its own.
        size: How many.
    """

    def __init__(self, directory: Path, size: int = 3) -> None:
        self._epmd = Epmd()
        names = [f"rabbit-{number}@localhost" for number in range(size)]
        cookie, password = secrets.token_hex(16), secrets.token_urlsafe(12)
        self.nodes = [
            Broker(
                directory / name.partition("@")[0],
                member=Membership(name, names, self._epmd, cookie, password),
            )
            for name in names
        ]

    def start(self) -> None:
        """Start all at once, and wait until each sees all."""
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.await_serving()
        self.await_running(len(self.nodes))

    def await_running(self, number: int) -> None:
        """Wait until all nodes that run see so many run."""

        def agreed() -> bool:
            return all(seen(node) == number for node in self.nodes if node.running)

        wait_until(agreed, f"{number} nodes running")

    def leader_of(self, queue: str, vhost: str = "/") -> Broker:
        """The node that leads a quorum queue, or holds a classic one."""
        asked = next(node for node in self.nodes if node.running)
        name = asked.home_of(queue, vhost)
        return next(node for node in self.nodes if node.name == name)

    def others(self, than: Broker) -> list[Broker]:
        """The nodes that run besides that one."""
        return [node for node in self.nodes if node is not than and node.running]

    def close(self) -> None:
        """Leave nothing behind but files."""
        for node in self.nodes:
            node.close()
        self._epmd.close()


def seen(node: Broker) -> int:
    """How many nodes run, as that one sees it."""
    return int(node.eval("length(rabbit_nodes:all_running())"))
