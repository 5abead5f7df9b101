"""Who casts and calls: one lean process for all workers, in the wire that each of them reads.

gracekit, the workers by hand and oslo.messaging read the same envelope. For the others a sample
of a cast and of a call is taken, as the library's own client put them into the queue, and sent
again with new ids: so all are sent to, and called, by the same few lines. A call costs them
little, as its frames are packed before it is timed, and a reply is known by the id in it: two
processors are shared, and what the caller takes is missing to the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiormq
from aiormq.channel import Channel
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from benchmarks.brokered import declare, properties
from benchmarks.measure import numbered
from benchmarks.plain import ARGS, SAMPLE_ID
from gracekit.rpc.amqp.frames import DELIVER, METHOD, METHOD_ID
from gracekit.rpc.amqp.wire import Wire as Socket
from gracekit.rpc.amqp.wire import WireFactory
from gracekit.rpc.message import ReplyAddress, Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.transport import reply_queue, shared_queue

LENGTH_OF_AN_ID: Final = 32
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
        method: What is called.
    """

    exchange: str
    topic: str
    method: str = "work"

    def cast(self, request_id: str) -> Sent:
        """A cast."""
        return self._sent(request_id, None)

    def call(self, request_id: str, reply_to: str) -> Sent:
        """A call."""
        return self._sent(request_id, ReplyAddress(queue=reply_to, msg_id=request_id))

    def _sent(self, request_id: str, reply: ReplyAddress | None) -> Sent:
        request = Request(method=self.method, args=dict(ARGS), request_id=request_id, reply=reply)
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


class _Replies:
    """What comes on the channel of the calls: see `Tap`.

    A worker's library puts the call's id into properties or body, as it likes: the first
    frame that has it ends the call.

    Args:
        prefix: Of the ids, which end in digits.

    Attributes:
        waiting: Calls that are not answered, by id.
        came: Replies so far, also those that nobody waits for.
    """

    def __init__(self, prefix: str) -> None:
        digits = LENGTH_OF_AN_ID - len(prefix)
        self._id = re.compile(rb"%b[0-9]{%d}" % (prefix.encode(), digits))
        self.waiting: dict[bytes, asyncio.Future[None]] = {}
        self.came = 0

    def take(self, kind: int, data: bytes, offset: int, end: int) -> bool:
        """See `Tap`; aiormq gets what is no message."""
        if kind == METHOD:
            is_reply = bool(METHOD_ID.unpack_from(data, offset)[0] == DELIVER)
            self.came += is_reply
            return is_reply
        found = self._id.search(data, offset, end)
        answered = self.waiting.pop(found.group(), None) if found is not None else None
        if answered is not None:
            answered.set_result(None)
        return True

    def ask(self, method: int) -> None:
        """See `Tap`."""

    def end(self) -> None:
        """See `Tap`."""

    def lost(self, _closing: object) -> None:
        """No reply comes any more."""
        for answered in self.waiting.values():
            answered.set_exception(ConnectionError("the caller's channel was closed"))
        self.waiting.clear()


class Caller:
    """Sends to every worker in the same way."""

    def __init__(self, casting: Channel, calling: Channel, socket: Socket) -> None:
        self._casting = casting  # with confirms
        self._calling = calling
        self._socket = socket
        prefix = f"{time.time_ns():x}"  # no journal has seen them
        self._ids = numbered(prefix)
        self._replies = _Replies(prefix)
        self._queue = reply_queue(f"reply_{'b' * 32}")
        self._called = 0

    async def listen(self) -> None:
        """Take replies."""
        await declare(self._calling, self._queue)
        self._socket.tap(self._calling.number, self._replies)
        closing = self._calling.closing
        closing.add_done_callback(self._replies.lost)
        await self._calling.basic_consume(self._queue.name, _never, no_ack=True)

    async def put(self, queue: str, wire: Wire, *, as_ours: bool) -> None:
        """Put a cast into *queue*, which is declared as gracekit declares it, or just durable."""
        if as_ours:
            await declare(self._casting, shared_queue(queue))
        else:
            await self._casting.queue_declare(queue, durable=True)
        await self.cast(wire, 1)

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
        """What makes a call each time, *number* of them, packed before they are timed."""
        ids = [next(self._ids) for _ in range(number)]
        rest = iter([(one.encode(), self._packed(wire.call(one, self._queue.name))) for one in ids])
        waiting = self._replies.waiting

        async def call() -> None:
            if self._calling.is_closed:
                raise ConnectionError("the caller's channel is closed")
            self._called += 1
            call_id, frames = next(rest)
            answered = waiting[call_id] = asyncio.get_running_loop().create_future()
            self._socket.send_soon(frames)
            await answered

        return call

    @property
    def surplus(self) -> int:
        """Replies so far beyond one for each call."""
        return self._replies.came - self._called

    def _packed(self, sent: Sent) -> bytes:
        """As frames, unconfirmed."""
        method = Basic.Publish(exchange=sent.exchange, routing_key=sent.routing_key)
        header = ContentHeader(body_size=len(sent.body), properties=sent.properties)
        parts = (method, header, ContentBody(sent.body))
        return b"".join(frame.marshal(part, self._calling.number) for part in parts)


async def _never(message: object) -> None:
    raise AssertionError(f"not by way of the tap: {message}")


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
    wires = WireFactory()
    async with aiormq.connect(url, transport_factory=wires) as connection:
        casting = await connection.channel(publisher_confirms=True)
        calls = await connection.channel(publisher_confirms=False)
        assert isinstance(casting, Channel)
        assert isinstance(calls, Channel)
        assert wires.wire is not None
        caller = Caller(casting, calls, wires.wire)
        await caller.listen()
        yield caller
