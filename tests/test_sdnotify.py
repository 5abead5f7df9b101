"""What systemd is told, and that telling it never hurts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from gracekit import sdnotify


class Systemd:
    """A notification socket of our own."""

    def __init__(self, address: str) -> None:
        self.env = {"NOTIFY_SOCKET": address.replace("\0", "@")}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(address)

    def heard(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().split("\n"))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path) -> Iterator[Systemd]:
    path = f"{tmp_path}/notify" if request.param == "path" else f"\0gracekit-{os.getpid()}"
    listener = Systemd(path)
    yield listener
    listener.close()


def test_ready_and_status_are_told(systemd):
    """
    Both kinds of address take READY with a line for people.
    """
    assert sdnotify.ready("serving compute", env=systemd.env)
    assert systemd.heard() == {"READY": "1", "STATUS": "serving compute"}


def test_stopping_never_comes_without_an_extension(systemd):
    """
    STOPPING starts systemd's stop timer, so the same datagram asks for the time we need.
    """
    assert sdnotify.stopping(extend_s=29, env=systemd.env)
    assert systemd.heard() == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "29000000"}


def test_progress_extends_only_when_asked(systemd):
    """
    A status line alone leaves the time-out as it is.
    """
    assert sdnotify.status("draining: 3 in flight", env=systemd.env)
    assert systemd.heard() == {"STATUS": "draining: 3 in flight"}

    assert sdnotify.status("draining", extend_s=1.5, env=systemd.env)
    assert systemd.heard() == {"STATUS": "draining", "EXTEND_TIMEOUT_USEC": "1500000"}


def test_status_cannot_forge_an_assignment(systemd):
    """
    A method name with a line break stays one line, and a long one is cut.
    """
    assert sdnotify.status("a\nSTOPPING=1\r" + "x" * 5000, env=systemd.env)
    heard = systemd.heard()

    assert list(heard) == ["STATUS"]
    assert heard["STATUS"].startswith("a STOPPING=1 xxx")
    assert len(heard["STATUS"]) == 256


def test_watchdog_is_fed_at_half_the_time_systemd_allows(systemd):
    """
    The interval comes from systemd, and only for the process that it watches.
    """
    assert sdnotify.watchdog_interval_s(env={"WATCHDOG_USEC": "30000000"}) == 15
    mine = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    assert sdnotify.watchdog_interval_s(env=mine) == 15
    assert sdnotify.watchdog_interval_s(env=mine | {"WATCHDOG_PID": "1"}) is None
    for wrong in ({}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "0"}):
        assert sdnotify.watchdog_interval_s(env=wrong) is None

    assert sdnotify.watchdog(env=systemd.env)
    assert systemd.heard() == {"WATCHDOG": "1"}


@pytest.mark.parametrize("address", [None, "", "/nowhere/at/all", "@nobody", "vsock:2:1", "/\0"])
def test_nobody_listening_is_no_error(address):
    """
    Without systemd, or with a broken address, nothing is sent and nothing raised.
    """
    env = {} if address is None else {"NOTIFY_SOCKET": address}

    assert not sdnotify.ready(env=env)
    assert not sdnotify.stopping(extend_s=1, env=env)


def test_a_full_socket_does_not_block(systemd):
    """
    A systemd that does not read costs us the message, never the drain.
    """
    sent = 0
    while sdnotify.status("x" * 200, env=systemd.env):
        sent += 1
        assert sent < 100_000

    assert not sdnotify.stopping(extend_s=1, env=systemd.env)
