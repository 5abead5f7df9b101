"""Trace keys from the wire: what is well formed goes on, the rest reaches neither API nor log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as active
from opentelemetry.context import Context

from gracekit.tracing.carrier import TRACE_KEYS, adopted, carried, outgoing, stamped
from gracekit.tracing.spans import Tracing
from tests.scale import scale

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


class Heard(logging.Handler):
    """What the API logs about what it cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# -- reading -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("traceparent", PARENT),
        ("traceparent", f"01-{'a' * 32}-{'b' * 16}-01-later"),
        ("tracestate", "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"),
        ("tracestate", "tenant@vendor=x y"),
        ("baggage", "user=ann,plan=a%20b"),
        ("baggage", "user=ann;ttl=5;secret"),
        ("baggage", "empty="),
    ],
)
def test_well_formed_keys_are_read_as_they_are(key: str, text: str):
    """What W3C writes is passed to the API unchanged."""
    source = {"traceparent": PARENT, "user_id": "joe", key: text}

    assert carried(source) == {"traceparent": PARENT, key: text}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("traceparent", ""),
        ("traceparent", None),
        ("traceparent", 7),
        ("traceparent", [PARENT]),
        ("traceparent", PARENT.upper()),
        ("traceparent", f"{PARENT}\n"),
        ("traceparent", f"{PARENT}-{'x' * 1000}"),
        ("tracestate", "no member"),
        ("tracestate", f"a={'b' * 600}"),
        ("tracestate", "a=b\nc"),
        ("baggage", "no member"),
        ("baggage", "a=\x1b[31m"),
        ("baggage", "a=é"),
        ("baggage", f"a={'b' * 9000}"),
    ],
)
def test_ill_formed_keys_are_left_out(key: str, value: object):
    """The API would log them raw; to a request they are worth nothing."""
    source: dict[str, Any] = {"traceparent": PARENT, "baggage": "k=v", key: value}

    assert carried(source) == {
        name: text
        for name, text in {"traceparent": PARENT, "baggage": "k=v"}.items()
        if name != key
    }


def test_good_members_of_a_list_survive_bad_ones():
    """One peer's mistake does not cost the others' baggage."""
    source = {"baggage": "a=1, b ad=2 ,c=3", "tracestate": "A=1,b=2"}

    assert carried(source) == {"baggage": "a=1,c=3", "tracestate": "b=2"}


WIRE = st.one_of(
    st.text(max_size=80),
    st.text("abz019=;,@-_ \t%\"'\\é\n", max_size=80),
    st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", fullmatch=True),
    st.none() | st.integers() | st.lists(st.text(max_size=5), max_size=3),
)


@given(source=st.dictionaries(st.sampled_from(TRACE_KEYS), WIRE))
@settings(max_examples=scale(300, 20_000))
def test_nothing_from_the_wire_reaches_a_log(source: dict[str, Any]):
    """The API reads what is left without a word, whatever a peer has sent."""
    heard = Heard()
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(heard)
    try:
        keys = carried(source)
        propagate.extract(dict(keys), context=Context())
    finally:
        logger.removeHandler(heard)

    assert keys.keys() <= source.keys()
    assert [line for line in heard.lines if "Duplicate key" not in line] == []


# -- writing -------------------------------------------------------------------------


def test_nothing_is_sent_where_nothing_is_active():
    """Without OpenTelemetry in use a message stays as it was."""
    assert outgoing() == {}


def test_the_active_span_and_baggage_are_sent():
    """Also where no tracer records: what was received is passed on."""
    keys = {"traceparent": PARENT, "tracestate": "a=b", "baggage": "k=v"}
    token = active.attach(propagate.extract(keys, context=Context()))
    try:
        assert outgoing() == keys
    finally:
        active.detach(token)


def test_baggage_alone_is_sent():
    """It needs no span."""
    token = active.attach(baggage.set_baggage("k", "v", Context()))
    try:
        assert outgoing() == {"baggage": "k=v"}
    finally:
        active.detach(token)


def test_a_context_is_copied_before_it_is_stamped():
    """The caller's own mapping stays as it was; the state of another trace does not stay with
    ours.
    """
    mine = {"user_id": "joe", "traceparent": "old", "tracestate": "old=1"}
    kept = dict(mine)

    assert stamped(mine, {"traceparent": PARENT}) == {"user_id": "joe", "traceparent": PARENT}
    assert stamped(mine, {"baggage": "k=v"}) == {**kept, "baggage": "k=v"}
    assert adopted(mine, {"traceparent": PARENT}) == {"user_id": "joe", "traceparent": PARENT}
    assert adopted(mine, {"traceparent": "junk"}) is mine
    assert mine == kept


# -- without a provider ---------------------------------------------------------------


def begin(tracing: Tracing, context: dict[str, Any]) -> Any:
    return tracing.begin(context, method="m", operation="call", message_id="r", attempt=1)


def test_an_untraced_request_is_not_touched():
    """No provider, no keys, nothing active: nothing is made for it."""
    tracing = Tracing()
    tracing.look()

    assert begin(tracing, {"user_id": "joe"}) is None


def test_a_carried_trace_is_current_until_the_end():
    """So that what a handler sends goes on with it."""
    attempt = begin(Tracing(), {"traceparent": PARENT})
    inside = trace.get_current_span().get_span_context()
    attempt.end()

    assert trace.format_trace_id(inside.trace_id) == "a" * 32
    assert not trace.get_current_span().get_span_context().is_valid
