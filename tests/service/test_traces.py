"""Traces: a handler runs in its caller's, and a task from the record in one of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as active
from opentelemetry.context import Context as TraceContext

from gracekit import Context, NoSuchMethodError, Service
from gracekit.errors import UnserialisableError
from gracekit.rpc.oslo_wire import decode_request
from gracekit.rpc.transport import Delivery, Message, shared_queue
from gracekit.tracing.spans import Tracing
from tests.rpc.kit import Inbox
from tests.service.kit import World

pytestmark = pytest.mark.looptime

CANARY = "canary-7f3a"
THEIRS = f"00-{'a' * 32}-{'b' * 16}-01"
OTHERS = f"00-{'c' * 32}-{'d' * 16}-01"


class Span(trace.Span):
    """A span that remembers what it was told."""

    def __init__(
        self, name: str, parent: trace.SpanContext, ids: Iterator[int], **given: Any
    ) -> None:
        self.name = name
        self.parent = parent
        self.given = given
        self.attributes = dict(given["attributes"] or {})
        self.status: trace.Status | None = None
        self.ended = False
        self.context = trace.SpanContext(
            trace_id=parent.trace_id if parent.is_valid else next(ids),
            span_id=next(ids),
            is_remote=False,
            trace_flags=trace.TraceFlags(1),
        )

    def get_span_context(self) -> trace.SpanContext:
        return self.context

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status

    def end(self, end_time: int | None = None) -> None:
        self.ended = True

    def is_recording(self) -> bool:
        return not self.ended

    def set_attributes(self, attributes: Any) -> None: ...
    def add_event(self, name: str, attributes: Any = None, timestamp: Any = None) -> None: ...
    def update_name(self, name: str) -> None: ...
    def record_exception(self, exception: BaseException, *_: Any, **__: Any) -> None: ...


class Recorder(trace.TracerProvider, trace.Tracer):
    """A tracer provider of the few lines that the API asks for."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._ids = itertools.count(1)

    def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
        return self

    def start_span(self, name: str, context: Any = None, **given: Any) -> Span:
        parent = trace.get_current_span(context).get_span_context()
        span = Span(name, parent, self._ids, **({"attributes": {}, "links": []} | given))
        self.spans.append(span)
        return span

    @contextmanager
    def start_as_current_span(self, name: str, **given: Any) -> Iterator[Span]:
        span = self.start_span(name, **given)
        with trace.use_span(span, end_on_exit=True):
            yield span

    def named(self, name: str) -> list[Span]:
        """The attempts of a method."""
        return [
            span
            for span in self.of(trace.SpanKind.SERVER, trace.SpanKind.CONSUMER)
            if span.name == name
        ]

    def sent(self) -> list[Span]:
        """The requests that clients have sent."""
        return self.of(trace.SpanKind.CLIENT, trace.SpanKind.PRODUCER)

    def of(self, *kinds: trace.SpanKind) -> list[Span]:
        return [span for span in self.spans if span.given.get("kind") in kinds]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """This process has a tracer provider for the time of a test."""
    made = Recorder()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made)
    return made


def as_parent(span: Span) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


@contextmanager
def inside(context: TraceContext) -> Iterator[None]:
    token = active.attach(context)
    try:
        yield
    finally:
        active.detach(token)


def here() -> str:
    """The trace that runs here; empty for none."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


@pytest.fixture
def svc() -> Service:
    made = Service("compute")

    @made.rpc(on_interrupt="retry", settle=1)
    async def work(ctx: Context, seconds: float = 0) -> dict[str, Any]:
        await asyncio.sleep(seconds)
        return {"trace": here(), "baggage": dict(baggage.get_all()), "ctx": dict(ctx)}

    @made.rpc
    def plain(ctx: Context) -> str:
        return here()

    @made.rpc(on_interrupt="requeue")
    async def short(ctx: Context) -> str:
        return here()

    @made.rpc
    async def bad(ctx: Context, secret: str) -> None:
        raise KeyError(secret)

    @made.rpc(on_interrupt="retry")
    async def steps(ctx: Context) -> str:
        async for _ in ctx.steps(range(100)):
            await asyncio.sleep(1)
        return here()

    return made


# -- on the wire ---------------------------------------------------------------------------


async def taken(world: World, inbox: Inbox) -> Delivery:
    delivery = await inbox.next()
    await delivery.ack()
    return delivery


async def read_topic(world: World, svc: Service) -> Inbox:
    """Somebody else reads the service's queue."""
    inbox = Inbox()
    client = await world.client(svc)
    await client._transport.consume([shared_queue("compute")], inbox.put, prefetch=10)
    return inbox


async def test_the_active_trace_goes_out_in_headers_and_body(
    world: World, svc: Service, recorder: Recorder
):
    """Both get the active trace, or else that of the context; the given context is not changed."""
    inbox = await read_topic(world, svc)
    context = {"user_id": "joe", "traceparent": OTHERS, "tracestate": "old=1"}
    view = (await world.client(svc)).prepare(context=context)

    with recorder.start_as_current_span("caller") as span, inside(baggage.set_baggage("k", "v")):
        await view.cast("work")
    await view.cast("work")

    traced, other = await taken(world, inbox), await taken(world, inbox)
    first, second = recorder.sent()
    assert first.parent.span_id == span.get_span_context().span_id
    expected = {"traceparent": as_parent(first), "baggage": "k=v"}
    assert traced.headers == expected
    assert decode_request(traced.body).context == {"user_id": "joe"} | expected
    assert as_parent(second).split("-")[1] == OTHERS.split("-")[1]
    assert other.headers["traceparent"] == as_parent(second)
    assert decode_request(other.body).context["traceparent"] == as_parent(second)
    assert context == {"user_id": "joe", "traceparent": OTHERS, "tracestate": "old=1"}


async def test_where_nothing_is_active_nothing_is_added(world: World, svc: Service):
    """A message of a program that does not use OpenTelemetry is as it always was."""
    inbox = await read_topic(world, svc)

    await (await world.client(svc)).cast("work")

    delivery = await taken(world, inbox)
    assert delivery.headers == {}
    assert decode_request(delivery.body).context == {}


# -- a direct request ----------------------------------------------------------------------


@pytest.mark.parametrize(("method", "answer"), [("work", "trace"), ("plain", ""), ("short", "")])
async def test_a_handler_runs_in_a_child_of_its_callers_span(
    world: World, svc: Service, recorder: Recorder, method: str, answer: str
):
    """Coroutine, thread, and a method without a row."""
    await world.start(svc)
    client = await world.client(svc)

    with recorder.start_as_current_span("caller") as caller:
        result = await client.call(method)

    (span,) = recorder.named(method)
    (sent,) = recorder.sent()
    assert sent.parent.span_id == caller.get_span_context().span_id
    assert span.parent.span_id == sent.context.span_id
    assert (result[answer] if answer else result) == trace.format_trace_id(span.context.trace_id)
    assert span.ended
    assert here() == ""


async def test_a_span_has_the_current_names_and_no_secret(
    world: World, svc: Service, recorder: Recorder
):
    """Neither arguments nor context nor what the handler said of them."""
    await world.start(svc)
    client = (await world.client(svc)).prepare(context={"token": CANARY})

    with pytest.raises(KeyError):
        await client.prepare(request_id="r-1").call("bad", secret=CANARY)
    await client.cast("work")
    await client.fanout("work")
    await world.settle()

    bad, cast, fanout = recorder.of(trace.SpanKind.SERVER, trace.SpanKind.CONSUMER)
    both = {
        "rpc.system.name": "gracekit",
        "rpc.method": "bad",
        "messaging.system": "gracekit",
        "messaging.destination.name": "compute",
        "messaging.operation.name": "call",
        "messaging.message.id": "r-1",
        "error.type": "KeyError",
    }
    ours = {"messaging.operation.type": "process", "gracekit.attempt": 1}
    assert bad.attributes == both | ours
    assert recorder.sent()[0].attributes == both | {"messaging.operation.type": "send"}
    assert bad.status is not None
    assert (bad.status.status_code, bad.status.description) == (trace.StatusCode.ERROR, None)
    assert [s.attributes["messaging.operation.name"] for s in (cast, fanout)] == ["cast", "fanout"]
    kinds = [span.given["kind"] for span in (bad, cast, fanout)]
    assert kinds == [trace.SpanKind.SERVER, trace.SpanKind.CONSUMER, trace.SpanKind.CONSUMER]
    kinds = [span.given["kind"] for span in recorder.sent()]
    assert kinds == [trace.SpanKind.CLIENT, trace.SpanKind.PRODUCER, trace.SpanKind.PRODUCER]
    assert CANARY not in repr([vars(span) for span in recorder.spans])


async def test_work_whose_result_is_left_out_is_no_error(
    world: World, svc: Service, recorder: Recorder
):
    """It was done; only its caller has a failure."""

    @svc.rpc
    async def odd(ctx: Context) -> object:
        return object()

    await world.start(svc)
    with pytest.raises(UnserialisableError):
        await (await world.client(svc)).call("odd")

    (span,) = recorder.named("odd")
    assert all(one.ended for one in recorder.spans)
    assert (span.attributes.get("error.type"), span.status) == (None, None)


async def test_a_refused_request_has_no_span_at_its_service(
    world: World, svc: Service, recorder: Recorder
):
    """So no name from the wire ever becomes one."""
    await world.start(svc)

    with pytest.raises(NoSuchMethodError):
        await (await world.client(svc)).call("no_such_method")

    assert recorder.spans == recorder.sent()


async def deliver(
    world: World, svc: Service, body: dict[str, str], headers: dict[str, str]
) -> dict[str, Any]:
    """Call `work` with these keys in body and headers; what it saw."""
    client = await world.client(svc)
    publish = client._transport.publish

    async def with_headers(queue: Any, message: Message) -> None:
        await publish(queue, Message(body=message.body, headers=headers))

    client._transport.publish = with_headers
    answer: dict[str, Any] = await client.prepare(context=body).call("work")
    return answer


async def test_headers_stand_over_the_body(world: World, svc: Service):
    """The message's sender knows better than what a context was copied from; the row keeps
    theirs.
    """
    await world.start(svc)

    seen = await deliver(
        world,
        svc,
        {"traceparent": OTHERS, "tracestate": "old=1", "user_id": "joe"},
        {"traceparent": THEIRS, "x-junk": "1"},
    )

    assert seen["trace"] == "a" * 32
    assert seen["ctx"] == {"traceparent": THEIRS, "user_id": "joe"}


async def test_the_body_serves_where_headers_say_nothing(world: World, svc: Service):
    """An oslo client sends its trace in the context alone."""
    await world.start(svc)

    seen = await deliver(world, svc, {"traceparent": OTHERS, "baggage": "k=v"}, {"x-junk": "1"})

    assert (seen["trace"], seen["baggage"]) == ("c" * 32, {"k": "v"})


async def test_ill_formed_keys_change_nothing(
    world: World, svc: Service, caplog: pytest.LogCaptureFixture
):
    """The request is served, and its text reaches no log."""
    await world.start(svc)
    junk = {"traceparent": CANARY, "tracestate": CANARY, "baggage": f"{CANARY}\n\x1b[31m"}

    seen = await deliver(world, svc, junk, junk)

    assert (seen["trace"], seen["baggage"]) == ("", {})
    assert CANARY not in caplog.text


async def test_a_trace_is_passed_on_where_nobody_records(world: World):
    """A service without OpenTelemetry's SDK is no hole in its callers' traces."""
    svc, near = Service("compute"), Service("near")

    @svc.rpc
    async def far(ctx: Context) -> str:
        return here()

    await world.start(svc)
    client = await world.client(svc)

    @near.rpc
    async def work(ctx: Context) -> str:
        return await client.call(far)

    await world.start(near)
    caller = (await world.client(near)).prepare(context={"traceparent": THEIRS})

    assert await caller.call(work) == "a" * 32


async def test_an_untraced_request_is_not_in_the_trace_of_the_start(
    world: World, svc: Service, recorder: Recorder
):
    """A program may open its service inside a span; the requests that come are not its work."""
    with recorder.start_as_current_span("start") as start:
        await world.start(svc)
    client = await world.client(svc)

    result = await client.call("work")

    (span,), (sent,) = recorder.named("work"), recorder.sent()
    assert span.parent.span_id == sent.context.span_id
    assert not sent.parent.is_valid
    assert result["trace"] != trace.format_trace_id(start.get_span_context().trace_id)


async def test_a_job_is_not_in_the_trace_of_the_start_either(
    world: World, svc: Service, recorder: Recorder
):
    """It runs for as long as the service does, and that span ended long ago."""
    seen: list[str] = []

    @svc.periodic(every=5)
    async def job(ctx: Context) -> None:
        seen.append(here())

    with recorder.start_as_current_span("start"):
        await world.start(svc)
    await world.until(lambda: len(seen) == 2)

    assert seen == ["", ""]


# -- a task from the record ----------------------------------------------------------------


def check_own_trace(recorder: Recorder, again: Span, last: Span) -> None:
    """The decision about a task begins its trace, and both are linked to the last known span."""
    (settled,) = (span for span in recorder.spans if span.name == f"settle {again.name}")
    assert not settled.parent.is_valid
    assert settled.context.trace_id != last.context.trace_id
    assert again.parent.span_id == settled.context.span_id
    for span in (settled, again):
        links: Sequence[trace.Link] = span.given["links"]
        assert [link.context.span_id for link in links] == [last.context.span_id]
    assert settled.attributes["gracekit.outcome"] == "run_again"
    assert again.attributes["messaging.operation.name"] == "resume"
    assert all(span.ended for span in recorder.spans if span.name != "caller")


async def test_a_recovered_task_has_a_trace_of_its_own_with_a_link(
    world: World, svc: Service, recorder: Recorder
):
    """The old one may have ended days ago; the link leads there, and the baggage is still meant."""
    life = await world.start(svc)
    client = await world.client(svc)
    with recorder.start_as_current_span("caller"), inside(baggage.set_baggage("k", "v")):
        calling = asyncio.create_task(client.call("work", seconds=5))
        await life.hears("task.started")
    await life.crash()

    await world.start(svc)
    result = await calling
    await world.settle()

    _, again = recorder.named("work")
    check_own_trace(recorder, again, recorder.sent()[0])
    assert again.attributes["gracekit.attempt"] == 2
    assert result["trace"] == trace.format_trace_id(again.context.trace_id)
    assert result["baggage"] == {"k": "v"}


async def test_a_handed_over_task_has_one_too(world: World, svc: Service, recorder: Recorder):
    """It is linked to the attempt that was cut, whose span says how; that is no error."""
    life = await world.start(svc)
    client = await world.client(svc)
    with recorder.start_as_current_span("caller"):
        calling = asyncio.create_task(client.prepare(timeout=500).call("steps"))
        await life.hears("task.started")
    await life.drain()

    await world.start(svc)
    await calling
    await world.settle()

    first, again = recorder.named("steps")
    check_own_trace(recorder, again, first)
    assert first.attributes["gracekit.cut"] == "safe_point"
    assert first.status is None


async def test_an_untraced_task_from_the_record_has_no_link(
    world: World, svc: Service, recorder: Recorder
):
    """There is nothing to link to."""
    life = await world.start(svc)
    client = await world.client(svc)
    client._tracing = Tracing()
    await client.cast("work", seconds=5)
    await life.hears("task.started")
    await life.crash()

    second = await world.start(svc)
    await second.hears("task.finished")

    assert [span.given["links"] for span in recorder.named("work")] == [[], []]
