"""Compares the platform's time limit for a stop with our hard limit; used for all platforms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from gracekit.config.settings import (
    Settings,
    last_breath_s,
    platform_stop_s,
    shorter_drain,
    variable_name,
)
from gracekit.config.values import format_duration
from gracekit.doctor.finding import Finding, Level, fail, ok, skip, told, warn
from gracekit.doctor.start_command import StartCommand
from gracekit.errors import ConfigError

TIMES: Final = ("drain_timeout_s", "handover_grace_s", "handover_flush_s", "exit_margin_s")
"""The settings whose sum is the hard limit."""


def compare(
    settings: Settings,
    *,
    check: str,
    limit_s: float,
    said: str,
    knob: str,
    spent: Mapping[str, float] = MappingProxyType({}),
    promised_s: float | None = None,
) -> Finding:
    """Check that a run ends before the platform kills it.

    Args:
        settings: Of the run.
        check: Name of the finding.
        limit_s: Seconds from the platform's stop request to its kill; infinite for never.
        said: Where the limit is written: `TimeoutStopSec of compute.service`.
        knob: The option to raise: `terminationGracePeriodSeconds`.
        spent: Seconds of the limit that pass before the drain begins, by what takes them.
        promised_s: The `kill_after` that the run's command gives it; None for none. The remedy is
            also good for that.
    """
    spent_s = sum(spent.values())
    hard, alarm = settings.hard_limit_s + spent_s, last_breath_s(settings) + spent_s
    before = "".join(f"{what} {format_duration(s)} + " for what, s in spent.items() if s)
    ours = f"{before}hard limit {format_duration(settings.hard_limit_s)}"
    least = platform_stop_s(settings, before_s=spent_s)
    if math.isinf(limit_s):
        return warn(
            check,
            f"{said} is infinite: a process that is stuck beyond its alarm is never killed",
            f"set {knob} to {least}",
        )
    theirs = f"{said} = {format_duration(limit_s)}"
    shorter = shorter_drain(settings, limit_s - spent_s)
    if promised_s is not None and promised_s > limit_s:
        least = max(least, math.ceil(promised_s))
        shorter += f" and {variable_name('kill_after_s')}={limit_s:g}" if shorter else ""
    needed = f"raise {knob} to at least {least}"
    if hard >= limit_s:
        return fail(
            check,
            f"{ours} must be below {theirs}: the platform kills before tasks are handed over",
            f"{needed}{shorter}",
        )
    if alarm >= limit_s:
        return warn(
            check,
            f"the kernel's alarm at {format_duration(alarm)} should be below {theirs}: a stuck "
            "process dies of the platform's SIGKILL first, and looks like any other kill",
            needed,
        )
    return ok(check, f"{ours}, alarm at {format_duration(alarm)}, is below {theirs}")


def check_promise(
    settings: Settings, given: StartCommand, *, limit_s: float, said: str, knob: str
) -> Iterator[Finding]:
    """Check that the run's `kill_after` is not above its platform's limit.

    Says nothing if its hard limit is above that too: the remedy of `compare` is for both.

    Args:
        settings: Of the run.
        given: Its command. If it gives no settings, `kill_after` comes from the operator's own
            environment, and is not checked.
        limit_s: Seconds from the platform's stop request to its kill; infinite for never.
        said: Where the limit is written.
        knob: The option to raise.
    """
    promised = settings.kill_after_s
    if promised is None or not given.says:
        return
    check, shown = variable_name("kill_after_s"), format_duration(promised)
    if promised > limit_s and settings.hard_limit_s >= limit_s:
        return
    if promised > limit_s:
        yield fail(
            check,
            f"{shown} must be at most {said} = {format_duration(limit_s)}: a start would accept a "
            "drain that the platform ends by SIGKILL",
            f"set {check}={limit_s:g}, or {knob} to {promised:g}",
        )
    else:
        yield ok(check, f"{shown} is not more than {said}")


def doubted(finding: Finding, given: StartCommand, unknown: frozenset[str]) -> Finding:
    """*finding* about the hard limit, as far as it stands if a hidden source may set its times.

    A FAIL becomes a WARN; if the variable of a time is named and its value is hidden, a SKIP.
    """
    hidden = [name for name in TIMES if name in unknown]
    if any(variable_name(name) in given.hidden_variables for name in hidden):
        return _lowered(finding, Level.SKIP, given, "may set other times")
    if hidden and finding.level is Level.FAIL:
        return _lowered(finding, Level.WARN, given, "may set other times")
    return finding


def refused(check: str, given: StartCommand, error: ConfigError) -> list[Finding]:
    """The findings for a refused start; lowered to WARN if some settings are hidden here."""
    found = told(check, error)
    if not given.hidden:
        return found
    return [_lowered(one, Level.WARN, given, "may set what is missing") for one in found]


def _lowered(finding: Finding, level: Level, given: StartCommand, what: str) -> Finding:
    seen = f"{finding.seen}; {' or '.join(given.hidden)} {what}"
    return msgspec.structs.replace(finding, level=level, seen=seen)


def not_known(check: str, name: str, what: str) -> Finding:
    """A SKIP, because *what* depends on the setting *name*, whose value is hidden."""
    return skip(check, f"the value of {variable_name(name)} is not known here, nor {what}")
