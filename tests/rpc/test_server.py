"""What a server knows of its queues and of what it has read of them."""

from __future__ import annotations

import asyncio

import pytest

from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.server import Capacity, RpcServer
from gracekit.rpc.transport import Delivery, directed_queue, shared_queue
from tests.rpc.kit import Inbox, message

pytestmark = pytest.mark.looptime

QUEUE = shared_queue("compute")
DIRECTED = directed_queue("compute", "node-1")
WAIT_S = 1.0
SETTLED_S = 0.1  # long after whatever happens at once


@pytest.fixture
async def transport() -> MemoryTransport:
    made = MemoryTransport(MemoryBroker(), Process())
    await made.start()
    await made.declare([QUEUE, DIRECTED])
    return made


class Served:
    """A server, its places, and what came to them."""

    def __init__(
        self, transport: MemoryTransport, places: int, *, prefetch_bytes: int = 10_000
    ) -> None:
        self.taken: list[Delivery] = []
        self.capacity = Capacity(places)
        self.server = RpcServer(
            transport,
            [QUEUE, DIRECTED],
            self.taken.append,
            self.capacity,
            prefetch=10,
            prefetch_bytes=prefetch_bytes,
            wait_s=WAIT_S,
            cancel_ok_timeout_s=5.0,
        )

    @property
    def counts(self) -> tuple[int, int, bool]:
        return self.server.fresh.total(), self.server.returned, self.server.has_waiting


async def test_a_server_counts_what_its_queues_hold(transport):
    """All that it reads, in their order; what it holds itself is among it, until it is
    acknowledged.
    """
    served = Served(transport, 1)
    await transport.publish(QUEUE, message("a"))
    await transport.publish(DIRECTED, message("b"))

    assert served.server.queues == (QUEUE, DIRECTED)
    assert await served.server.depth() == 2
    await served.server.start()
    await asyncio.sleep(SETTLED_S)
    assert await served.server.depth() == 2
    await served.taken[0].ack()
    assert await served.server.depth() == 1
    await served.server.stop()


async def test_a_server_counts_what_waits_in_its_queues_and_in_its_hands(transport):
    """A delivery without a place waits too, and the server knows for how long; one that has a place
    does not. Nothing that waits is 0 s old.
    """
    served = Served(transport, 1)
    assert await served.server.waiting() == (0, 0.0)
    for text in ("a", "b", "c"):
        await transport.publish(QUEUE, message(text))
    assert await served.server.waiting() == (3, None)

    await served.server.start()
    await asyncio.sleep(SETTLED_S)
    number, oldest_s = await served.server.waiting()
    assert (number, len(served.taken)) == (2, 1)
    assert oldest_s == pytest.approx(SETTLED_S)
    await asyncio.sleep(WAIT_S)  # they are given back
    assert await served.server.waiting() == (2, None)
    await served.server.stop()


async def test_what_goes_back_for_want_of_a_place_has_not_come(transport):
    """It counts while it waits for a place, and not any more when it is given back. When it comes
    again it is redelivered, and does not count either.
    """
    served = Served(transport, 2)
    for text in ("a", "b", "c"):
        await transport.publish(QUEUE, message(text))
    await served.server.start()
    await asyncio.sleep(SETTLED_S)
    assert served.counts == (3, 0, True)

    await asyncio.sleep(WAIT_S)
    assert served.counts == (2, 1, False)

    await served.taken[0].ack()
    served.capacity.give()
    await asyncio.sleep(SETTLED_S)
    assert [delivery.redelivered for delivery in served.taken] == [False, False, True]
    assert served.counts == (2, 1, False)
    await served.server.stop()


async def test_a_closed_intake_leaves_the_count_of_what_was_taken(transport):
    """What had no place at that moment goes back; what is still in a handler's hands stays
    counted.
    """
    served = Served(transport, 1)
    for text in ("a", "b", "c"):
        await transport.publish(QUEUE, message(text))
    await served.server.start()
    await asyncio.sleep(SETTLED_S)

    assert await served.server.close_intake() == 2

    assert served.counts == (1, 2, False)


async def test_a_redelivered_message_counts_neither_when_it_comes_nor_when_it_goes(transport):
    """Somebody had it before: it is none of those that stood in the queue."""
    inbox = Inbox()
    consumer = await transport.consume([QUEUE], inbox.put, prefetch=2)
    for text in ("a", "b"):
        await transport.publish(QUEUE, message(text))
    held = await inbox.take(2)
    await consumer.cancel()
    for delivery in held:
        await delivery.give_back()
    await transport.publish(QUEUE, message("c"))
    served = Served(transport, 1)

    await served.server.start()
    await asyncio.sleep(SETTLED_S)
    assert served.counts == (1, 0, True)

    await served.server.stop()
    assert served.counts == (0, 2, False)


async def test_what_is_too_large_to_wait_has_not_come(transport):
    """Also what still arrives while reading ends: all of it goes back, and none counts."""
    served = Served(transport, 0, prefetch_bytes=10)
    for _ in range(3):
        await transport.publish(QUEUE, message("x" * 11))

    await served.server.start()
    await asyncio.sleep(SETTLED_S)

    assert served.counts == (0, 3, False)
    assert await served.server.depth() == 3
    await served.server.stop()
