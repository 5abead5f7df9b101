"""The same messages: what clients of both kinds put on the wire, and what servers answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiormq
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage

from gracekit import RpcClient
from tests.oslo.kit import PATIENCE_S, OsloClient
from tests.oslo.meeting import HOST, SERVERS, meet, our_url, widened_peer, words

pytestmark = [
    pytest.mark.process,
    pytest.mark.parametrize("profile", ["durable", "oslo-transient"]),
]

TAP = "shop-tap"
REPLIES = "reply_" + 32 * "e"
PROPERTIES = (  # `message_id`, which aiormq draws, is read by nobody
    *("content_type", "content_encoding", "delivery_mode"),
    *("correlation_id", "reply_to", "message_type", "app_id", "user_id"),
)


@dataclass
class Tap:
    """A queue that is read message by message.

    Attributes:
        channel: Where it is read, and may be written.
        got: What came, the oldest first.
    """

    channel: AbstractChannel
    got: list[DeliveredMessage] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_message(self, message: DeliveredMessage) -> None:
        self.got.append(message)
        self._news.set()

    async def take(self, number: int) -> list[DeliveredMessage]:
        """Wait for so many."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.got) < number:
                self._news.clear()
                await self._news.wait()
        taken, self.got = self.got[:number], self.got[number:]
        return taken


@contextlib.asynccontextmanager
async def tapped(url: str, queue: str) -> AsyncIterator[Tap]:
    """A queue of our own, on a connection of its own."""
    async with aiormq.connect(url) as connection:
        channel = await connection.channel()
        tap = Tap(channel)
        await channel.queue_declare(queue)
        await channel.basic_consume(queue, tap.on_message, no_ack=True)
        yield tap


def body(message: DeliveredMessage) -> dict[str, Any]:
    """The message in the envelope."""
    outer = json.loads(message.body)
    assert outer.keys() == {"oslo.version", "oslo.message"}
    assert outer["oslo.version"] == "2.0"
    inner: dict[str, Any] = json.loads(outer["oslo.message"])
    return inner


def shown(message: DeliveredMessage) -> dict[str, Any]:
    """All of it, with ids as `<id>` and tracebacks without frames."""
    inner = json.loads(words(json.dumps(body(message)))[0])
    if inner.get("failure"):
        failure = json.loads(inner["failure"])
        failure["tb"] = words("\n".join(failure["tb"]))
        inner["failure"] = failure
    properties = message.header.properties
    return {
        **{name: getattr(properties, name) for name in PROPERTIES},
        "priority": properties.priority or 0,
        "headers": properties.headers or {},
        # Ours is what is left of the call's time.
        "expires_in_s": properties.expiration and math.ceil(int(properties.expiration) / 15e3) * 15,
        "exchange": message.exchange,
        # A fanout exchange does not look at it.
        "routing_key": None if message.exchange == f"{TAP}_fanout" else message.routing_key,
        "message": inner,
    }


# -- requests -----------------------------------------------------------------------------


async def test_requests_are_the_same(rabbit_url: str, profile: str):
    """Exchange, routing key, properties and body, of calls, casts and fanouts."""
    ours = our_url(rabbit_url, profile)
    async with (
        widened_peer(rabbit_url, profile) as peer,
        RpcClient(ours, TAP) as us,
        tapped(rabbit_url, TAP) as tap,
    ):
        oslo = OsloClient(peer, {"topic": TAP, "exchange": None})
        await oslo.cast({}, "declares exchanges")
        await oslo.fanout({}, "declares exchanges")
        for exchange, key in (("openstack", TAP), ("openstack", f"{TAP}.{HOST}")):
            await tap.channel.queue_bind(TAP, exchange, routing_key=key)
        await tap.channel.queue_bind(TAP, f"{TAP}_fanout", routing_key=TAP)

        ctxt, args = {"user": "ann", "größe": None}, {"vm": "vm-1", "n": [1, {"a": None}]}
        place = {"namespace": "ops", "version": "1.2"}
        there, here = oslo.prepare(**place), us.prepare(**place, context=ctxt)
        monitored = there.prepare(timeout=45, call_monitor_timeout=7)
        monitoring = here.prepare(timeout=45, monitor_timeout=7)
        at_host, to_host = there.prepare(server=HOST), here.prepare(host=HOST)
        for mine, theirs in (
            (lambda: us.call("echo"), lambda: oslo.call({}, "echo")),
            (
                lambda: monitoring.call("echo", **args),
                lambda: monitored.call(ctxt, "echo", **args),
            ),
            (lambda: to_host.call("echo"), lambda: at_host.call(ctxt, "echo")),
            (lambda: us.cast("echo"), lambda: oslo.cast({}, "echo")),
            (lambda: to_host.cast("echo", **args), lambda: at_host.cast(ctxt, "echo", **args)),
            (lambda: us.fanout("echo"), lambda: oslo.fanout({}, "echo")),
            (lambda: here.fanout("echo", **args), lambda: there.fanout(ctxt, "echo", **args)),
        ):
            assert await taken(tap, mine()) == await taken(tap, theirs())


async def taken(tap: Tap, sending: Any) -> dict[str, Any]:
    """What is sent; a call is answered."""
    pending = asyncio.ensure_future(sending)
    (message,) = await tap.take(1)
    if reply_queue := body(message).get("_reply_q"):
        reply = {"result": None, "failure": None, "ending": True, "_unique_id": 32 * "f"}
        reply["_msg_id"] = body(message)["_msg_id"]
        await publish(tap, "", reply_queue, reply)
    await pending
    return shown(message)


async def publish(tap: Tap, exchange: str, key: str, inner: dict[str, Any]) -> None:
    envelope = {"oslo.version": "2.0", "oslo.message": json.dumps(inner)}
    await tap.channel.basic_publish(
        json.dumps(envelope).encode(),
        exchange=exchange,
        routing_key=key,
        properties=aiormq.spec.Basic.Properties(
            content_type="application/json", content_encoding="utf-8", delivery_mode=2
        ),
    )


# -- answers ------------------------------------------------------------------------------


async def test_answers_are_the_same(rabbit_url: str, tmp_path: Path, profile: str):
    """Results, failures and heartbeats; who asked for no heartbeats gets none."""
    async with meet(rabbit_url, profile, tmp_path) as meeting, tapped(rabbit_url, REPLIES) as tap:
        for method, args in (
            ("echo", {"a": [None, 1.5]}),
            ("fail", {"fault": "builtin_two_args"}),
            ("fail", {"fault": "app_with_kwargs"}),
            ("fail", {"fault": "app_with_args"}),
        ):
            theirs, *ours = [await answered(tap, topic, method, args) for topic in SERVERS]
            assert ours == [theirs] * 2

        for topic in SERVERS:
            for timeout in (None, 2):
                asked = request("block", {"gate": "wire"}, topic, _timeout=timeout)
                await publish(tap, "openstack", topic, asked)
        beats = [shown(each) for each in await tap.take(2 * len(SERVERS))]
        await meeting.peer.ask("open", gate="wire")
        meeting.stock.open("wire")
        answers: list[dict[str, Any]] = []
        while sum(each["message"]["ending"] for each in answers) < 2 * len(SERVERS):
            answers += [shown(each) for each in await tap.take(1)]

    by_id = {each["message"].pop("_msg_id"): each for each in beats}
    assert by_id.keys() == {f"{topic} 2" for topic in SERVERS}
    theirs, *ours = by_id.values()
    assert theirs["message"] == {
        "result": None, "failure": None, "ending": False, "_unique_id": "<id>",
    }  # fmt: skip
    assert ours == [theirs] * 2
    unasked = [each["message"] for each in answers if "None" in each["message"]["_msg_id"]]
    assert len(unasked) == len(SERVERS)
    assert all(each["ending"] for each in unasked)


def request(method: str, args: dict[str, Any], topic: str, **more: Any) -> dict[str, Any]:
    """A call on the wire."""
    return {
        "method": method,
        "args": args,
        "_unique_id": f"{method} {args} {topic} {more}",
        "_reply_q": REPLIES,
        "_msg_id": f"{topic} {more.get('_timeout')}",
        "_timeout": None,
        **more,
    }


async def answered(tap: Tap, topic: str, method: str, args: dict[str, Any]) -> dict[str, Any]:
    """What a server sends."""
    await publish(tap, "openstack", topic, request(method, args, topic))
    (message,) = await tap.take(1)
    answer = shown(message)
    assert answer["message"].pop("_msg_id") == f"{topic} None"
    return answer
