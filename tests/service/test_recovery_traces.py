"""The traces of tasks that a drain hands over, and of what recovery does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gracekit import Context, Retry, Service, TaskInterruptedError
from gracekit.tracing.conventions import LOCAL_QUEUES, SCHEMA_URL, Messaging
from gracekit.tracing.spans import MOST_DECIDED, Tracing
from tests.service.kit import Doors, World

pytestmark = pytest.mark.looptime


class Collected:
    """The spans of this process that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def all(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str, kind: trace.SpanKind = trace.SpanKind.INTERNAL) -> ReadableSpan:
        """The only one of that name and kind."""
        (found,) = (span for span in self.all() if (span.name, span.kind) == (name, kind))
        return found

    def attempts(self, method: str) -> list[ReadableSpan]:
        kinds = {trace.SpanKind.SERVER, trace.SpanKind.CONSUMER}
        return [span for span in self.all() if span.name == method and span.kind in kinds]


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Collected:
    """Give this process a tracer provider for one test."""
    made = Collected()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", made.provider)
    return made


@pytest.fixture
def doors(svc: Service) -> Doors:
    """A service whose handlers wait, and whose tasks have each a policy."""
    made = Doors()

    @svc.rpc(on_interrupt="probe", settle=1)
    async def migrate(ctx: Context, vm: str) -> str:
        await made.pass_(vm)
        return vm

    @migrate.probe
    async def _(ctx: Context, vm: str) -> Retry:
        with trace.get_tracer("app").start_as_current_span("asked the backend"):
            return Retry()

    @svc.rpc(settle=1)
    async def burn(ctx: Context, vm: str) -> None:
        await made.pass_(vm)

    @burn.errored
    async def _(ctx: Context, vm: str, reason: str) -> None: ...

    return made


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return span.parent and (span.parent.trace_id, span.parent.span_id)


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


async def test_call_hand_over_and_settled_can_be_followed(
    world: World, svc: Service, doors: Doors, collected: Collected
):
    """From the caller to the second attempt there are two traces, and links between them."""
    first = await world.start(svc, drain_timeout_s=5)
    client = await world.client(svc)
    with trace.get_tracer("caller").start_as_current_span("caller"):
        calling = asyncio.create_task(client.prepare(timeout=500).call("migrate", vm="a"))
        await doors.wait(1)
    await first.drain()
    await world.start(svc)
    await doors.wait(2)
    doors.open("a")
    assert await calling == "a"
    await world.settle()

    # the caller's trace
    caller, sent = collected.named("caller"), collected.named("migrate", trace.SpanKind.CLIENT)
    cut, again = collected.attempts("migrate")
    assert parent(sent) == ids(caller)
    assert parent(cut) == ids(sent)
    assert cut.attributes["gracekit.cut"] == "cancelled"
    # the task's new one
    settled, probed = collected.named("settle migrate"), collected.named("probe migrate")
    assert parent(settled) is None
    assert links(settled) == links(probed) == links(again) == [ids(cut)]
    assert parent(probed) == parent(again) == ids(settled)
    assert parent(collected.named("asked the backend")) == ids(probed)
    assert settled.attributes["gracekit.outcome"] == "run_again"
    assert again.attributes["gracekit.attempt"] == 2
    assert ids(caller)[0] != ids(settled)[0]


async def test_a_task_that_is_given_up_says_so_in_its_new_trace(
    world: World, svc: Service, doors: Doors, collected: Collected
):
    """The trace has the reason, and then the call of its `errored` hook."""
    first = await world.start(svc, drain_timeout_s=5)
    calling = asyncio.create_task(
        (await world.client(svc)).prepare(timeout=500).call("burn", vm="a")
    )
    await doors.wait(1)
    await first.drain()
    await world.start(svc)
    with pytest.raises(TaskInterruptedError):
        await calling
    await world.settle()

    (cut,) = collected.attempts("burn")
    settled, told = collected.named("settle burn"), collected.named("errored burn")
    assert settled.attributes["gracekit.outcome"] == "errored"
    assert settled.attributes["gracekit.reason"] == "interrupted"
    assert parent(told) == ids(settled)
    assert links(settled) == links(told) == [ids(cut)]
    sent = collected.named("burn", trace.SpanKind.CLIENT)
    assert sent.attributes["error.type"] == "TaskInterruptedError"


async def test_spans_are_those_of_one_scope_and_name_no_resource(
    world: World, svc: Service, doors: Doors, collected: Collected
):
    """Each names the version of its conventions; none has data of the requests."""
    life = await world.start(svc, drain_timeout_s=5)
    await (await world.client(svc)).cast("migrate", vm="canary-7f3a")
    await doors.wait(1)
    await life.drain()
    await world.start(svc)
    await doors.wait(2)

    ours = [span for span in collected.all() if span.instrumentation_scope.name == "gracekit"]
    assert len(ours) > 3
    assert {span.instrumentation_scope.schema_url for span in ours} == {SCHEMA_URL}
    assert not any("canary" in span.to_json() for span in ours)
    doors.open("canary-7f3a")


async def test_without_a_provider_nothing_is_made(world: World, svc: Service, doors: Doors):
    """No span is made in a drain and its recovery, and the row keeps its caller's context."""
    life = await world.start(svc, drain_timeout_s=5)
    context = {"user_id": "joe"}
    await (await world.client(svc)).prepare(context=context, request_id="r").cast("migrate", vm="a")
    await doors.wait(1)
    await life.drain()

    assert world.task("r")["context"] == '{"user_id":"joe"}'


def test_a_message_to_a_broker_is_named_by_exchange_and_key():
    """The conventions for RabbitMQ demand this; other messages are named by the queue."""
    assert Messaging("rabbitmq", "openstack").destination("compute.node-1") == {
        "messaging.system": "rabbitmq",
        "messaging.destination.name": "openstack",
        "messaging.rabbitmq.destination.routing_key": "compute.node-1",
    }
    assert LOCAL_QUEUES.destination("compute") == {
        "messaging.system": "gracekit",
        "messaging.destination.name": "compute",
    }


def test_decisions_whose_tasks_begin_elsewhere_are_forgotten(collected: Collected):
    """A service that settles tasks which others resume must not remember them for ever."""
    tracing = Tracing()
    tracing.look()

    for n in range(MOST_DECIDED + 10):
        with tracing.settling({}, method="migrate", message_id=f"r{n}", attempt=1):
            tracing.decided(f"r{n}", "run_again", "")

    assert len(tracing._decided) == MOST_DECIDED
    assert tracing._settling == {}
