"""dramatiq: one worker process with its eight threads and its usual middleware.

- It acks after the actor, which is its only way.
- Its prefetch is told by its variable of the environment; the default is two for each thread.
- No calls: it has no results on RabbitMQ.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from benchmarks.child import Measure, Prepare
from benchmarks.plain import ARGS, SAMPLE, SAMPLE_ID, Tally, url_of

KIND: Final = "dramatiq"
PREFETCH: Final = "dramatiq_queue_prefetch"


@contextlib.asynccontextmanager
async def _worker(prefetch: int, directory: Path) -> AsyncIterator[Measure]:
    os.environ[PREFETCH] = str(prefetch)  # read when it is imported
    import dramatiq  # noqa: PLC0415 - see above

    tally = Tally()
    broker, _ = _actor(directory, tally)
    worker = dramatiq.Worker(broker)
    worker.start()
    yield tally.more
    worker.stop()
    broker.close()


@contextlib.asynccontextmanager
async def _sample(_size: int, directory: Path) -> AsyncIterator[Measure]:
    tally = Tally()
    broker, work = _actor(directory, tally)
    broker.enqueue(work.message(**ARGS).copy(message_id=SAMPLE_ID))
    yield tally.more
    broker.close()


def _actor(directory: Path, tally: Tally) -> tuple[Any, Any]:
    import dramatiq  # noqa: PLC0415 - as in _worker
    from dramatiq.brokers.rabbitmq import RabbitmqBroker  # noqa: PLC0415 - as in _worker

    broker = RabbitmqBroker(url=url_of(directory))
    dramatiq.set_broker(broker)

    def work(vm: str, note: str) -> None:  # noqa: ARG001 - as sent
        tally.one()

    return broker, dramatiq.actor(work, queue_name=KIND)


PREPARE: Final[dict[str, Prepare]] = {KIND: _worker, SAMPLE: _sample}
