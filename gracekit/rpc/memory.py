"""The transport inside one process, for tests and simulation in virtual time.

A `MemoryBroker` stands for the broker, which outlives its clients; each
`MemoryTransport` is one connection to it. There are no threads and no timers:
deliveries are made by `call_soon`, expiry is checked when a queue is used, and the
same calls always lead to the same order.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from gracekit.errors import DependencyError, StoreBrokenError, Undeliverable
from gracekit.process import Point, Process
from gracekit.rpc.foreign_readers import QueueReader
from gracekit.rpc.transport import (
    OWNED,
    Consumer,
    DeadLetter,
    Delivery,
    Message,
    OnDelivery,
    Queue,
    QueueKind,
    ReadFailure,
    Settlement,
)
from gracekit.tracing.conventions import LOCAL_QUEUES


class _Stored(msgspec.Struct, eq=False):
    """A message with its position in a queue.

    Attributes:
        number: Its position; lower numbers were published earlier.
        expires_at: Loop time in seconds; None for never.
        redelivered: Whether it was delivered before.
    """

    number: int
    message: Message
    expires_at: float | None
    redelivered: bool = False

    def __lt__(self, other: _Stored) -> bool:  # the order of the heap
        return self.number < other.number

    def is_expired(self) -> bool:
        """Whether it expired before a consumer took it."""
        return self.expires_at is not None and _left(self.expires_at) == 0


class _MemoryQueue(msgspec.Struct, eq=False):
    """A queue, its waiting messages (a heap), and its readers (the next one first)."""

    queue: Queue
    owner: MemoryTransport | None
    waiting: list[_Stored] = msgspec.field(default_factory=list)
    readers: list[_MemoryConsumer] = msgspec.field(default_factory=list)
    pump_due: bool = False


class MemoryBroker:
    """The broker that `MemoryTransport`s connect to.

    Attributes:
        dead_letters: Dead-lettered messages, oldest first.
        in_hand: How many deliveries consumers have not settled, by queue name.
    """

    def __init__(self) -> None:
        self.dead_letters: list[DeadLetter] = []
        self.in_hand: Counter[str] = Counter()
        self._queues: dict[str, _MemoryQueue] = {}
        self._announced: dict[MemoryTransport, list[QueueReader]] = {}
        self._expired: Counter[str] = Counter()
        self._last_number = 0

    def expired(self) -> Mapping[str, int]:
        """How many messages expired unread, by queue name, as of now."""
        for entry in self._queues.values():
            self._drop_expired(entry)
        return dict(self._expired)

    def waiting(self, queue: str) -> int:
        """Messages in *queue* that no consumer has; 0 if there is no such queue."""
        if queue not in self._queues:
            return 0
        self._drop_expired(self._queues[queue])
        return len(self._queues[queue].waiting)

    def depth(self, queues: Iterable[str]) -> int:
        """Messages in *queues* that are not settled: waiting ones and those consumers have."""
        there = {queue for queue in queues if queue in self._queues}
        return sum(self.waiting(queue) + self.in_hand[queue] for queue in there)

    # -- called by transports -----------------------------------------------------

    def declare(self, queue: Queue, transport: MemoryTransport) -> None:
        """Make a queue; fanout and reply queues belong to *transport*."""
        owner = transport if queue.kind in OWNED else None
        self._queues.setdefault(queue.name, _MemoryQueue(queue, owner))

    def put(self, queue: str, message: Message) -> bool:
        """Append a message; false if there is no such queue."""
        if queue not in self._queues:
            return False
        expires_at = None
        if message.expires_in_s is not None:
            expires_at = asyncio.get_running_loop().time() + message.expires_in_s
        self._last_number += 1
        self.put_back(queue, _Stored(self._last_number, message, expires_at))
        return True

    def put_back(self, queue: str, stored: _Stored) -> None:
        """Return a message to its old position; drop it if the queue does not exist any more."""
        if queue in self._queues:
            heapq.heappush(self._queues[queue].waiting, stored)
            self.pump_soon([queue])

    def fanout_queues(self, topic: str) -> list[str]:
        """Names of the queues that get a copy of each fanout to *topic*."""
        return [
            name
            for name, entry in self._queues.items()
            if entry.queue.kind is QueueKind.FANOUT and entry.queue.topic == topic
        ]

    def drop_owned_by(self, transport: MemoryTransport) -> None:
        """Remove the queues of a connection with their messages, and its announcement."""
        self._announced.pop(transport, None)
        for name in [name for name, entry in self._queues.items() if entry.owner is transport]:
            del self._queues[name]

    def announce(self, readers: list[QueueReader], transport: MemoryTransport) -> list[QueueReader]:
        """Record the readers of a connection; return readers of these queues with another store."""
        self._announced[transport] = readers
        mine = {(reader.queue, reader.store) for reader in readers}
        queues = {queue for queue, _ in mine}
        return [
            reader
            for said in self._announced.values()
            for reader in said
            if reader.queue in queues and (reader.queue, reader.store) not in mine
        ]

    def directed(self, topics: Sequence[str]) -> list[Queue]:
        """The directed queues of *topics*."""
        queues = [entry.queue for entry in self._queues.values()]
        return [q for q in queues if q.kind is QueueKind.DIRECTED and q.topic in topics]

    def prune(self, queue: str, *, dry_run: bool) -> bool:
        """Remove a queue without readers and waiting messages; return whether it was one."""
        entry = self._queues.get(queue)
        if entry is None or entry.readers or self.waiting(queue):
            return False
        if not dry_run:
            del self._queues[queue]
        return True

    def add_reader(self, consumer: _MemoryConsumer) -> None:
        """Begin to deliver to *consumer*."""
        for queue in consumer.queues:
            self._queues[queue].readers.append(consumer)
        self.pump_soon(consumer.queues)

    def remove_reader(self, consumer: _MemoryConsumer) -> None:
        """Deliver nothing more to *consumer*; it keeps its unsettled deliveries."""
        for queue in consumer.queues:
            if queue in self._queues and consumer in self._queues[queue].readers:
                self._queues[queue].readers.remove(consumer)

    # -- delivery -----------------------------------------------------------------

    def pump_soon(self, queues: Iterable[str]) -> None:
        """Deliver from *queues* on the next iteration of the loop."""
        for queue in queues:
            entry = self._queues.get(queue)
            if entry is not None and not entry.pump_due:
                entry.pump_due = True
                # In an empty context: a broker must not inherit that of the code that published.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._pump, entry, context=contextvars.Context())

    def _pump(self, entry: _MemoryQueue) -> None:
        """Deliver waiting messages, oldest first, to the readers in turn, while they have room."""
        entry.pump_due = False
        while entry.waiting:
            reader = next((one for one in entry.readers if one.has_room), None)
            if reader is None:
                return
            stored = heapq.heappop(entry.waiting)
            if stored.is_expired():
                self._expired[entry.queue.name] += 1
                continue
            entry.readers.remove(reader)
            entry.readers.append(reader)
            reader.deliver(entry.queue, stored)

    def _drop_expired(self, entry: _MemoryQueue) -> None:
        alive = [stored for stored in entry.waiting if not stored.is_expired()]
        if len(alive) < len(entry.waiting):
            self._expired[entry.queue.name] += len(entry.waiting) - len(alive)
            heapq.heapify(alive)
            entry.waiting = alive


class _MemoryConsumer:
    """One consumer, and its unsettled deliveries."""

    def __init__(
        self,
        transport: MemoryTransport,
        broker: MemoryBroker,
        queues: Sequence[Queue],
        on_delivery: OnDelivery,
        prefetch: int,
    ) -> None:
        self.queues: Final = [queue.name for queue in queues]
        self._transport = transport
        self._broker = broker
        self._on_delivery = on_delivery
        self._prefetch = prefetch
        self._context = contextvars.copy_context()
        self._unsettled: dict[int, tuple[str, _Stored]] = {}
        self._paused = False

    @property
    def failure(self) -> ReadFailure | None:
        """See `Consumer.failure`; always None, as memory can always be read."""
        return None

    @property
    def has_room(self) -> bool:
        return not self._paused and len(self._unsettled) < self._prefetch

    def pause(self) -> None:
        """See `Consumer.pause`."""
        self._paused = True

    def resume(self) -> None:
        """See `Consumer.resume`."""
        self._paused = False
        self._broker.pump_soon(self.queues)

    async def cancel(self) -> None:
        """See `Consumer.cancel`."""
        self._broker.remove_reader(self)
        await asyncio.sleep(0)  # as for a real broker, other tasks run before the confirmation

    def deliver(self, queue: Queue, stored: _Stored) -> None:
        process = self._transport.process
        # Recorded before the points, so that a crash simulated there gives it back.
        self._unsettled[stored.number] = (queue.name, stored)
        self._broker.in_hand[queue.name] += 1
        process.reach(Point.DELIVER, "before")
        process.reach(Point.DELIVER, "after")

        async def settle(how: Settlement, reason: str) -> None:
            self._settle(stored.number, how, reason)

        self._context.copy().run(
            self._on_delivery,
            Delivery(
                body=stored.message.body,
                queue=queue,
                redelivered=stored.redelivered,
                expires_in_s=_left(stored.expires_at),
                headers=dict(stored.message.headers),
                process=process,
                settle=settle,
            ),
        )

    def drop(self) -> None:
        """End with the connection: give back unsettled deliveries; later settlements do nothing."""
        self._broker.remove_reader(self)
        for number in list(self._unsettled):
            self._settle(number, Settlement.GIVE_BACK, "")

    def _settle(self, number: int, how: Settlement, reason: str) -> None:
        if number not in self._unsettled:
            return
        queue, stored = self._unsettled.pop(number)
        self._broker.in_hand[queue] -= 1
        if how is Settlement.GIVE_BACK:
            stored.redelivered = True
            self._broker.put_back(queue, stored)
        elif how is Settlement.DEAD_LETTER:
            message = stored.message
            self._broker.dead_letters.append(
                DeadLetter(queue=queue, body=message.body, headers=message.headers, reason=reason)
            )
        self._broker.pump_soon(self.queues)


def _left(expires_at: float | None) -> float | None:
    if expires_at is None:
        return None
    return max(0.0, expires_at - asyncio.get_running_loop().time())


class MemoryTransport:
    """One connection to a `MemoryBroker`; see `Transport`."""

    is_local: Final = True
    is_connected: Final = None  # no broker
    messaging: Final = LOCAL_QUEUES

    def __init__(self, broker: MemoryBroker, process: Process) -> None:
        self.process: Final = process
        self._broker = broker
        self._consumers: list[_MemoryConsumer] = []
        self._started = False

    async def start(self) -> None:
        """See `Transport.start`."""
        self._started = True

    async def stop(self) -> None:
        """See `Transport.stop`."""
        self.crash()

    def crash(self) -> None:
        """Lose the connection at once, as a killed process does; `start` makes a new one."""
        self._started = False
        consumers, self._consumers = self._consumers, []
        self._broker.drop_owned_by(self)
        for consumer in consumers:
            consumer.drop()

    def on_broken(self, callback: Callable[[StoreBrokenError], None]) -> None:
        """Never calls *callback*: memory does not break."""

    async def declare(self, queues: Sequence[Queue]) -> None:
        """See `Transport.declare`."""
        self._check_started()
        for queue in queues:
            self._broker.declare(queue, self)

    async def compare(self, queues: Sequence[Queue], *, store: str | None) -> None:
        """See `Transport.compare`; does nothing, as these queues have no flags."""

    async def discard(self, queues: Sequence[Queue]) -> None:
        """See `Transport.discard`; does nothing, as queues end with their owner's connection."""

    async def publish(self, queue: Queue, message: Message) -> None:
        """See `Transport.publish`."""
        self._check_started()
        self.process.reach(Point.PUBLISH, "before")
        if not self._broker.put(queue.name, message):
            raise Undeliverable(
                f"no service ever declared queue {queue.name!r} on this broker, or its owner is "
                f"gone; start the service once or check the topic"
            )
        self.process.reach(Point.PUBLISH, "after")
        await asyncio.sleep(0)  # as with a broker, the message may arrive before the confirm

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """See `Transport.publish_fanout`."""
        self._check_started()
        self.process.reach(Point.PUBLISH, "before")
        for queue in self._broker.fanout_queues(topic):
            self._broker.put(queue, message)
        self.process.reach(Point.PUBLISH, "after")
        await asyncio.sleep(0)

    async def announce(
        self, queues: Sequence[Queue], *, store: str, label: str
    ) -> list[QueueReader]:
        """See `Transport.announce`."""
        self._check_started()
        pid = self.process.identify().pid
        readers = [
            QueueReader(queue=queue.name, store=store, label=label, pid=pid) for queue in queues
        ]
        return self._broker.announce(readers, self)

    async def keep_mark(self, name: str, mark: int) -> int:  # noqa: ARG002
        """See `Transport.keep_mark`; always 0, as memory keeps nothing longer than a store."""
        return 0

    async def directed(self, topics: Sequence[str]) -> list[Queue]:
        """See `Transport.directed`."""
        self._check_started()
        return self._broker.directed(topics)

    async def depth(self, queues: Sequence[Queue]) -> int:
        """See `Transport.depth`."""
        self._check_started()
        return self._broker.depth(queue.name for queue in queues)

    async def waiting(self, queues: Sequence[Queue]) -> tuple[int, float | None]:
        """See `Transport.waiting`; memory keeps no times."""
        self._check_started()
        return sum(self._broker.waiting(queue.name) for queue in queues), None

    async def prune(self, queues: Sequence[Queue], *, dry_run: bool = False) -> list[Queue]:
        """See `Transport.prune`."""
        self._check_started()
        return [queue for queue in queues if self._broker.prune(queue.name, dry_run=dry_run)]

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> Consumer:
        """See `Transport.consume`."""
        await self.declare(queues)
        consumer = _MemoryConsumer(self, self._broker, queues, on_delivery, prefetch)
        self._consumers.append(consumer)
        self._broker.add_reader(consumer)
        return consumer

    def _check_started(self) -> None:
        if not self._started:
            raise DependencyError("the memory transport is not started; await its start() first")
