"""A whole life under a real systemd: start, drain, kill, watchdog, restart."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import pytest

from tests.systemd.machine import APP, HERE, Machine, python

UNIT = """
[Unit]
Description=shop

[Service]
Type=notify
NotifyAccess=main
User=nobody
WorkingDirectory={app}
ExecStart={python} -P -m gracekit run shop:svc
KillMode=mixed
TimeoutStopSec=4
WatchdogSec=30
Restart=on-failure
RestartSec=1
SuccessExitStatus=75
RestartForceExitStatus=75
RestartPreventExitStatus=78
StateDirectory=shop
StateDirectoryMode=0700
StandardOutput=append:/var/lib/shop.log
StandardError=inherit
"""
FILES = {
    "GRACEKIT_TRANSPORT_URL": "sqlite:////var/lib/shop/gracekit.db",
    "GRACEKIT_STORE_URL": "sqlite:////var/lib/shop/gracekit-store.db",
    "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "0.2s",
}
NAME = "shop.service"
NEVER_S = 300
WAIT_S = 30


class Shop:
    """The service `shop` on a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        machine.add_app(HERE / "shop.py")
        self.set()

    def set(self, environment: str = "", **directives: str) -> None:
        """Set variables of the service, and directives of its unit."""
        given = " ".join(f"{name}={value}" for name, value in FILES.items())
        text = UNIT.format(app=APP, python=python()) + f"Environment={given} {environment}\n"
        self._machine.add_unit(NAME, text, **directives)

    def start(self) -> None:
        self._machine.ctl("start", NAME)

    def stop(self) -> float:
        """Stop it; seconds that it took."""
        began_at = time.monotonic()
        self._machine.ctl("stop", NAME)
        return time.monotonic() - began_at

    def shown(self, *properties: str) -> list[str]:
        """Values of properties of its unit."""
        found = self._machine.show(NAME, *properties)
        return [found[name] for name in properties]

    def cast(self, method: str, *durations_s: float) -> list[str]:
        """Send a request for each duration, and wait until they run; their ids."""
        words = ("cast", "shop", method, "--json")
        sent = [
            json.loads(self._machine.gracekit(*words, f"s={s}", env=FILES))["request_id"]
            for s in durations_s
        ]
        self.wait_for(dict.fromkeys(sent, "running"))
        return sent

    def wait_for(self, wanted: Mapping[str, str]) -> None:
        """Wait until tasks are in these states."""
        words = ("tasks", "--state", "all", "--json")
        found = dict[str, str]()
        deadline = time.monotonic() + WAIT_S
        while any(found.get(task) != state for task, state in wanted.items()):
            assert time.monotonic() < deadline, f"{found}, not {wanted}{self._machine.tail()}"
            rows = json.loads(self._machine.gracekit(*words, env=FILES))["tasks"]
            found = {row["request_id"]: row["state"] for row in rows}


@pytest.fixture
def shop(machine: Machine) -> Shop:
    return Shop(machine)


# -- start ----------------------------------------------------------------------------


def test_a_start_returns_when_the_service_is_ready(machine, shop):
    """
    `systemctl start` waits for the `on_start` hooks, and shows what the service says of itself.
    """
    shop.set("SHOP_START_S=1")

    shop.start()

    assert (machine.lib / "shop/started").exists()
    assert shop.shown("ActiveState", "StatusText") == ["active", "serving"]


# -- drain ----------------------------------------------------------------------------


def test_a_drain_whose_tasks_go_on_ending_ends_by_itself(machine, shop):
    """
    Each task that ends asks for more time, so the drain may take many times TimeoutStopSec.
    """
    shop.set(TimeoutStopSec="3")
    shop.start()
    tasks = shop.cast("work", 4, 6, 8, 10)

    took_s = shop.stop()

    assert took_s > 6
    assert shop.shown("Result", "ExecMainStatus") == ["success", "0"]
    assert any("EXTEND_TIMEOUT_USEC=6000000" in text for text in machine.told(NAME))
    shop.wait_for(dict.fromkeys(tasks, "succeeded"))


def test_a_drain_waits_for_a_task_whose_history_says_that_it_will_end(shop):
    """
    Nothing ends meanwhile, but five others have taken as long: the drain asks for more time.
    """
    shop.set(TimeoutStopSec="2")
    shop.start()
    shop.wait_for(dict.fromkeys(shop.cast("work", *[5.0] * 5), "succeeded"))
    shop.cast("work", 5)

    took_s = shop.stop()

    assert took_s > 3
    assert shop.shown("Result", "ExecMainStatus") == ["success", "0"]


def test_a_drain_without_progress_is_killed_and_its_tasks_are_settled(machine, shop):
    """
    No more time is asked for: systemd kills when its patience ends, and the next start runs the
    task again.
    """
    shop.set(TimeoutStopSec="2")
    shop.start()
    tasks = shop.cast("work", NEVER_S)

    took_s = shop.stop()

    assert took_s < 10
    assert shop.shown("Result") == ["timeout"]
    assert "no progress" in machine.told(NAME)[-1]
    shop.start()
    shop.wait_for(dict.fromkeys(tasks, "succeeded"))


def test_systemd_understands_what_a_run_tells_it_in_its_life(machine, shop):
    """
    It asks for time while it starts, is ready, then alive, and at last says that it stops.
    """
    shop.set("SHOP_START_S=3")
    shop.start()
    shop.cast("work", 1)
    shop.stop()

    told = dict.fromkeys(text.split(",")[0] for text in machine.told(NAME))
    steps = [text for text in told if not text.startswith("STATUS=draining")]

    assert steps == ["STATUS=starting: hooks", "READY=1", "WATCHDOG=1", "STOPPING=1"]


# -- crashes and restarts -------------------------------------------------------------


def test_a_blocked_loop_is_killed_by_the_watchdog_and_started_again(machine, shop):
    """
    The watchdog is fed from the event loop alone; the next run settles what the killed one left.
    """
    shop.set(WatchdogSec="2")
    shop.start()

    sent = shop.cast("block", NEVER_S)

    machine.wait_for(NAME, NRestarts="1", ActiveState="active")
    assert "Watchdog timeout (limit 2s)!" in machine.log
    shop.wait_for(dict.fromkeys(sent, "succeeded"))


def test_a_run_that_handed_over_is_started_again(machine, shop):
    """
    75 is a good end, and there is work left: systemd starts the service again, which does it.
    """
    shop.start()
    tasks = shop.cast("work", NEVER_S)

    machine.ctl("kill", "--kill-whom=main", "--signal=QUIT", NAME)

    machine.wait_for(NAME, NRestarts="1", ActiveState="active")
    assert "status=75/TEMPFAIL" in machine.log
    shop.wait_for(dict.fromkeys(tasks, "succeeded"))


def test_a_wrong_configuration_is_not_started_again(machine, shop):
    """
    78: starting again would not help.
    """
    shop.set("GRACEKIT_DRAIN_TIMEOUT=soon")

    machine.ctl("start", NAME, check=False)

    shown = shop.shown("ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == ["failed", "78", "0"]
