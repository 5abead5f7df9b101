"""Interprets RabbitMQ's answers to the question whether an entity has the flags that we declare.

AMQP cannot query the flags of a queue. But declaring an existing queue compares them: RabbitMQ
answers ok, or refuses with a text that names the first flag that differs. Such a declare
must never create anything, even if the queue is deleted at that moment. So it carries a
guard: an argument with which creation always fails. RabbitMQ does not compare the guard
of a queue, and compares that of an exchange last.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

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
