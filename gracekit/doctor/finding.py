"""What a check has found: how it stands, what was seen, what to do.

The exit code of all findings is the largest code among those that FAIL.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gracekit.exits import ExitCode


class Level(enum.Enum):
    """How one thing stands."""

    OK = "ok"
    WARN = "warn"  # it works, and somebody will wonder one day
    FAIL = "fail"  # it does not start, or a promise does not hold
    SKIP = "skip"  # it could not be seen from here


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence about one thing.

    Attributes:
        check: What was looked at, for example `hard limit`.
        seen: The value and the rule.
        remedy: What to do; empty where nothing is to be done.
        code: Exit code that a FAIL asks for: 78 where configuration, declaration
            or deployment must be mended, 69 where a disk, a broker or a process must,
            70 where the check itself is at fault.
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
    """Nothing to do."""
    return Finding(check=check, level=Level.OK, seen=seen)


def warn(check: str, seen: str, remedy: str) -> Finding:
    """Worth a look."""
    return Finding(check=check, level=Level.WARN, seen=seen, remedy=remedy)


def fail(check: str, seen: str, remedy: str, code: ExitCode = ExitCode.CONFIG) -> Finding:
    """To be mended before the next start."""
    return Finding(check=check, level=Level.FAIL, seen=seen, remedy=remedy, code=code)


def skip(check: str, seen: str, remedy: str = "") -> Finding:
    """Not visible from here."""
    return Finding(check=check, level=Level.SKIP, seen=seen, remedy=remedy)


def told(check: str, error: Exception, code: ExitCode = ExitCode.CONFIG) -> list[Finding]:
    """FAILs from the lines of an error of ours, which say value and rule; then the remedy."""
    found = []
    for line in str(error).splitlines() or [type(error).__name__]:
        seen, _, remedy = line.partition("; ")
        found.append(fail(check, seen, remedy, code))
    return found


def exit_code(findings: Iterable[Finding]) -> int:
    """0 if nothing FAILs, else the largest code that a FAIL asks for."""
    return max((int(one.code) for one in findings if one.level is Level.FAIL), default=0)
