"""Large messages: what is read of them and kept, and whom they hold up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiormq
import pytest

from gracekit.clock import Clock
from gracekit.errors import DependencyError
from gracekit.process import Process
from gracekit.rpc.amqp import amqp_transport
from gracekit.rpc.amqp import consumer as amqp_consumer
from gracekit.rpc.amqp import intake as amqp_intake
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.server import Capacity, RpcServer
from gracekit.rpc.transport import Delivery, Queue, QueueKind, directed_queue, shared_queue
from gracekit.telemetry.telemetry import Telemetry
from tests.process import served
from tests.process.helpers import until
from tests.rabbit.broker import Broker
from tests.rabbit.proxy import Proxy
from tests.rabbit.site import RabbitSite
from tests.rpc.kit import Inbox

QUEUE = shared_queue("compute")
LARGE = 200_000  # bytes: two frames
HOW_MANY = 30
BOUND = 5 * LARGE
ON_ITS_WAY = 1 << 16  # bytes of a read, whose frames are all taken


@contextlib.asynccontextmanager
async def transport_to(url: str, **given: int) -> AsyncIterator[AmqpTransport]:
    broker = read_url(url, exchange="gracekit", profile="durable")
    made = AmqpTransport(broker, process=Process(), clock=Clock(), telemetry=Telemetry(), **given)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture
def url(rabbit_url: str) -> str:
    return f"{rabbit_url}?heartbeat=1s"


async def send(url: str, number: int, size: int) -> None:
    """Put large messages into the queue, which exists."""
    async with aiormq.connect(url) as connection:
        channel = await connection.channel()
        for _ in range(number):
            await channel.basic_publish(b"x" * size, routing_key=QUEUE.name)


async def test_a_backlog_of_large_messages_does_not_keep_a_worker_from_starting(
    shared_broker: Broker, rabbit_vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a question comes behind all that was delivered before it."""
    monkeypatch.setattr(amqp_intake, "ANSWER_S", 1.0)
    url = shared_broker.url_of(rabbit_vhost)
    inbox = Inbox()
    others = [
        directed_queue("compute", "node-1"),
        Queue("compute_fanout_1", QueueKind.FANOUT, "compute"),
    ]
    with Proxy(shared_broker.port) as proxy:
        async with transport_to(shared_broker.url_of(rabbit_vhost, port=proxy.port)) as transport:
            await transport.declare([QUEUE])
            await send(url, HOW_MANY, LARGE)
            proxy.slow(1_000_000)

            await transport.consume([QUEUE, *others], inbox.put, prefetch=3 * HOW_MANY)

            assert len(inbox.all) < HOW_MANY
            proxy.heal()
            await inbox.take(HOW_MANY)


async def test_a_body_above_the_limit_is_not_kept(rabbit_url: str) -> None:
    """Its size is known from its header: nobody will parse it, so its pieces are dropped."""
    inbox = Inbox()
    async with transport_to(rabbit_url, keep=LARGE) as transport:
        await transport.consume([QUEUE], inbox.put, prefetch=10)
        for size in (LARGE + 1, LARGE, 3 * LARGE):
            await send(rabbit_url, 1, size)
        found = await inbox.take(3)

    assert [(len(one.body), one.dropped) for one in found] == [
        (0, LARGE + 1),
        (LARGE, 0),
        (0, 3 * LARGE),
    ]


@pytest.mark.process
async def test_a_body_above_the_limit_is_refused_with_its_size(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str
) -> None:
    """The record says how large it was, and the broker keeps it as a dead letter."""
    site = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    with contextlib.closing(site):
        service = await site.start(max_body_bytes=2000).serving()
        async with served.svc.client(site.url) as client:
            await client.cast("slow", key="x" * 3000, s=0)
        row = await site.found("SELECT reason, detail FROM task WHERE state = 'rejected'")
        await service.stop()

    assert row["reason"] == "oversize"
    assert "exceeds the limit of 2000" in row["detail"]
    assert "body of 3" in row["detail"]
    assert shared_broker.queues(rabbit_vhost)["shop_dead"].ready == 1


class Reader:
    """A server whose deliveries become tasks when the test says so."""

    def __init__(self, transport: AmqpTransport, *, capacity: int, prefetch_bytes: int) -> None:
        self.taken: list[Delivery] = []
        self.server = RpcServer(
            transport,
            [QUEUE],
            self.taken.append,
            Capacity(capacity),
            prefetch=HOW_MANY,
            prefetch_bytes=prefetch_bytes,
            wait_s=3600.0,
            cancel_ok_timeout_s=10.0,
        )


async def test_what_is_read_and_not_accepted_is_bounded_in_bytes(url: str) -> None:
    """Reading pauses meanwhile, the connection lives, and everything comes in the end."""
    async with transport_to(url) as transport:
        reader = Reader(transport, capacity=HOW_MANY, prefetch_bytes=BOUND)
        await reader.server.start()
        await send(url, HOW_MANY, LARGE)
        await until(lambda: len(reader.taken) * LARGE > BOUND, "as much as may be read")
        await asyncio.sleep(7)  # aiormq takes a connection for stuck after six
        read = sum(len(delivery.body) for delivery in reader.taken)
        for at in range(HOW_MANY):
            await until(lambda: len(reader.taken) > at, "the next")  # noqa: B023
            if at % 2:
                await reader.taken[at].ack()
            else:
                reader.taken[at].taken()
        await reader.server.stop()

    assert BOUND < read <= BOUND + 2 * LARGE + ON_ITS_WAY
    assert not any(delivery.redelivered for delivery in reader.taken)


async def test_a_pause_is_not_taken_for_a_message_that_stalls(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the midst of a message, and the rest is on its way: no reader is lost for it."""
    monkeypatch.setattr(amqp_consumer, "STALLED_S", 0.3)
    async with transport_to(url) as transport:
        reader = Reader(transport, capacity=HOW_MANY, prefetch_bytes=BOUND)
        await transport.declare([QUEUE])
        await send(url, HOW_MANY, LARGE)
        await reader.server.start()
        await until(lambda: len(reader.taken) * LARGE > BOUND, "as much as may be read")
        await asyncio.sleep(5 * amqp_consumer.STALLED_S)
        for at in range(HOW_MANY):
            await until(lambda: len(reader.taken) > at, "the next")  # noqa: B023
            await reader.taken[at].ack()
        await reader.server.stop()

    assert not any(delivery.redelivered for delivery in reader.taken)


async def test_what_has_no_place_does_not_hold_up_the_connection(
    url: str, shared_broker: Broker, rabbit_vhost: str
) -> None:
    """Ops requests come by it too: large messages without places go back at once."""
    async with transport_to(url) as transport:
        reader = Reader(transport, capacity=1, prefetch_bytes=BOUND)
        await reader.server.start()
        await send(url, HOW_MANY, LARGE)
        await until(lambda: reader.server.returned > 0, "messages given back")
        ops = Inbox()
        await transport.consume([shared_queue("compute-ops")], ops.put, prefetch=1)
        await reader.server.wait()
        left = (await asyncio.to_thread(shared_broker.queues, rabbit_vhost))["compute"]
        await reader.server.stop()

    assert len(reader.taken) == 1
    assert (left.ready, left.unacked) == (HOW_MANY - 1, 1)


async def test_a_paused_intake_can_be_closed(url: str) -> None:
    """A drain may begin while reading pauses: its answer comes behind what is on its way."""
    async with transport_to(url) as transport:
        reader = Reader(transport, capacity=HOW_MANY, prefetch_bytes=BOUND)
        await reader.server.start()
        await send(url, HOW_MANY, LARGE)
        await until(lambda: len(reader.taken) * LARGE > BOUND, "as much as may be read")

        await asyncio.wait_for(reader.server.close_intake(), 5)
        consumers = await transport._readers_of(QUEUE.name)
        await asyncio.gather(*(delivery.ack() for delivery in reader.taken))

    assert consumers == 0


async def test_what_queues_hold_is_not_known_while_reading_pauses(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer waits behind what is not read: the question is given up, and nobody is
    disturbed.
    """
    monkeypatch.setattr(amqp_transport, "DEPTH_TIMEOUT_S", 0.5)
    async with transport_to(url) as transport:
        reader = Reader(transport, capacity=HOW_MANY, prefetch_bytes=BOUND)
        await reader.server.start()
        await send(url, HOW_MANY, LARGE)
        await until(lambda: reader.server.is_held, "as much as may be read")

        for _ in range(2):
            with pytest.raises(DependencyError, match=r"did not answer in 0\.5 s"):
                await reader.server.depth()
        for at in range(HOW_MANY):
            await until(lambda: len(reader.taken) > at, "the next")  # noqa: B023
            await reader.taken[at].ack()

        assert await reader.server.depth() == 0
        assert reader.server.fresh == {"compute": HOW_MANY}
        await reader.server.stop()
