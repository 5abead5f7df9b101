"""The conformance suite: what every transport does, on each of them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gracekit.config.values import LONGEST_TOPIC
from gracekit.errors import DependencyError, Undeliverable
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.server import Capacity, RpcServer
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import (
    DeadLetter,
    Delivery,
    Message,
    Queue,
    QueueKind,
    Transport,
    directed_queue,
    notification_queue,
    shared_queue,
)
from tests.rpc.kit import (
    PATIENCE_S,
    AmqpMachine,
    Inbox,
    Machine,
    MemoryMachine,
    SqliteMachine,
    message,
)
from tests.scale import scale
from tests.stress import stress

QUEUE = shared_queue("compute")
NOTIFICATIONS = notification_queue("compute-notifications", "info")


EACH = ("memory", "sqlite", pytest.param("amqp", marks=pytest.mark.server))


@pytest.fixture(params=EACH)
async def machine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Machine]:
    tmp_path.chmod(0o700)
    machine: Machine
    match request.param:
        case "memory":
            machine = MemoryMachine()
        case "sqlite":
            machine = SqliteMachine(tmp_path)
        case "amqp":
            machine = AmqpMachine(request.getfixturevalue("rabbit_url"))
    yield machine
    await machine.close()


@pytest.fixture
async def one(machine: Machine) -> Transport:
    return await machine.connect()


@pytest.fixture
async def other(machine: Machine) -> Transport:
    return await machine.connect()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


async def publish(transport: Transport, *texts: str, queue: Queue = QUEUE) -> None:
    for text in texts:
        await transport.publish(queue, message(text))


async def test_a_transport_leaves_nothing_however_it_is_started_and_stopped(one):
    """Connections, channels, pollers and threads end with it."""
    await stress(one)


async def test_what_a_cancelled_stop_has_left_is_ended_by_the_next_one(one):
    """At whatever moment it was cancelled: no task, no thread, and no connection."""
    await one.stop()
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    for turns in range(20):
        await one.start()
        await one.declare([QUEUE])
        stopping = asyncio.create_task(one.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
        await one.stop()
        for thread in set(threading.enumerate()) - threads:
            thread.join(5.0)  # it has nothing to do any more, and may wait for the interpreter

        for _ in range(20):
            await asyncio.sleep(0)
        left = [*(asyncio.all_tasks() - tasks), *(set(threading.enumerate()) - threads)]
        assert not left, (turns, left)


async def test_a_server_leaves_nothing_however_it_is_started_and_stopped(one, inbox):
    """Its consumers end, and what they had read is back in the queue."""
    server = RpcServer(
        one, [QUEUE], inbox.put, Capacity(1), prefetch=10, prefetch_bytes=10_000, wait_s=1.0,
        cancel_ok_timeout_s=5.0,
    )  # fmt: skip
    await server.start()  # a connection to read by is made for the first of the transport's servers

    await stress(server)


# -- order and delivery ---------------------------------------------------------------


async def test_messages_arrive_in_the_order_of_their_publishing(one, other, inbox):
    """A queue is read oldest first, what waited before the reader came included."""
    await one.declare([QUEUE])
    await publish(other, "a", "b", "c")

    await one.consume([QUEUE], inbox.put, prefetch=10)
    await publish(other, "d", "e")
    await inbox.take(5)

    assert inbox.bodies == ["a", "b", "c", "d", "e"]


async def test_a_delivery_carries_what_was_sent(one, other, inbox):
    """Any bytes, headers, queue and remaining time arrive; the first delivery is no redelivery."""
    body = bytes(range(256)) * 1000
    await one.consume([QUEUE], inbox.put, prefetch=1)

    await other.publish(QUEUE, Message(body=body, expires_in_s=600, headers={"traceparent": "é"}))

    delivery = await inbox.next()
    assert (delivery.body, delivery.queue) == (body, QUEUE)
    assert delivery.headers == {"traceparent": "é"}
    assert delivery.expires_in_s == pytest.approx(600, abs=60)
    assert not delivery.redelivered


@pytest.mark.parametrize("machine", ["memory", "sqlite"], indirect=True)
async def test_a_paused_consumer_leaves_messages_to_others(one, other, inbox):
    """It gets none until it is resumed. Of a broker's connection, which reads nothing then, see
    tests/rabbit/test_large.py.
    """
    others = Inbox()
    consumer = await one.consume([QUEUE], inbox.put, prefetch=10)
    consumer.pause()
    await publish(other, "a", "b")
    reader = await other.consume([QUEUE], others.put, prefetch=10)
    await others.take(2)
    await reader.cancel()
    await publish(other, "c")
    consumer.resume()
    await inbox.next()

    assert (inbox.bodies, others.bodies) == (["c"], ["a", "b"])


async def test_what_is_acked_is_gone(one, other, inbox):
    """After an ack nobody gets the message, also not when its consumer leaves."""
    await one.consume([QUEUE], inbox.put, prefetch=1)
    await publish(other, "a", "b")
    await (await inbox.next()).ack()
    await (await inbox.next()).ack()

    await one.stop()
    later = Inbox()
    await other.consume([QUEUE], later.put, prefetch=10)
    await publish(other, "c")
    await later.take()

    assert later.bodies == ["c"]


async def test_a_consumer_reads_several_queues(one, other, inbox):
    """One prefetch covers them all, and each delivery tells its queue."""
    queues = [QUEUE, directed_queue("compute", "node-1")]
    await one.consume(queues, inbox.put, prefetch=10)

    for queue in queues:
        await publish(other, f"to {queue.name}", queue=queue)
    await inbox.take(2)

    assert {d.queue: d.body.decode() for d in inbox.all} == {
        queue: f"to {queue.name}" for queue in queues
    }


async def test_consumers_share_a_queue(one, other):
    """Each message goes to one consumer, and the one without room gets no more."""
    inboxes = [Inbox(), Inbox()]
    await one.consume([QUEUE], inboxes[0].put, prefetch=2)
    await other.consume([QUEUE], inboxes[1].put, prefetch=2)

    await publish(one, "a", "b", "c", "d")
    for inbox in inboxes:
        await inbox.take(2)

    assert sorted(inboxes[0].bodies + inboxes[1].bodies) == ["a", "b", "c", "d"]


# -- prefetch -------------------------------------------------------------------------


async def test_prefetch_bounds_what_is_unsettled(one, other, inbox):
    """While prefetch deliveries are unsettled nothing more comes; each settlement makes room for
    one.
    """
    await one.consume([QUEUE], inbox.put, prefetch=2)
    await publish(other, "a", "b", "c", "d")
    first, _ = await inbox.take(2)

    # Whoever has room gets the next one, so the full consumer did not take it.
    rest = Inbox()
    consumer = await other.consume([QUEUE], rest.put, prefetch=1)
    held = await rest.next()
    await consumer.cancel()
    assert held.body == b"c"
    await first.ack()
    await inbox.take()

    assert inbox.bodies == ["a", "b", "d"]


@pytest.mark.parametrize("prefetch", [1, 7, 64])
async def test_a_backlog_flows_through_a_small_prefetch(one, other, inbox, prefetch):
    """Acks alone keep the messages coming, each once and in order."""
    number = scale(200, 5000)
    await one.declare([QUEUE])
    expected = [str(n) for n in range(number)]
    await asyncio.gather(*(publish(other, text) for text in expected))

    await one.consume([QUEUE], inbox.put, prefetch=prefetch)
    for _ in expected:
        await (await inbox.next()).ack()

    assert inbox.bodies == expected


# -- giving back ----------------------------------------------------------------------


async def test_what_is_given_back_keeps_its_place(one, other):
    """Deliveries given back in any order are read before younger messages, in their old order."""
    first, second = Inbox(), Inbox()
    consumer = await one.consume([QUEUE], first.put, prefetch=3)
    await publish(other, "a", "b", "c", "d")
    a, b, c = await first.take(3)
    await consumer.cancel()

    for delivery in (b, c, a):
        await delivery.give_back()
    await other.consume([QUEUE], second.put, prefetch=10)
    await second.take(4)

    assert second.bodies == ["a", "b", "c", "d"]
    assert [d.redelivered for d in second.all] == [True, True, True, False]


async def test_a_waiting_consumer_gets_what_another_gives_back(one, other):
    """Giving back wakes whoever waits for the queue."""
    first, second = Inbox(), Inbox()
    consumer = await one.consume([QUEUE], first.put, prefetch=1)
    await publish(other, "a")
    delivery = await first.next()
    await consumer.cancel()
    await other.consume([QUEUE], second.put, prefetch=1)

    await delivery.give_back()

    assert (await second.next()).redelivered


async def test_what_one_reader_gives_back_is_for_another_first(one, other):
    """In a rolling upgrade only one of the two can serve it, and tries are few."""
    kept, tries = Inbox(), []

    async def give_back(delivery: Delivery) -> None:
        await asyncio.sleep(0.01)
        await delivery.give_back()

    def refuse(delivery: Delivery) -> None:
        tries.append(asyncio.create_task(give_back(delivery)))

    await one.consume([QUEUE], refuse, prefetch=10)
    await other.consume([QUEUE], kept.put, prefetch=100)
    for number in range(30):
        await publish(other, str(number))
        await asyncio.sleep(0.02)
    await kept.take(30)

    await asyncio.gather(*tries)
    assert len(tries) <= 45


async def test_a_consumer_may_get_back_what_it_gave_back(one, inbox):
    """A message given back again and again is not lost, and never overtakes its prefetch."""
    await one.consume([QUEUE], inbox.put, prefetch=1)
    await publish(one, "a", "b")

    for _ in range(10):
        delivery = await inbox.next()
        assert delivery.body == b"a"
        await delivery.give_back()
    await (await inbox.next()).ack()

    assert (await inbox.next()).body == b"b"


async def test_stop_gives_back_what_is_unsettled(one, other):
    """A transport that stops leaves its deliveries to others; settling them later does nothing."""
    first, second = Inbox(), Inbox()
    await one.consume([QUEUE], first.put, prefetch=2)
    await other.declare([QUEUE])
    await publish(other, "a", "b")
    stale = await first.take(2)

    await one.stop()
    for delivery in stale:
        await delivery.ack()
    await other.consume([QUEUE], second.put, prefetch=2)
    await second.take(2)

    assert second.bodies == ["a", "b"]
    assert all(delivery.redelivered for delivery in second.all)


# -- cancelling -----------------------------------------------------------------------


async def test_nothing_is_delivered_after_cancel_ok(one, other):
    """When cancel returns, the consumer has had its last delivery, and others get the next."""
    first, second = Inbox(), Inbox()
    consumer = await one.consume([QUEUE], first.put, prefetch=100)
    publishing = asyncio.gather(*(publish(other, str(n)) for n in range(50)))
    await first.next()

    await consumer.cancel()
    seen = list(first.bodies)
    await publishing
    await other.consume([QUEUE], second.put, prefetch=100)
    await second.take(50 - len(seen))

    assert first.bodies == seen
    assert sorted(seen + second.bodies, key=int) == [str(n) for n in range(50)]
    assert not any(delivery.redelivered for delivery in second.all)


async def test_a_delivery_can_be_settled_after_cancel_ok(one, other, inbox):
    """Deliveries made before the cancel stay with their consumer, who settles them."""
    consumer = await one.consume([QUEUE], inbox.put, prefetch=2)
    await publish(other, "a", "b")
    a, b = await inbox.take(2)

    await consumer.cancel()
    await consumer.cancel()
    await a.ack()
    await b.give_back()
    later = Inbox()
    await other.consume([QUEUE], later.put, prefetch=10)

    assert (await later.next()).body == b"b"


# -- queues that belong to somebody ------------------------------------------------------


async def test_a_fanout_reaches_every_instance_once(machine, one):
    """Each running reader of the topic has a copy of its own; other topics have none."""
    inboxes = [Inbox() for _ in range(3)]
    for number, inbox in enumerate(inboxes):
        topic = "compute" if number < 2 else "network"
        queue = Queue(f"{topic}_fanout_{number}", QueueKind.FANOUT, topic)
        await (await machine.connect()).consume([queue], inbox.put, prefetch=10)

    await one.publish_fanout("compute", message("a"))
    await one.publish_fanout("network", message("b"))
    for inbox in inboxes:
        await inbox.take()

    assert [inbox.bodies for inbox in inboxes] == [["a"], ["a"], ["b"]]


async def test_a_fanout_to_nobody_is_no_error(one):
    """A fanout asks for whoever runs, and that may be nobody."""
    await one.publish_fanout("nobody", message("a"))


@pytest.mark.parametrize("kind", [QueueKind.FANOUT, QueueKind.REPLY])
async def test_a_queue_goes_with_its_owner(one, other, inbox, kind):
    """A reply or fanout queue ends with its transport; what is sent there later is
    undeliverable.
    """
    queue = Queue("mine", kind, "t")
    await one.consume([queue], inbox.put, prefetch=1)
    await publish(other, "a", queue=queue)
    await inbox.next()

    await one.stop()

    with pytest.raises(Undeliverable, match="no service ever declared queue 'mine'"):
        await publish(other, "b", queue=queue)


async def test_an_undeclared_queue_takes_nothing(one):
    """Publishing to a queue that never was is refused, with the remedy."""
    with pytest.raises(Undeliverable, match=r"'nowhere' on .*start the service once or check"):
        await publish(one, "a", queue=Queue("nowhere", QueueKind.SHARED, "nowhere"))


async def test_only_an_idle_queue_is_pruned(one, other, inbox):
    """Nobody reads it, nothing is in it and in nobody's hands; a dry run removes nothing."""
    read, full, held, idle = (directed_queue("compute", name) for name in "abcd")
    await one.declare([read, full, held, idle])
    await one.consume([read], inbox.put, prefetch=1)
    await publish(one, "waits", queue=full)
    consumer = await one.consume([held], inbox.put, prefetch=1)
    await publish(one, "in hand", queue=held)
    delivery = await inbox.next()
    never = directed_queue("compute", "never")

    for dry_run in (True, False):
        pruned = await other.prune([read, full, held, idle, never], dry_run=dry_run)
        assert pruned == [idle]

    with pytest.raises(Undeliverable):
        await publish(other, "x", queue=idle)
    for queue in (read, full, held):
        await publish(other, "x", queue=queue)
    await consumer.cancel()
    await delivery.ack()


async def test_a_transport_lists_directed_queues_if_it_can(machine, one):
    """Of the topics that were asked for; a broker lists none."""
    directed = directed_queue("compute", "h1")
    await one.declare([shared_queue("compute"), directed, directed_queue("other", "h1")])

    assert await one.directed(["compute"]) == ([directed] if machine.keeps_reasons else [])
    assert await one.prune([]) == []


# -- how much queues hold --------------------------------------------------------------------


async def test_an_empty_queue_and_a_missing_one_hold_nothing(one):
    """Neither is an error, and what others hold counts beside them."""
    never = directed_queue("compute", "never")
    await one.declare([QUEUE])

    assert await one.depth([]) == 0
    assert await one.depth([QUEUE]) == 0
    assert await one.depth([never]) == 0
    await publish(one, "a", "b", "c")
    assert await one.depth([never, QUEUE, directed_queue("compute", "no")]) == 3
    assert await one.depth([QUEUE, never]) == 3


async def test_a_queue_holds_what_nobody_has_settled(machine, one, other, inbox):
    """What is in a consumer's hands counts, but for a broker, which reports what waits. What is
    given back counts again, and what is acknowledged does not.
    """
    await one.declare([QUEUE])
    await publish(other, "a", "b", "c")
    assert await other.depth([QUEUE]) == 3

    consumer = await one.consume([QUEUE], inbox.put, prefetch=2)
    a, b = await inbox.take(2)
    await consumer.cancel()
    assert await other.depth([QUEUE]) == (3 if machine.counts_in_hand else 1)
    await a.give_back()
    await depth_is(other, [QUEUE], 3 if machine.counts_in_hand else 2)
    await b.ack()
    await depth_is(other, [QUEUE], 2)

    await one.consume([QUEUE], inbox.put, prefetch=2)
    for delivery in await inbox.take(2):
        await delivery.ack()
    await depth_is(one, [QUEUE], 0)


async def test_what_no_consumer_has_waits_and_a_file_knows_for_how_long(machine, one, other, inbox):
    """In any of the queues that are asked about. What a consumer has does not wait, what is given
    back does; the age is that of the oldest one.
    """
    never = directed_queue("compute", "never")
    await one.declare([QUEUE])
    assert await one.waiting([QUEUE, never]) == (0, None)

    await publish(other, "a", "b")
    await machine.pass_time(0.3)
    await publish(other, "c")
    number, oldest_s = await other.waiting([never, QUEUE])
    assert number == 3
    assert oldest_s is None or oldest_s >= 0.3
    assert (oldest_s is not None) == isinstance(one, SqliteTransport)

    consumer = await one.consume([QUEUE], inbox.put, prefetch=2)
    a, _ = await inbox.take(2)
    await consumer.cancel()
    assert (await other.waiting([QUEUE]))[0] == 1
    await a.give_back()
    async with asyncio.timeout(PATIENCE_S):
        while (await other.waiting([QUEUE]))[0] != 2:
            await asyncio.sleep(0.01)


async def depth_is(transport: Transport, queues: list[Queue], number: int) -> None:
    """A broker carries out a settlement in its own time, and says nothing."""
    async with asyncio.timeout(PATIENCE_S):
        while (found := await transport.depth(queues)) != number:
            assert isinstance(transport, AmqpTransport), found
            await asyncio.sleep(0.01)


async def test_what_a_stopped_transport_held_waits_again(one, other, inbox):
    """It counts once, whether the queue was asked about before or after."""
    await one.consume([QUEUE], inbox.put, prefetch=2)
    await publish(other, "a", "b", "c")
    await inbox.take(2)

    await one.stop()

    await depth_is(other, [QUEUE], 3)


async def test_queues_are_counted_together(one, other):
    """Whatever their kinds are; a queue that is named twice counts once, and others do not
    count.
    """
    directed = directed_queue("compute", "node-1")
    fanout = Queue("compute_fanout_1", QueueKind.FANOUT, "compute")
    queues = [QUEUE, directed, fanout, shared_queue("network")]
    await one.declare(queues)
    await publish(other, "a", "b")
    await publish(other, "c", queue=directed)
    await publish(other, "d", queue=queues[-1])
    await other.publish_fanout("compute", message("e"))

    assert await one.depth(queues[:3]) == 4
    assert await other.depth([QUEUE, QUEUE, directed]) == 3
    assert await other.depth([fanout]) == 1


@pytest.mark.parametrize("machine", ["memory", "sqlite"], indirect=True)
async def test_expired_messages_do_not_count(machine, one, other, inbox):
    """Nobody gets them. One in a consumer's hands has not expired."""
    consumer = await one.consume([QUEUE], inbox.put, prefetch=1)
    for expires_in_s in (0.05, 0.05, 600, None):
        await other.publish(QUEUE, message("a", expires_in_s=expires_in_s))
    held = await inbox.next()
    await consumer.cancel()

    await machine.pass_time(0.1)
    assert await one.depth([QUEUE]) == 3
    await held.give_back()
    assert await one.depth([QUEUE]) == 2


async def test_a_transport_that_is_stopped_counts_nothing(one):
    """The error says so; it is none that a caller has to tell from a broker that is away."""
    await one.stop()

    for asked in (one.depth, one.waiting):
        with pytest.raises(DependencyError, match="not started"):
            await asked([QUEUE])


# -- expiry and dead letters ---------------------------------------------------------------


async def test_an_expired_message_is_dropped_and_counted(machine, one, other, inbox):
    """What nobody took in time is not delivered, and its number is known."""
    await one.declare([QUEUE])
    await other.publish(QUEUE, message("short", expires_in_s=0.01))
    await other.publish(QUEUE, message("short too", expires_in_s=0.01))
    await other.publish(QUEUE, message("long", expires_in_s=600))
    await publish(other, "for ever")

    await machine.pass_time(0.02)
    await one.consume([QUEUE], inbox.put, prefetch=10)
    await inbox.take(2)

    assert inbox.bodies == ["long", "for ever"]
    assert await machine.expired() == {QUEUE.name: 2}


async def test_a_message_in_hand_does_not_expire(machine, one, other, inbox):
    """Expiry is for what nobody has taken; it counts again once the message is given back."""
    consumer = await one.consume([QUEUE], inbox.put, prefetch=1)
    await other.publish(QUEUE, message("a", expires_in_s=0.05))
    delivery = await inbox.next()
    await consumer.cancel()

    await machine.pass_time(0.1)
    assert await machine.expired() == {}
    await delivery.give_back()

    assert await machine.expired() == {QUEUE.name: 1}


async def test_a_dead_letter_is_kept_with_its_reason(machine, one, other, inbox):
    """A message that a consumer cannot use leaves its queue, and people can find it."""
    await one.consume([QUEUE], inbox.put, prefetch=1)
    await other.publish(QUEUE, Message(body=b"\xff", headers={"h": "1"}))
    await publish(other, "next")

    await (await inbox.next()).dead_letter("unreadable")
    assert (await inbox.next()).body == b"next"

    reason = "unreadable" if machine.keeps_reasons else "rejected"
    assert await machine.dead_letters() == [
        DeadLetter(queue=QUEUE.name, body=b"\xff", headers={"h": "1"}, reason=reason)
    ]


# -- notifications ---------------------------------------------------------------------


async def test_notifications_wait_for_readers_yet_to_come(machine):
    """Their queue outlives the publisher that declared it, and each reader; they keep their
    order.
    """
    publisher = await machine.connect()
    await publisher.declare([NOTIFICATIONS])
    await publish(publisher, "a", "b", "c", queue=NOTIFICATIONS)
    await publisher.stop()
    first, second = Inbox(), Inbox()

    reader = await machine.connect()
    await reader.consume([NOTIFICATIONS], first.put, prefetch=1)
    await (await first.next()).ack()
    await reader.stop()
    reader = await machine.connect()
    await reader.consume([NOTIFICATIONS], second.put, prefetch=10)
    await second.take(2)

    assert (first.bodies[0], second.bodies) == ("a", ["b", "c"])


async def test_notifications_that_were_not_settled_come_again(one, other, inbox):
    """Given back, or held by a reader that has gone: in their old order, and marked."""
    later = Inbox()
    await one.consume([NOTIFICATIONS], inbox.put, prefetch=2)
    await publish(other, "a", "b", "c", queue=NOTIFICATIONS)
    await inbox.take(2)
    await one.stop()
    await other.consume([NOTIFICATIONS], later.put, prefetch=10)
    await later.take(3)

    assert later.bodies == ["a", "b", "c"]
    assert [delivery.redelivered for delivery in later.all] == [True, True, False]
    await later.all[1].give_back()
    assert (await later.next()).body == b"b"


async def test_two_readers_share_notifications(one, other, inbox):
    """Each goes to one of them."""
    others = Inbox()
    await one.consume([NOTIFICATIONS], inbox.put, prefetch=1)
    await other.consume([NOTIFICATIONS], others.put, prefetch=1)
    await publish(one, "a", "b", queue=NOTIFICATIONS)
    await inbox.take()
    await others.take()

    assert sorted(inbox.bodies + others.bodies) == ["a", "b"]


async def test_notifications_that_nobody_reads_expire(machine, one, inbox):
    """Each after its own time, so that a queue without a reader does not grow for ever."""
    await one.declare([NOTIFICATIONS])
    for text, expires_in_s in (("short", 0.01), ("long", 600), ("for ever", None)):
        await one.publish(NOTIFICATIONS, message(text, expires_in_s=expires_in_s))

    await machine.pass_time(0.02)
    await one.consume([NOTIFICATIONS], inbox.put, prefetch=10)
    await inbox.take(2)

    assert inbox.bodies == ["long", "for ever"]


async def test_notifications_are_counted(one, other):
    """As what any queue holds; the queue counts nothing before it is declared."""
    assert await other.depth([NOTIFICATIONS]) == 0
    await one.declare([NOTIFICATIONS])
    await publish(one, "a", "b", queue=NOTIFICATIONS)

    assert await other.depth([NOTIFICATIONS]) == 2


async def test_a_notification_queue_that_was_removed_is_declared_again(one, other, inbox):
    """Until then a publisher is told that its notification was not kept."""
    with pytest.raises(Undeliverable, match=re.escape(NOTIFICATIONS.name)):
        await publish(one, "too early", queue=NOTIFICATIONS)
    await one.declare([NOTIFICATIONS])
    await publish(one, "a", queue=NOTIFICATIONS)
    reader = await other.consume([NOTIFICATIONS], inbox.put, prefetch=1)
    await (await inbox.next()).ack()
    await reader.cancel()
    await wait_removed(other, NOTIFICATIONS)

    with pytest.raises(Undeliverable, match=re.escape(NOTIFICATIONS.name)):
        await publish(one, "lost", queue=NOTIFICATIONS)
    await one.declare([NOTIFICATIONS])
    await publish(one, "b", queue=NOTIFICATIONS)
    await other.consume([NOTIFICATIONS], inbox.put, prefetch=1)

    assert (await inbox.next()).body == b"b"


async def wait_removed(transport: Transport, queue: Queue) -> None:
    """Until its reader has left."""
    async with asyncio.timeout(PATIENCE_S):
        while await transport.prune([queue]) != [queue]:
            await asyncio.sleep(0.01)


async def test_no_notification_queue_is_taken_for_one_of_a_host(one):
    """It is named like a directed queue of its topic, and no host reads it."""
    await one.declare([NOTIFICATIONS])

    assert await one.directed([NOTIFICATIONS.topic]) == []


# -- life ----------------------------------------------------------------------------


async def test_messages_wait_while_nobody_runs(machine):
    """A queue outlives its readers and its senders."""
    first = await machine.connect()
    await first.declare([QUEUE])
    await first.stop()
    sender = await machine.connect()
    await publish(sender, "a", "b")
    await sender.stop()

    inbox = Inbox()
    await (await machine.connect()).consume([QUEUE], inbox.put, prefetch=10)
    await inbox.take(2)

    assert inbox.bodies == ["a", "b"]
    assert not any(delivery.redelivered for delivery in inbox.all)


async def test_start_and_stop_may_be_repeated(one, inbox):
    """Twice, in the wrong order and again: the transport is then what the last call made of it."""
    for _ in range(scale(3, 50)):
        await one.start()
        await asyncio.gather(one.start(), one.start())
        await asyncio.gather(one.stop(), one.stop())
        await one.stop()
    with pytest.raises(DependencyError, match="not started"):
        await one.declare([QUEUE])

    await one.start()
    await one.consume([QUEUE], inbox.put, prefetch=1)
    await publish(one, "a")

    assert (await inbox.next()).body == b"a"


async def test_a_delivery_is_settled_once(one, inbox):
    """A second settlement does nothing, whatever it asks for."""
    await one.consume([QUEUE], inbox.put, prefetch=1)
    await publish(one, "a", "b")
    delivery = await inbox.next()

    await delivery.ack()
    await delivery.give_back()
    await delivery.dead_letter("no")

    assert (await inbox.next()).body == b"b"


async def test_the_longest_names_carry_messages(one, other, inbox):
    """What is taken as a topic and as a host is good for all queues and exchanges named for
    them.
    """
    topic, host = "t" * LONGEST_TOPIC, "h" * 100
    directed = directed_queue(topic, host)
    fanout = Queue(f"{topic}_fanout_{'0' * 32}", QueueKind.FANOUT, topic)
    await one.announce([shared_queue(topic)], store="file", label="l")
    await one.consume([shared_queue(topic), directed, fanout], inbox.put, prefetch=10)

    await publish(other, "a", queue=directed)
    await other.publish_fanout(topic, message("b"))
    await inbox.take(2)

    assert set(inbox.bodies) == {"a", "b"}


# -- who keeps what where -------------------------------------------------------------


async def test_a_reader_with_another_store_is_told_to_the_next(machine, one, other):
    """Of two that read one queue into two stores, the second learns of the first."""
    first = await one.announce([QUEUE], store="file 1", label="compute@a")
    second = await other.announce([QUEUE], store="file 2", label="compute@b")

    assert first == []
    known = (
        ("file 1", "compute@a") if machine.keeps_reasons else ("", "a service with another store")
    )
    assert [(reader.queue, reader.store, reader.label) for reader in second] == [
        ("compute", *known)
    ]


async def test_readers_of_one_store_or_of_other_queues_are_not_foreign(one, other):
    """Siblings share a store, and services with topics of their own share only the transport."""
    await one.announce([QUEUE], store="file 1", label="compute@a")

    sibling = await other.announce([QUEUE], store="file 1", label="compute@b")
    stranger = await other.announce([shared_queue("network")], store="file 2", label="network@a")

    assert (sibling, stranger) == ([], [])


async def test_an_announcement_goes_with_its_connection(one, other):
    """What a reader said counts until it disconnects."""
    await one.announce([QUEUE], store="file 1", label="compute@a")
    await one.stop()

    assert await other.announce([QUEUE], store="file 2", label="compute@b") == []
