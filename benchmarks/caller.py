"""Who casts and calls: one lean process for all workers, in the wire that each of them reads.

gracekit, the workers by hand and oslo.messaging read the same envelope. For the others a sample
of a cast and of a call is taken, as the library's own client put them into the queue, and sent
again with new ids: so all are sent to, and called, by the same few lines on aiormq.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiormq
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic

from benchmarks.brokered import declare, opened, properties
from benchmarks.measure import numbered
from benchmarks.plain import ARGS, SAMPLE_ID
from gracekit.rpc.message import ReplyAddress, Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.transport import reply_queue

AT_ONCE: Final = 250
"""Casts whose confirms are waited for together."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One message, ready to be published."""

    exchange: str
    routing_key: str
    body: bytes
    properties: Basic.Properties


class Wire(Protocol):
    """How messages to one worker look."""

    def cast(self, request_id: str) -> Sent:
        """A cast."""

    def call(self, request_id: str, reply_to: str) -> Sent:
        """A call."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """That of oslo.messaging.

    Attributes:
        exchange: The control exchange.
        topic: The queue's name.
    """

    exchange: str
    topic: str

    def cast(self, request_id: str) -> Sent:
        """A cast."""
        return self._sent(request_id, None)

    def call(self, request_id: str, reply_to: str) -> Sent:
        """A call."""
        return self._sent(request_id, ReplyAddress(queue=reply_to, msg_id=request_id))

    def _sent(self, request_id: str, reply: ReplyAddress | None) -> Sent:
        request = Request(method="work", args=dict(ARGS), request_id=request_id, reply=reply)
        return Sent(self.exchange, self.topic, encode_request(request), properties())


@dataclass(frozen=True, slots=True)
class Replayed:
    """A library's own messages again: what was its sample's id is another one's now.

    Attributes:
        of_cast: The sample of a cast.
        of_call: The sample of a call; None where there are no calls.
    """

    of_cast: Sent
    of_call: Sent | None

    def cast(self, request_id: str) -> Sent:
        """A cast."""
        return _again(self.of_cast, request_id)

    def call(self, request_id: str, reply_to: str) -> Sent:
        """A call."""
        assert self.of_call is not None, "it takes no calls"
        sent = _again(self.of_call, request_id)
        sent.properties.reply_to = reply_to
        return sent


def _again(sample: Sent, request_id: str) -> Sent:
    read = {name: getattr(sample.properties, name) for name in Basic.Properties.attributes()}
    given = {name: _with_id(value, request_id) for name, value in read.items()}
    body = sample.body.replace(SAMPLE_ID.encode(), request_id.encode())
    return Sent(sample.exchange, sample.routing_key, body, Basic.Properties(**given))


def _with_id(value: Any, request_id: str) -> Any:
    if isinstance(value, str):
        return value.replace(SAMPLE_ID, request_id)
    if isinstance(value, dict):
        return {key: _with_id(one, request_id) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_id(one, request_id) for one in value]
    return value


class Caller:
    """Sends to every worker in the same way; as lean as aiormq allows."""

    def __init__(self, casting: Channel, calling: Channel) -> None:
        self._casting = casting  # with confirms
        self._calling = calling
        self._ids = numbered(f"{time.time_ns():x}")  # no journal has seen them
        self._queue = reply_queue(f"reply_{'b' * 32}")
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def listen(self) -> None:
        """Take replies."""
        await declare(self._calling, self._queue)
        await self._calling.basic_consume(self._queue.name, self._take, no_ack=True)

    async def _take(self, message: DeliveredMessage) -> None:
        answered = message.header.properties.correlation_id or opened(message.body)["_msg_id"]
        self._waiting.pop(answered).set_result(None)

    async def sample(self, queue: str) -> Sent:
        """The message at the head of *queue*, which is then gone."""
        message = await self._casting.basic_get(queue, no_ack=True)
        assert isinstance(message.delivery, Basic.GetOk), f"there is no sample in {queue}"
        delivery, found = message.delivery, message.header.properties
        return Sent(delivery.exchange or "", delivery.routing_key or "", message.body, found)

    async def cast(self, wire: Wire, number: int) -> None:
        """Put *number* casts into the queue; they are there when it returns."""
        while number > 0:
            some = [wire.cast(next(self._ids)) for _ in range(min(number, AT_ONCE))]
            await asyncio.gather(*(_publish(self._casting, sent) for sent in some))
            number -= len(some)

    def calls(self, wire: Wire, number: int) -> Callable[[], Awaitable[None]]:
        """What makes a call each time, *number* of them, written before they are timed."""
        ids = [next(self._ids) for _ in range(number)]
        rest = iter([(one, wire.call(one, self._queue.name)) for one in ids])

        async def call() -> None:
            call_id, sent = next(rest)
            answered = self._waiting[call_id] = asyncio.get_running_loop().create_future()
            await _publish(self._calling, sent)
            await answered

        return call


async def _publish(channel: Channel, sent: Sent) -> None:
    await channel.basic_publish(
        sent.body,
        exchange=sent.exchange,
        routing_key=sent.routing_key,
        properties=sent.properties,
        wait=False,
    )


@contextlib.asynccontextmanager
async def calling(url: str) -> AsyncIterator[Caller]:
    """A caller on the broker at *url*."""
    async with aiormq.connect(url) as connection:
        casting = await connection.channel(publisher_confirms=True)
        calls = await connection.channel(publisher_confirms=False)
        assert isinstance(casting, Channel)
        assert isinstance(calls, Channel)
        caller = Caller(casting, calls)
        await caller.listen()
        yield caller
