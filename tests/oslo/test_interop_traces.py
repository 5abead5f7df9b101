"""Traces across the border: whoever sends and whoever serves, it is one trace, in oslo's keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as active
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.oslo.meeting import (
    ADAPTED,
    NATIVE,
    OSLO,
    SERVERS,
    Meeting,
    Met,
    Returned,
    by_oslo,
    by_us,
    meet,
)

pytestmark = pytest.mark.process

TRACE, SPAN = 0xA1 << 120, 0xB2 << 56
PARENT = f"00-{TRACE:032x}-{SPAN:016x}"


@contextmanager
def a_span(**more: str) -> Iterator[None]:
    """A span of somebody else is active; *more* is its trace state."""
    state = trace.TraceState(list(more.items()))
    context = trace.SpanContext(
        TRACE, SPAN, is_remote=False, trace_flags=trace.TraceFlags(1), trace_state=state
    )
    with trace.use_span(trace.NonRecordingSpan(context)):
        yield


def seen(met: Met) -> dict[str, Any]:
    """What a handler saw as context, without the key that oslo's server adds."""
    assert isinstance(met, Returned), met
    context: dict[str, Any] = json.loads(met.text)
    context.pop("client_timeout", None)
    if "traceparent" in context:
        context["traceparent"] = context["traceparent"].rpartition("-")[0]  # less its flags
    return context


async def spans(meeting: Meeting, name: str) -> list[dict[str, Any]]:
    """Spans of oslo's process that have ended; the adapted service is in it too."""
    told = await meeting.peer.ask("spans")
    return [span for span in told if span["name"] == name]


def parent_of(span: dict[str, Any]) -> str:
    """As `traceparent` names it, less the flags."""
    return f"00-{span['context']['trace_id'][2:]}-{(span['parent_id'] or '')[2:]}"


async def child_of(meeting: Meeting, name: str, parent: str) -> dict[str, Any]:
    """The span of that parent; a server ends it behind its reply, and so it may not be told yet."""
    for _ in range(100):
        for span in await spans(meeting, name):
            if parent_of(span) == parent:
                return span
        await asyncio.sleep(0.05)
    raise AssertionError(f"no span {name!r} of {parent} ended in 5 s")


def as_parent(span: dict[str, Any]) -> str:
    """As `traceparent` would name it."""
    ids = span["context"]
    return f"00-{ids['trace_id'][2:]}-{ids['span_id'][2:]}"


@pytest.mark.parametrize("profile", ["durable", "oslo-transient"])
async def test_traces_are_the_same(rabbit_url: str, tmp_path: Path, profile: str):
    """By both clients to all servers, and through one of ours."""
    async with meet(rabbit_url, profile, tmp_path, spans=True) as meeting:
        await check_from_oslo(meeting)
        await check_from_us(meeting)
        await check_through_us(meeting)


async def test_what_both_record_is_one_trace(
    rabbit_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With an SDK on both sides oslo's span of a call is the parent of gracekit's, and vice
    versa.
    """
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with meet(rabbit_url, "durable", tmp_path, spans=True) as meeting:
        await by_oslo(meeting, "context")
        (sent,) = await spans(meeting, f"{NATIVE}.context")
        served = await ended(exporter, trace.SpanKind.SERVER, NATIVE)
        assert parent_of(told(served)) == as_parent(sent)

        await by_us(meeting, "context")
        for topic, name in ((OSLO, "context receive"), (ADAPTED, "context")):
            asked = await ended(exporter, trace.SpanKind.CLIENT, topic)
            assert await child_of(meeting, name, as_parent(told(asked)))
    for span in (served, asked):
        assert span.attributes is not None
        assert span.attributes["messaging.system"] == "rabbitmq"
        assert span.attributes["messaging.destination.name"] == "openstack"


async def ended(exporter: InMemorySpanExporter, kind: trace.SpanKind, topic: str) -> ReadableSpan:
    """Our span of that kind, of a request to that topic; a server's ends after its reply."""
    key = "messaging.rabbitmq.destination.routing_key"
    for _ in range(100):
        for span in exporter.get_finished_spans():
            if span.kind is kind and (span.attributes or {}).get(key) == topic:
                return span
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {kind} of {topic} ended in 5 s")


def told(span: ReadableSpan) -> dict[str, Any]:
    """Our span in the form in which oslo's process reports its own."""
    found: dict[str, Any] = json.loads(span.to_json())
    return found


async def check_from_oslo(meeting: Meeting) -> None:
    """Each handler sees oslo's span as its parent, and no other key; the servers' are children."""
    met = await by_oslo(meeting, "context", {}, {"request_id": "req-1"})
    for topic, each in zip(SERVERS, met, strict=True):
        (sent,) = await spans(meeting, f"{topic}.context")
        assert seen(each) == {"request_id": "req-1", "traceparent": as_parent(sent)}
    parents = {as_parent((await spans(meeting, f"{topic}.context"))[0]) for topic in SERVERS}
    assert {parent_of(span) for span in await spans(meeting, "context receive")} <= parents
    (sent,) = await spans(meeting, f"{ADAPTED}.context")
    assert await child_of(meeting, "context", as_parent(sent))
    assert len(await spans(meeting, "context")) == 1


async def check_from_us(meeting: Meeting) -> None:
    """In the keys that oslo's client would write, and no others; oslo's span is a child of ours."""
    with a_span():
        met = await by_us(meeting, "context", {}, {"request_id": "req-2"})
    for each in met:
        assert seen(each) == {"request_id": "req-2", "traceparent": PARENT}
    for name in ("context receive", "context"):  # of oslo's server, of the adapted one
        assert await child_of(meeting, name, PARENT)

    token = active.attach(baggage.set_baggage("who", "ann"))
    with a_span(vendor="x"):
        met = await by_us(meeting, "context")
    active.detach(token)
    for each in met:
        keys = {"traceparent": PARENT, "tracestate": "vendor=x"}
        assert seen(each) in (keys, {**keys, "baggage": "who=ann"})

    assert [seen(each) for each in await by_us(meeting, "context")] == [{}] * 3


async def check_through_us(meeting: Meeting) -> None:
    """A service of ours that records nothing passes the trace on."""
    args = {"topic": OSLO, "name": "context", "arguments": {}}
    met = await meeting.asked_by_oslo(NATIVE, "forward", args)
    (sent,) = await spans(meeting, f"{NATIVE}.forward")

    assert seen(met) == {"traceparent": as_parent(sent)}
    assert await child_of(meeting, "context receive", as_parent(sent))
