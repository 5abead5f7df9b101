"""The platform's patience against our hard limit: one comparison, whoever the platform is."""

from __future__ import annotations

import math

from gracekit.config.settings import Settings, shorter_drain
from gracekit.config.values import format_duration
from gracekit.doctor.configuration import last_breath_s
from gracekit.doctor.finding import Finding, fail, ok, warn


def compare(
    settings: Settings, *, check: str, limit_s: float, said: str, knob: str, spent_s: float = 0.0
) -> Finding:
    """Whether a run is gone before the platform kills it.

    Args:
        settings: Of the run.
        check: Name of the finding.
        limit_s: Seconds from the platform's stop request to its kill; infinite for never.
        said: Where that number stands: `TimeoutStopSec of compute.service`.
        knob: What to raise: `terminationGracePeriodSeconds`.
        spent_s: Seconds of it that are gone before SIGTERM comes (preStop).
    """
    hard, alarm = settings.hard_limit_s + spent_s, last_breath_s(settings) + spent_s
    before = f"preStop {format_duration(spent_s)} + " if spent_s else ""
    ours = f"{before}hard limit {format_duration(settings.hard_limit_s)}"
    if math.isinf(limit_s):
        return warn(
            check,
            f"{said} is infinite: a process that is stuck beyond its alarm is never killed",
            f"set {knob} to {math.floor(alarm) + 1}",
        )
    theirs = f"{said} = {format_duration(limit_s)}"
    needed = f"raise {knob} to at least {math.floor(alarm) + 1}"
    if hard >= limit_s:
        return fail(
            check,
            f"{ours} must be below {theirs}: the platform kills before tasks are handed over",
            f"{needed}{shorter_drain(settings, limit_s - spent_s)}",
        )
    if alarm >= limit_s:
        return warn(
            check,
            f"the kernel's alarm at {format_duration(alarm)} should be below {theirs}: a stuck "
            "process dies of the platform's SIGKILL first, and looks like any other kill",
            needed,
        )
    return ok(check, f"{ours}, alarm at {format_duration(alarm)}, is below {theirs}")
