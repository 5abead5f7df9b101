"""SIGHUP, SIGTSTP and SIGCONT to a service whose standard input is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit import RpcClient
from tests.process import served
from tests.process.doors import ask_by_door
from tests.process.helpers import ServiceProcess, Site


class Platform:
    """The notification socket of the processes of this test."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(30)

    def wait(self, what: str) -> list[str]:
        """The messages up to the first that holds *what*."""
        heard: list[str] = []
        while not heard or what not in heard[-1]:
            heard.append(self._socket.recv(4096).decode())
        return heard

    def left(self) -> list[str]:
        """The messages that nobody has read yet."""
        self._socket.setblocking(False)
        heard: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                heard.append(self._socket.recv(4096).decode())
        return heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    made = Platform(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    yield made
    made.close()


@pytest.fixture
def config(site: Site) -> Path:
    """The file of settings of `gracekit run`."""
    made = site.root / "settings.toml"
    made.write_text('drain_timeout = "60s"\nmax_running = 2\nlog_level = "info"\n')
    return made


def incidents(site: Site) -> list[tuple[str, str]]:
    rows = site.rows("SELECT what, detail FROM incident ORDER BY id")
    return [(row["what"], row["detail"]) for row in rows]


async def hang_up(service: ServiceProcess, said: str) -> None:
    service.signal(signal.SIGHUP)
    await service.wait_log(said)


async def test_hup_changes_what_may_change_and_names_what_may_not(
    site: Site, client: RpcClient, config: Path, platform: Platform
) -> None:
    """A third handler begins at once, the log level changes, and the drain takes the new time. A
    line names what needs a restart. systemd is notified of the begin and the end of the reload.
    """
    service = await site.start_cli(config=config, log_format="text").serving()
    ids = [await client.cast(served.held, key=f"k{n}", vm=f"v{n}") for n in range(4)]
    await site.effect("start", times=2)
    config.write_text(
        'drain_timeout = "1s"\nmax_running = 3\nlog_level = "debug"\nmax_accepted = 500\n'
        'log_format = "json"\n'  # a variable wins over it
    )

    await hang_up(service, "service.reloaded")

    heard = platform.wait("RELOADING=1")[-1]
    assert "MONOTONIC_USEC=" in heard
    assert platform.wait("READY=1")[-1] == "READY=1"
    await site.effect("start", times=3)
    assert (
        'service.reloaded changed="drain_timeout 1m -> 1s, max_running 2 -> 3, log_level info -> '
        'debug"'
    ) in service.log
    assert "setting.kept setting=max_accepted value=unset wanted=500" in service.log
    await client.call(served.ping)
    await service.wait_log("task.started")  # a line of the level debug
    assert await service.stop() == 75
    assert "timeout_s=1" in service.log
    assert [site.state(one) for one in ids].count("accepted") == 1


async def test_a_file_that_is_wrong_changes_nothing(
    site: Site, client: RpcClient, config: Path, platform: Platform
) -> None:
    """It is unreadable, breaks a rule, or does not fit what stays: the log says why, and the
    service goes on.
    """
    config.write_text('drain_timeout = "10s"\nkill_after = "30s"\n')
    service = await site.start_cli(config=config, log_format="text").serving()

    config.write_text('drain_timeout = "soon"\nlog_level = "debug"\ncolour = "red"\n')
    await hang_up(service, "'soon' is not a duration")
    await service.wait_log("unknown setting colour")
    config.unlink()
    await hang_up(service, "cannot read the settings in")
    config.write_text('drain_timeout = "60s"\nkill_after = "90s"\nlog_level = "debug"\n')
    await hang_up(service, "with the settings that need a restart, drain_timeout 1m")

    assert len([one for one in platform.wait("READY=1") if "READY" in one]) == 1  # of its start
    for _ in range(3):
        assert "RELOADING=1" in platform.wait("RELOADING=1")[-1]
        platform.wait("READY=1")
    assert "service.reloaded" not in service.log
    assert service.log.count("service.reload_failed") == 4
    assert "setting.kept setting=kill_after value=30s wanted=90s" in service.log
    assert "must be below kill_after = 30s" in service.log
    assert await client.call(served.ping) == service.pid
    assert await service.stop() == 0


async def test_a_file_that_cannot_be_read_to_its_end_fails_a_reload_after_a_limit(
    site: Site, config: Path, platform: Platform
) -> None:
    """It says so, and a later one reads the settings. systemd gets both messages of each reload."""
    service = await site.start_cli(config=config, log_format="text").serving()
    platform.wait("READY=1")
    config.unlink()
    os.mkfifo(config, 0o600)

    await hang_up(service, "were not read within 10 s")
    assert "READY=1" in platform.wait("READY=1")[-1]
    with config.open("w") as fifo:
        fifo.write("max_running = 3\n")
    config.unlink()
    config.write_text('drain_timeout = "60s"\nmax_running = 3\nlog_level = "info"\n')
    await hang_up(service, "max_running 2 -> 3")

    assert await service.stop() == 0


async def test_the_log_changes_its_format_before_the_line_that_says_so(
    site: Site, config: Path, platform: Platform
) -> None:
    """The format changes from text to JSON, and the level to errors alone."""
    config.write_text('log_format = "text"\n')
    service = await site.start_cli(config=config).serving()
    config.write_text('log_format = "json"\n')
    await hang_up(service, "log_format text -> json")
    told = json.loads(service.log.splitlines()[-1])
    config.write_text('log_format = "json"\nlog_level = "error"\nmax_accepted = "many"\n')
    await hang_up(service, "many")
    config.write_text('log_format = "json"\nlog_level = "error"\n')
    service.signal(signal.SIGHUP)
    for _ in range(3):
        platform.wait("RELOADING=1")
    platform.wait("READY=1")

    assert told["event"] == "service.reloaded"
    assert await service.stop() == 0
    assert "drain.started" not in service.log


async def test_in_a_drain_a_reload_is_put_off_to_the_next_start(
    site: Site, client: RpcClient, config: Path, platform: Platform
) -> None:
    """A drain's times are fixed, and it goes on to its end; systemd, which was told that the
    service stops, does not hear that it reloads or is ready.
    """
    service = await site.start_cli(config=config, log_format="text").serving()
    await client.cast(served.held, key="k", vm="v")
    await site.effect("start")
    service.terminate()
    await service.wait_log("drain.started")
    config.write_text('drain_timeout = "1s"\n')

    await hang_up(service, "SIGHUP is ignored in a drain: the next start reads the settings")
    site.go()

    assert await service.exit_code() == 0
    assert site.seen("done", "k")
    platform.wait("STOPPING=1")
    assert not [one for one in platform.left() if "RELOADING=1" in one or "READY=1" in one]


async def test_tstp_closes_the_intake_and_cont_opens_it_again(
    site: Site, client: RpcClient
) -> None:
    """The process is not stopped; both are recorded like the verbs, with the names of the
    signals.
    """
    service = await site.start().serving()
    running = await client.cast(served.held, key="k", vm="v")
    await site.effect("start")

    service.signal(signal.SIGTSTP)
    await service.wait_log("intake.closed")
    waiting = await client.cast(served.slow, key="w", s=0)
    site.go()
    await site.in_state(running, "succeeded")  # by a process that was not stopped
    service.signal(signal.SIGTSTP)
    await service.wait_log("SIGTSTP is ignored: the service is quiet")
    assert site.state(waiting) is None
    service.signal(signal.SIGCONT)
    await site.in_state(waiting, "succeeded")
    service.signal(signal.SIGCONT)  # while it serves: without an effect

    assert await service.stop() == 0
    assert incidents(site) == [
        ("operator_quiet", "signal SIGTSTP: no reason given"),
        ("operator_resume", "signal SIGCONT: no reason given"),
    ]
    assert service.log.count("signal=SIGCONT") == 1


async def test_only_a_stop_arms_the_kernel_s_alarm(site: Site, client: RpcClient) -> None:
    """A service that is quiet or has read its settings again lives on past its hard limit."""
    short = {"drain_timeout": "100ms", "handover_grace": "100ms", "handover_flush": "100ms"}
    service = await site.start(**short, exit_margin="100ms").serving()  # an alarm after 0.9 s
    for number in (signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT):
        service.signal(number)
    await asyncio.sleep(1.5)

    assert await client.call(served.ping) == service.pid
    assert await service.stop() == 0


async def test_cont_behind_a_term_does_not_open_a_quiet_service(site: Site) -> None:
    """systemd sends both to stop a unit."""
    service = await site.start().serving()
    service.signal(signal.SIGTSTP)
    await service.wait_log("intake.closed")
    service.terminate()
    service.signal(signal.SIGCONT)

    assert await service.exit_code() == 0
    assert "drain.resumed" not in service.log
    assert service.run["stop_by"] == "SIGTERM"


async def test_cont_behind_a_stop_does_not_undo_a_drain_by_command(
    site: Site, client: RpcClient
) -> None:
    """If a debugger stops a process and continues it, that is no request to serve again."""
    service = await site.start().serving()
    await client.cast(served.held, key="k", vm="v")
    await site.effect("start")
    await ask_by_door(site.store, service.run["run_id"], "drain", timeout="60s")
    await service.wait_log("intake.closed")
    service.signal(signal.SIGSTOP)
    service.signal(signal.SIGCONT)
    site.go()

    assert await service.exit_code() == 0
    assert "drain.resumed" not in service.log


async def test_at_a_terminal_ctrl_z_is_the_shell_s(site: Site) -> None:
    """There the signals that stop and continue a job have their default action."""
    service = await site.start_at_terminal().serving()
    status = Path(f"/proc/{service.pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    caught = {n for n in signal.valid_signals() if int(mask, 16) >> (n - 1) & 1}

    assert signal.SIGTERM in caught
    assert not caught & {signal.SIGTSTP, signal.SIGCONT}
    assert await service.stop() == 0
