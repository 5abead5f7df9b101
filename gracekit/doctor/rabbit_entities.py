"""The queues and exchanges of a service on RabbitMQ, and whether existing ones are declared alike.

AMQP cannot query the flags of a queue. But declaring an existing queue compares them: RabbitMQ
answers ok, or refuses with a text that names the first flag that differs. Such a declare
must never create anything, even if the queue is deleted at that moment. So it carries a
guard: an argument with which creation always fails. RabbitMQ does not compare the guard
of a queue, and compares that of an exchange last.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gracekit.doctor.finding import Finding, fail, ok, skip
from gracekit.rpc.amqp.amqp_transport import marks_of
from gracekit.rpc.amqp.profiles import (
    PROFILES,
    ExchangeFlags,
    Profile,
    QueueFlags,
    dead_letter_queue,
    fanout_exchange,
)
from gracekit.rpc.transport import Queue, directed_queue, shared_queue

Flags = QueueFlags | ExchangeFlags

SHOWN: Final = 5
QUEUE_GUARD: Final[Mapping[str, Any]] = MappingProxyType({"x-max-age": "1h"})
"""An argument for streams only; any other queue with it cannot be created."""
EXCHANGE_GUARD: Final[Mapping[str, Any]] = MappingProxyType({"alternate-exchange": 1})
"""Must be a text; an exchange with a number there cannot be created."""
_GUARDS: Final = (*QUEUE_GUARD, *EXCHANGE_GUARD)
_NOT_MADE: Final = re.compile(r"invalid (?:type '[^']*' for )?arg '([^']+)'")
_DIFFERS: Final = re.compile(r"inequivalent arg '([^']+)'")
_VALUES: Final = re.compile(r"received (.*) but current is (.*)", re.DOTALL)
_TYPED: Final = re.compile(r"the value ('.*') of type '\w+'", re.DOTALL)
_NONE: Final = "none"
CHECK: Final = "profile"
_ALIKE: Final = (
    "have all programs declare alike (docs/oslo.md, Which profile), and delete what differs once "
    "it is empty and unused; or take another vhost"
)


@dataclass(frozen=True, slots=True)
class BrokerEntity:
    """A queue or exchange with a fixed name, used by every run of the service.

    Attributes:
        kind: `queue` or `exchange`.
        flags: Returns the flags of a profile; None if the profile does not declare it.
        is_common: Whether all services of the deployment use it, as the control exchange.
    """

    kind: str
    name: str
    flags: Callable[[Profile], Flags | None] = field(compare=False, repr=False)
    is_common: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, with its entities that have fixed names.

    Attributes:
        hosts: Hosts with a directed queue; on the ops topic also instances.
        is_ops: Whether it is the ops topic, which no worker of oslo.messaging has.
        is_shared: Whether the service reads the queue that all hosts read.
        announced: Its service's queues that two stores must not read.
        away: Other names on record; they may have left queues.
    """

    name: str
    hosts: Sequence[str]
    is_ops: bool = False
    is_shared: bool = True
    announced: Sequence[Queue] = ()
    away: Sequence[str] = ()

    @property
    def queues(self) -> list[Queue]:
        """The queues of requests, without fanout queues, whose names are random."""
        shared = [shared_queue(self.name)] if self.is_shared else []
        return [*shared, *(directed_queue(self.name, host) for host in self.hosts)]

    @property
    def away_queues(self) -> list[Queue]:
        """The queues of the names that are `away`, which may not exist."""
        return [directed_queue(self.name, name) for name in self.away]

    @property
    def dead(self) -> BrokerEntity:
        """The queue of rejected and expired requests."""
        return BrokerEntity("queue", dead_letter_queue(self.name), _dead)


def entities_of(topics: Iterable[Topic], exchange: str, store: str) -> list[BrokerEntity]:
    """All entities with fixed names that a start declares, in the order of the output."""
    return [
        BrokerEntity("exchange", exchange, lambda profile: profile.control, is_common=True),
        *(entity for topic in topics for entity in _entities_of(topic, store)),
    ]


def queue_entity(queue: Queue) -> BrokerEntity:
    """*queue* as a BrokerEntity."""
    return BrokerEntity("queue", queue.name, lambda profile: profile.flags_of(queue))


def _entities_of(topic: Topic, store: str) -> Iterator[BrokerEntity]:
    fanout = BrokerEntity("exchange", fanout_exchange(topic.name), lambda profile: profile.fanout)
    marks = (mark for queue in topic.announced for mark in marks_of(queue, store))
    yield from (*map(queue_entity, topic.queues), fanout, topic.dead, *map(queue_entity, marks))


def _dead(profile: Profile) -> QueueFlags | None:
    return profile.topic if profile.dead_letters else None


def listed(entities: Iterable[BrokerEntity], most: int = SHOWN) -> str:
    """`queue a, exchange b and 2 more`; names at most *most*."""
    names = [str(entity) for entity in entities]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# -- the answers of the broker ---------------------------------------------------------


class Fit(enum.Enum):
    """How an existing queue or exchange compares with our declaration."""

    FITS = "fits"
    DIFFERS = "differs"
    MISSING = "missing"
    FORBIDDEN = "forbidden"  # the user may not declare it
    LOCKED = "locked"  # exclusive to another connection
    DOWN = "down"  # it exists, but its node or process is down
    DENIED = "denied"  # RabbitMQ 4.3 and later: transient and not exclusive
    UNCLEAR = "unclear"


_BY_NAME: Final = {
    "NOT_FOUND": Fit.DOWN,  # also used for a queue whose node or process is down
    "ACCESS_REFUSED": Fit.FORBIDDEN,
    "RESOURCE_LOCKED": Fit.LOCKED,
}


class BrokerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        said: The broker's text, if it says more than `fit`.
        argument: The first flag or argument that differs.
        ours: The value that we declare; empty if the broker's text was cut.
        theirs: The present value; likewise.
        messages: Number of ready messages.
        consumers: Number of consumers.
    """

    fit: Fit
    said: str = ""
    argument: str = ""
    ours: str = ""
    theirs: str = ""
    messages: int = 0
    consumers: int = 0

    @property
    def difference(self) -> str:
        """`durable = false instead of true`."""
        if not self.theirs:
            return f"another {self.argument}"
        return f"{self.argument} = {self.theirs} instead of {self.ours}"


def read_refusal(text: str) -> BrokerAnswer:
    """Interpret a refusal: `PRECONDITION_FAILED - inequivalent arg 'durable' for queue …`."""
    name, _, reason = text.partition(" - ")
    if name == "PRECONDITION_FAILED":
        return _compared(reason)
    if name == "NOT_FOUND" and reason.startswith(("no queue ", "no exchange ")):
        return BrokerAnswer(fit=Fit.MISSING)
    if name == "INTERNAL_ERROR" and "transient_nonexcl_queues" in reason:
        return BrokerAnswer(fit=Fit.DENIED, said=_one_line(reason))
    return BrokerAnswer(fit=_BY_NAME.get(name, Fit.UNCLEAR), said=_one_line(reason or text))


def _compared(reason: str) -> BrokerAnswer:
    differs = _DIFFERS.match(reason)
    if differs is None:
        guarded = _NOT_MADE.match(reason)
        gone = guarded is not None and guarded[1] in _GUARDS
        return BrokerAnswer(fit=Fit.MISSING) if gone else BrokerAnswer(fit=Fit.UNCLEAR, said=reason)
    argument, ours, theirs = differs[1], "", ""
    values = _VALUES.search(reason)
    if values is not None:
        ours, theirs = map(_plain, values.groups())
    if argument in EXCHANGE_GUARD:  # it is compared last, so all else is equal
        if theirs in {"", _NONE}:
            return BrokerAnswer(fit=Fit.FITS)
        ours = _NONE
    return BrokerAnswer(fit=Fit.DIFFERS, argument=argument, ours=ours, theirs=theirs)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _plain(value: str) -> str:
    """`true` of `'true'`, `quorum` of `the value 'quorum' of type 'longstr'`, `''` of nothing."""
    typed = _TYPED.fullmatch(value)
    quoted = typed[1] if typed is not None else value
    return quoted.strip("'") or "''"


# -- which profile fits ----------------------------------------------------------------


Fits = Mapping[BrokerEntity, Mapping[str, BrokerAnswer]]
"""For each existing entity, by profile: how it compares with what the profile declares."""


def check_profile(
    ours: str,
    fits: Fits,
    *,
    found: Mapping[BrokerEntity, BrokerAnswer],
    accepted: Sequence[str],
    in_url: bool = False,
) -> Finding:
    """Check whether a start will be refused (406), and which profile would not be.

    Args:
        ours: Name of our profile.
        fits: Must contain *ours*, and all other profiles if *ours* differs anywhere.
        found: For each existing entity, its number of consumers.
        accepted: Names of the profiles that the broker's version accepts.
        in_url: Whether the transport URL, and not the setting, names the profile.
    """
    if not fits:
        return ok(CHECK, f"{ours}; none of its queues and exchanges exists yet")
    wrong = _wrong(fits, ours)
    if not wrong:
        known = [entity for entity, answers in fits.items() if answers[ours].fit is Fit.FITS]
        if not known:
            return skip(CHECK, "nothing of what exists could be compared, see above")
        return ok(CHECK, f"{ours} fits what exists: {listed(known)}")
    seen = f"profile {ours} would be refused (406): {_different(fits, ours, wrong)}"
    fit = fitting(fits)
    usable = [name for name in fit if name in accepted]
    if usable:
        exists = f"{seen}; all that exists is as {_or(usable)} declares it"
        choose = _choose(usable, in_url=in_url)
        free = not _used_by_others(wrong, found)
        return fail(CHECK, exists, f"{choose}, or {_delete(wrong)}" if free else choose)
    if fit:
        exists = (
            f"{seen}; all that exists is as {_or(fit)} declares it, and that has transient queues"
        )
        stop = "stop everything that uses them, and " if _used_by_others(wrong, found) else ""
        seen = f"{exists}, which this broker's version refuses"
        return fail(CHECK, seen, f"{stop}{_delete(wrong)}")
    # In a tie it is one of oslo.messaging, whose workers were there before.
    nearest = min(reversed(accepted), key=lambda profile: len(_wrong(fits, profile)))
    first = _different(fits, nearest, _wrong(fits, nearest)[:1])
    return fail(CHECK, f"{seen}; no profile fits all; nearest is {nearest}, but {first}", _ALIKE)


def fitting(fits: Fits) -> list[str]:
    """Names of the profiles that fit all existing entities."""
    compared = [name for name in PROFILES if all(name in answers for answers in fits.values())]
    return [name for name in compared if not _wrong(fits, name)]


def _wrong(fits: Fits, profile: str) -> list[BrokerEntity]:
    return [entity for entity, answers in fits.items() if answers[profile].fit is Fit.DIFFERS]


def _used_by_others(
    entities: Sequence[BrokerEntity], found: Mapping[BrokerEntity, BrokerAnswer]
) -> list[BrokerEntity]:
    """Those that must not be deleted while others run: the control exchange, queues with readers.

    If the control exchange is deleted, all services of the deployment lose their bindings.
    """
    return [one for one in entities if one.is_common or (one in found and found[one].consumers)]


def _delete(entities: Sequence[BrokerEntity]) -> str:
    listing = listed(entities, len(entities))
    return f"delete {listing} once empty and unused; the next start declares anew"


def _different(fits: Fits, ours: str, wrong: Sequence[BrokerEntity]) -> str:
    """`queue a, queue b have durable = false instead of true, exchange c has …`."""
    alike: dict[str, list[BrokerEntity]] = {}
    for entity in wrong:
        alike.setdefault(fits[entity][ours].difference, []).append(entity)
    return ", ".join(
        f"{listed(entities)} {'has' if len(entities) == 1 else 'have'} {difference}"
        for difference, entities in alike.items()
    )


def _choose(profiles: Sequence[str], *, in_url: bool) -> str:
    first, *others = profiles
    rest = f" (or {_or(others)})" if others else ""
    if in_url:
        return f"write profile={first}{rest} into the transport URL, in place of what it says"
    return f"set GRACEKIT_DECLARE_PROFILE={first}{rest}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)
