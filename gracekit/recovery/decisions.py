"""Decisions on started, unfinished tasks: what a probe may answer, and what policy says.

`decide` is pure: the reconciler carries out what it answers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, assert_never

from gracekit import backoff
from gracekit.config.choices import NOT_TWICE, OnInterrupt
from gracekit.config.values import parse_duration
from gracekit.errors import ConfigError, InvalidArgumentsError
from gracekit.journal.rows import TaskRow
from gracekit.request.suspects import is_guilty
from gracekit.rpc.failures import words_of
from gracekit.tracker.task import Interruption, Reason


@dataclass(frozen=True, slots=True)
class Done:
    """The work was done: the task SUCCEEDED with *result* (plain JSON data)."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The work was not done, and it is safe to start it again."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The work cannot be completed: the task FAILED, and *reason* goes to its caller."""

    reason: str


@dataclass(frozen=True, slots=True, init=False)
class Wait:
    """The truth is not known yet: ask again after *seconds* (a number, or text like `"1m"`)."""

    seconds: float

    def __init__(self, seconds: float | str) -> None:
        """Say when to ask again; raises InvalidArgumentsError if *seconds* is no duration."""
        try:
            object.__setattr__(self, "seconds", parse_duration(seconds))
        except ConfigError as error:
            raise InvalidArgumentsError(f"Wait({words_of(seconds)}): {error}") from None


ProbeAnswer = Done | Retry | Fail | Wait


class Step(enum.Enum):
    """What the reconciler does with a claimed row."""

    RUN_AGAIN = "run_again"
    PROBE = "probe"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Decision:
    """A step, and for ERROR its reason."""

    step: Step
    reason: Reason | None = None


def policy_of(then: OnInterrupt, now: OnInterrupt) -> OnInterrupt:
    """What counts for a row that was accepted under another policy than its method has now.

    The present version knows best what is safe, but not what an older one has
    begun: a task is run again unasked only if both say that it may be.
    """
    return "error" if then in NOT_TWICE and now not in NOT_TWICE else now


def decide(row: TaskRow, *, policy: OnInterrupt, max_attempts: int, has_probe: bool) -> Decision:
    """What becomes of a started, unfinished task.

    A stop at a safe point is no interruption: the task goes on from its cursor,
    whatever its policy. A hand-over costs nothing; crashes since the last
    progress are capped, if the last one met it alone.
    """
    if row.cut is Interruption.SAFE_POINT:
        return Decision(Step.RUN_AGAIN)
    if policy == "error":
        return Decision(Step.ERROR, Reason.INTERRUPTED)
    if is_guilty(row.crashes, max_attempts, alone=row.alone):
        return Decision(Step.ERROR, Reason.ATTEMPTS)
    match policy:
        case "retry" | "requeue":  # a `requeue` request has a row once it was delivered again
            return Decision(Step.RUN_AGAIN)
        case "probe" if has_probe:
            return Decision(Step.PROBE)
        case "probe":
            return Decision(Step.ERROR, Reason.INTERRUPTED)
        case _:
            assert_never(policy)


def probe_pause_s(waiting_since: float | None, now: float) -> float:
    """Seconds until the next look after a probe that failed."""
    return backoff.PROBE.after(0.0 if waiting_since is None else now - waiting_since)
