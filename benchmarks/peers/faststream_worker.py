"""FastStream: a subscriber, its arguments checked by pydantic, as it does by itself.

- It acks after the handler, which is its default.
- `logger=None`: else it logs two lines a message.
- A call is a message with `reply_to`; it publishes what the handler returns there, and waits for
  the broker's confirm, as its channel does by default.
- Its own client sends one request at a time: each holds a lock until its reply has come.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from benchmarks.child import Measure, Prepare
from benchmarks.measure import calling
from benchmarks.plain import ARGS, SAMPLE, SAMPLE_ID, Count, called_by, parked, url_of

KIND: Final = "faststream"
QUEUE: Final = RabbitQueue(KIND, durable=True)
PATIENCE_S: Final = 60.0
"""Of its client, for a reply; the default is to wait for ever."""


@contextlib.asynccontextmanager
async def _worker(handler: str, prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    count = Count()
    channel = Channel(prefetch_count=prefetch)
    broker = RabbitBroker(url_of(directory), default_channel=channel, logger=None)
    broker.subscriber(QUEUE)(getattr(count, handler))
    async with broker:
        await broker.start()
        yield count.more


@contextlib.asynccontextmanager
async def _sample(_size: int, directory: Path) -> AsyncIterator[Measure]:
    ids: dict[str, Any] = {"correlation_id": SAMPLE_ID, "message_id": SAMPLE_ID}
    async with RabbitBroker(url_of(directory), logger=None) as broker:
        await broker.declare_queue(QUEUE)
        await broker.publish(dict(ARGS), QUEUE, persist=True, **ids)
        await broker.publish(dict(ARGS), QUEUE, persist=True, reply_to=SAMPLE_ID, **ids)
        yield Count().more


@contextlib.asynccontextmanager
async def _client(_size: int, directory: Path) -> AsyncIterator[Measure]:
    async with RabbitBroker(url_of(directory), logger=None) as broker:
        yield calling(lambda: broker.request(dict(ARGS), QUEUE, persist=True, timeout=PATIENCE_S))


PREPARE: Final[dict[str, Prepare]] = {
    KIND: partial(_worker, "work"),
    parked(KIND): partial(_worker, "park"),
    SAMPLE: _sample,
    called_by(KIND): _client,
}
