"""What the tests of single checks share: a `/proc` made of files, and findings by name."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from gracekit.doctor.finding import Finding, Level


def process(
    proc: Path,
    pid: int,
    *command: str,
    parent: int = 0,
    blocked: Iterable[int] = (),
    ignored: Iterable[int] = (),
    caught: Iterable[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT),
    environment: dict[str, str] | None = None,
    cgroup: str = "/",
    inner: int | None = None,
) -> None:
    """One process, as the kernel would show it; *inner*: its pid in a namespace of its own."""
    directory = proc / str(pid)
    (directory / "fd").mkdir(parents=True)
    (directory / "cmdline").write_text("".join(f"{word}\0" for word in command))
    masks = {"SigBlk": blocked, "SigIgn": ignored, "SigCgt": caught}
    lines = [f"Name:\t{command[0]}", f"PPid:\t{parent}"]
    lines += [f"NSpid:\t{pid}\t{inner}"] if inner is not None else []
    lines += [f"{name}:\t{_mask(numbers):016x}" for name, numbers in masks.items()]
    (directory / "status").write_text("\n".join(lines) + "\n")
    pairs = (environment or {}).items()
    (directory / "environ").write_text("".join(f"{name}={value}\0" for name, value in pairs))
    (directory / "cgroup").write_text(f"0::{cgroup}\n")


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << (number - 1) for number in numbers)


def levels(findings: Iterable[Finding]) -> dict[str, Level]:
    """Check to level."""
    return {finding.check: finding.level for finding in findings}


def one(findings: Iterable[Finding], check: str) -> Finding:
    """The one finding of that name."""
    (found,) = [finding for finding in findings if finding.check == check]
    return found
