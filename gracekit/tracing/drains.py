"""The trace of one drain: a span with its steps, and a child for each task that it waits for.

It is made from the events of the run, which it receives for the time of the drain. Each child is
linked to the span of the task's attempt, which belongs to another trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context

from gracekit.tracing import conventions as names

_CUTS: Final = {"task.handed_over": "handed_over", "task.given_back": "given_back"}
_NOTED: Final = frozenset(
    {"intake.closed", "drain.extended", "drain.waiting", "drain.step_failed", "drain.out_of_time"}
)
_TEXTS: Final = (str, bool, int, float)


class DrainTrace:
    """The trace of one drain.

    Args:
        tracer: Makes the spans.
        running: Spans of the attempts that are under way, by request id.
    """

    def __init__(self, tracer: trace.Tracer, running: Mapping[str, trace.SpanContext]) -> None:
        self._tracer = tracer
        self._running = running
        self._span = tracer.start_span("drain", context=Context())
        self._tasks: dict[str, trace.Span] = {}
        self._steps: set[str] = set()

    def step(self, name: str) -> None:
        """Record that a step begins; a repeated step is recorded once."""
        if name not in self._steps:
            self._steps.add(name)
            self._span.add_event(name)

    def hear(self, event: str, fields: Mapping[str, Any]) -> None:
        """Handle one event of the run: of the drain, or of a task."""
        match event:
            case "drain.started" | "drain.finished":
                self._span.set_attributes(_prefixed(fields))
            case "drain.resumed":
                self._span.set_attribute(names.OUTCOME, "resumed")
            case "task.awaited":
                self._await(fields)
            case "task.finished" | "task.handed_over" | "task.given_back" | "job.finished":
                self._leave(str(fields.get("task_id")), event, fields)
            case "task.not_started":
                self._note_task(event, fields)
        if event in _NOTED:
            self._span.add_event(event, _prefixed(fields))

    def end(self) -> None:
        """End all spans, as the drain is over or was undone by `resume`."""
        for span in self._tasks.values():
            span.end()
        self._tasks.clear()
        self._span.end()

    def _await(self, fields: Mapping[str, Any]) -> None:
        request_id, method = str(fields.get("task_id")), str(fields.get("method"))
        origin = self._running.get(request_id)
        self._tasks[request_id] = self._tracer.start_span(
            f"await {method}",
            context=trace.set_span_in_context(self._span, Context()),
            attributes={
                names.RPC_METHOD: method,
                names.MESSAGE_ID: request_id,
                names.ATTEMPT: fields.get("attempt") or 0,
            },
            links=[] if origin is None else [trace.Link(origin)],
        )

    def _leave(self, request_id: str, event: str, fields: Mapping[str, Any]) -> None:
        span = self._tasks.pop(request_id, None)
        if span is None:
            if event in _CUTS:  # it began after the drain, so it has no span
                self._note_task(event, fields)
            return
        span.set_attribute(names.OUTCOME, _CUTS.get(event) or str(fields.get("outcome")))
        if fields.get("cut") is not None:
            span.set_attribute(names.CUT, str(fields["cut"]))
        span.end()

    def _note_task(self, event: str, fields: Mapping[str, Any]) -> None:
        named = {names.RPC_METHOD: "method", names.MESSAGE_ID: "task_id"}
        self._span.add_event(event, {key: str(fields.get(name)) for key, name in named.items()})


def _prefixed(fields: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """Fields of an event as attributes, without those that name tasks, resources or holds."""
    return {
        f"gracekit.drain.{name}": value
        for name, value in fields.items()
        if isinstance(value, _TEXTS) and name not in {"holds", "task_id", "resource", "error"}
    }
