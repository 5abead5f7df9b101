"""The values by which the application reports its resources, such as `Found` and `Settled`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Final

from gracekit.errors import InvalidArgumentsError
from gracekit.leases.leases import Resource
from gracekit.recovery.decisions import Wait
from gracekit.rpc.argument_paths import need_resource_id
from gracekit.rpc.failures import words_of

LATEST: Final = 1e11
"""Seconds since 1970; a later moment must have been given in milliseconds."""
LONGEST_STATUS: Final = 100
"""Most characters of a status."""


@dataclass(frozen=True, slots=True, init=False)
class Found:
    """A resource in a transient status, as the `find` of its kind returns it.

    Attributes:
        id: Id of the resource, as text.
        status: Its status in the application's records.
        since: Wall time, in seconds, of the last change of status; None if unknown.
        busy: Whether the application says that it is being worked on; it is then left alone.
        needs: (kind, id) of the resources that must be settled before it.
    """

    id: str
    status: str
    since: float | None
    busy: bool
    needs: tuple[Resource, ...]

    def __init__(
        self,
        id: object,  # noqa: A002 - the attribute's name
        status: str,
        *,
        since: float | datetime | None = None,
        busy: bool = False,
        needs: Iterable[Resource | None] = (),
    ) -> None:
        """Describe one resource.

        Args:
            id: Text, a whole number or a UUID.
            status: Its status on record.
            since: Seconds since 1970, or a datetime with a time zone.
            busy: Whether the application's record says that it is being worked on. True, False,
                1 or 0; other values are refused, as a text such as "no" would count as True.
            needs: What it depends on: `[server.of(row.server_id)]`. None in it is left out.

        Raises:
            InvalidArgumentsError: an argument is wrong; the message says why.
        """
        put = object.__setattr__
        put(self, "id", need_resource_id(id))
        put(self, "status", status_of(status))
        put(self, "since", _seconds(since))
        put(self, "busy", _truth(busy))
        put(self, "needs", _needs(needs))


@dataclass(frozen=True, slots=True, init=False)
class Settled:
    """The truth is known: the resource has *status*, and *facts* are written with it.

    Attributes:
        status: Status to write in place of the one that was found.
        facts: Further columns of the application's record, as `write` takes them.
    """

    status: str
    facts: Mapping[str, object]

    def __init__(self, status: str, /, **facts: object) -> None:
        """Say which status is true; raises InvalidArgumentsError if it is no text."""
        object.__setattr__(self, "status", status_of(status))
        object.__setattr__(self, "facts", MappingProxyType(facts))


class _Failure:
    __slots__ = ()
    reason: str

    def __post_init__(self) -> None:
        """Check it; raises InvalidArgumentsError if *reason* is no text."""
        if not isinstance(self.reason, str):
            raise InvalidArgumentsError(
                f"the reason of {type(self).__name__} is text, and not {words_of(self.reason)}: "
                f"write {type(self).__name__}('what the backend says')"
            )


@dataclass(frozen=True, slots=True)
class Absent(_Failure):
    """The backend does not have the resource; the rule's `failed` status is written."""

    reason: str = "the backend does not know it"


@dataclass(frozen=True, slots=True)
class Broken(_Failure):
    """The backend says that the resource has failed; the rule's `failed` status is written."""

    reason: str


TruthAnswer = Settled | Absent | Broken | Wait
"""What the probe of a kind may answer."""


def status_of(value: object) -> str:
    """*value*, if it can be a status.

    Raises:
        InvalidArgumentsError: it cannot.
    """
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_STATUS or "\0" in value:
        raise InvalidArgumentsError(
            f"a status is text of 1 to {LONGEST_STATUS} characters without NUL, and not "
            f"{words_of(value)}"
        )
    return value


def _truth(busy: object) -> bool:
    if not isinstance(busy, int) or busy not in {0, 1}:  # databases have 0 and 1 for False and True
        raise InvalidArgumentsError(
            f"busy= is True or False, and not {words_of(busy)}: write "
            "busy=row.task_state is not None, or busy=bool(row.busy)"
        )
    return bool(busy)


def _needs(needs: object) -> tuple[Resource, ...]:
    match needs:
        case str() | (str(), _) if not isinstance(needs, list):  # one, and not a list of them
            raise _no_needs(needs)
        case Iterable():
            return tuple(map(_need, filter(None, needs)))
    raise _no_needs(needs)


def _need(value: object) -> Resource:
    match value:
        case (str(kind), name) if isinstance(value, Sequence):
            return kind, need_resource_id(name)
    raise _no_needs(value)


def _no_needs(value: object) -> InvalidArgumentsError:
    return InvalidArgumentsError(
        f"needs= has {words_of(value)}: give it a list of (kind, id) pairs, as "
        "needs=[server.of(row.server_id)]"
    )


def _seconds(since: object) -> float | None:
    if since is None:
        return None
    if isinstance(since, datetime):
        if since.tzinfo is None:
            raise InvalidArgumentsError(
                f"since={since} has no time zone: give a datetime with one, as by "
                ".replace(tzinfo=timezone.utc), or seconds since 1970"
            )
        return since.timestamp()
    if isinstance(since, int | float) and not isinstance(since, bool) and math.isfinite(since):
        if since > LATEST:
            raise InvalidArgumentsError(
                f"since={since} is beyond the year 5000: give seconds since 1970, not milliseconds"
            )
        return float(since)
    raise InvalidArgumentsError(
        f"since= is seconds since 1970 or a datetime with a time zone, and not {words_of(since)}"
    )
