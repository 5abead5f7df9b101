"""What systemd is told: READY, STATUS, STOPPING, WATCHDOG.

Nothing here raises, blocks or keeps state; without NOTIFY_SOCKET nothing is
sent. STOPPING is irrevocable from systemd 259 on: only a final drain sends it,
never quiet, and always together with EXTEND_TIMEOUT_USEC.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

_LONGEST_STATUS: Final = 256


def ready(text: str = "", *, env: Mapping[str, str] | None = None) -> bool:
    """The service takes requests; true if systemd was told."""
    return _send({"READY": "1"} | _status(text), env)


def status(
    text: str, *, extend_s: float | None = None, env: Mapping[str, str] | None = None
) -> bool:
    """Show *text* in `systemctl status`; true if systemd was told.

    Args:
        text: One line, for example `draining: 3 in flight, 18s left`.
        extend_s: Seconds from now within which the next sign of progress
            comes; systemd does not kill before. None leaves its time-out alone.
        env: The environment; None for this process's own.
    """
    return _send(_status(text) | _extension(extend_s), env)


def stopping(*, extend_s: float, text: str = "", env: Mapping[str, str] | None = None) -> bool:
    """The service is going down for good; *extend_s* as in `status`."""
    return _send({"STOPPING": "1"} | _status(text) | _extension(extend_s), env)


def watchdog(*, env: Mapping[str, str] | None = None) -> bool:
    """The event loop still runs. Call this from the loop, so that a stuck one is caught."""
    return _send({"WATCHDOG": "1"}, env)


def watchdog_interval_s(*, env: Mapping[str, str] | None = None) -> float | None:
    """Seconds between two calls of `watchdog`: half of what systemd allows; None without."""
    variables = os.environ if env is None else env
    # systemd sets the pid too: a child that inherits the environment is not the one it watches.
    if variables.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        interval_s = int(variables["WATCHDOG_USEC"]) / 1_000_000 / 2
    except (KeyError, ValueError):
        return None
    return interval_s if interval_s > 0 else None


def _status(text: str) -> dict[str, str]:
    # A line break would begin another assignment, such as a forged STOPPING=1.
    line = " ".join(text.split())[:_LONGEST_STATUS]
    return {"STATUS": line} if line else {}


def _extension(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"EXTEND_TIMEOUT_USEC": str(max(0, int(seconds * 1_000_000)))}


def _send(assignments: Mapping[str, str], env: Mapping[str, str] | None) -> bool:
    address = (os.environ if env is None else env).get("NOTIFY_SOCKET", "")
    if address[:1] not in {"/", "@"}:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    data = "\n".join(f"{key}={value}" for key, value in assignments.items()).encode(
        errors="replace"
    )
    with (
        contextlib.suppress(OSError, ValueError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
    ):
        sender.setblocking(False)
        sender.connect(address)
        return sender.send(data) == len(data)
    return False
