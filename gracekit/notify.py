"""Tells the platform how the service is, by systemd's notification protocol: one object.

Nothing here raises, blocks or keeps state; without NOTIFY_SOCKET nothing is sent.
STOPPING is irrevocable from systemd 259 on: only a final drain sends it, never quiet.
See `man 3 sd_notify` and `man 5 systemd.service`.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Final

_LONGEST_STATUS: Final = 256


class Notify:
    """Tells the platform how the service is. Each method returns whether the message was sent.

    Args:
        env: The environment; None for this process's own, as it is at each call.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = env

    @property
    def has_listener(self) -> bool:
        """Whether a supervisor listens; if not, costly messages need not be made."""
        return bool(self._variables.get("NOTIFY_SOCKET"))

    def ready(self, text: str = "") -> bool:
        """The service takes requests, for the first time or after `reloading`."""
        return self._send({"READY": "1"} | _status(text))

    def status(self, text: str) -> bool:
        """Show *text* in `systemctl status`; one line, as `draining: 3 running, 18s left`."""
        return self._send(_status(text))

    def extend(self, seconds: float, text: str = "") -> bool:
        """Ask for more time: the next sign of progress comes within *seconds* from now.

        systemd grants it in a start and in a stop, where its own time-out would come earlier.
        """
        return self._send(_status(text) | _extension(seconds))

    def stopping(self, text: str = "", *, extend_s: float | None = None) -> bool:
        """The service is going down for good; *extend_s* as in `extend`, in the same message."""
        return self._send({"STOPPING": "1"} | _status(text) | _extension(extend_s))

    def reloading(self, text: str = "") -> bool:
        """The service changes its settings; `ready` says that it is done."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._send({"RELOADING": "1", "MONOTONIC_USEC": str(now_us)} | _status(text))

    def watchdog(self) -> bool:
        """The event loop still runs. Called from the loop, so that a stuck one is caught."""
        return self._send({"WATCHDOG": "1"})

    def watchdog_interval_s(self) -> float | None:
        """Seconds between two calls of `watchdog`: half of what systemd allows; None without."""
        variables = self._variables
        # systemd sets the pid too: a child that inherits the environment is not the one it watches.
        if variables.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None
        try:
            interval_s = int(variables["WATCHDOG_USEC"]) / 1_000_000 / 2
        except (KeyError, ValueError):
            return None
        return interval_s if interval_s > 0 else None

    def barrier(self, *, timeout_s: float) -> bool:
        """Wait until all that was sent before has been read; blocks for *timeout_s* at most.

        For the end of a process, whose last words systemd could not tell from another's.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            sent = self._send({"BARRIER": "1"}, descriptor=theirs)
            os.close(theirs)
            theirs = -1
            return sent and bool(_closed_within(ours, timeout_s))
        finally:
            for descriptor in (ours, theirs):
                if descriptor >= 0:
                    os.close(descriptor)

    @property
    def _variables(self) -> Mapping[str, str]:
        return os.environ if self._env is None else self._env

    def _send(self, assignments: Mapping[str, str], *, descriptor: int | None = None) -> bool:
        address = self._variables.get("NOTIFY_SOCKET", "")
        if address[:1] not in {"/", "@"}:
            return False
        if address.startswith("@"):  # the abstract namespace
            address = "\0" + address[1:]
        lines = (f"{key}={value}" for key, value in assignments.items())
        data = "\n".join(lines).encode(errors="replace")
        with (
            contextlib.suppress(OSError, ValueError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.setblocking(False)
            sender.connect(address)
            return sender.sendmsg([data], _rights(descriptor)) == len(data)
        return False


def _closed_within(descriptor: int, timeout_s: float) -> bool:
    """Whether the other end of a pipe was closed in time."""
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP comes unasked
    return bool(poll.poll(timeout_s * 1000))


def _rights(descriptor: int | None) -> list[tuple[int, int, array.array[int]]]:
    if descriptor is None:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


def _status(text: str) -> dict[str, str]:
    # A line break would begin another assignment, such as a forged STOPPING=1.
    line = " ".join(text.split())[:_LONGEST_STATUS]
    return {"STATUS": line} if line else {}


def _extension(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"EXTEND_TIMEOUT_USEC": str(max(0, int(seconds * 1_000_000)))}
