"""Tasks a second through the whole service path, against the loop that one would write by hand.

The hand-written loop makes a task for each item, commits it, runs the same
handler that does nothing, and commits its end; both commits are grouped as
ours are. Ours adds what the loop leaves out: the queue, decoding, dedupe,
turns, states, a context, cancellation, events. Both stores are on disk,
synchronous=FULL; the transport is in memory, so that only our path is timed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

from benchmarks.bare import FINISH, INSERT, GroupWriter
from benchmarks.durable import bare_row
from benchmarks.measure import Figure, Goal, Plan, Taken, against, timed, turns
from benchmarks.workload import TOPIC, Sender, Site, serving
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.transport import Delivery, Message, shared_queue

NAME: Final = "service"
AT_ONCE: Final = {1: 400, 32: 4000, 256: 6000}
GOAL: Final = Goal(0.5, at_least=True)


def run(plan: Plan) -> Iterator[Figure]:
    """Journaled methods at 1, 32 and 256 in flight, then methods without a row."""
    yield from asyncio.run(_run(plan))


async def _run(plan: Plan) -> list[Figure]:
    writer = GroupWriter(plan.directory / "loop.db")
    loop = _Loop(writer)
    async with serving(Site(), plan.directory, "service") as (_, sender):
        figures = []
        for at_once in AT_ONCE:
            figures += await _journaled(plan, sender, loop, at_once)
        figures += await _without_row(plan, sender)
    await writer.stop()
    return figures


async def _journaled(plan: Plan, sender: Sender, loop: _Loop, at_once: int) -> list[Figure]:
    number = plan.size(AT_ONCE[at_once], 4)

    async def ours() -> list[float]:
        return (await sender.repeat("work", at_once=at_once, number=number)).values()

    async def bare() -> list[float]:
        return (await loop.run(at_once=at_once, number=number)).values()

    rates, cpu = await turns(plan.rounds, ours, bare)
    return [
        against(NAME, f"journaled, {at_once} in flight", rates, "tasks/s", GOAL),
        against(NAME, f"processor time, {at_once} in flight", cpu, "us a task"),
    ]


async def _without_row(plan: Plan, sender: Sender) -> list[Figure]:
    number = plan.size(6000, 4)

    async def ours() -> list[float]:
        return (await sender.repeat("read", at_once=32, number=number)).values()

    async def bare() -> list[float]:
        return (await _transport_alone(at_once=32, number=number)).values()

    rates, cpu = await turns(plan.rounds, ours, bare)
    return [
        against(NAME, "requeue / memory:// alone, 32", rates, "tasks/s"),
        against(NAME, "processor time of that", cpu, "us a task"),
    ]


class _Loop:
    """What one would write by hand."""

    def __init__(self, writer: GroupWriter) -> None:
        self._writer = writer
        self._number = 0

    async def run(self, *, at_once: int, number: int) -> Taken:
        rest = iter(range(number))

        async def lane() -> None:
            for _ in rest:
                self._number += 1
                await asyncio.create_task(self._live(self._number))

        with timed(number) as taken:
            await asyncio.gather(*(lane() for _ in range(at_once)))
        return taken

    async def _live(self, number: int) -> None:
        await self._writer.submit(INSERT, (number, *bare_row(f"{number:032}")))
        await _nothing()
        await self._writer.submit(FINISH, ("succeeded", "null", time.time(), number))


async def _nothing() -> None:
    pass


async def _transport_alone(*, at_once: int, number: int) -> Taken:
    """The same messages, acked as they come."""
    transport = MemoryTransport(MemoryBroker(), Process())
    await transport.start()
    done: dict[bytes, asyncio.Future[None]] = {}
    acks: set[asyncio.Task[None]] = set()

    async def ack(delivery: Delivery) -> None:
        await delivery.ack()
        done.pop(delivery.body[:32]).set_result(None)

    def take(delivery: Delivery) -> None:
        task = asyncio.create_task(ack(delivery))
        acks.add(task)
        task.add_done_callback(acks.discard)

    await transport.consume([shared_queue(TOPIC)], take, prefetch=1000)
    rest = iter(range(number))

    async def lane() -> None:
        for item in rest:
            body = f"{item:032}".encode() + b"x" * 300
            done[body[:32]] = asyncio.get_running_loop().create_future()
            waiting = done[body[:32]]
            await transport.publish(shared_queue(TOPIC), Message(body=body))
            await waiting

    with timed(number) as taken:
        await asyncio.gather(*(lane() for _ in range(at_once)))
    await transport.stop()
    return taken
