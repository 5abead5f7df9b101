"""Trace context of messages: sent with each request, read from each delivery.

Values from the wire are checked before they reach the API, because the API logs those it cannot
parse. Without a tracer provider the trace context of a request is still passed on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from opentelemetry import context as active
from opentelemetry import propagate
from opentelemetry.context import Context

LONGEST_BAGGAGE: Final = 8192
MOST_MEMBERS: Final = 180

_TOKEN: Final = r"[!#-'*+\-.0-9A-Z^_`a-z|~]+"
_VALUE: Final = r"[!#-+\--:<-\[\]-~]*"
_PARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,400})?")
_STATE: Final = re.compile(
    r"([a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_BAGGAGE: Final = re.compile(rf"{_TOKEN}={_VALUE}(;{_TOKEN}(={_VALUE})?)*")
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


# -- on the way out -----------------------------------------------------------------


def outgoing() -> dict[str, str]:
    """The trace keys of the active span and baggage; empty if there are none."""
    carrier: dict[str, str] = {}
    if not active.get_current():
        return carrier
    propagate.inject(carrier)
    return {key: carrier[key] for key in TRACE_KEYS if key in carrier}


def stamped(context: Mapping[str, Any], keys: Mapping[str, str]) -> Mapping[str, Any]:
    """A copy of a request's *context* with *keys*, and without those that they replace."""
    kept = dict(context)
    if "traceparent" in keys:
        kept.pop("tracestate", None)  # it belongs to the parent that is replaced
    return {**kept, **keys}


# -- on the way in ------------------------------------------------------------------


def adopted(context: Mapping[str, Any], headers: Mapping[str, str]) -> Mapping[str, Any]:
    """A request's context, in which the trace keys of the message's headers take precedence."""
    found = carried(headers)
    return stamped(context, found) if found else context


def carried(source: Mapping[str, Any]) -> Mapping[str, str]:
    """The well-formed trace keys in *source*, which is data from the wire."""
    if "traceparent" not in source and "baggage" not in source:
        return _NOTHING
    return {
        key: text
        for key, read in _READERS.items()
        if isinstance(value := source.get(key), str) and (text := read(value))
    }


def _parent(text: str) -> str:
    return text if _PARENT.fullmatch(text) else ""


def _state(text: str) -> str:
    return _members(text, _STATE) if len(text) <= 512 else ""  # noqa: PLR2004 - W3C's limit


def _baggage(text: str) -> str:
    return _members(text, _BAGGAGE) if len(text) <= LONGEST_BAGGAGE else ""


def _members(text: str, form: re.Pattern[str]) -> str:
    """The members of a comma-separated list that have that form."""
    stripped = (member.strip(" \t") for member in text.split(",", MOST_MEMBERS)[:MOST_MEMBERS])
    return ",".join(member for member in stripped if form.fullmatch(member))


_READERS: Final[Mapping[str, Callable[[str], str]]] = MappingProxyType(
    {"traceparent": _parent, "tracestate": _state, "baggage": _baggage}
)
TRACE_KEYS: Final = tuple(_READERS)
"""Names of the headers of a message, and of the keys of its context; no others are used."""


# -- neither ------------------------------------------------------------------------


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Run without a trace: the service's own work must not join the trace of its opener."""
    token = active.attach(Context()) if active.get_current() else None
    try:
        yield
    finally:
        if token is not None:
            active.detach(token)
