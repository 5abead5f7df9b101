"""The result of a check: a level, an observation and a remedy.

The exit code of `gracekit doctor` is the largest code of the findings that FAIL.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import msgspec

from gracekit.exits import ExitCode


class Level(enum.Enum):
    """How serious a finding is."""

    OK = "ok"
    WARN = "warn"  # it works now, but may cause trouble
    FAIL = "fail"  # a start is refused, or a guarantee does not hold
    SKIP = "skip"  # it cannot be checked from here


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes:
        check: Name of the check, for example `hard limit`.
        seen: The observed value and the rule.
        remedy: What to do; empty if there is nothing to do.
        code: Exit code of a FAIL: 78 if the configuration, a declaration or the
            deployment is wrong, 69 if a disk, a broker or a process is, 70 for a
            bug in the check itself.
        area: Group of checks; set by `examine`.
    """

    check: str
    level: Level
    seen: str
    remedy: str = ""
    code: ExitCode = ExitCode.CONFIG
    area: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "area": self.area,
            "check": self.check,
            "level": self.level.value,
            "seen": self.seen,
            "remedy": self.remedy or None,
            "code": int(self.code) if self.level is Level.FAIL else None,
        }


def ok(check: str, seen: str) -> Finding:
    """A finding that needs no action."""
    return Finding(check=check, level=Level.OK, seen=seen)


def warn(check: str, seen: str, remedy: str) -> Finding:
    """A finding of something that may cause trouble."""
    return Finding(check=check, level=Level.WARN, seen=seen, remedy=remedy)


def fail(check: str, seen: str, remedy: str, code: ExitCode = ExitCode.CONFIG) -> Finding:
    """A finding that must be corrected before the next start."""
    return Finding(check=check, level=Level.FAIL, seen=seen, remedy=remedy, code=code)


def skip(check: str, seen: str, remedy: str = "") -> Finding:
    """A finding of something that cannot be checked from here."""
    return Finding(check=check, level=Level.SKIP, seen=seen, remedy=remedy)


def told(check: str, error: Exception, code: ExitCode = ExitCode.CONFIG) -> list[Finding]:
    """One FAIL for each line of gracekit's *error*: the observation, `; ` and the remedy."""
    found = []
    for line in str(error).splitlines() or [type(error).__name__]:
        seen, _, remedy = line.partition("; ")
        found.append(fail(check, seen, remedy, code))
    return found


def exit_code(findings: Iterable[Finding]) -> int:
    """0 if nothing FAILs, otherwise the largest code of a FAIL."""
    return max((int(one.code) for one in findings if one.level is Level.FAIL), default=0)
