"""Checks of the machine and its Python: clock, limits, versions, names."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from gracekit.config.settings import Settings
from gracekit.config.values import format_duration
from gracekit.doctor.files.database import ReadOnlyDatabase
from gracekit.doctor.finding import Finding, fail, ok, skip, told, warn
from gracekit.doctor.machine import proc
from gracekit.errors import ConfigError
from gracekit.exits import ExitCode
from gracekit.runtime.loops import UVLOOP_REMEDY, loop_factory, loop_name, why_no_uvloop

OLDEST_PYTHON: Final = (3, 11)
NEWEST_TRIED: Final = (3, 14)
EPOCH_OF_DOUBT: Final = 1_735_689_600.0  # 2025-01-01: a clock before that was never set
TOLERANCE_S: Final = 5.0

_CONTAINER_ID: Final = re.compile(r"[0-9a-f]{12}")
_DRAWN_NAMES: Final = {
    "docker": _CONTAINER_ID,
    "podman": _CONTAINER_ID,
    "kubernetes": re.compile(r".*-[a-z0-9]{5}"),  # of a Deployment
}
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[.*?\])?\s*>=\s*([0-9.]+)")
_NEWEST_MOMENT: Final = """
SELECT max(moment) FROM (SELECT max(beat_at) AS moment FROM run
UNION ALL SELECT max(accepted_at) FROM task UNION ALL SELECT max(finished_at) FROM task)"""


def check_python() -> Finding:
    """Check the version of Python."""
    version = sys.version_info[:2]
    shown = sys.version.split()[0]
    if version < OLDEST_PYTHON:
        return fail("Python", f"{shown}, and 3.11 is the oldest", "install a newer Python")
    if version > NEWEST_TRIED:
        tried = ".".join(map(str, NEWEST_TRIED))
        return warn("Python", f"{shown}, and {tried} is the newest tried", f"use {tried}")
    return ok("Python", shown)


def check_dependencies() -> Iterator[Finding]:
    """Compare installed versions with those that gracekit's metadata requires."""
    try:
        wanted = metadata.requires("gracekit") or []
    except metadata.PackageNotFoundError:
        yield skip("dependencies", "gracekit runs from a source tree, without metadata")
        return
    found = []
    for requirement in wanted:
        match = _REQUIREMENT.match(requirement)
        if match is None or "extra" in requirement:
            continue
        name, least = match[1], match[2]
        installed = _version(name)
        if installed is None or _number(installed) < _number(least):
            yield fail(
                "dependencies",
                f"{name} {installed or 'is missing'}, and {least} is the oldest that works",
                f"pip install '{name}>={least}'",
            )
            return
        found.append(f"{name} {installed}")
    yield ok("dependencies", ", ".join(found))


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


def check_clock_against(look: ReadOnlyDatabase, wall: float | None = None) -> Finding:
    """Check whether the wall clock is behind the newest record of the store."""
    now = time.time() if wall is None else wall
    ((newest,),) = look.rows(_NEWEST_MOMENT)
    ahead = float(str(newest)) - now if newest is not None else 0.0
    if ahead > TOLERANCE_S:
        return warn(
            "clock",
            f"the store has a record of {format_duration(float(round(ahead)))} in the future: the "
            "clock was stepped back, and settle times and holds last longer by that",
            "let the clock be slewed (chrony, systemd-timesyncd), not stepped",
        )
    return ok("clock", "no record is in the future")


def check_limits() -> Iterator[Finding]:
    """Check the file-size limit that a service started from here would inherit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY:
        yield warn(
            "file size",
            f"files may not grow beyond {soft} bytes: the store would break like a full disk",
            "ulimit -f unlimited, or LimitFSIZE=infinity in the unit",
        )
    else:
        yield ok("file size", "no limit")


def check_loop(settings: Settings) -> Iterator[Finding]:
    """Check that the event loop that the setting `loop` names can be used."""
    try:
        seen = f"{loop_name(loop_factory(settings))}; loop = {settings.loop}"
    except ConfigError as error:
        yield from told("loop", error)
        return
    if settings.loop == "auto" and _is_installed("uvloop") and (why := why_no_uvloop()):
        yield warn("loop", f"{seen}, because gracekit needs {why}", UVLOOP_REMEDY)
    else:
        yield ok("loop", seen)


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


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


def check_user() -> Finding:
    """Report the user for whom files are checked; it should be the service's user."""
    return ok("user", f"uid {os.geteuid()}; modes and owners are judged for this user")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
