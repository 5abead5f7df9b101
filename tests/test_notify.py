"""What systemd is told, and that telling it never hurts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gracekit.notify import Notify


class Systemd:
    """A notification socket of our own."""

    def __init__(self, address: str) -> None:
        self.env = {"NOTIFY_SOCKET": address.replace("\0", "@")}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(address)
        self.done = threading.Event()

    def heard(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().split("\n"))

    def hear_all(self) -> None:
        """Read whatever comes, and close the descriptors that come with it, until `done`."""
        while not self.done.is_set():
            try:
                _, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1)
            except BlockingIOError:
                self.done.wait(0.01)
            else:
                for descriptor in descriptors:
                    os.close(descriptor)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path) -> Iterator[Systemd]:
    path = f"{tmp_path}/notify" if request.param == "path" else f"\0gracekit-{os.getpid()}"
    listener = Systemd(path)
    yield listener
    listener.close()


def test_ready_and_status_are_told(systemd):
    """Both kinds of address take READY with a line for people."""
    assert Notify(systemd.env).ready("serving compute")
    assert systemd.heard() == {"READY": "1", "STATUS": "serving compute"}


def test_stopping_asks_for_time_in_the_same_message(systemd):
    """STOPPING starts systemd's stop timer, so the same datagram asks for the time we need."""
    assert Notify(systemd.env).stopping(extend_s=29)
    assert systemd.heard() == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "29000000"}


def test_progress_extends_only_when_asked(systemd):
    """A status line alone leaves the time-out as it is."""
    assert Notify(systemd.env).status("draining: 3 in flight")
    assert systemd.heard() == {"STATUS": "draining: 3 in flight"}

    assert Notify(systemd.env).extend(1.5, "draining")
    assert systemd.heard() == {"STATUS": "draining", "EXTEND_TIMEOUT_USEC": "1500000"}


def test_a_reload_says_when_it_began(systemd):
    """By the clock of systemd, which tells a reload from an earlier one by it."""
    before = time.monotonic_ns() // 1000
    assert Notify(systemd.env).reloading()
    heard = systemd.heard()

    assert heard.keys() == {"RELOADING", "MONOTONIC_USEC"}
    assert before <= int(heard["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000


def test_a_barrier_waits_until_all_before_it_was_read(systemd):
    """systemd closes what comes with it; nobody is waited for without end."""
    notify = Notify(systemd.env)
    assert not notify.barrier(timeout_s=0.01)
    reader = threading.Thread(target=systemd.hear_all)
    reader.start()

    assert notify.barrier(timeout_s=20)
    systemd.done.set()
    reader.join()


@pytest.mark.process
def test_a_barrier_without_a_free_descriptor_waits_for_nothing():
    """It comes last, when the exit code of the process is on record."""
    words = "import resource; from gracekit.notify import Notify; "
    words += "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); "
    words += "assert not Notify({'NOTIFY_SOCKET': '/nowhere'}).barrier(timeout_s=1)"

    subprocess.run([sys.executable, "-c", words], check=True, timeout=60)


def test_status_cannot_forge_an_assignment(systemd):
    """A method name with a line break stays one line, and a long one is cut."""
    assert Notify(systemd.env).status("a\nSTOPPING=1\r" + "x" * 5000)
    heard = systemd.heard()

    assert list(heard) == ["STATUS"]
    assert heard["STATUS"].startswith("a STOPPING=1 xxx")
    assert len(heard["STATUS"]) == 256


def test_watchdog_is_fed_at_half_the_time_systemd_allows(systemd):
    """The interval comes from systemd, and only for the process that it watches."""
    assert Notify({"WATCHDOG_USEC": "30000000"}).watchdog_interval_s() == 15
    mine = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    assert Notify(mine).watchdog_interval_s() == 15
    assert Notify(mine | {"WATCHDOG_PID": "1"}).watchdog_interval_s() is None
    for wrong in ({}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "0"}):
        assert Notify(wrong).watchdog_interval_s() is None

    assert Notify(systemd.env).watchdog()
    assert systemd.heard() == {"WATCHDOG": "1"}


@pytest.mark.parametrize("address", [None, "", "/nowhere/at/all", "@nobody", "vsock:2:1", "/\0"])
def test_nobody_listening_is_no_error(address):
    """Without systemd, or with a broken address, nothing is sent and nothing raised."""
    env = {} if address is None else {"NOTIFY_SOCKET": address}

    assert not Notify(env).ready()
    assert not Notify(env).stopping(extend_s=1)


def test_a_full_socket_does_not_block(systemd):
    """A systemd that does not read costs us the message, never the drain."""
    sent = 0
    while Notify(systemd.env).status("x" * 200):
        sent += 1
        assert sent < 100_000

    assert not Notify(systemd.env).stopping(extend_s=1)
