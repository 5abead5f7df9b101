"""A call's round trip on sqlite:// between two processes, against the transport alone.

Alone means: a request message to a process that acks it and sends an answer
message back, without journal, envelope or tracking. Both directions are
messages on disk, so the bare round trip has two durable commits in two
processes; a journaled call adds two in its store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from benchmarks.measure import Figure, Pair, Plan, against, latencies, told_of_calls, turns
from benchmarks.plain import ARGS
from benchmarks.processes import Process, service
from benchmarks.served import TOPIC, read, svc, work
from gracekit import RpcClient
from gracekit.clock import Clock
from gracekit.process import Process as ProcessPort
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Delivery, Message, Queue, QueueKind, shared_queue

NAME: Final = "calls"
REPEATS: Final = {1: 100, 32: 20, 256: 5}
ROOM: Final = 256
NOTE: Final = str(ARGS["note"])


def run(plan: Plan) -> Iterator[Figure]:
    """Journaled and requeue calls at 1, 32 and 256."""
    yield from asyncio.run(_run(plan))


async def _run(plan: Plan) -> list[Figure]:
    directory = plan.directory / "calls"
    directory.mkdir()
    alone = directory / "alone.db"
    with (
        service(directory, max_running=ROOM) as ours,
        Process(directory, "benchmarks.served", str(alone), settings={}) as bare,
    ):
        ours.serving()
        bare.serving()
        url = f"sqlite:///{directory / 'transport.db'}"
        async with svc.client(url) as client, _echo(alone) as echo:
            figures = []
            for at_once in REPEATS:
                figures += await _at_once(plan, at_once, client, echo)
            return figures


async def _at_once(plan: Plan, at_once: int, client: RpcClient, echo: _Echo) -> list[Figure]:
    repeats = plan.size(REPEATS[at_once], 1)

    async def journaled() -> list[float]:
        step = lambda: client.call(work, vm="vm-1", note=NOTE)  # noqa: E731 - one word for a call
        return told_of_calls(*await latencies(at_once, repeats, step))

    async def without_row() -> list[float]:
        step = lambda: client.call(read, vm="vm-1", note=NOTE)  # noqa: E731 - likewise
        return told_of_calls(*await latencies(at_once, repeats, step))

    async def alone() -> list[float]:
        return told_of_calls(*await latencies(at_once, repeats, echo.call))

    figures: list[Figure] = []
    for what, ours in (("journaled", journaled), ("requeue", without_row)):
        columns: list[list[Pair]] = await turns(plan.rounds, ours, alone)
        for name, unit, pairs in zip(
            ("p50", "p99", "rate"), ("ms", "ms", "calls/s"), columns, strict=True
        ):
            figures.append(against(NAME, f"{what} {name} at {at_once}", pairs, unit))
    return figures


class _Echo:
    """A caller with nothing but the transport."""

    def __init__(self, transport: SqliteTransport, queue: Queue) -> None:
        self._transport = transport
        self._queue = queue
        self._last = 0
        self._waiting: dict[bytes, asyncio.Future[None]] = {}
        self._acks: set[asyncio.Task[None]] = set()

    async def call(self) -> None:
        self._last += 1
        text = f"{self._last:032}".encode() + b"x" * 300
        future = self._waiting[text] = asyncio.get_running_loop().create_future()
        body = b" ".join((self._queue.name.encode(), text))
        await self._transport.publish(shared_queue(TOPIC), Message(body=body))
        await future

    def take(self, delivery: Delivery) -> None:
        task = asyncio.create_task(delivery.ack())
        self._acks.add(task)
        task.add_done_callback(self._acks.discard)
        self._waiting.pop(delivery.body).set_result(None)


@contextlib.asynccontextmanager
async def _echo(path: Path) -> AsyncIterator[_Echo]:
    transport = SqliteTransport(path, process=ProcessPort(), clock=Clock())
    await transport.start()
    queue = Queue(f"reply_{'e' * 32}", QueueKind.REPLY)
    echo = _Echo(transport, queue)
    await transport.consume([queue], echo.take, prefetch=100)
    try:
        yield echo
    finally:
        await transport.stop()
