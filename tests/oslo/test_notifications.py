"""Notifications between both: real listeners and notifiers of oslo.messaging, and ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gracekit import Notification, NotificationListener, RpcClient
from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.rpc.connect import open_transport
from gracekit.rpc.notifications import encode_notification
from gracekit.rpc.transport import Message, Transport, notification_queue
from tests.oslo.kit import PATIENCE_S, Peer, oslo_peer, oslo_server
from tests.oslo.meeting import OSLO_PROFILES, our_url

pytestmark = pytest.mark.process

TOPIC = "shop-notifications"
PROFILES = ["oslo-transient", "oslo-durable", "oslo-quorum", "durable"]
NOTIFICATION = Notification(
    message_id="7b1f4a52-6c0f-4b7e-9d1a-3f2f6f3c9a10",
    publisher_id="compute.node-1",
    event_type="task.update",
    priority="INFO",
    payload={"task_id": "t1", "requested": {"memory_mb": 8192, "größe": [1, None, True, 0.5]}},
    timestamp="2026-11-25 03:54:31.123456",
    context={"user_id": "ann", "nested": {"a": 1}},
)


@contextlib.asynccontextmanager
async def ours(url: str, profile: str) -> AsyncIterator[Transport]:
    """A transport of ours."""
    transport = open_transport(our_url(url, profile), process=Process(), clock=Clock())
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop()


async def publish(transport: Transport, notification: Notification) -> None:
    """As an outbox does."""
    queue = notification_queue(TOPIC, notification.priority.lower())
    body = encode_notification(notification, unique_id=Clock().new_id())
    await transport.declare([queue])
    await transport.publish(queue, Message(body=body, expires_in_s=3600))


async def notify(peer: Peer, driver: str = "messagingv2", **changes: Any) -> None:
    """By a real notifier."""
    said = {
        "publisher_id": "nova.node-2",
        "priority": "info",
        "ctxt": {"user_id": "bob", "auth_token": "secret"},
        "event_type": "instance.update",
        "payload": {"vm": "vm-1", "n": [1, {"a": None}]},
        **changes,
    }
    await peer.ask("notify", topic=TOPIC, driver=driver, **said)


@pytest.mark.parametrize("profile", PROFILES)
async def test_an_oslo_listener_receives_what_we_publish(rabbit_url: str, profile: str):
    """All fields and the context, both published before it listens and after."""
    async with ours(rabbit_url, profile) as transport:
        await publish(transport, NOTIFICATION)
        async with oslo_peer(rabbit_url, profile=OSLO_PROFILES[profile]) as peer:
            await peer.ask("listen", topic=TOPIC)
            first = await peer.event("notified", priority="info")
            await publish(transport, _of_priority("ERROR"))
            second = await peer.event("notified", priority="error")
            await peer.close()

    for told in (first, second):
        assert told["publisher_id"] == NOTIFICATION.publisher_id
        assert told["event_type"] == NOTIFICATION.event_type
        assert told["payload"] == NOTIFICATION.payload
        assert told["metadata"] == {
            "message_id": NOTIFICATION.message_id,
            "timestamp": NOTIFICATION.timestamp,
        }
        assert dict(NOTIFICATION.context).items() <= told["ctxt"].items()


def _of_priority(priority: str) -> Notification:
    fields = {name: getattr(NOTIFICATION, name) for name in NOTIFICATION.__struct_fields__}
    return Notification(**{**fields, "priority": priority})


@pytest.mark.parametrize("profile", PROFILES)
async def test_an_oslo_listener_that_came_first_shares_its_queues(rabbit_url: str, profile: str):
    """We declare queues that it has declared, with its flags, and may read beside it."""
    async with oslo_peer(rabbit_url, profile=OSLO_PROFILES[profile]) as peer:
        await peer.ask("listen", topic=TOPIC)
        async with ours(rabbit_url, profile) as transport:
            await publish(transport, NOTIFICATION)
            await peer.event("notified", priority="info")
            async with NotificationListener(transport, TOPIC):
                await publish(transport, NOTIFICATION)


@pytest.mark.parametrize("driver", ["messagingv2", "messaging"])
@pytest.mark.parametrize("profile", PROFILES)
async def test_our_listener_receives_what_an_oslo_notifier_sends(
    rabbit_url: str, profile: str, driver: str
):
    """In both formats, of each priority, sent before it listens and after."""
    url = our_url(rabbit_url, profile)
    async with oslo_peer(rabbit_url, profile=OSLO_PROFILES[profile]) as peer:
        await notify(peer, driver)
        async with NotificationListener(url, TOPIC, priorities=("info", "warn")) as listener:
            async with asyncio.timeout(PATIENCE_S):
                first = await anext(listener)
                await notify(peer, driver, priority="warn", publisher_id=None)
                second = await anext(listener)
        assert listener.unreadable == 0

    assert first.publisher_id == "nova.node-2"
    assert first.event_type == "instance.update"
    assert (first.priority, second.priority) == ("INFO", "WARN")
    assert first.payload == {"vm": "vm-1", "n": [1, {"a": None}]}
    assert first.context["user"] == "bob"
    assert first.context["auth_token"] is None  # the library leaves it out
    assert len(first.timestamp) == len(NOTIFICATION.timestamp) or first.timestamp.endswith("000000")
    assert first.message_id != second.message_id


async def test_an_oslo_server_passes_over_what_a_client_knows(rabbit_url: str):
    """The key beside the reply address reaches neither its handler's arguments nor its context."""
    topic = "shop"
    async with (
        oslo_server(rabbit_url, topic) as server,
        RpcClient(our_url(rabbit_url, "oslo-transient"), topic) as client,
    ):
        knowing = client.prepare(pending=True, timeout=PATIENCE_S, context={"user": "ann"})
        assert await knowing.call("echo", vm="vm-1") == {"vm": "vm-1"}
        (begun,) = await server.begun()

    assert begun["ctxt"]["user"] == "ann"
    assert not any("pending" in key for key in begun["ctxt"])
    assert begun["message"]["args"] == {"vm": "vm-1"}
