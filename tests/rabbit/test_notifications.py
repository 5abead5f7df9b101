"""Notification queues on a broker: their flags, and what happens when one is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final

import aiormq
import pytest

from gracekit import Notification, NotificationListener
from gracekit.clock import Clock
from gracekit.errors import ConfigError, Undeliverable
from gracekit.process import Process
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.amqp.profiles import PROFILES
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.notifications import encode_notification
from gracekit.rpc.transport import Message, notification_queue, shared_queue
from gracekit.telemetry.telemetry import Telemetry
from tests.process.helpers import until
from tests.rabbit.broker import Broker
from tests.rpc.kit import PATIENCE_S, Inbox, message

TOPIC: Final = "compute-notifications"
QUEUE: Final = notification_queue(TOPIC, "info")
EXCHANGE: Final = "gracekit"

_CLASSIC: Final = (True, None)
_TRANSIENT: Final = (False, None)
_QUORUM: Final = (True, {"x-queue-type": "quorum"})
FLAGS: Final[Mapping[str, tuple[bool, Mapping[str, Any] | None]]] = MappingProxyType(
    {
        "durable": _CLASSIC,
        "quorum": _QUORUM,
        "oslo-transient": _TRANSIENT,
        "oslo-durable": _CLASSIC,
        "oslo-durable-all": _CLASSIC,
        "oslo-quorum": _QUORUM,
        "oslo-quorum-all": _QUORUM,
    }
)
"""As a listener of oslo.messaging declares its queues, by the profile whose options it has."""


@asynccontextmanager
async def transport_to(url: str, profile: str = "durable") -> AsyncIterator[AmqpTransport]:
    broker = read_url(url, exchange=EXCHANGE, profile=profile)
    made = AmqpTransport(broker, process=Process(), clock=Clock(), telemetry=Telemetry())
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def notification(message_id: str) -> Message:
    said = Notification(
        message_id=message_id, publisher_id="compute.node-1", event_type="task.update",
        priority="INFO", payload={}, timestamp="2026-11-25 03:54:31.123456",
    )  # fmt: skip
    return Message(body=encode_notification(said, unique_id=f"u-{message_id}"))


async def next_id(listener: NotificationListener) -> str:
    async with asyncio.timeout(PATIENCE_S):
        return (await anext(listener)).message_id


def test_each_profile_is_here():
    """A new one gets its flags above."""
    assert FLAGS.keys() == PROFILES.keys()


@pytest.mark.parametrize("profile", PROFILES)
async def test_the_flags_are_those_of_an_oslo_listener(rabbit_url: str, profile: str) -> None:
    """No dead letters in any profile: the broker would refuse the second of two that differ."""
    durable, arguments = FLAGS[profile]
    async with transport_to(rabbit_url, profile) as transport:
        await transport.declare([QUEUE])
        connection = await aiormq.connect(rabbit_url)
        try:
            channel = await connection.channel()
            await channel.queue_declare(QUEUE.name, durable=durable, arguments=arguments)
            await channel.basic_publish(
                b"by the exchange", exchange=EXCHANGE, routing_key=QUEUE.name
            )
        finally:
            await connection.close()
        inbox = Inbox()
        await transport.consume([QUEUE], inbox.put, prefetch=1)

        assert (await inbox.next()).body == b"by the exchange"


async def test_another_profile_is_refused_with_the_remedy(rabbit_url: str) -> None:
    """As of any queue: publisher and listeners declare it alike."""
    async with transport_to(rabbit_url, "quorum") as publisher:
        await publisher.declare([QUEUE])
    async with transport_to(rabbit_url, "durable") as transport:
        listener = NotificationListener(transport, TOPIC)
        with pytest.raises(ConfigError, match="exists with other flags than profile 'durable'"):
            await listener.start()
        await listener.stop()


async def test_a_queue_that_is_deleted_under_its_listener_is_made_again(
    shared_broker: Broker, rabbit_vhost: str
) -> None:
    """The listener declares it and goes on; what was in it is lost, as an operator has meant."""
    url = shared_broker.url_of(rabbit_vhost)
    async with transport_to(url) as publisher, NotificationListener(url, TOPIC) as listener:
        await publisher.publish(QUEUE, notification("m1"))
        assert await next_id(listener) == "m1"
        await asyncio.to_thread(shared_broker.delete_queue, QUEUE.name, rabbit_vhost)

        await until(lambda: QUEUE.name in shared_broker.queues(rabbit_vhost), "the queue")
        await publisher.declare([QUEUE])
        await publisher.publish(QUEUE, notification("m2"))

        assert await next_id(listener) == "m2"


async def test_a_queue_that_is_deleted_under_its_publisher_is_declared_again(
    shared_broker: Broker, rabbit_vhost: str
) -> None:
    """Between the two the publisher is told that nobody has kept its notification."""
    url = shared_broker.url_of(rabbit_vhost)
    async with transport_to(url) as publisher:
        await publisher.declare([QUEUE])
        await publisher.publish(QUEUE, message("a"))
        await asyncio.to_thread(shared_broker.delete_queue, QUEUE.name, rabbit_vhost)

        with pytest.raises(Undeliverable, match=QUEUE.name):
            await publisher.publish(QUEUE, message("lost"))
        await publisher.declare([QUEUE])
        await publisher.publish(QUEUE, message("b"))

        assert await publisher.depth([QUEUE]) == 1


async def test_notifications_under_another_key_are_no_strays(rabbit_url: str) -> None:
    """An operator may bind the queue under other keys; they arrive at once, and in their order."""
    inbox = Inbox()
    async with transport_to(rabbit_url) as transport:
        await transport.declare([QUEUE])
        connection = await aiormq.connect(rabbit_url)
        try:
            channel = await connection.channel()
            await channel.queue_bind(QUEUE.name, EXCHANGE, routing_key="nova.info")
            for body in (b"a", b"b"):
                await channel.basic_publish(body, exchange=EXCHANGE, routing_key="nova.info")
        finally:
            await connection.close()
        await transport.consume([QUEUE], inbox.put, prefetch=10)
        found = await inbox.take(2)

    assert [(one.body, one.redelivered, one.sent_to) for one in found] == [
        (b"a", False, ""),
        (b"b", False, ""),
    ]


async def test_what_is_no_notification_is_dropped(shared_broker: Broker, rabbit_vhost: str) -> None:
    """The broker keeps no dead letters of this queue; the loop goes on."""
    url = shared_broker.url_of(rabbit_vhost)
    async with transport_to(url) as publisher, NotificationListener(url, TOPIC) as listener:
        await publisher.publish(QUEUE, message("no notification"))
        await publisher.publish(QUEUE, notification("m1"))
        assert await next_id(listener) == "m1"
        assert listener.unreadable == 1

    await until(
        lambda: (shared_broker.queues(rabbit_vhost)[QUEUE.name].ready) == 0, "an empty queue"
    )
    assert f"{TOPIC}_dead" not in shared_broker.queues(rabbit_vhost)


async def test_a_service_keeps_its_dead_letters_when_notifications_go(
    shared_broker: Broker, rabbit_vhost: str
) -> None:
    """`remove` of a notification queue, also where a service has the same topic."""
    service = shared_queue(TOPIC)
    async with transport_to(shared_broker.url_of(rabbit_vhost)) as transport:
        await transport.declare([service, QUEUE])
        await transport.remove([QUEUE])

    names = shared_broker.queues(rabbit_vhost).keys()
    assert names == {TOPIC, f"{TOPIC}_dead"}
