"""taskiq with taskiq-aio-pika: a receiver in one process.

- It acks when the result is saved, which is its default; there is no result backend.
- A classic queue is chosen, as the others have; its default is a quorum queue.
- As many tasks run at one time as are prefetched; its default is 100.
- No calls: it has no results on RabbitMQ.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from taskiq.api import run_receiver_task
from taskiq_aio_pika import AioPikaBroker, Queue, QueueType

from benchmarks.child import Measure, Prepare
from benchmarks.plain import ARGS, SAMPLE, SAMPLE_ID, Count, parked, url_of

KIND: Final = "taskiq"


def _broker(directory: Path, prefetch: int = 1) -> Any:
    queue = Queue(name=KIND, type=QueueType.CLASSIC, durable=True)
    return AioPikaBroker(url_of(directory), qos=prefetch).with_queue(queue)


def _task(broker: Any, handler: Any) -> Any:
    async def work(vm: str, note: str) -> None:
        await handler(vm, note)

    return broker.register_task(work, task_name="work")


@contextlib.asynccontextmanager
async def _worker(handler: str, prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    count, broker = Count(), _broker(directory, prefetch)
    broker.is_worker_process = True
    _task(broker, getattr(count, handler))
    await broker.startup()
    receiver = asyncio.create_task(run_receiver_task(broker, max_async_tasks=prefetch))
    yield count.more
    receiver.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await receiver
    await broker.shutdown()


@contextlib.asynccontextmanager
async def _sample(_size: int, directory: Path) -> AsyncIterator[Measure]:
    count, broker = Count(), _broker(directory)
    await broker.startup()
    await _task(broker, count.work).kicker().with_task_id(SAMPLE_ID).kiq(**ARGS)
    yield count.more
    await broker.shutdown()


PREPARE: Final[dict[str, Prepare]] = {
    KIND: partial(_worker, "work"),
    parked(KIND): partial(_worker, "park"),
    SAMPLE: _sample,
}
