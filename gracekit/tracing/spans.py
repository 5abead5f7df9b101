"""Spans of one process: requests sent, attempts, and decisions of recovery.

An attempt is a child of its caller's span. A recovered task begins a new trace, linked to the
interrupted attempt, or to the caller's span if no attempt is on record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import Token
from typing import Any, Final

from opentelemetry import context as active
from opentelemetry import propagate, trace
from opentelemetry.context import Context

from gracekit.tracing import conventions as names
from gracekit.tracing.carrier import apart, carried
from gracekit.tracing.conventions import Messaging, request_attributes

MOST_DECIDED: Final = 1000
"""Most decisions of recovery whose spans are kept until their tasks run again."""
_NOTHING: Final = contextlib.nullcontext()
_KINDS: Final = {"call": trace.SpanKind.CLIENT}  # in clients; cast and fanout: PRODUCER
_SERVES: Final = {"call": trace.SpanKind.SERVER}  # in services; cast and fanout: CONSUMER
_EMPTY: Final = Context()  # not the current context, which belongs to the opener of the service


class Attempt:
    """The trace of one attempt; its context is the current one until `end`.

    Attributes:
        span: None if nothing is recorded and the caller's trace is only passed on.
    """

    __slots__ = ("_token", "span")

    def __init__(self, context: Context, span: trace.Span | None = None) -> None:
        self.span = span
        self._token: Token[Context] = active.attach(context)

    def keys(self) -> dict[str, str]:
        """The trace keys of its span, for the journal; empty if nothing is recorded."""
        carrier: dict[str, str] = {}
        if self.span is not None:
            propagate.inject(carrier, trace.set_span_in_context(self.span, Context()))
        return dict(carried(carrier))

    def end(self, *, error_type: str | None = None, cut: str | None = None) -> None:
        """End the span and restore the previous context.

        Args:
            error_type: Class name of the exception that the handler raised; None for none.
            cut: How it was interrupted; None if it ended by itself.
        """
        active.detach(self._token)
        if self.span is None:
            return
        if cut is not None:
            self.span.set_attribute(names.CUT, cut)
        if error_type is not None:
            _note_error(self.span, error_type)
        self.span.end()


class Tracing:
    """Spans of this process, once it has a tracer provider.

    Attributes:
        messaging: The messaging system of incoming requests; None if it is not known.
    """

    def __init__(self) -> None:
        self._tracer: trace.Tracer | None = None
        self._settling: dict[str, trace.Span] = {}  # decisions being taken, by message id
        self._decided: dict[str, trace.SpanContext] = {}  # decisions taken, until their task begins
        self.messaging: Messaging | None = None

    def look(self) -> None:
        """Use the process's tracer provider from now on, if it has one."""
        provider = trace.get_tracer_provider()
        is_none = isinstance(provider, trace.ProxyTracerProvider)
        self._tracer = (
            None if is_none else provider.get_tracer(names.SYSTEM, schema_url=names.SCHEMA_URL)
        )

    # -- a client -----------------------------------------------------------------------

    def sending(
        self,
        operation: str,
        method: str,
        message_id: str,
        context: Mapping[str, Any],
        to: Callable[[], Mapping[str, Any]],
    ) -> contextlib.AbstractContextManager[None]:
        """A span for sending a request; for a call it also covers the wait for the answer.

        It is a child of the active span, or else of the one in the request's context.

        Args:
            operation: call, cast or fanout.
            method: Name of the method, as the program gave it.
            message_id: The request's id.
            context: The request's context.
            to: Returns the attributes of the destination; called only if spans are recorded.
        """
        if self._tracer is None:
            return _NOTHING
        attributes = {**request_attributes(method, operation, message_id), **to()}
        attributes[names.OPERATION_TYPE] = "send"
        kind = _KINDS.get(operation, trace.SpanKind.PRODUCER)
        here = active.get_current()
        if not trace.get_current_span(here).get_span_context().is_valid:
            here = propagate.extract(carried(context), context=here)
        span = self._tracer.start_span(method, context=here, kind=kind, attributes=attributes)
        return _current(span, here)

    # -- a service ----------------------------------------------------------------------

    def begin(
        self,
        context: Mapping[str, Any],
        *,
        method: str,
        operation: str | None,
        message_id: str,
        attempt: int,
        queue: str | None = None,
        shown: Mapping[str, str] | None = None,
    ) -> Attempt | None:
        """Trace one attempt; None if nothing is recorded and there is no trace to pass on.

        Args:
            context: The request's context.
            method: Name of a registered method, never wire text.
            operation: call, cast or fanout: the span is a child of the caller's. None for a
                recovered task: it gets a new trace, linked to its last span.
            message_id: The request's id.
            attempt: Number of this attempt.
            queue: The queue that the request came from; None for a recovered task.
            shown: What is shown of the request's context, for attributes; None for nothing.
        """
        keys = carried(context)
        if self._tracer is None and not keys and not active.get_current():
            return None
        parent = propagate.extract(keys, context=_EMPTY) if keys else _EMPTY
        if self._tracer is None:
            return Attempt(parent)
        links = []
        if operation is None:
            links = _links(parent)
            decided = self._decided.pop(message_id, trace.INVALID_SPAN_CONTEXT)
            parent = trace.set_span_in_context(trace.NonRecordingSpan(decided), parent)
        attributes = request_attributes(method, operation or "resume", message_id)
        attributes[names.OPERATION_TYPE] = "process"
        attributes[names.ATTEMPT] = attempt
        if shown:
            attributes |= {f"{names.CONTEXT}.{key}": text for key, text in shown.items()}
        if self.messaging is not None and queue is not None:
            attributes.update(self.messaging.destination(queue))
        kind = _SERVES.get(operation or "", trace.SpanKind.CONSUMER)
        span = self._tracer.start_span(
            method, context=parent, kind=kind, attributes=attributes, links=links
        )
        inside = trace.set_span_in_context(span, parent)
        # If it is not sampled, only that decision is passed on.
        return Attempt(inside, span if span.is_recording() else None)

    # -- recovery -----------------------------------------------------------------------

    @contextlib.contextmanager
    def settling(
        self, context: Mapping[str, Any], *, method: str, message_id: str, attempt: int
    ) -> Iterator[None]:
        """A span for the decision about one unfinished task, at the root of the task's new trace.

        Args:
            context: The request's context from the journal.
            method: Name of the method from the journal.
            message_id: The request's id.
            attempt: Number of the attempt that was interrupted.
        """
        if self._tracer is None:
            yield
            return
        attributes = request_attributes(method, "settle", message_id) | {names.ATTEMPT: attempt}
        span = self._tracer.start_span(
            f"settle {method}", context=Context(), attributes=attributes, links=_links_of(context)
        )
        self._settling[message_id] = span
        try:
            with _current(span, Context()):
                yield
        finally:
            self._settling.pop(message_id, None)

    def decided(self, message_id: str, decision: str, reason: str) -> None:
        """Record the decision of recovery; the task's next attempt joins the same trace."""
        span = self._settling.get(message_id)
        if span is None:
            return
        span.set_attribute(names.OUTCOME, decision)
        if reason:
            span.set_attribute(names.REASON, reason)
        self._decided[message_id] = span.get_span_context()
        if len(self._decided) > MOST_DECIDED:  # another run may have begun the oldest one's task
            del self._decided[next(iter(self._decided))]

    def hook(
        self, what: str, context: Mapping[str, Any], *, method: str, message_id: str
    ) -> contextlib.AbstractContextManager[None]:
        """A span for a probe or `errored` hook, in the task's new trace, linked to its last span.

        If nothing is recorded, the hook runs without a trace, not in the one that is active here.

        Args:
            what: `probe` or `errored`.
            context: The request's context from the journal.
            method: Name of the method.
            message_id: The request's id.
        """
        if self._tracer is None:
            return apart()
        settling = self._settling.get(message_id)
        decided = self._decided.pop(message_id, trace.INVALID_SPAN_CONTEXT)
        parent = trace.NonRecordingSpan(decided) if settling is None else settling
        span = self._tracer.start_span(
            f"{what} {method}",
            context=trace.set_span_in_context(parent, Context()),
            attributes=request_attributes(method, what, message_id),
            links=_links_of(context),
        )
        return _current(span, Context())


@contextlib.contextmanager
def _current(span: trace.Span, base: Context) -> Iterator[None]:
    """Make *span* current in *base* for the block, then end it; of an error record the class."""
    token = active.attach(trace.set_span_in_context(span, base))
    try:
        yield
    except BaseException as error:
        _note_error(span, type(error).__name__)
        raise
    finally:
        active.detach(token)
        span.end()


def _note_error(span: trace.Span, error_type: str) -> None:
    # Without the message, which may contain values that the caller sent.
    span.set_attribute(names.ERROR_TYPE, error_type)
    span.set_status(trace.Status(trace.StatusCode.ERROR))


def _links_of(context: Mapping[str, Any]) -> list[trace.Link]:
    """A link to the last known span of a request."""
    keys = carried(context)
    return _links(propagate.extract(keys, context=Context())) if keys else []


def _links(context: Context) -> list[trace.Link]:
    origin = trace.get_current_span(context).get_span_context()
    return [trace.Link(origin)] if origin.is_valid else []
