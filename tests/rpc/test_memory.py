"""What is special about the memory transport: crashes, virtual time, and the same order always."""

from __future__ import annotations

import asyncio

import pytest

from gracekit.errors import DependencyError, Undeliverable
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.transport import DEPTH_TIMEOUT_S, Queue, QueueKind, reply_queue, shared_queue
from gracekit.testing.faults import Fault, PlannedFaults
from tests.played import PlayedProcess, PlayedTransport
from tests.rpc.kit import Inbox, message

pytestmark = pytest.mark.looptime

QUEUE = shared_queue("q")


async def connected(broker: MemoryBroker) -> MemoryTransport:
    transport = MemoryTransport(broker, Process())
    await transport.start()
    return transport


async def test_a_crash_gives_back_without_a_word():
    """At a crash nothing is awaited: what was unsettled is there for others, marked, in its old
    order.
    """
    broker = MemoryBroker()
    dying, other = await connected(broker), await connected(broker)
    first, second = Inbox(), Inbox()
    await dying.consume([QUEUE, Queue("r", QueueKind.REPLY)], first.put, prefetch=2)
    for text in ("a", "b", "c"):
        await other.publish(QUEUE, message(text))
    stale = await first.take(2)

    dying.crash()
    await stale[0].ack()
    await other.consume([QUEUE], second.put, prefetch=10)
    await second.take(3)

    assert first.bodies == ["a", "b"]
    assert [(d.body, d.redelivered) for d in second.all] == [
        (b"a", True),
        (b"b", True),
        (b"c", False),
    ]
    with pytest.raises(Undeliverable):
        await other.publish(reply_queue("r"), message("late"))
    with pytest.raises(DependencyError):
        await dying.publish(QUEUE, message("from the dead"))


async def test_a_message_expires_in_virtual_time():
    """An hour passes in no time, to the second."""
    broker = MemoryBroker()
    transport = await connected(broker)
    await transport.declare([QUEUE])
    await transport.publish(QUEUE, message("a", expires_in_s=3600))

    await asyncio.sleep(3599)
    assert broker.waiting("q") == 1
    await asyncio.sleep(1)
    assert broker.waiting("q") == 0
    assert broker.expired() == {"q": 1}


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.DELAY])
async def test_a_played_transport_may_not_say_what_its_queues_hold(fault):
    """As a real one: it says so in time, and may be asked again."""
    faults = PlannedFaults()
    faults.delay_s = 3600.0
    transport = PlayedTransport(MemoryBroker(), PlayedProcess(set(), 1), faults)
    await transport.start()
    await transport.declare([QUEUE])
    await transport.publish(QUEUE, message("a"))
    faults.plan("transport", "depth", fault)
    began = asyncio.get_running_loop().time()

    with pytest.raises(DependencyError, match="not counted"):
        await transport.depth([QUEUE])

    assert asyncio.get_running_loop().time() - began <= DEPTH_TIMEOUT_S
    assert await transport.depth([QUEUE]) == 1


async def test_readers_take_turns():
    """With room everywhere, messages go round, always in the same way."""
    broker = MemoryBroker()
    inboxes = [Inbox() for _ in range(3)]
    for inbox in inboxes:
        await (await connected(broker)).consume([QUEUE], inbox.put, prefetch=10)

    sender = await connected(broker)
    for n in range(6):
        await sender.publish(QUEUE, message(str(n)))
    for inbox in inboxes:
        await inbox.take(2)

    assert [inbox.bodies for inbox in inboxes] == [["0", "3"], ["1", "4"], ["2", "5"]]


async def test_delivery_never_happens_inside_a_publish():
    """The consumer's callback runs on a turn of its own, as over a network."""
    transport = await connected(MemoryBroker())
    inbox = Inbox()
    await transport.consume([QUEUE], inbox.put, prefetch=1)

    publishing = transport.publish(QUEUE, message("a"))
    publishing.send(None)

    assert inbox.all == []
    publishing.close()
    assert (await inbox.next()).body == b"a"
