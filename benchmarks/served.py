"""Processes that the benches start: a service, and what merely answers messages.

`gracekit run benchmarks.served:svc` is the service. `python -m
benchmarks.served FILE` reads the same queue with the transport alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from gracekit import Context, Service
from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Delivery, Message, reply_queue, shared_queue

TOPIC = "bench"
ENDED = "GRACEKIT_TEST_BENCH_ENDED"
"""Variable: file in which `through_drain` notes its end, in monotonic nanoseconds."""

svc = Service(TOPIC)


@svc.rpc
async def work(ctx: Context, vm: str, note: str) -> None:
    """Do nothing."""


@svc.rpc(on_interrupt="requeue")
async def read(ctx: Context, vm: str, note: str) -> None:
    """Do nothing, without a row."""


@svc.rpc
async def through_drain(ctx: Context) -> None:
    """End a moment after a drain began."""
    path = Path(os.environ[ENDED])
    path.with_suffix(".begun").touch()
    while not ctx.draining:  # noqa: ASYNC110 - as handlers do
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    path.write_text(str(time.monotonic_ns()))  # noqa: ASYNC240 - a moment


async def answer_alone(path: Path) -> None:
    """Answer what comes until killed: a body is a queue's name, a blank and the answer."""
    transport = SqliteTransport(path, process=Process(), clock=Clock())
    await transport.start()
    answering: set[asyncio.Task[None]] = set()

    async def answer(delivery: Delivery) -> None:
        queue, _, text = delivery.body.partition(b" ")
        await delivery.ack()
        await transport.publish(reply_queue(queue.decode()), Message(body=text))

    def take(delivery: Delivery) -> None:
        task = asyncio.create_task(answer(delivery))
        answering.add(task)
        task.add_done_callback(answering.discard)

    await transport.consume([shared_queue(TOPIC)], take, prefetch=256)
    print("service.serving", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(answer_alone(Path(sys.argv[1])))
