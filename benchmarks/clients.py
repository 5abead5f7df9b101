"""Clients, a process each: those that call the workers by their own library, and two that cast.

`benchmarks.caller` is as lean as can be, the same for all workers, and nobody's client. Here each
worker is called as its users call it: gracekit by `RpcClient`, aiormq by hand with an exclusive
queue for replies. Clients of libraries in other environments are in the modules of their workers.

A caller's measurement takes two numbers, how many calls wait at one time and how many there are in
all, and gives p50 and p99 in milliseconds and calls a second. A caster's takes the number of casts,
which go into a queue that nobody reads. Processor time is read from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import aiormq
import msgspec
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from benchmarks.brokered import declare, opened, properties
from benchmarks.child import Measure, Prepare
from benchmarks.measure import calling, latencies
from benchmarks.plain import ARGS, called_by, url_of
from gracekit import RpcClient
from gracekit.clock import Clock
from gracekit.config.values import EXCHANGE
from gracekit.rpc.message import Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.transport import shared_queue

CASTERS: Final = ("gracekit casts", "aiormq publishes")
"""Ours, and the bare one."""
AT_ONCE: Final = 32
"""Casts that are sent side by side."""

# -- callers ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _gracekit(topic: str, _size: int, directory: Path) -> AsyncIterator[Measure]:
    async with RpcClient(url_of(directory), topic) as client:
        yield calling(lambda: client.call("work", **ARGS))


@contextlib.asynccontextmanager
async def _aiormq(topic: str, _size: int, directory: Path) -> AsyncIterator[Measure]:
    async with aiormq.connect(url_of(directory)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        assert isinstance(channel, Channel)
        declared = await channel.queue_declare(exclusive=True)
        assert declared.queue is not None
        client = _ByHand(channel, topic, declared.queue)
        await channel.basic_consume(declared.queue, client.on_reply, no_ack=True)
        yield calling(client.call)


class _ByHand:
    """What one would write, without a time-out and without a look at failures."""

    def __init__(self, channel: Channel, topic: str, queue: str) -> None:
        self._channel = channel
        self._topic = topic
        self._queue = queue
        self._waiting: dict[str, asyncio.Future[object]] = {}

    async def call(self) -> object:
        msg_id = uuid.uuid4().hex
        future = self._waiting[msg_id] = asyncio.get_running_loop().create_future()
        message = {
            "method": "work",
            "args": dict(ARGS),
            "_msg_id": msg_id,
            "_reply_q": self._queue,
            "_unique_id": uuid.uuid4().hex,
        }
        text = msgspec.json.encode(message).decode()
        await self._channel.basic_publish(
            msgspec.json.encode({"oslo.version": "2.0", "oslo.message": text}),
            exchange=EXCHANGE,
            routing_key=self._topic,
            properties=properties(),
            wait=False,
        )
        return await future

    async def on_reply(self, message: DeliveredMessage) -> None:
        reply = opened(message.body)
        self._waiting.pop(reply["_msg_id"]).set_result(reply["result"])


# -- casters ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _gracekit_casts(_size: int, directory: Path) -> AsyncIterator[Measure]:
    queue = CASTERS[0].replace(" ", "-")
    async with _unread(queue, directory) as channel, RpcClient(url_of(directory), queue) as client:
        yield _casting(channel, queue, lambda: client.cast("work", **ARGS))


@contextlib.asynccontextmanager
async def _aiormq_publishes(_size: int, directory: Path) -> AsyncIterator[Measure]:
    """Unconfirmed, the bytes of one cast again and again, written before."""
    queue = CASTERS[1].replace(" ", "-")
    request = Request(method="work", args=dict(ARGS), request_id=Clock().new_id())
    body = encode_request(request)
    async with _unread(queue, directory) as channel:

        async def publish() -> None:
            await channel.basic_publish(
                body, exchange=EXCHANGE, routing_key=queue, properties=properties(), wait=False
            )

        yield _casting(channel, queue, publish)


def _casting(channel: Channel, queue: str, cast: Callable[[], Awaitable[object]]) -> Measure:
    async def measure(number: int) -> list[float]:
        _, all_s = await latencies(AT_ONCE, number // AT_ONCE, cast)
        await channel.queue_purge(queue)  # also waits until what was published has arrived
        return [number / all_s]

    return measure


@contextlib.asynccontextmanager
async def _unread(queue: str, directory: Path) -> AsyncIterator[Channel]:
    """A channel without confirms, and a queue that nobody reads."""
    async with aiormq.connect(url_of(directory)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        assert isinstance(channel, Channel)
        await declare(channel, shared_queue(queue))
        yield channel


PREPARE: Final[dict[str, Prepare]] = {
    **{
        called_by(topic): partial(_gracekit, topic)
        for topic in ("requeue", "requeue-defaults", "retry", "retry-defaults")
    },
    called_by("aiormq"): partial(_aiormq, "aiormq"),
    CASTERS[0]: _gracekit_casts,
    CASTERS[1]: _aiormq_publishes,
}
