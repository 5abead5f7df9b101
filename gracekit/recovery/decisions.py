"""Decisions on started, unfinished tasks: the answers of a probe, and what the policy says.

`decide` is a pure function; the reconciler carries out its result.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

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


class Decision(msgspec.Struct, frozen=True):
    """A step, and for ERROR its reason."""

    step: Step
    reason: Reason | None = None


def policy_of(then: OnInterrupt, now: OnInterrupt) -> OnInterrupt:
    """The policy for a row that was accepted under another policy than its method has now.

    The present version knows best what is safe, but not what an older version
    began. So a task is run again without a probe only if both policies allow it.
    """
    return "error" if then in NOT_TWICE and now not in NOT_TWICE else now


def decide(row: TaskRow, *, policy: OnInterrupt, max_attempts: int, has_probe: bool) -> Decision:
    """What to do with a started, unfinished task.

    After a stop at a safe point the task goes on from its cursor, whatever its
    policy is. A hand-over counts as no crash. A task with `max_attempts` crashes
    since its last progress is given up, if it ran alone at the last one.
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
    """Seconds until a failed probe is called again."""
    return backoff.PROBE.after(0.0 if waiting_since is None else now - waiting_since)
