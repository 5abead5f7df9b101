"""What a run says of itself when it is asked, or why it says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gracekit.phase import ServiceState

RunAnswer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run says of itself.

    Attributes:
        answer: Its status; None if it gave none.
        tasks: Its tasks in flight, as far as they were asked for.
        brief: Why it gave none, or not all of its tasks, in a few words; else empty.
        why: The sentence behind that, where there is more to say.
    """

    answer: RunAnswer | None = None
    tasks: Sequence[RunAnswer] = ()
    brief: str = ""
    why: str = ""


Reports = Mapping[str, RunReport]
"""Run id to what that run says."""

NO_REPORT: Final = RunReport(brief=ServiceState.STARTING.value)
"""Of a run that began after the others were asked."""
