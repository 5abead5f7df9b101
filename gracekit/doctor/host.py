"""Checks of the machine: clock and host name."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

from gracekit.config.settings import Settings
from gracekit.config.values import format_duration
from gracekit.doctor import proc
from gracekit.doctor.finding import Finding, fail, ok, warn
from gracekit.exits import ExitCode

EPOCH_OF_DOUBT: Final = 1_735_689_600.0  # 2025-01-01: a clock before that was never set

_CONTAINER_ID: Final = re.compile(r"[0-9a-f]{12}")
_DRAWN_NAMES: Final = {
    "docker": _CONTAINER_ID,
    "podman": _CONTAINER_ID,
    "kubernetes": re.compile(r".*-[a-z0-9]{5}"),  # of a Deployment
}


def check_clock(wall: float | None = None) -> Finding:
    """Check whether the wall clock was set."""
    now = time.time() if wall is None else wall
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(0.0, now)))
    if now < EPOCH_OF_DOUBT:
        return fail(
            "clock",
            f"{shown}: it was never set after boot, so settle times and deadlines in the store "
            "mean nothing",
            "set it before the service starts: After=time-sync.target in the unit",
            ExitCode.DEPENDENCY,
        )
    return ok("clock", shown)


def check_host_name(settings: Settings, pid: int, root: Path = proc.PROC) -> Finding:
    """Check that the host name survives a restart, as the directed queue is named for it.

    A container's default name does not.
    """
    kind, name = proc.container_of(pid, root), settings.host
    drawn = _DRAWN_NAMES.get(kind or "")
    if settings.origin("host") == "default" and drawn is not None and drawn.fullmatch(name):
        return warn(
            "host",
            f"{name} looks like the drawn name of one {kind} container: the next one has another, "
            "and requests directed to this one wait until host_gone_after = "
            f"{format_duration(settings.host_gone_after_s)} gives them up",
            "set GRACEKIT_HOST to a name that stays: of the node, or of a StatefulSet's pod",
        )
    return ok("host", f"{name}, from {settings.origin('host')}")
