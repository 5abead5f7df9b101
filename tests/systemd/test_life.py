"""A whole life of the unit that `gracekit init systemd` prints, under a real systemd."""

from __future__ import annotations

from tests.systemd.kit import LOG, NAME
from tests.systemd.machine import APP

NEVER_S = 300


# -- start ----------------------------------------------------------------------------


def test_a_start_returns_when_the_service_is_ready(machine, shop):
    """`systemctl start` waits for the `on_start` hooks, and the status shows the service's line."""
    shop.set("SHOP_START_S=1")

    shop.start()

    assert (machine.lib / "shop/started").exists()
    assert shop.shown("ActiveState", "StatusText") == ["active", "serving"]


# -- drain ----------------------------------------------------------------------------


def test_a_drain_whose_tasks_go_on_ending_ends_by_itself(machine, shop):
    """Each task that ends asks for more time, so the drain may take many times TimeoutStopSec."""
    shop.set(TimeoutStopSec="4")
    shop.start()
    tasks = shop.cast("end_in_drain", 2, 4, 6, 8, 10)

    took_s = shop.stop()

    assert took_s > 9
    assert shop.shown("Result", "ExecMainStatus") == ["success", "0"]
    assert any("EXTEND_TIMEOUT_USEC=6000000" in text for text in machine.told(NAME))
    shop.wait_for(dict.fromkeys(tasks, "succeeded"))


def test_a_drain_waits_for_a_task_whose_history_says_that_it_will_end(shop):
    """No task ends meanwhile, but five earlier ones took as long, so the drain asks for more
    time.
    """
    shop.set(TimeoutStopSec="2")
    shop.start()
    shop.cast("work", *[8.0] * 5, state="succeeded")
    shop.cast("work", 8)

    took_s = shop.stop()

    assert took_s > 3
    assert shop.shown("Result", "ExecMainStatus") == ["success", "0"]


def test_a_drain_without_progress_is_killed_and_its_tasks_are_settled(machine, shop):
    """The drain asks for no more time, so systemd kills the service after TimeoutStopSec, and the
    next start runs the task again.
    """
    shop.set(TimeoutStopSec="4")
    shop.start()
    tasks = shop.cast("work", NEVER_S)

    took_s = shop.stop()

    assert took_s < 12
    assert shop.shown("Result") == ["timeout"]
    assert any("no progress" in text for text in machine.told(NAME))
    shop.start()
    shop.wait_for(dict.fromkeys(tasks, "succeeded"))


def test_a_drain_that_only_a_hold_keeps_open_is_killed_at_the_platform_s_time(machine, shop):
    """To count the open holds again and again is no progress: no more time is asked for."""
    shop.set(TimeoutStopSec="4")
    shop.start()
    shop.cast("hold", NEVER_S, state="succeeded")

    took_s = shop.stop()

    assert took_s < 12
    assert shop.shown("Result") == ["timeout"]
    assert any("no progress" in text for text in machine.told(NAME))


def test_systemd_understands_what_a_run_tells_it_in_its_life(machine, shop):
    """The run asks for time while it starts, says that it is ready, then alive, and that it
    stops.
    """
    shop.set("SHOP_START_S=3")
    shop.start()
    shop.cast("end_in_drain", 0)
    shop.stop()

    machine.until(lambda: "STOPPING=1" in str(machine.told(NAME)), "that it stops")
    told = dict.fromkeys(text.split(",")[0] for text in machine.told(NAME))
    steps = [text for text in told if not text.startswith("STATUS=draining")]

    assert steps == ["STATUS=starting: hooks", "READY=1", "WATCHDOG=1", "STOPPING=1"]


def test_a_reload_is_told_from_its_beginning_to_its_end(machine, shop):
    """`systemctl reload` sends SIGHUP; the run reads its settings file again and says when it is
    done.
    """
    file = machine.app / "shop.toml"
    file.write_text('drain_timeout = "25s"\n')
    machine.add_unit(NAME, shop.printed("--config", str(APP / file.name)), **LOG)
    shop.start()
    file.write_text('drain_timeout = "20s"\n')

    machine.ctl("reload", NAME)
    machine.wait_for_log("service.reloaded")

    def told() -> list[str]:
        words = (text.split(",")[0] for text in machine.told(NAME))
        return [word for word in words if not word.startswith(("WATCHDOG", "STATUS"))]

    machine.until(lambda: len(told()) >= 3, "a reload and its end")
    assert told() == ["READY=1", "RELOADING=1", "READY=1"]
    assert shop.shown("ActiveState", "NRestarts") == ["active", "0"]


# -- crashes and restarts -------------------------------------------------------------


def test_a_blocked_loop_is_killed_by_the_watchdog_and_started_again(machine, shop):
    """The watchdog is fed from the event loop alone; the next run settles what the killed one
    left.
    """
    shop.set(WatchdogSec="4")
    shop.start()

    sent = shop.cast("block", NEVER_S)

    machine.wait_for(NAME, NRestarts="1", ActiveState="active")
    assert "Watchdog timeout (limit 4s)!" in machine.log
    shop.wait_for(dict.fromkeys(sent, "succeeded"))


def test_a_run_that_handed_over_is_started_again(machine, shop):
    """75 is a good end with work left: systemd starts the service again, which finishes the
    work.
    """
    shop.start()
    tasks = shop.cast("work", NEVER_S)

    machine.ctl("kill", "--kill-whom=main", "--signal=QUIT", NAME)

    machine.wait_for(NAME, NRestarts="1", ActiveState="active")
    assert "status=75/TEMPFAIL" in machine.log
    shop.wait_for(dict.fromkeys(tasks, "succeeded"))


def test_a_wrong_configuration_is_not_started_again(machine, shop):
    """With 78 a restart would not help."""
    shop.set("GRACEKIT_DRAIN_TIMEOUT=soon")

    machine.ctl("start", NAME, check=False)

    shown = shop.shown("ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == ["failed", "78", "0"]
