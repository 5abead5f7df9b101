"""What a pass has done: the result of each resource, and a report of the whole."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gracekit.leases.leases import Resource
from gracekit.recovery.resources.found import Found

KEPT_RESULTS: Final = 10_000
"""Most results that a pass by an operator keeps."""


LONGEST_REASON: Final = 1000
"""Most characters of a reason; without a limit it may be all the output of a backend's program."""


class ResourceOutcome(enum.Enum):
    """What became of one resource."""

    SETTLED = "settled"  # its rule has written a status
    FAILED = "failed"  # its rule has written its failed status
    WAITING = "waiting"  # its rule is followed again later
    LEFT = "left"  # not acted on: a task works on it, or the rule says so
    MOVED_ON = "moved_on"  # its record has changed since it was found
    STALE = "stale"  # the lease was lost while its rule acted; nothing was written


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one resource, or in a dry run would become.

    Attributes:
        resource: (kind, id).
        status: As found.
        since: As found.
        outcome: What was done; in a dry run, what is expected.
        written: The status that was written; None if none was.
        rule: Name of the rule.
        token: Token of its lease; None if it had no lease.
        reason: Why; empty if the outcome says enough. In a dry run, what would be done.
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
        fields = msgspec.to_builtins(self)
        kind, name = fields.pop("resource")
        return {"kind": kind, "id": name, **fields}


def left(kind: str, found: Found, reason: str) -> Result:
    """The result of a resource that is not acted on."""
    return Result(
        resource=(kind, found.id),
        status=found.status,
        since=found.since,
        outcome=ResourceOutcome.LEFT,
        reason=reason,
    )


class PassReport(msgspec.Struct, kw_only=True):
    """What one pass has done so far.

    Attributes:
        keeps: Whether results are kept, as for a pass that an operator asked for.
        numbers: Number of resources by outcome.
        results: The first `KEPT_RESULTS` results, if *keeps*.
        broken: Kinds that could not be read to the end, and why.
        unruled: Number of resources without a rule, by kind and status.
        interrupted: Whether a drain, a quiet or a stop has ended it early.
        waits_for_pass: Whether it waits for another pass that is under way.
        waits_for: Requests in the queues that must be read before it begins; 0 for none.
        is_unread: Whether it has begun before they were all read.
        tasks: Unfinished tasks that were settled before it, because an operator has asked; in a
            dry run, those that would be.
    """

    keeps: bool
    numbers: Counter[ResourceOutcome] = msgspec.field(default_factory=Counter)
    results: list[Result] = msgspec.field(default_factory=list)
    broken: dict[str, str] = msgspec.field(default_factory=dict)
    unruled: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    interrupted: bool = False
    waits_for_pass: bool = False
    waits_for: int = 0
    is_unread: bool = False
    tasks: int = 0

    def add(self, result: Result) -> None:
        """Count *result*, and keep it if results are kept."""
        self.numbers[result.outcome] += 1
        if self.keeps and len(self.results) < KEPT_RESULTS:
            self.results.append(result)

    @property
    def counts(self) -> dict[str, Any]:
        """Number of resources for each outcome, by its value; 0 is shown too."""
        return {outcome.value: self.numbers[outcome] for outcome in ResourceOutcome}


def short_facts(facts: Mapping[str, object]) -> dict[str, str]:
    """Facts for people: numbers and booleans as they are, of all else only its length or type.

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
