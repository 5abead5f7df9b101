"""Ports and processes of this machine, and waiting for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
WAIT_S: Final = 60.0
"""Bound of every wait for a node: the machine may be busy."""

_STATE, _PARENT, _STARTED = 0, 1, 19  # of what the kernel tells of a process, its name left out


def wait_until(condition: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
    """Ask until it is true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.01)


MOST_CLAIMS: Final = 200
_claims: list[socket.socket] = []


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on, and that neither the system nor another test hands out.

    A node takes its ports seconds after they were chosen: meanwhile no other may choose them. One
    that the system hands out may be gone when a killed node wants it back; worse, a client that
    tries again and again to reach it comes to connect with itself.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ours = range(10_000, low) if low > 12_000 else range(high + 1, 65_536)
    candidates = random.SystemRandom().sample(ours or range(10_000, 65_536), k=100)
    free = (port for port in candidates if _is_free(port) and reserve(port))
    return list(itertools.islice(free, number))


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind((HOST, port))
        except OSError:
            return False
        return True


def reserve(port: int) -> bool:
    """Keep *port* from `free_ports` of all processes, for the next 200; false if it is kept."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0gracekit-test-port-{port}")  # gone with the process, however that ends
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    if len(_claims) > MOST_CLAIMS:
        _claims.pop(0).close()
    return True


def connects(port: int) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


class Guard:
    """Kills what it was told to watch when this process has died and could not."""

    _SCRIPT: Final = 'while read -r line; do pids=$line; done; [ -z "$pids" ] || kill -9 $pids'

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._shell.pid

    def watch(self, *pids: int) -> None:
        """These and no others."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{' '.join(map(str, pids))}\n".encode())
        self._shell.stdin.flush()

    def close(self) -> None:
        self.watch()
        self._shell.communicate()


@dataclass(frozen=True, slots=True)
class Child:
    """A process by more than its number, which another may get."""

    pid: int
    started: str

    @property
    def state(self) -> str:
        """A letter of the kernel's; empty of one that is gone."""
        stat = _stat(self.pid)
        return stat[_STATE] if stat and stat[_STARTED] == self.started else ""

    @property
    def lives(self) -> bool:
        return self.state not in {"", "Z", "X"}


def process(pid: int) -> Child:
    """The one that has the number now."""
    stat = _stat(pid)
    return Child(pid, stat[_STARTED] if stat else "")


def descendants(pid: int) -> list[Child]:
    """The processes below *pid*."""
    numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    all_of_them = [(number, stat) for number in numbers if (stat := _stat(number))]
    found: list[Child] = []
    above = {pid}
    while above:
        below = [Child(n, s[_STARTED]) for n, s in all_of_them if int(s[_PARENT]) in above]
        found += below
        above = {child.pid for child in below}
    return found


def see_off(children: Sequence[Child]) -> None:
    """They go by themselves when the node has gone; what does not is killed."""

    def left() -> list[Child]:
        return [child for child in children if child.lives]

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), "the node's children gone", within_s=5)
    for child in left():
        os.kill(child.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """What the kernel tells, from the state on; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
