"""The report that a living run gives on request, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gracekit.phase import ServiceState

RunAnswer = dict[str, Any]


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run.

    Attributes:
        answer: Its status; None without an answer.
        tasks: Its tasks in flight, if they were requested.
        brief: Why the answer or some tasks are missing, in a few words; otherwise empty.
        why: The same as a full sentence; empty if *brief* is enough.
    """

    answer: RunAnswer | None = None
    tasks: Sequence[RunAnswer] = ()
    brief: str = ""
    why: str = ""


Reports = Mapping[str, RunReport]
"""Reports by run id."""

NO_REPORT: Final = RunReport(brief=ServiceState.STARTING.value)
"""Stands for the report of a run that began after the reports were collected."""
