"""Reports the state of the service to the platform, by systemd's notification protocol.

Nothing here raises or keeps state, and only `barrier` blocks. Without NOTIFY_SOCKET nothing
is sent.
From systemd 259 on STOPPING is irrevocable, so only a final drain sends it, never quiet.
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
    """Reports the state of the service. Each method returns whether the message was sent.

    Args:
        env: The environment; None for this process's own, read at each call.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = env

    def ready(self, text: str = "") -> bool:
        """Report that the service accepts requests, at first or after `reloading`."""
        return self._send({"READY": "1"} | _status(text))

    def status(self, text: str) -> bool:
        """Show *text* in `systemctl status`; one line, such as `draining: 3 running, 18s left`."""
        return self._send(_status(text))

    def extend(self, seconds: float, text: str = "") -> bool:
        """Ask systemd not to time out a start or stop within the next *seconds*.

        systemd applies this only if its own timeout would end earlier.
        """
        return self._send(_status(text) | _extension(seconds))

    def stopping(self, text: str = "", *, extend_s: float | None = None) -> bool:
        """Report that the service is stopping for good; *extend_s* as in `extend`."""
        return self._send({"STOPPING": "1"} | _status(text) | _extension(extend_s))

    def reloading(self, text: str = "") -> bool:
        """Report that the service reads its settings again; `ready` reports the end of it."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        return self._send({"RELOADING": "1", "MONOTONIC_USEC": str(now_us)} | _status(text))

    def watchdog(self) -> bool:
        """Report that the event loop runs. Call it on the loop, so that a stuck loop is noticed."""
        return self._send({"WATCHDOG": "1"})

    def watchdog_interval_s(self) -> float | None:
        """Seconds between two calls of `watchdog`: half of what systemd allows; None without."""
        variables = self._variables
        # A child inherits the environment, but systemd watches only the process with this pid.
        if variables.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None
        try:
            interval_s = int(variables["WATCHDOG_USEC"]) / 1_000_000 / 2
        except (KeyError, ValueError):
            return None
        return interval_s if interval_s > 0 else None

    def barrier(self, *, timeout_s: float) -> bool:
        """Wait until systemd has read all earlier messages; blocks for at most *timeout_s*.

        Call it at the end of a process: systemd cannot attribute a message that it reads after
        the sender is gone.
        """
        try:
            ours, theirs = os.pipe2(os.O_CLOEXEC)
        except OSError:  # no descriptor is free
            return False
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
    poll.register(descriptor, 0)  # POLLHUP is always reported
    return bool(poll.poll(timeout_s * 1000))


def _rights(descriptor: int | None) -> list[tuple[int, int, array.array[int]]]:
    if descriptor is None:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


def _status(text: str) -> dict[str, str]:
    # Without line breaks, after which text could forge another assignment, such as STOPPING=1.
    line = " ".join(text.split())[:_LONGEST_STATUS]
    return {"STATUS": line} if line else {}


def _extension(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"EXTEND_TIMEOUT_USEC": str(max(0, int(seconds * 1_000_000)))}
