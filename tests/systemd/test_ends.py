"""Why a unit stopped, by systemd's own word; and a stop from inside that lasts under its unit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.systemd.kit import LOG, NAME, Shop
from tests.systemd.machine import USER, Machine

NEVER_S = 300
NAMED = {"GRACEKIT_INSTANCE": "shop-0", "GRACEKIT_DRAIN_TIMEOUT": "2s"}


def last_exit(shop: Shop) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shop.ask("exits", "--json"))["exits"][0]
    return found


@pytest.fixture
def named(machine: Machine, shop: Shop) -> Shop:
    """The service with a name of its own, so that a user's wish can last."""
    words = ("init", "systemd", "shop:svc", "--user", USER)
    machine.add_unit(NAME, machine.gracekit(*words, env=NAMED), **LOG)
    return shop


def stop_from_inside(shop: Shop) -> None:
    shop.ask("cast", "shop", "stop", "reason=enough", "--ops")


# -- a wish that lasts ----------------------------------------------------------------


def test_a_stop_from_inside_lasts_until_an_operator_starts_the_service(machine, named):
    """systemd asks first, and leaves the unit inactive, without a failure."""
    named.start()
    stop_from_inside(named)
    machine.wait_for(NAME, ActiveState="inactive")

    named.start()  # as at a boot
    down = named.shown("ActiveState", "Result", "ExecMainStatus")
    shown = named.ask("status")
    named.ask("service", "start", "shop", "--instance", "shop-0")
    named.start()

    assert down == ["inactive", "success", "0"]
    assert "shop-0 is down by method stop: enough" in shown
    assert named.shown("ActiveState") == ["active"]


def test_it_lasts_also_if_work_was_left(machine, named):
    """With 75 systemd starts the service again at once, and asks first."""
    named.start()
    named.cast("work", NEVER_S)
    stop_from_inside(named)

    machine.wait_for(NAME, ActiveState="inactive")
    assert "status=75/TEMPFAIL" in machine.log
    assert (last_exit(named)["why"], last_exit(named)["left"]) == ("user_stop", "handed_over")
    assert named.shown("Result") == ["success"]


# -- systemd's word -------------------------------------------------------------------


def test_systemd_tells_what_killed_the_process(machine, shop):
    """ExecStopPost has it, before the next start takes the run over."""
    shop.start()
    machine.ctl("kill", "--kill-whom=main", "--signal=KILL", NAME)
    machine.wait_for(NAME, NRestarts="1", ActiveState="active")

    found = last_exit(shop)
    assert (found["why"], found["kernel"]["by"]) == ("killed", "systemd")


def test_a_stop_while_the_host_is_shut_down_is_told_from_another_one(machine, shop):
    """`/run/nologin` is there from the beginning of a shutdown on."""
    found = []
    for shuts_down in (False, True):
        shop.start()
        if shuts_down:
            machine.run("touch", "/run/nologin")
        shop.stop()
        found.append(last_exit(shop)["why"])

    assert found == ["signal_stop", "host_stop"]


# -- below a small parent -------------------------------------------------------------


def test_below_a_small_parent_systemd_hears_the_service(machine, shop):
    """It is ready, alive and reloaded, and stops; systemd's main process is the parent."""
    unit = shop.printed().replace("run shop:svc", "run --keep-evidence shop:svc")
    unit = unit.replace("NotifyAccess=main", "NotifyAccess=all")
    machine.add_unit(NAME, unit, **LOG, WatchdogSec="4", TimeoutStopSec="4")
    shop.start()
    machine.until(lambda: "WATCHDOG=1" in machine.told(NAME), "the watchdog is fed")
    machine.ctl("reload", NAME)
    machine.wait_for_log("service.reloaded")
    tasks = shop.cast("end_in_drain", 2, 4, 6)

    shop.stop()

    shop.wait_for(dict.fromkeys(tasks, "succeeded"))
    assert shop.shown("Result", "ExecMainStatus", "NRestarts") == ["success", "0", "0"]
    assert any("EXTEND_TIMEOUT_USEC" in text for text in machine.told(NAME))
    found = last_exit(shop)
    assert (found["why"], found["kernel"]["sender"].split(",")[0]) == (
        "signal_stop",
        "pid 1 (systemd)",
    )


def test_below_a_small_parent_a_blocked_loop_is_killed_by_the_watchdog(machine, shop):
    """The service feeds it by itself, not the parent."""
    unit = shop.printed().replace("run shop:svc", "run --keep-evidence shop:svc")
    machine.add_unit(
        NAME, unit.replace("NotifyAccess=main", "NotifyAccess=all"), **LOG, WatchdogSec="4"
    )
    shop.start()

    sent = shop.cast("block", NEVER_S)

    machine.wait_for(NAME, NRestarts="1", ActiveState="active")
    shop.wait_for(dict.fromkeys(sent, "succeeded"))
