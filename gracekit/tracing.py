"""Trace context: out with each request, in with each delivery, around each attempt.

Of the OpenTelemetry API alone. Where the process has no tracer provider nothing
is recorded, and what a request carries is only passed on. What comes from the
wire is checked before the API sees it, because the API logs what it cannot read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import Token
from types import MappingProxyType
from typing import Any, Final

from opentelemetry import context as active
from opentelemetry import propagate, trace
from opentelemetry.context import Context

LONGEST_BAGGAGE: Final = 8192
MOST_MEMBERS: Final = 180
_SYSTEM: Final = "gracekit"

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
    """The trace keys of what is active here; empty where nothing is."""
    carrier: dict[str, str] = {}
    if not active.get_current():
        return carrier
    propagate.inject(carrier)
    return {key: carrier[key] for key in TRACE_KEYS if key in carrier}


def stamped(context: Mapping[str, Any], keys: Mapping[str, str]) -> Mapping[str, Any]:
    """A copy of a request's *context* with *keys*, and without those that they replace."""
    kept = dict(context)
    if "traceparent" in keys:
        kept.pop("tracestate", None)  # it belongs to the parent that goes
    return {**kept, **keys}


# -- on the way in ------------------------------------------------------------------


def adopted(context: Mapping[str, Any], headers: Mapping[str, str]) -> Mapping[str, Any]:
    """A request's context with the trace keys of its message's headers, which stand."""
    found = carried(headers)
    return stamped(context, found) if found else context


def carried(source: Mapping[str, Any]) -> Mapping[str, str]:
    """The trace keys in *source*, wire data, as far as they are well formed."""
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
    """The members of a list that are of that form."""
    stripped = (member.strip(" \t") for member in text.split(",", MOST_MEMBERS)[:MOST_MEMBERS])
    return ",".join(member for member in stripped if form.fullmatch(member))


_READERS: Final[Mapping[str, Callable[[str], str]]] = MappingProxyType(
    {"traceparent": _parent, "tracestate": _state, "baggage": _baggage}
)
TRACE_KEYS: Final = tuple(_READERS)
"""As headers of a message, and as keys of its context; no others are sent or read."""


# -- around an attempt --------------------------------------------------------------


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """For work that nobody's trace is about: not that of whoever has opened the service."""
    token = active.attach(Context()) if active.get_current() else None
    try:
        yield
    finally:
        if token is not None:
            active.detach(token)


class Attempt:
    """One attempt, traced: its context is the current one until `end`."""

    __slots__ = ("_span", "_token")

    def __init__(self, context: Context, span: trace.Span | None) -> None:
        self._span = span
        if span is not None:
            context = trace.set_span_in_context(span, context)
        self._token: Token[Context] = active.attach(context)

    def end(self, *, error_type: str | None = None, cut: str | None = None) -> None:
        """Give the old context back.

        Args:
            error_type: Class of what the handler raised; None for nothing.
            cut: How it was cut; None if it ended.
        """
        active.detach(self._token)
        if self._span is None:
            return
        if cut is not None:
            self._span.set_attribute("gracekit.cut", cut)
        if error_type is not None:
            self._span.set_attribute("error.type", error_type)
            # Without the message: it may hold what the caller has sent.
            self._span.set_status(trace.Status(trace.StatusCode.ERROR))
        self._span.end()


class Tracing:
    """Spans of this process's attempts, once it has a tracer provider."""

    def __init__(self) -> None:
        self._tracer: trace.Tracer | None = None

    def look(self) -> None:
        """Take the process's tracer provider, if it has one by now."""
        provider = trace.get_tracer_provider()
        is_none = isinstance(provider, trace.ProxyTracerProvider)
        self._tracer = None if is_none else provider.get_tracer(_SYSTEM)

    def begin(
        self,
        context: Mapping[str, Any],
        *,
        method: str,
        operation: str | None,
        message_id: str,
        attempt: int,
    ) -> Attempt | None:
        """Trace one attempt; None where there is nothing to trace, or to pass on.

        Args:
            context: The request's.
            method: Name of a registered method, never wire text.
            operation: call, cast or fanout: a child of the caller's span. None for a
                task from the record: a trace of its own, linked to the caller's.
            message_id: The request's id.
            attempt: Number of this start.
        """
        keys = carried(context)
        if self._tracer is None and not keys and not active.get_current():
            return None
        # Never the current context: it is of whoever has opened the service.
        parent = propagate.extract(keys, context=Context()) if keys else Context()
        if self._tracer is None:
            return Attempt(parent, None)
        links = []
        if operation is None:
            origin = trace.get_current_span(parent).get_span_context()
            links = [trace.Link(origin)] if origin.is_valid else []
            parent = trace.set_span_in_context(trace.INVALID_SPAN, parent)
        span = self._tracer.start_span(
            method,
            context=parent,
            kind=trace.SpanKind.SERVER if operation == "call" else trace.SpanKind.CONSUMER,
            attributes={
                "rpc.system.name": _SYSTEM,
                "rpc.method": method,
                "messaging.operation.name": operation or "resume",
                "messaging.operation.type": "process",
                "messaging.message.id": message_id,
                "gracekit.attempt": attempt,
            },
            links=links,
        )
        return Attempt(parent, span)
