"""Reads `/proc`: a process's parents, signals, environment, unit and container."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

PROC: Final = Path("/proc")
_OF_DISKS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})


class Masks(msgspec.Struct, frozen=True, kw_only=True):
    """The signal masks of a process.

    Attributes:
        blocked: Signals that stay pending.
        ignored: Signals that are discarded.
        caught: Signals that have a handler.
    """

    blocked: frozenset[int]
    ignored: frozenset[int]
    caught: frozenset[int]


def command_of(pid: int, proc: Path = PROC) -> list[str]:
    """Its command line; empty for a kernel thread or a process that has ended."""
    return [word for word in _read(proc / str(pid) / "cmdline").split("\0") if word]


def parents_of(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield its parent, that one's parent, and so on up to PID 1 of this namespace."""
    seen = {pid}
    while (parent := parent_of(pid, proc)) > 0 and parent not in seen:
        yield parent
        seen.add(parent)
        pid = parent


def parent_of(pid: int, proc: Path = PROC) -> int:
    """Its parent; 0 if that is outside this namespace, or the process has ended."""
    return int(_status(pid, proc).get("PPid", "0"))


def masks_of(pid: int, proc: Path = PROC) -> Masks | None:
    """Its signal masks; None if it has ended or may not be read."""
    status = _status(pid, proc)
    if "SigCgt" not in status:
        return None
    return Masks(
        blocked=_signals(status["SigBlk"]),
        ignored=_signals(status["SigIgn"]),
        caught=_signals(status["SigCgt"]),
    )


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Whether a signal such as SIGSTOP, or a debugger, has stopped it; false if it has ended."""
    return _status(pid, proc).get("State", "")[:1] in {"T", "t"}


def pid_namespace(proc: Path = PROC) -> int | None:
    """The pid namespace of this process; None if it may not be read."""
    return inner_pid(os.getpid(), proc)[0]


def environment_of(pid: int, proc: Path = PROC) -> Mapping[str, str]:
    """Its environment at its start; empty if it may not be read."""
    pairs = (entry.partition("=") for entry in _read(proc / str(pid) / "environ").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def unit_of(pid: int, proc: Path = PROC) -> str | None:
    """The systemd service that it runs in; None if it runs in none."""
    for line in _read(proc / str(pid) / "cgroup").splitlines():
        # Only the last part: a user's shell is somewhere below user@1000.service.
        unit = line.rpartition("/")[2]
        if unit.endswith(".service") and not unit.startswith("user@"):
            return unit
    return None


def inner_pid(pid: int, proc: Path = PROC) -> tuple[int | None, int]:
    """Its pid namespace, or None if that may not be read, and its pid inside it."""
    numbers = _status(pid, proc).get("NSpid", str(pid)).split()
    try:
        namespace = (proc / str(pid) / "ns" / "pid").stat().st_ino
    except OSError:
        namespace = None
    return namespace, int(numbers[-1])


def container_of(pid: int, proc: Path = PROC) -> str | None:
    """`kubernetes`, `docker` or `podman` if it runs in a container; otherwise None."""
    text, root = _read(proc / str(pid) / "cgroup"), proc / str(pid) / "root"
    if "kubepods" in text or environment_of(pid, proc).get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if "docker" in text:
        return "docker"
    if "libpod" in text:
        return "podman"
    # The files below also exist on machines that were made from a container's image.
    if _has_whole_disk(pid, proc):
        return None
    if _exists(root / ".dockerenv"):
        return "docker"
    return "podman" if _exists(root / "run" / ".containerenv") else None


def _has_whole_disk(pid: int, proc: Path) -> bool:
    """Whether its root is the root of a disk's file system; in a container it is not."""
    is_whole = False
    for line in _read(proc / str(pid) / "mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        words = mount.split()
        if words[4:5] == ["/"]:  # the last one counts: it is mounted over the others
            is_whole = words[3] == "/" and source.partition(" ")[0] in _OF_DISKS
    return is_whole


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # another user's process
        return False


def _status(pid: int, proc: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in _read(proc / str(pid) / "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _signals(mask: str) -> frozenset[int]:
    bits = int(mask, 16)
    return frozenset(n for n in range(1, signal.NSIG) if bits >> (n - 1) & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
