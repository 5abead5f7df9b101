"""What a run reports when it is asked, or why there is no report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gracekit.phase import ServiceState

RunAnswer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run reports.

    Attributes:
        answer: Its status; None without an answer.
        tasks: Its tasks in flight, as far as they were asked for.
        brief: Why there is no answer, or not all tasks, in a few words; else empty.
        why: A whole sentence about that; empty if *brief* says everything.
    """

    answer: RunAnswer | None = None
    tasks: Sequence[RunAnswer] = ()
    brief: str = ""
    why: str = ""


Reports = Mapping[str, RunReport]
"""Run id to the report of that run."""

NO_REPORT: Final = RunReport(brief=ServiceState.STARTING.value)
"""For a run that began after the others were asked."""
