"""What a pass has done: of one resource, and in all."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gracekit.leases.leases import Resource
from gracekit.recovery.resources.found import Found

KEPT_RESULTS: Final = 10_000
"""Resources of which a pass that somebody asked for keeps what became of them."""


LONGEST_REASON: Final = 1000
"""Characters of a reason, which may be all that a backend's program has printed."""


class ResourceOutcome(enum.Enum):
    """What became of one resource."""

    SETTLED = "settled"  # its rule has written a status
    FAILED = "failed"  # its rule has written its failed status
    WAITING = "waiting"  # its rule is asked again
    LEFT = "left"  # not acted on: somebody works on it, or the rule says so
    MOVED_ON = "moved_on"  # its record was not what was found any more
    STALE = "stale"  # the lease was lost while its rule acted; nothing was written


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one resource, or would.

    Attributes:
        resource: (kind, id).
        status: As found.
        since: As found.
        outcome: What was done; in a dry run, what is expected.
        written: The status that was written; None if none was.
        rule: Name of the rule.
        token: Of its lease; None if it had none.
        reason: Why; empty where the outcome says it all. In a dry run, what would be done.
        facts: What was written with the status, in a short form.
    """

    resource: Resource
    status: str
    since: float | None
    outcome: ResourceOutcome
    written: str | None = None
    rule: str = ""
    token: int | None = None
    reason: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        kind, name = self.resource
        return {
            "kind": kind,
            "id": name,
            "status": self.status,
            "since": self.since,
            "outcome": self.outcome.value,
            "written": self.written,
            "rule": self.rule,
            "token": self.token,
            "reason": self.reason,
            "facts": dict(self.facts),
        }


def left(kind: str, found: Found, reason: str) -> Result:
    """*found* is not acted on."""
    return Result(
        resource=(kind, found.id),
        status=found.status,
        since=found.since,
        outcome=ResourceOutcome.LEFT,
        reason=reason,
    )


@dataclass(slots=True, kw_only=True)
class PassReport:
    """What one pass has done so far.

    Attributes:
        numbers: Of resources, by outcome.
        results: Each of them, up to `KEPT_RESULTS`; none of a pass that nobody asked for.
        broken: Kinds whose pass is over before its end, and why.
        unruled: Numbers of resources without a rule, by kind and status.
        interrupted: A drain, a quiet or a stop has ended it early.
        waits_for_pass: Whether another one is under way, which it waits for.
        waits_for: Requests in the queues that are to be taken before it begins; 0 for none.
        tasks: Unfinished tasks that were settled before it, because an operator has asked; in a
            dry run, those that would be.
    """

    keeps: bool
    numbers: Counter[ResourceOutcome] = field(default_factory=Counter)
    results: list[Result] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    unruled: Counter[tuple[str, str]] = field(default_factory=Counter)
    interrupted: bool = False
    waits_for_pass: bool = False
    waits_for: int = 0
    tasks: int = 0

    def add(self, result: Result) -> None:
        """Count *result*."""
        self.numbers[result.outcome] += 1
        if self.keeps and len(self.results) < KEPT_RESULTS:
            self.results.append(result)

    @property
    def counts(self) -> dict[str, Any]:
        """By the word of each outcome."""
        return {outcome.value: self.numbers[outcome] for outcome in ResourceOutcome}


def short_facts(facts: Mapping[str, object]) -> dict[str, str]:
    """Facts for people: numbers and truths as they are, of all else how much it is.

    A text may be a secret of the application, such as the password in an address.
    """
    return {name: _short(value) for name, value in facts.items()}


def _short(value: object) -> str:
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, str):
        return f"({len(value)} characters)"
    try:
        return str(len(value))  # type: ignore[arg-type]  # asked by trying
    except TypeError:
        return f"({type(value).__name__})"
