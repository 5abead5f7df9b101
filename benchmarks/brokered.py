"""Workers that read a queue of a broker, a process each; `benchmarks.rabbitmq` sends to them.

Each reads the queue that is called like itself, from a broker whose URL stands in
the file `url`, and its handler only counts. The bare ones do what one would write
by hand: they decode, run the handler in the task that their library makes for a
delivery, answer whom it concerns, and ack. They decode with msgspec as gracekit
does, so that what is compared is not the JSON. Of each there is a second one, whose
processor time is told by stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import aio_pika
import aiormq
import msgspec
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic

from benchmarks.child import Measure, Prepare
from benchmarks.stages import Sampler
from gracekit import Context, Service, Settings
from gracekit.config import EXCHANGE
from gracekit.rpc.amqp.profiles import PROFILES, Topology
from gracekit.rpc.transport import Queue, shared_queue
from gracekit.runtime import Runtime

URL_FILE: Final = "url"
QUEUES_OF_A_LANE: Final = 3
"""Shared, directed and fanout: gracekit divides its prefetch among them."""

SETTLE_S: Final = 0.2
"""After the last handler: outcomes and acks of the last messages have left by then."""

PERSISTENT: Final = 2


class Count:
    """How many messages the handler has seen."""

    def __init__(self) -> None:
        self._seen = 0
        self._wanted = 0
        self._last = 0.0
        self._enough = asyncio.Event()

    def one(self) -> None:
        """One more was seen."""
        self._seen += 1
        self._last = time.perf_counter()
        if self._seen == self._wanted:
            self._enough.set()

    async def work(self, vm: str, note: str) -> None:  # noqa: ARG002 - as sent
        """The handler of the bare ones."""
        self.one()

    async def more(self, number: int) -> list[float]:
        """Wait until *number* more have come; when the last of them did, by the system's clock."""
        self._wanted += number
        if self._seen < self._wanted:
            self._enough.clear()
            await self._enough.wait()
        return [self._last]


# -- gracekit -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _gracekit(
    on_interrupt: Literal["requeue", "retry"], prefetch: int, directory: Path
) -> AsyncIterator[Measure]:
    count, service = Count(), Service(on_interrupt)

    @service.rpc(on_interrupt=on_interrupt)
    async def work(ctx: Context, vm: str, note: str) -> None:  # noqa: ARG001 - as declared
        count.one()

    settings = Settings(
        transport_url=_url(directory),
        store_url=f"sqlite:///{directory / on_interrupt}.db",
        host="bench",
        prefetch=prefetch * QUEUES_OF_A_LANE,
        max_accepted=prefetch * QUEUES_OF_A_LANE,
        max_running=prefetch,
    )
    async with Runtime(service, settings):
        yield count.more


# -- by hand ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _aiormq(prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    count = Count()
    async with aiormq.connect(_url(directory)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        assert isinstance(channel, Channel)
        await declare(channel, shared_queue("aiormq"))
        await channel.basic_qos(prefetch_count=prefetch)

        async def on_message(message: DeliveredMessage) -> None:
            request = opened(message.body)
            await count.work(**request["args"])
            if "_reply_q" in request:
                await channel.basic_publish(
                    _answer(request),
                    routing_key=request["_reply_q"],
                    properties=properties(),
                    wait=False,
                )
            assert message.delivery_tag is not None
            await channel.basic_ack(message.delivery_tag, wait=False)

        await channel.basic_consume("aiormq", on_message)
        yield count.more


@contextlib.asynccontextmanager
async def _aio_pika(prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    count = Count()
    async with await aio_pika.connect(_url(directory)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        underlay = await channel.get_underlay_channel()
        assert isinstance(underlay, Channel)
        await declare(underlay, shared_queue("aio-pika"))
        await channel.set_qos(prefetch_count=prefetch)
        queue = await channel.get_queue("aio-pika")

        async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            request = opened(message.body)
            await count.work(**request["args"])
            if "_reply_q" in request:
                reply = aio_pika.Message(
                    _answer(request),
                    content_type="application/json",
                    content_encoding="utf-8",
                    delivery_mode=PERSISTENT,
                )
                await channel.default_exchange.publish(reply, request["_reply_q"])
            await message.ack()

        await queue.consume(on_message)
        yield count.more


async def declare(channel: Channel, queue: Queue) -> None:
    """Make *queue* exist as gracekit declares it: durable, classic."""
    await Topology(PROFILES["durable"], EXCHANGE).declare_queue(channel, queue)


def properties() -> Basic.Properties:
    """Of one message: aiormq writes an id of its own into them."""
    return Basic.Properties(
        content_type="application/json", content_encoding="utf-8", delivery_mode=PERSISTENT
    )


def opened(body: bytes) -> dict[str, Any]:
    """What is in the envelope."""
    message: dict[str, Any] = msgspec.json.decode(msgspec.json.decode(body)["oslo.message"])
    return message


_answers: Final = itertools.count()


def _answer(request: dict[str, Any]) -> bytes:
    """A reply with all that callers of oslo.messaging want to see in it."""
    message = {
        "result": None,
        "failure": None,
        "ending": True,
        "_msg_id": request["_msg_id"],
        "_unique_id": f"{next(_answers):032}",
    }
    text = msgspec.json.encode(message).decode()
    return msgspec.json.encode({"oslo.version": "2.0", "oslo.message": text})


def _url(directory: Path) -> str:
    return (directory / URL_FILE).read_text()


_WORKERS: Final[dict[str, Prepare]] = {
    "requeue": partial(_gracekit, "requeue"),
    "retry": partial(_gracekit, "retry"),
    "aiormq": _aiormq,
    "aio-pika": _aio_pika,
}
KINDS: Final = tuple(_WORKERS)


# -- by stage -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _by_stage(prepare: Prepare, prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    """The worker, which also tells the seconds of each of `STAGES`."""
    async with prepare(prefetch, directory) as more:
        sampler = Sampler()

        async def sampled(number: int) -> list[float]:
            with sampler.on() as seconds:
                told = await more(number)
                await asyncio.sleep(SETTLE_S)
            return told + seconds

        yield sampled


def by_stage(kind: str) -> str:
    """What the worker *kind* is called when it tells its stages."""
    return f"{kind}, by stage"


PREPARE: Final[dict[str, Prepare]] = _WORKERS | {
    by_stage(kind): partial(_by_stage, prepare) for kind, prepare in _WORKERS.items()
}
