"""Checks of the platform that this process runs on, and of how long it waits for a stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gracekit.config.settings import Settings, last_breath_s, platform_stop_s
from gracekit.config.values import format_duration
from gracekit.doctor import proc
from gracekit.doctor.finding import Finding, ok, skip, warn
from gracekit.doctor.grace import compare
from gracekit.doctor.pods import DEFAULT_GRACE_S
from gracekit.doctor.units import check_directives, show_unit

DOCKER_GRACE_S: Final = 10.0  # `docker stop`, `podman stop` and compose, without an option
_CONTAINERS: Final = MappingProxyType(
    {
        "kubernetes": (DEFAULT_GRACE_S, "terminationGracePeriodSeconds"),
        "docker": (
            DOCKER_GRACE_S,
            "docker run --stop-timeout, or stop_grace_period of compose,",
        ),
        "podman": (DOCKER_GRACE_S, "podman run --stop-timeout"),
    }
)
"""By platform: seconds from SIGTERM to SIGKILL by default, and the option that sets them."""


def check_kill_after(settings: Settings) -> Finding:
    """Check the setting `kill_after`, the platform's time limit for a stop."""
    if settings.kill_after_s is None:
        return skip(
            "kill_after",
            "not set, so a start cannot check its hard limit against the platform's",
            "set GRACEKIT_KILL_AFTER to the seconds between the platform's SIGTERM and SIGKILL",
        )
    return compare(
        settings,
        check="kill_after",
        limit_s=settings.kill_after_s,
        said="kill_after",
        knob="the platform's limit, and GRACEKIT_KILL_AFTER with it,",
    )


def check_container(settings: Settings, pid: int, root: Path = proc.PROC) -> Finding:
    """Compare the longest time of a stop with the container's default limit for it.

    The real limit cannot be read from inside the container.
    """
    kind = proc.container_of(pid, root)
    if kind is None:
        return skip("container", "none seen")
    if settings.kill_after_s is not None:
        return ok("container", f"{kind}; its limit is what kill_after says")
    (usual, knob), ours = _CONTAINERS[kind], last_breath_s(settings)
    shown = f"{kind}, which kills {format_duration(usual)} after SIGTERM by default"
    if ours < usual:
        return ok("container", f"{shown}; a run is gone after {format_duration(ours)}")
    return warn(
        "container",
        f"{shown}; a run may take {format_duration(ours)}, and the true limit cannot be seen "
        "from inside",
        f"set {knob} to at least {platform_stop_s(settings)} and GRACEKIT_KILL_AFTER to the same",
    )


def check_systemd(settings: Settings, pid: int, root: Path = proc.PROC) -> Iterator[Finding]:
    """Check the systemd unit that a process runs in."""
    unit = proc.unit_of(pid, root)
    if unit is None:
        yield skip("systemd", f"{_process(pid)} runs in no unit; name one with --unit")
        return
    shown = show_unit(unit)
    if shown is None:
        yield skip(
            "systemd",
            f"{_process(pid)} runs in {unit}, and systemctl does not answer here",
            "give the unit's file with --unit",
        )
        return
    yield from check_directives(settings, unit, shown)


def _process(pid: int) -> str:
    return "this process (gracekit doctor)" if pid == os.getpid() else f"process {pid}"
