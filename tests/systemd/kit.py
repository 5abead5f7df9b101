"""The service `shop` on a machine with systemd, by the unit that `gracekit init systemd` prints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from tests.systemd.machine import HERE, USER, Machine

FILES = {
    "GRACEKIT_TRANSPORT_URL": "sqlite:////var/lib/shop/gracekit.db",
    "GRACEKIT_STORE_URL": "sqlite:////var/lib/shop/gracekit-store.db",
}
LOG = {"StandardOutput": "append:/var/lib/shop.log", "StandardError": "inherit"}
NAME = "shop.service"
WAIT_S = 30


class Shop:
    """The service `shop` on a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        machine.add_app(HERE / "shop.py")
        self._unit = self.printed()
        self.set()

    def printed(self, *words: str) -> str:
        """The unit that `gracekit init systemd` prints."""
        settle = {"GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "0.2s"}
        words = ("init", "systemd", "shop:svc", "--user", USER, *words)
        return self._machine.gracekit(*words, env=settle)

    def set(self, environment: str = "", **directives: str) -> None:
        """Set variables of the service, and directives of its unit, in a drop-in."""
        more = {"Environment": environment} if environment else {}  # an empty one resets all
        self._machine.add_unit(NAME, self._unit, **LOG, **more, **directives)

    def ask(self, *words: str) -> str:
        """Run the command line as the service's user; returns what it printed."""
        return self._machine.gracekit(*words, env=FILES)

    def start(self) -> None:
        self._machine.ctl("start", NAME)

    def stop(self) -> float:
        """Stop it; returns how many seconds that took."""
        began_at = time.monotonic()
        self._machine.ctl("stop", NAME)
        return time.monotonic() - began_at

    def shown(self, *properties: str) -> list[str]:
        """Values of properties of its unit."""
        found = self._machine.show(NAME, *properties)
        return [found[name] for name in properties]

    def cast(self, method: str, *durations_s: float, state: str = "running") -> list[str]:
        """Send a request for each duration, and wait until they are in *state*; their ids.

        A running task makes a file, so this sees it at once, without starting a command.
        """
        words = ("cast", "shop", method, "--json")
        sent = [json.loads(self.ask(*words, f"s={s}"))["request_id"] for s in durations_s]
        if state == "running":
            self._machine.until(lambda: set(sent) <= self._begun(), f"{method} runs")
        else:
            self.wait_for(dict.fromkeys(sent, state))
        return sent

    def _begun(self) -> set[str]:
        return set(self._machine.run("ls", "/run/shop").split())

    def wait_for(self, wanted: Mapping[str, str]) -> None:
        """Wait until tasks are in these states."""
        words = ("tasks", "--state", "all", "--json")
        found = dict[str, str]()
        deadline = time.monotonic() + WAIT_S
        while any(found.get(task) != state for task, state in wanted.items()):
            assert time.monotonic() < deadline, f"{found}, not {wanted}{self._machine.tail()}"
            rows = json.loads(self.ask(*words))["tasks"]
            found = {row["request_id"]: row["state"] for row in rows}
