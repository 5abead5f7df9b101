"""What RabbitMQ's answer means when it is asked whether something is as we would declare it.

AMQP has no question for the flags of a queue. But a declare of what exists compares them: it is
answered with ok, or refused with a text that names the first that differs. So that such a
declare makes nothing, even if what existed goes in the same moment, it carries a guard: an
argument with which nothing can be made, and which is left out of the comparison of a queue,
or comes last in that of an exchange.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

QUEUE_GUARD: Final[Mapping[str, Any]] = MappingProxyType({"x-max-age": "1h"})
"""Of streams alone; with it no other queue is made."""
EXCHANGE_GUARD: Final[Mapping[str, Any]] = MappingProxyType({"alternate-exchange": 1})
"""Must be a text; with a number no exchange is made."""

_GUARDS: Final = (*QUEUE_GUARD, *EXCHANGE_GUARD)
_NOT_MADE: Final = re.compile(r"invalid (?:type '[^']*' for )?arg '([^']+)'")
_DIFFERS: Final = re.compile(r"inequivalent arg '([^']+)'")
_VALUES: Final = re.compile(r"received (.*) but current is (.*)", re.DOTALL)
_TYPED: Final = re.compile(r"the value ('.*') of type '\w+'", re.DOTALL)
_NONE: Final = "none"


class Fit(enum.Enum):
    """How a queue or exchange compares with what we would declare."""

    FITS = "fits"
    DIFFERS = "differs"
    MISSING = "missing"
    FORBIDDEN = "forbidden"  # the user may not declare it
    LOCKED = "locked"  # exclusive to another connection
    DOWN = "down"  # on record, and its node or process is not there
    DENIED = "denied"  # RabbitMQ 4.3 and later: transient and not exclusive
    UNCLEAR = "unclear"


_BY_NAME: Final = {
    "NOT_FOUND": Fit.DOWN,  # it says so too of a queue whose node or process is not there
    "ACCESS_REFUSED": Fit.FORBIDDEN,
    "RESOURCE_LOCKED": Fit.LOCKED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAnswer:
    """One answer.

    Attributes:
        said: The broker's words, where they say more than `fit`.
        argument: The first flag or argument that differs.
        ours: What we would declare; empty where the broker's text was cut.
        theirs: What it is; likewise.
        messages: Ready in the queue.
        consumers: That read it.
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
    """What a refusal says: `PRECONDITION_FAILED - inequivalent arg 'durable' for queue …`."""
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
    if argument in EXCHANGE_GUARD:  # all the rest is equal
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
