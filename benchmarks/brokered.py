"""Workers that read a queue of a broker, a process each; `benchmarks.rabbitmq` sends to them.

Each reads the queue that is called like itself, from a broker whose URL stands in
the file `url`, and its handler only counts. The bare ones do what one would write
by hand: they decode, run the handler in the task that their library makes for a
delivery, answer whom it concerns, and ack. They decode with msgspec as gracekit
does, so that what is compared is not the JSON. Of each there is a second one, whose
processor time is told by stage, and a third, whose handlers do not return.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
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
from benchmarks.plain import Count, parked, url_of
from benchmarks.stages import Sampler
from benchmarks.watched import ADMIN, port_file, port_of, sample_traces
from gracekit import Context, Service, Settings
from gracekit.config.values import EXCHANGE
from gracekit.process import Process
from gracekit.rpc.amqp.profiles import PROFILES, Topology
from gracekit.rpc.transport import Queue, shared_queue
from gracekit.runtime.face import Runtime
from gracekit.runtime.process_life import calm_collector
from gracekit.store.files import Synchronous
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine

QUEUES_OF_A_LANE: Final = 3
"""Shared, directed and fanout: gracekit divides its prefetch among them."""

SETTLE_S: Final = 0.2
"""After the last handler: outcomes and acks of the last messages have left by then."""

PERSISTENT: Final = 2


# -- gracekit -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _gracekit(
    topic: str,
    on_interrupt: Literal["requeue", "retry"],
    synchronous: Synchronous,
    handler: str,
    prefetch: int,
    directory: Path,
    *,
    tuned: bool = True,
    watched: bool = False,
) -> AsyncIterator[Measure]:
    """A service; unless it is *tuned*, with as many places as a user gets who sets nothing."""
    count, service, stays = Count(), Service(topic), handler == "park"

    @service.rpc(on_interrupt=on_interrupt)
    async def work(ctx: Context, vm: str, note: str) -> None:  # noqa: ARG001 - as declared
        count.one()
        if stays:
            await count.stay()

    process, store = Process(), directory / f"{topic}.db"
    room: dict[str, Any] = {
        "prefetch": prefetch * QUEUES_OF_A_LANE,
        "max_accepted": prefetch * QUEUES_OF_A_LANE,
        "max_running": prefetch,
    }
    settings = Settings(
        transport_url=url_of(directory),
        store_url=f"sqlite:///{store}",
        host="bench",
        admin=ADMIN if watched else "off",
        **(room if tuned else {}),
    )
    engine = SqliteEngine(
        store, load_migrations(MIGRATIONS), process=process, synchronous=synchronous
    )
    calm_collector()  # as `run_service` does
    if watched:
        sample_traces()
    async with Runtime(service, settings, process=process, engine=engine) as runtime:
        if watched:
            port_file(directory, topic).write_text(str(port_of(runtime)))
        yield count.more


# -- by hand ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _aiormq(handler: str, prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    count = Count()
    work = getattr(count, handler)
    async with aiormq.connect(url_of(directory)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        assert isinstance(channel, Channel)
        await declare(channel, shared_queue("aiormq"))
        await channel.basic_qos(prefetch_count=prefetch)

        async def on_message(message: DeliveredMessage) -> None:
            request = opened(message.body)
            await work(**request["args"])
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
async def _aio_pika(handler: str, prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    count = Count()
    work = getattr(count, handler)
    async with await aio_pika.connect(url_of(directory)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        underlay = await channel.get_underlay_channel()
        assert isinstance(underlay, Channel)
        await declare(underlay, shared_queue("aio-pika"))
        await channel.set_qos(prefetch_count=prefetch)
        queue = await channel.get_queue("aio-pika")

        async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            request = opened(message.body)
            await work(**request["args"])
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


_WORKERS: Final[dict[str, Callable[[str, int, Path], AbstractAsyncContextManager[Measure]]]] = {
    "requeue": partial(_gracekit, "requeue", "requeue", "FULL"),
    "requeue-uvloop": partial(_gracekit, "requeue-uvloop", "requeue", "FULL"),
    "requeue-defaults": partial(_gracekit, "requeue-defaults", "requeue", "FULL", tuned=False),
    "retry": partial(_gracekit, "retry", "retry", "FULL"),
    "retry-defaults": partial(_gracekit, "retry-defaults", "retry", "FULL", tuned=False),
    "retry-watched": partial(_gracekit, "retry-watched", "retry", "FULL", watched=True),
    "retry-normal": partial(_gracekit, "retry-normal", "retry", "NORMAL"),
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


PREPARE: Final[dict[str, Prepare]] = {
    name: prepare
    for kind, worker in _WORKERS.items()
    for name, prepare in (
        (kind, partial(worker, "work")),
        (parked(kind), partial(worker, "park")),
        (by_stage(kind), partial(_by_stage, partial(worker, "work"))),
    )
}
