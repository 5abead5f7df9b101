"""The transport itself when its broker misbehaves: generations, confirms, alarms."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiormq
import pytest

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.errors import (
    CallTimeoutError,
    ConfigError,
    DependencyError,
    UnconfirmedError,
    Undeliverable,
)
from gracekit.process import Process
from gracekit.rpc.amqp import consumer as amqp_consumer
from gracekit.rpc.amqp import intake as intakes
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.amqp.channels import MessageChannel
from gracekit.rpc.amqp.consumer import AmqpConsumer, Declarer
from gracekit.rpc.amqp.intake import Intake
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.client import RpcClient
from gracekit.rpc.message import Reply
from gracekit.rpc.oslo_wire import decode_request, encode_reply
from gracekit.rpc.transport import (
    Delivery,
    Message,
    Queue,
    QueueKind,
    directed_queue,
    fanout_queue,
    reply_queue,
    shared_queue,
)
from gracekit.telemetry.telemetry import Telemetry
from tests.process.helpers import until
from tests.rabbit.broker import Broker
from tests.rabbit.erlang import binary
from tests.rabbit.proxy import Proxy
from tests.rpc.kit import Inbox, message

QUEUE = shared_queue("compute")
UNFORESEEN = RuntimeError("unforeseen")


class Ear:
    """What a transport's telemetry says."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self._news = asyncio.Event()

    def hear(self, event: str, fields: Any) -> None:
        self.heard.append((event, fields))
        self._news.set()

    async def until(self, event: str, times: int = 1) -> None:
        async with asyncio.timeout(30):
            while [name for name, _ in self.heard].count(event) < times:
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
async def transport(own_broker: Broker, own_vhost: str, ear: Ear) -> AsyncIterator[AmqpTransport]:
    telemetry = Telemetry()
    telemetry.subscribe(ear.hear)
    url = f"{own_broker.url_of(own_vhost)}?publish_timeout=3s"
    made = AmqpTransport(
        read_url(url, exchange="gracekit", profile="durable"),
        process=Process(),
        clock=Clock(),
        telemetry=telemetry,
    )
    await made.start()
    yield made
    await made.stop()


async def test_a_settlement_for_a_connection_that_is_gone_is_dropped(
    transport, own_broker: Broker, own_vhost: str, ear: Ear
) -> None:
    """Delivery tags begin anew on each channel: an ack of an earlier one would hit another
    message.
    """
    inbox = Inbox()
    consumer = await transport.consume([QUEUE], inbox.put, prefetch=10)
    for text in ("a", "b", "c"):
        await transport.publish(QUEUE, message(text))
    early = await inbox.take(3)

    await asyncio.to_thread(own_broker.close_all_connections)
    await ear.until("consumer.resumed")
    late = await inbox.take(3)
    await early[0].ack()
    await early[1].give_back()
    await early[2].dead_letter("no")
    held = (await asyncio.to_thread(own_broker.queues, own_vhost))["compute"]
    for delivery in late:
        await delivery.ack()
    await consumer.close()

    assert [delivery.body for delivery in late] == [b"a", b"b", b"c"]
    assert all(delivery.redelivered for delivery in late)
    assert (held.ready, held.unacked) == (0, 3)
    left = (await asyncio.to_thread(own_broker.queues, own_vhost))["compute"]
    assert (left.ready, left.unacked) == (0, 0)


async def test_a_message_under_a_key_of_others_comes_with_that_key(
    transport, own_broker: Broker, own_vhost: str
) -> None:
    """The service refuses it by that; what comes after it is not touched."""
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=10)
    connection = await aiormq.connect(own_broker.url_of(own_vhost))
    try:
        channel = await connection.channel()
        await channel.queue_bind(QUEUE.name, "gracekit", routing_key="k\u00e9y")
        await channel.basic_publish(b"stray", exchange="gracekit", routing_key="k\u00e9y")
    finally:
        await connection.close()
    stray = await inbox.next()
    await transport.publish(QUEUE, message("good"))
    good = await inbox.next()
    for delivery in (stray, good):
        await delivery.ack()

    assert (stray.body, stray.sent_to) == (b"stray", "k\u00e9y")
    assert (good.body, good.sent_to) == (b"good", "")
    await until(lambda: own_broker.queues(own_vhost)["compute"].unacked == 0, "all settled")


async def test_a_message_whose_key_and_properties_are_no_text_holds_up_no_other(
    transport, own_broker: Broker, own_vhost: str, ear: Ear
) -> None:
    """A fanout exchange takes any key of a client; what cannot be read is judged like other
    strays.
    """
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=10)
    connection = await aiormq.connect(own_broker.url_of(own_vhost))
    try:
        channel = await connection.channel()
        await channel.exchange_declare("everybody", exchange_type="fanout")
        await channel.queue_bind(QUEUE.name, "everybody")
    finally:
        await connection.close()
    publish = (
        f"rabbit_basic:publish(rabbit_misc:r({binary(own_vhost)}, exchange, "
        '<<"everybody">>), <<255,254>>, [{content_type, <<255>>}, {message_id, <<254>>}, '
        '{headers, [{<<255>>, longstr, <<254>>}]}], <<"odd">>)'
    )
    await asyncio.to_thread(own_broker.eval, publish)
    await transport.publish(QUEUE, message("good"))
    odd = await inbox.next()
    good = await inbox.next()
    if odd.body == b"good":
        odd, good = good, odd
    for delivery in (odd, good):
        await delivery.ack()

    assert (odd.body, good.body) == (b"odd", b"good")
    assert "consumer.lost" not in {name for name, _ in ear.heard[2:]}
    await until(lambda: own_broker.queues(own_vhost)["compute"].unacked == 0, "all settled")


async def test_queues_are_bound_again_when_their_exchange_was_deleted(
    transport, own_broker: Broker, own_vhost: str, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may declare an exchange may delete it: the service makes it again, and says so."""
    monkeypatch.setattr(amqp_consumer, "LOOK_EVERY_S", 0.1)
    inbox = Inbox()
    directed = directed_queue("compute", "node-1")
    copies = fanout_queue("compute", "0" * 32)
    await transport.consume([directed, copies, QUEUE], inbox.put, prefetch=10)
    connection = await aiormq.connect(own_broker.url_of(own_vhost))
    try:
        channel = await connection.channel()
        for exchange in ("gracekit", "compute_fanout"):
            await channel.exchange_delete(exchange)
    finally:
        await connection.close()
    await ear.until("binding.lost", 2)

    await publish_at_last(transport, QUEUE, "a")
    await publish_at_last(transport, directed, "b")
    await transport.publish_fanout("compute", message("c"))
    bodies = {delivery.body for delivery in await inbox.take(3)}

    told = {fields["exchange"] for event, fields in ear.heard if event == "binding.lost"}
    assert bodies == {b"a", b"b", b"c"}
    assert told == {"gracekit", "compute_fanout"}
    assert not [event for event, _ in ear.heard if event == "consumer.lost"]


async def test_acks_of_one_turn_leave_as_one_frame(
    transport, own_broker: Broker, own_vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred acks of a group cost the broker one; what is still open is not among them."""
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=200)
    await asyncio.gather(*(transport.publish(QUEUE, message(str(n))) for n in range(100)))
    deliveries = await inbox.take(100)
    frames: list[tuple[int, bool]] = []
    monkeypatch.setattr(MessageChannel, "ack", _noting(MessageChannel.ack, frames))
    open_, *others = deliveries[50], *deliveries[:50], *deliveries[51:]
    await asyncio.gather(*(delivery.ack() for delivery in deliveries[:50]))
    await asyncio.sleep(0.05)
    assert frames == [(50, True)]
    await asyncio.gather(*(delivery.ack() for delivery in deliveries[51:]))

    def unacked() -> bool:
        return own_broker.queues(own_vhost)["compute"].unacked == 1

    await until(unacked, "one unacked")
    await open_.ack()
    await until(lambda: own_broker.queues(own_vhost)["compute"].unacked == 0, "none unacked")
    assert len(others) == 99


async def test_acks_of_replies_leave_together_though_they_come_one_by_one(
    transport, own_broker: Broker, own_vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 32 of them, a moment after the first one, or when reading ends; the broker keeps
    none.
    """
    monkeypatch.setattr(intakes, "REPLY_ACKS_S", 3600.0)  # the first 32 leave by their number
    frames: list[tuple[int, bool]] = []
    monkeypatch.setattr(MessageChannel, "ack", _noting(MessageChannel.ack, frames))
    inbox, queue = Inbox(), reply_queue("reply_of_a_client")
    consumer = await transport.consume([queue], inbox.put, prefetch=100)

    async def next_reply() -> Delivery:
        await transport.publish(queue, message("a"))
        (delivery,) = await inbox.take(1)
        return delivery

    for _ in range(32):
        delivery = await next_reply()
        assert delivery.ack_now()
        await delivery.ack()  # a second one does nothing
    assert frames == [(32, True)]
    monkeypatch.setattr(intakes, "REPLY_ACKS_S", 0.05)
    two = [await next_reply(), await next_reply()]
    assert all(delivery.ack_now() for delivery in two)
    assert frames == [(32, True)]
    await until(lambda: frames[1:] == [(34, True)], "the two acks")
    assert (await next_reply()).ack_now()
    await consumer.close()

    assert frames == [(32, True), (34, True), (35, False)]
    left = (await asyncio.to_thread(own_broker.queues, own_vhost)).get(queue.name)
    assert left is None or (left.ready, left.unacked) == (0, 0)


async def test_a_reply_that_was_not_acked_in_time_is_ignored_when_it_comes_again(
    own_broker: Broker, own_vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is lost while an ack waits for others brings the reply a second time."""
    monkeypatch.setattr(Intake, "_ack_reply", Intake._has_settled)  # so the acks never leave
    url = own_broker.url_of(own_vhost)
    async with RpcClient(url, "compute") as client, answering(url, "compute") as asked:
        assert [await client.call("work", n=n) for n in range(3)] == ["done"] * 3
        await asyncio.to_thread(own_broker.close_all_connections)
        await until(lambda: client._replies.ignored >= 3, "the three replies again")

        assert await client.prepare(timeout="30s").call("work", n=3) == "done"
        # A request whose ack was lost with the connection comes again, as everywhere.
        assert list(dict.fromkeys(one["n"] for one in asked)) == [0, 1, 2, 3]


@pytest.fixture
def proxy(shared_broker: Broker) -> Iterator[Proxy]:
    with Proxy(shared_broker.port) as made:
        yield made


def _away(proxy: Proxy) -> None:
    proxy.refuse()
    proxy.cut()


async def test_the_first_call_of_a_client_waits_for_a_broker_that_is_away(
    shared_broker: Broker, rabbit_vhost: str, proxy: Proxy
) -> None:
    """As later calls and casts do. It is the first that needs the connection for replies, and one
    that gives up takes nothing from the others.
    """
    url = shared_broker.url_of(rabbit_vhost, port=proxy.port)
    async with (
        answering(shared_broker.url_of(rabbit_vhost), "compute") as asked,
        RpcClient(url, "compute") as client,
    ):
        _away(proxy)
        views = [
            client.prepare(timeout=30),
            client.prepare(timeout=30, fail_fast=True),
            client.prepare(timeout=30, monitor_timeout=30),
        ]
        calls = [asyncio.create_task(view.call("work", n=n)) for n, view in enumerate(views)]
        with pytest.raises(CallTimeoutError, match="was not sent"):
            await client.prepare(timeout=1).call("work", n=9)
        proxy.heal()

        assert await asyncio.gather(*calls) == ["done", "done", "done"]
    assert sorted(one["n"] for one in asked) == [0, 1, 2]


@pytest.mark.parametrize("trouble", [_away, Proxy.swallow], ids=["away", "silent"])
async def test_a_first_call_that_waits_in_vain_says_that_nothing_was_sent(
    shared_broker: Broker, rabbit_vhost: str, proxy: Proxy, trouble: Callable[[Proxy], None]
) -> None:
    """After the time of a publish, for however many calls."""
    url = f"{shared_broker.url_of(rabbit_vhost, port=proxy.port)}?publish_timeout=2s"
    async with RpcClient(url, "compute") as client:
        trouble(proxy)
        began = time.monotonic()
        calls = [client.call("work", n=n) for n in range(3)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        took_s = time.monotonic() - began
        proxy.heal()

    assert [type(one) for one in ended] == [DependencyError] * 3
    assert "no reply queue could be opened within 2 s, and nothing was sent: " in str(ended[0])
    assert took_s < 5  # of three times two, if each began to wait when the one before had ended


async def test_a_stop_ends_a_first_call_that_waits_for_the_broker(
    shared_broker: Broker, rabbit_vhost: str, proxy: Proxy
) -> None:
    """It does not wait until the call gives up."""
    async with RpcClient(shared_broker.url_of(rabbit_vhost, port=proxy.port), "compute") as client:
        _away(proxy)
        calling = asyncio.create_task(client.call("work"))
        await asyncio.sleep(0.5)

    async with asyncio.timeout(5):
        with pytest.raises(DependencyError, match="the client was stopped before it had a reply"):
            await calling


async def test_a_service_that_looks_for_other_readers_does_not_wait_for_the_broker(
    shared_broker: Broker, rabbit_vhost: str, proxy: Proxy
) -> None:
    """Its start is refused at once, and the supervisor decides."""
    transport = _made(shared_broker.url_of(rabbit_vhost, port=proxy.port))
    await transport.start()
    try:
        _away(proxy)
        async with asyncio.timeout(5):
            with pytest.raises(DependencyError, match="cannot be reached"):
                await transport.announce([QUEUE], store="sqlite:///s.db", label="a")
    finally:
        await transport.stop()


@contextlib.asynccontextmanager
async def answering(url: str, topic: str) -> AsyncIterator[list[Any]]:
    """A server without gracekit's: answers each request with "done", and notes its arguments."""
    transport, asked = (
        AmqpTransport(
            read_url(url, exchange="gracekit", profile="durable"),
            process=Process(),
            clock=Clock(),
            telemetry=Telemetry(),
        ),
        list[Any](),
    )
    tasks: set[asyncio.Task[None]] = set()

    async def answer(delivery: Delivery) -> None:
        request = decode_request(delivery.body)
        asked.append(request.args)
        if (to := request.reply) is not None:
            reply = Reply(msg_id=to.msg_id, reply_id="1", result="done")
            await transport.publish(reply_queue(to.queue), Message(body=encode_reply(reply)))
        await delivery.ack()

    def take(delivery: Delivery) -> None:
        tasks.add(asyncio.create_task(answer(delivery)))

    await transport.start()
    await transport.consume([shared_queue(topic)], take, prefetch=10)
    yield asked
    await asyncio.wait(tasks)
    await transport.stop()


def _noting(ack: Any, frames: list[tuple[int, bool]]) -> Any:
    def noted(self: Any, groups: Any) -> None:
        frames.extend(groups)
        ack(self, groups)

    return noted


def _made(url: str) -> AmqpTransport:
    return AmqpTransport(
        read_url(url, exchange="gracekit", profile="durable"),
        process=Process(),
        clock=Clock(),
        telemetry=Telemetry(),
    )


async def test_what_is_sent_under_an_alarm_is_in_the_queue_once(
    own_broker: Broker, own_vhost: str
) -> None:
    """The broker has it and will confirm it: it is waited for, and not sent again."""
    patient = _made(f"{own_broker.url_of(own_vhost)}?publish_timeout=60s")
    await patient.start()
    try:
        await patient.declare([QUEUE])
        await patient.publish(QUEUE, message("before"))
        await asyncio.to_thread(own_broker.set_alarm)
        sending = asyncio.create_task(patient.publish(QUEUE, message("a")))
        await asyncio.sleep(8)  # longer than a confirm is waited for where nothing is wrong
        assert not sending.done()
        await asyncio.to_thread(own_broker.clear_alarm)
        await sending
    finally:
        await patient.stop()

    assert own_broker.queues(own_vhost)["compute"].ready == 2


async def test_what_an_alarm_keeps_from_being_sent_is_not_called_a_lost_connection(
    own_broker: Broker, own_vhost: str
) -> None:
    """The first message may be in the queue; of later ones nothing is sent, and the error says
    why.
    """
    sender = _made(f"{own_broker.url_of(own_vhost)}?publish_timeout=2s")
    await sender.start()
    try:
        await sender.declare([QUEUE])
        await sender.publish(QUEUE, message("before"))
        await asyncio.to_thread(own_broker.set_alarm)
        with pytest.raises(UnconfirmedError):
            await sender.publish(QUEUE, message("a"))
        for key in ("b", "c"):
            with pytest.raises(DependencyError, match="the broker took no message within 2 s, and"):
                await sender.publish(QUEUE, message(key))
        await asyncio.to_thread(own_broker.clear_alarm)
        await sender.publish(QUEUE, message("after"))
    finally:
        await sender.stop()

    assert own_broker.queues(own_vhost)["compute"].ready in {2, 3}


@pytest.mark.parametrize("way", ["call", "cast", "fanout"])
async def test_an_unconfirmed_request_has_its_id_for_the_next_try(
    own_broker: Broker, own_vhost: str, way: str
) -> None:
    """It may run; under another id it could run twice."""
    url = f"{own_broker.url_of(own_vhost)}?publish_timeout=2s"
    async with answering(own_broker.url_of(own_vhost), "compute"), RpcClient(url, "compute") as one:
        await one.call("work")
        await one.fanout("work")  # its channel is open, too
        await asyncio.to_thread(own_broker.set_alarm)
        with pytest.raises(UnconfirmedError, match=r": order-1$") as given:
            await getattr(one.prepare(request_id="order-1"), way)("work")
        await asyncio.to_thread(own_broker.clear_alarm)

    assert given.value.request_id == "order-1"


async def test_a_publish_says_whether_it_may_have_been_carried_out(
    transport, own_broker: Broker
) -> None:
    """Not confirmed in time, and not even sent for want of a connection, are two errors."""
    await transport.declare([QUEUE])
    await transport.publish(QUEUE, message("a"))
    own_broker.freeze()
    try:
        with pytest.raises(UnconfirmedError, match="send it again under the same request id"):
            await transport.publish(QUEUE, message("b"))
    finally:
        own_broker.thaw()
    await asyncio.to_thread(own_broker.kill)
    await asyncio.sleep(0.5)  # until the loss is known

    with pytest.raises(DependencyError, match="nothing was sent"):
        await transport.publish(QUEUE, message("c"))


@pytest.mark.parametrize("trouble", ["alarm", "away", "frozen"])
async def test_what_is_under_way_fails_when_its_transport_stops(
    own_broker: Broker, own_vhost: str, ear: Ear, trouble: str
) -> None:
    """Whoever sends in the midst of a stop is told at once, and not after all of
    `publish_timeout`.
    """
    telemetry = Telemetry()
    telemetry.subscribe(ear.hear)
    stopped = AmqpTransport(
        read_url(
            f"{own_broker.url_of(own_vhost)}?publish_timeout=1h",
            exchange="gracekit",
            profile="durable",
        ),
        process=Process(),
        clock=Clock(),
        telemetry=telemetry,
    )
    await stopped.start()
    await stopped.declare([QUEUE])
    await stopped.publish(QUEUE, message("before"))
    match trouble:
        case "alarm":
            await asyncio.to_thread(own_broker.set_alarm)
        case "away":
            await asyncio.to_thread(own_broker.kill)
            await ear.until("broker.lost", times=2)
        case "frozen":
            own_broker.freeze()
    sending = [
        asyncio.create_task(stopped.publish(QUEUE, message("a"))),
        asyncio.create_task(stopped.publish_fanout("compute", message("b"))),
    ]
    await asyncio.sleep(0.1)  # they are sent, or wait

    stopping = asyncio.create_task(stopped.stop())
    async with asyncio.timeout(1):
        found = await asyncio.gather(*sending, return_exceptions=True)
    await stopping

    # The first was sent, but where nobody was; the other waits for its exchange.
    first = DependencyError if trouble == "away" else UnconfirmedError
    assert [type(error) for error in found] == [first, DependencyError]
    assert all("before the transport was stopped" in str(error) for error in found)


async def test_a_reply_queue_keeps_its_name_over_a_restart_of_the_broker(
    transport, own_broker: Broker, ear: Ear
) -> None:
    """Calls under way get their answers: the queue is durable, and its reader comes back to it.
    Meanwhile the reader says since when it cannot read, and why.
    """
    inbox = Inbox()
    queue = Queue("reply_1", QueueKind.REPLY)
    consumer = await transport.consume([queue], inbox.put, prefetch=1)
    assert consumer.failure is None
    await asyncio.to_thread(own_broker.kill)
    await ear.until("consumer.lost")
    lost = consumer.failure
    assert lost is not None
    await asyncio.to_thread(own_broker.start)
    await ear.until("consumer.resumed")
    assert lost.since < asyncio.get_running_loop().time()
    assert consumer.failure is None
    await publish_at_last(transport, queue, "answer")

    assert (await inbox.next()).body == b"answer"


async def test_a_cancelled_consumer_stays_cancelled(
    transport, own_broker: Broker, own_vhost: str, ear: Ear
) -> None:
    """A lost connection brings back who reads, and nobody whose intake was closed."""
    inbox = Inbox()
    consumer = await transport.consume([QUEUE], inbox.put, prefetch=1)
    await transport.consume([shared_queue("compute-ops")], inbox.put, prefetch=1)
    await consumer.cancel()

    await asyncio.to_thread(own_broker.close_all_connections)
    await ear.until("consumer.resumed")
    await transport.publish(QUEUE, message("a"))

    queues = await asyncio.to_thread(own_broker.queues, own_vhost)
    assert queues["compute"].consumers == 0
    assert queues["compute"].ready == 1
    assert queues["compute-ops"].consumers == 1


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (Link, "_lost"),
        (Link, "_drop"),
        (Link, "_reconnect"),
        (AmqpConsumer, "_ended"),
        (Intake, "close"),
        (AmqpConsumer, "_open_again"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_a_keeper_that_fails_begins_again_and_messages_flow(
    transport, own_broker: Broker, ear: Ear, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    """An exception that nobody foresaw, in any step of who keeps a connection or a consumer, is
    logged; neither this loss nor a later one ends the reading.
    """
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=1)
    raise_once(monkeypatch, owner, step)

    for times, text in enumerate(("a", "b"), 1):
        await asyncio.to_thread(own_broker.close_all_connections)
        await ear.until("consumer.resumed", times)
        await publish_at_last(transport, QUEUE, text)
        async with asyncio.timeout(30):
            body = None
            while body != text.encode():  # an ack may have met the loss: then "a" comes again
                delivery = await inbox.next()
                await delivery.ack()
                body = delivery.body

    failures = [fields for event, fields in ear.heard if event == "background.failed"]
    assert [fields["error"] for fields in failures] == [repr(UNFORESEEN)]


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: type, step: str) -> None:
    """Let the next call of a coroutine function of that class raise what nobody foresaw."""
    real, calls = getattr(owner, step), itertools.count()

    async def raising(self: Any, *given: Any) -> Any:
        if next(calls) == 0:
            raise UNFORESEEN
        return await real(self, *given)

    monkeypatch.setattr(owner, step, raising)


async def publish_at_last(transport: AmqpTransport, queue: Queue, text: str) -> None:
    """The publisher's connection, and a binding, come back in their own time."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(DependencyError, Undeliverable):
                await transport.publish(queue, message(text))
                return


@pytest.mark.parametrize(
    ("counts", "lost"),
    [
        ([0, 1, 0, 1], None),
        ([0, 0], "queue compute has no reader any more"),
        ([0, None], "queue compute is gone"),
        ([None], "queue compute is gone"),
    ],
)
async def test_that_nobody_reads_is_believed_when_it_is_seen_twice(
    transport, ear: Ear, monkeypatch: pytest.MonkeyPatch, counts: list[int | None], lost: str | None
) -> None:
    """A broker may count a reader late, say where a queue has just moved; that a queue is missing
    it knows at once.
    """
    played, over = [*counts], asyncio.Event()

    async def count(self: Declarer, name: str) -> int | None:
        if played:
            return played.pop(0)
        over.set()
        return 1

    monkeypatch.setattr(Declarer, "consumers_of", count)
    monkeypatch.setattr(amqp_consumer, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(backoff, "NO_READER_S", 0.01)
    await transport.consume([QUEUE], Inbox().put, prefetch=1)
    async with asyncio.timeout(30):
        await over.wait()

    reasons = [fields["error"] for event, fields in ear.heard if event == "consumer.lost"]
    assert reasons == ([lost] if lost else [])


# -- what a review has found --------------------------------------------------------------


async def test_a_give_back_that_is_cut_is_not_acked_by_a_later_group(
    transport, own_broker: Broker, own_vhost: str
) -> None:
    """Its frame may not have left: the message must come back, when its channel ends."""
    inbox = Inbox()
    consumer = await transport.consume([QUEUE], inbox.put, prefetch=100)
    await asyncio.gather(*(transport.publish(QUEUE, message(str(n))) for n in range(60)))
    deliveries = await inbox.take(60)

    giving = asyncio.gather(*(delivery.give_back() for delivery in deliveries[:50]))
    await asyncio.sleep(0)
    giving.cancel()
    await asyncio.gather(giving, return_exceptions=True)
    for delivery in deliveries[50:]:
        await delivery.ack()
    await consumer.close()
    left = (await asyncio.to_thread(own_broker.queues, own_vhost))["compute"]

    assert left.ready >= 50


async def test_an_ack_after_a_close_is_not_sent(
    transport, own_broker: Broker, own_vhost: str, ear: Ear
) -> None:
    """On a channel that is closed it would cost the connection, and with it all other channels."""
    inbox = Inbox()
    consumer = await transport.consume([QUEUE], inbox.put, prefetch=10)
    await transport.publish(QUEUE, message("a"))
    delivery = await inbox.next()
    await consumer.close()
    await delivery.ack()
    other = await transport.consume([QUEUE], inbox.put, prefetch=10)
    again = await inbox.next()
    await again.ack()
    await other.close()

    assert again.redelivered
    assert "broker.lost" not in [name for name, _ in ear.heard]


@pytest.mark.parametrize("profile", ["durable", "quorum", "oslo-durable-all"])
async def test_nothing_that_was_ours_alone_is_left_after_a_stop(
    own_broker: Broker, own_vhost: str, profile: str
) -> None:
    """Fanout and reply queues go, of whatever kind they are, and no connection is lost for it."""
    ear, telemetry = Ear(), Telemetry()
    telemetry.subscribe(ear.hear)
    made = AmqpTransport(
        read_url(own_broker.url_of(own_vhost), exchange="gracekit", profile=profile),
        process=Process(),
        clock=Clock(),
        telemetry=telemetry,
    )
    await made.start()
    fanout = Queue("compute_fanout_1", QueueKind.FANOUT, "compute")
    await made.consume([QUEUE, fanout], Inbox().put, prefetch=10)
    await made.consume([Queue("reply_1", QueueKind.REPLY)], Inbox().put, prefetch=10)
    await made.stop()

    left = await asyncio.to_thread(own_broker.queues, own_vhost)
    assert {"compute_fanout_1", "reply_1"} & left.keys() == set()
    assert "compute" in left
    assert ear.heard == []


async def test_two_first_users_share_one_connection(
    transport, own_broker: Broker, own_vhost: str
) -> None:
    """Clients of one transport may begin together; none of its connections outlives it."""
    before = await asyncio.to_thread(own_broker.connections)
    queues = [Queue(f"reply_{n}", QueueKind.REPLY) for n in range(5)]
    await asyncio.gather(*(transport.consume([q], Inbox().put, prefetch=1) for q in queues))
    meanwhile = await asyncio.to_thread(own_broker.connections)
    await transport.stop()

    assert meanwhile == before + 1
    await until(lambda: own_broker.connections() == before - 1, "no connection left")


@pytest.mark.parametrize("content_type", [None, "application/octet-stream"])
async def test_a_message_needs_no_content_type(
    transport, own_broker: Broker, own_vhost: str, content_type: str | None
) -> None:
    """What its body is decides; an oslo.messaging reader drops it, which docs/oslo.md says."""
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=1)
    async with aiormq.connect(own_broker.url_of(own_vhost)) as connection:
        channel = await connection.channel()
        properties = aiormq.spec.Basic.Properties(content_type=content_type)
        await channel.basic_publish(b"{}", routing_key=QUEUE.name, properties=properties)
    delivery = await inbox.next()
    await delivery.ack()

    assert delivery.body == b"{}"


async def test_a_name_that_no_queue_can_have_is_undeliverable(transport) -> None:
    """A caller may send any reply address; 255 letters can be more bytes than the wire allows."""
    with pytest.raises(Undeliverable, match="no queue has a name as long"):
        await transport.publish(Queue("ü" * 255, QueueKind.REPLY), message("a"))


async def test_a_stop_does_not_wait_for_bytes_that_cannot_leave(
    own_broker: Broker, own_vhost: str
) -> None:
    """A frozen broker reads nothing: the socket is cut, and the stop ends within its bounds."""
    made = AmqpTransport(
        read_url(own_broker.url_of(own_vhost), exchange="gracekit", profile="durable"),
        process=Process(),
        clock=Clock(),
        telemetry=Telemetry(),
    )
    await made.start()
    await made.declare([QUEUE])
    await made.publish(QUEUE, message("a"))
    own_broker.freeze()
    try:
        stuck = [
            asyncio.create_task(made.publish(QUEUE, message("x" * 1_000_000))) for _ in range(20)
        ]
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await made.stop()
        took_s = time.monotonic() - began
    finally:
        own_broker.thaw()
    for one in stuck:
        one.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)

    assert took_s < 8


async def test_an_idle_quorum_queue_is_left_with_the_command_that_removes_it(
    shared_broker: Broker, rabbit_vhost: str
):
    """RabbitMQ closes the whole connection when it is asked to remove one only if it is empty. The
    command can be copied as it is: names may have spaces, and the virtual host is named.
    """
    broker = read_url(shared_broker.url_of(rabbit_vhost), exchange="gracekit", profile="quorum")
    transport = AmqpTransport(broker, process=Process(), clock=Clock(), telemetry=Telemetry())
    await transport.start()
    try:
        left = [directed_queue("compute", "h1"), directed_queue("compute", "h #2")]
        await transport.declare(left)

        assert await transport.prune([QUEUE, *left], dry_run=True) == left
        with pytest.raises(ConfigError, match="quorum") as refused:
            await transport.prune(left)
        assert str(refused.value).endswith(
            "for q in compute.h1 'compute.h #2'; do "
            f'rabbitmqctl delete_queue -p {rabbit_vhost} "$q"; done'
        )
        await transport.publish(directed_queue("compute", "h1"), message("a"))
    finally:
        await transport.stop()


async def test_a_loss_by_missed_heartbeats_says_so(own_broker: Broker, own_vhost: str) -> None:
    """A connection on which nothing comes any more is told by how long that has lasted."""
    ear, telemetry = Ear(), Telemetry()
    telemetry.subscribe(ear.hear)
    url = f"{own_broker.url_of(own_vhost)}?heartbeat=1s"
    broker = read_url(url, exchange="gracekit", profile="durable")
    link = Link(broker, purpose="test", label="test", clock=Clock(), telemetry=telemetry)
    await link.start()
    own_broker.freeze()
    try:
        await ear.until("broker.lost")
    finally:
        own_broker.thaw()
        await link.stop()

    (lost,) = [fields for name, fields in ear.heard if name == "broker.lost"]
    assert re.fullmatch(r"no heartbeat for \d+ s", lost["error"])
