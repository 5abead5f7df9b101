"""How much a broker says that queues hold, and what the question costs others: nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from gracekit.clock import Clock
from gracekit.errors import DependencyError
from gracekit.process import Process
from gracekit.rpc.amqp import amqp_transport
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.amqp.bounds import CLOSE_S
from gracekit.rpc.amqp.profiles import PROFILES
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.transport import DEPTH_TIMEOUT_S, Queue, directed_queue, shared_queue
from gracekit.telemetry.telemetry import Telemetry
from tests.process.helpers import until
from tests.rabbit.broker import Broker
from tests.rabbit.erlang import resource
from tests.rpc.kit import Inbox, message

QUEUE = shared_queue("compute")
OTHER = directed_queue("compute", "node-1")
MISSING = directed_queue("compute", "missing")
BOUND_S = DEPTH_TIMEOUT_S + CLOSE_S + 1.0
CHANNELS = "length(rabbit_channel:list_local())"


@asynccontextmanager
async def transport_to(
    url: str, heard: list[str], profile: str = "durable"
) -> AsyncIterator[AmqpTransport]:
    telemetry = Telemetry()
    telemetry.subscribe(lambda event, _: heard.append(event))
    broker = read_url(url, exchange="gracekit", profile=profile)
    made = AmqpTransport(broker, process=Process(), clock=Clock(), telemetry=telemetry)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture
def heard() -> list[str]:
    """Events of the transport."""
    return []


@pytest.fixture
async def transport(
    own_broker: Broker, own_vhost: str, heard: list[str]
) -> AsyncIterator[AmqpTransport]:
    async with transport_to(own_broker.url_of(own_vhost), heard) as made:
        yield made


@pytest.mark.parametrize("profile", PROFILES)
async def test_queues_of_any_profile_are_counted(
    shared_broker: Broker, rabbit_vhost: str, heard: list[str], profile: str
) -> None:
    """Quorum queues and transient ones too: who asks need not know how they were declared."""
    url = shared_broker.url_of(rabbit_vhost)
    inbox = Inbox()
    async with (
        transport_to(url, heard, profile) as owner,
        transport_to(url, heard) as other,
    ):
        await owner.declare([QUEUE, OTHER])
        for text in ("a", "b", "c"):
            await owner.publish(QUEUE, message(text))
        await owner.publish(OTHER, message("d"))
        assert await other.depth([QUEUE, MISSING, OTHER]) == 4
        assert await other.waiting([QUEUE, MISSING, OTHER]) == (4, None)

        await owner.consume([QUEUE], inbox.put, prefetch=2)
        await inbox.take(2)
        assert await other.depth([QUEUE, OTHER]) == 2
        assert await owner.depth([QUEUE]) == 1

    assert heard == []


async def test_the_question_leaves_no_channel_and_disturbs_no_reader(
    transport: AmqpTransport, own_broker: Broker, heard: list[str]
) -> None:
    """Asked again and again, also about missing queues, for which the broker closes the channel."""
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=100)
    await transport.publish(QUEUE, message("the first"))  # which opens a channel to publish by
    await inbox.next()
    before = await asyncio.to_thread(own_broker.eval, CHANNELS)

    for number in range(20):
        assert await transport.depth([MISSING, QUEUE, MISSING, OTHER]) == 0
        await transport.publish(QUEUE, message(str(number)))

    await inbox.take(20)
    assert inbox.bodies[1:] == [str(number) for number in range(20)]
    assert not any(delivery.redelivered for delivery in inbox.all)
    assert await asyncio.to_thread(own_broker.eval, CHANNELS) == before
    assert heard == []


async def test_a_queue_that_is_down_is_not_taken_for_a_missing_one(
    transport: AmqpTransport, own_broker: Broker, own_vhost: str
) -> None:
    """The broker says NOT_FOUND of both, but what this one holds comes back with it."""
    await transport.declare([QUEUE])
    await transport.publish(QUEUE, message("a"))

    with down(own_broker, own_vhost, QUEUE), pytest.raises(DependencyError, match="NOT_FOUND"):
        await transport.depth([MISSING, QUEUE])

    assert await transport.depth([MISSING, QUEUE]) == 1


@contextmanager
def down(broker: Broker, vhost: str, queue: Queue) -> Iterator[None]:
    """The broker takes the queue's process for one that has crashed."""

    def be(state: str) -> None:
        broker.eval(
            "rabbit_misc:execute_mnesia_transaction(fun() -> "
            f"rabbit_amqqueue:update({resource(vhost, 'queue', queue.name)}, "
            f"fun(Q) -> amqqueue:set_state(Q, {state}) end) end)"
        )

    be("crashed")
    try:
        yield
    finally:
        be("live")


async def test_a_broker_that_is_away_does_not_say(
    transport: AmqpTransport, own_broker: Broker
) -> None:
    """The error comes at once where the loss is known; it is asked again when it is back."""
    await transport.declare([QUEUE])
    await transport.publish(QUEUE, message("a"))
    await asyncio.to_thread(own_broker.kill)

    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(DependencyError):
            await transport.depth([QUEUE])
        assert time.monotonic() - began < BOUND_S

    await asyncio.to_thread(own_broker.start)
    async with asyncio.timeout(30):
        while (found := await depth_or_none(transport)) is None:
            await asyncio.sleep(0.1)
    assert found == 1


async def depth_or_none(transport: AmqpTransport) -> int | None:
    try:
        return await transport.depth([QUEUE])
    except DependencyError:
        return None


async def test_a_first_question_needs_a_broker_too(
    transport: AmqpTransport, own_broker: Broker
) -> None:
    """The connection that reads is opened for it."""
    assert await transport.depth([QUEUE]) == 0
    await transport.stop()
    await transport.start()
    await asyncio.to_thread(own_broker.kill)

    with pytest.raises(DependencyError, match="cannot be reached"):
        await transport.depth([QUEUE])


async def test_a_frozen_broker_is_given_up_and_its_readers_live_on(
    transport: AmqpTransport,
    own_broker: Broker,
    heard: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Questions that were given up, and whose answers come later, cost nobody the connection."""
    monkeypatch.setattr(amqp_transport, "DEPTH_TIMEOUT_S", 1.0)
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=10)
    own_broker.freeze()
    try:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(DependencyError, match=r"compute.*did not answer in 1 s"):
                await transport.depth([QUEUE])
            assert time.monotonic() - began < 1.0 + CLOSE_S + 1.0
    finally:
        own_broker.thaw()

    assert await transport.depth([QUEUE]) == 0
    await transport.publish(QUEUE, message("a"))
    assert (await inbox.next()).body == b"a"
    assert "broker.lost" not in heard
    assert "consumer.lost" not in heard


async def test_a_queue_that_does_not_answer_holds_up_nobody_else(
    transport: AmqpTransport,
    own_broker: Broker,
    own_vhost: str,
    heard: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker waits for it, and does not even close the channel of the question meanwhile."""
    monkeypatch.setattr(amqp_transport, "DEPTH_TIMEOUT_S", 1.0)
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=10)
    await transport.declare([OTHER])
    await transport.publish(OTHER, message("a"))
    before = await asyncio.to_thread(own_broker.eval, CHANNELS)
    turn = (
        f"{{ok, Q}} = rabbit_amqqueue:lookup({resource(own_vhost, 'queue', OTHER.name)}), "
        "ok = sys:{}(amqqueue:get_pid(Q))"
    )
    await asyncio.to_thread(own_broker.eval, turn.replace("{}", "suspend"))
    try:
        began = time.monotonic()
        with pytest.raises(DependencyError, match=r"compute.*did not answer in 1 s"):
            await transport.depth([QUEUE, OTHER])
        assert time.monotonic() - began < 1.0 + CLOSE_S + 1.0
        assert await transport.depth([QUEUE]) == 0
        await transport.publish(QUEUE, message("b"))
        assert (await inbox.next()).body == b"b"
    finally:
        await asyncio.to_thread(own_broker.eval, turn.replace("{}", "resume"))

    assert await transport.depth([QUEUE, OTHER]) == 1
    await until(lambda: own_broker.eval(CHANNELS) == before, "the channel of the question closed")
    assert heard == []


async def test_a_quorum_queue_without_a_leader_is_reported_as_empty(
    own_broker: Broker, own_vhost: str, heard: list[str]
) -> None:
    """RabbitMQ answers at once, and nothing in its answer tells such a queue from an empty one."""
    server = (
        f"{{ok, Q}} = rabbit_amqqueue:lookup({resource(own_vhost, 'queue', QUEUE.name)}), "
        "ok = ra:{}_server(quorum_queues, amqqueue:get_pid(Q))"
    )
    async with transport_to(own_broker.url_of(own_vhost), heard, "quorum") as transport:
        await transport.declare([QUEUE])
        await transport.publish(QUEUE, message("a"))
        await asyncio.to_thread(own_broker.eval, server.replace("{}", "stop"))
        try:
            assert await transport.depth([QUEUE]) == 0
        finally:
            await asyncio.to_thread(own_broker.eval, server.replace("{}", "restart"))

    assert heard == []
