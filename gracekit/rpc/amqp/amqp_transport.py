"""The transport over RabbitMQ, in oslo.messaging's wire format.

It has two connections: one only consumes and declares, and is opened at the first
use; the other only publishes. Each consumer has a separate channel, so that a
full lane of new requests never delays ops.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shlex
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from aiormq.exceptions import AMQPError

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, StoreBrokenError
from gracekit.process import Process
from gracekit.rpc.amqp.bounds import CLOSE_S, TROUBLE, bounded
from gracekit.rpc.amqp.consumer import AmqpConsumer, Declarer
from gracekit.rpc.amqp.existing import ExistingEntities
from gracekit.rpc.amqp.link import CUT_AFTER_S, CUT_SILENT_AFTER_S, Link
from gracekit.rpc.amqp.profiles import Topology, dead_letter_queue
from gracekit.rpc.amqp.publisher import Publisher
from gracekit.rpc.amqp.url import Broker
from gracekit.rpc.amqp.wire import MOST
from gracekit.rpc.foreign_readers import QueueReader
from gracekit.rpc.transport import (
    DEPTH_TIMEOUT_S,
    OWNED,
    Delivery,
    Message,
    OnDelivery,
    Queue,
    QueueKind,
    reply_queue,
)
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracing.conventions import Messaging

DELETE_TIMEOUT_S: Final = 1.0
LOOKS: Final = 3


class AmqpTransport:
    """One process's connections to a broker; see `Transport`.

    Args:
        broker: Where the broker is, and how to use it.
        process: This process.
        clock: Loop time and jitter.
        telemetry: Receives events about lost and restored connections.
        keep: Largest body in bytes to read; of larger ones only the size is kept.
    """

    is_local: Final = False

    def __init__(
        self,
        broker: Broker,
        *,
        process: Process,
        clock: Clock,
        telemetry: Telemetry,
        keep: int = MOST,
    ) -> None:
        self.broker: Final = broker
        self.messaging: Final = Messaging("rabbitmq", broker.exchange)
        self._process = process
        self._clock = clock
        self._telemetry = telemetry
        self._keep = keep
        self._topology = Topology(broker.profile, broker.exchange)
        link = partial(
            Link,
            broker,
            label=f"gracekit {process.identify().pid}",
            clock=clock,
            telemetry=telemetry,
        )
        self._reading = link(purpose="consume")
        self._writing = link(purpose="publish")
        self._declarer = Declarer(self._reading, self._topology)
        self._publisher: Publisher | None = None
        self._consumers: set[AmqpConsumer] = set()
        self._owned: dict[str, None] = {}  # names of fanout and reply queues
        self._leaving: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()

    @property
    def is_connected(self) -> bool:
        """See `Transport.is_connected`."""
        links = [self._writing, *([self._reading] if self._consumers else [])]
        return all(link.is_up for link in links)

    def on_broken(self, callback: Callable[[StoreBrokenError], None]) -> None:
        """Never calls *callback*: after a loss this transport reconnects for ever."""

    # -- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """See `Transport.start`.

        Raises:
            ConfigError: the broker refuses the login or vhost, or its certificate is not trusted.
            DependencyError: it cannot be reached.
        """
        async with self._changing:
            if self._publisher is not None:
                return
            await self._writing.start()
            self._publisher = Publisher(
                self._writing,
                self._topology,
                timeout_s=self.broker.publish_timeout_s,
                clock=self._clock,
                telemetry=self._telemetry,
            )

    async def stop(self) -> None:
        """See `Transport.stop`."""
        async with self._changing:
            if self._publisher is not None:
                self._publisher.stop()
            self._publisher = None
            links = (self._reading, self._writing)
            try:
                await self._end_leaving()
                await asyncio.gather(*(consumer.close() for consumer in self._consumers))
                self._consumers.clear()
                await self._delete_owned()
                # If the broker was silent on one connection, do not wait for it on the other.
                cut_after_s = CUT_SILENT_AFTER_S if self._reading.is_silent else CUT_AFTER_S
                await asyncio.gather(*(link.stop(cut_after_s=cut_after_s) for link in links))
            except BaseException:
                # Cancelled or failed: end the connections in the background, without delaying
                # the caller.
                for link in links:
                    background.run_beside(self._leaving, link.stop())
                raise

    async def _end_leaving(self) -> None:
        for task in self._leaving:
            task.cancel()
        if self._leaving:
            await asyncio.wait(set(self._leaving), timeout=CLOSE_S)

    async def _delete_owned(self) -> None:
        owned, self._owned = list(self._owned), {}
        if not self._reading.is_up:
            return  # the broker lets them expire
        with contextlib.suppress(*TROUBLE, TimeoutError):
            async with asyncio.timeout(DELETE_TIMEOUT_S):
                await asyncio.gather(*map(self._declarer.delete, owned), return_exceptions=True)

    # -- sending -------------------------------------------------------------------------

    async def declare(self, queues: Sequence[Queue]) -> None:
        """See `Transport.declare`.

        Raises:
            ConfigError: the broker refuses the profile's declaration.
            DependencyError: the broker cannot do it now.
        """
        self._check_started()
        await self._reading.start()
        await self._declarer.declare(queues)
        self._owned |= dict.fromkeys(queue.name for queue in queues if queue.kind in OWNED)

    async def compare(self, queues: Sequence[Queue], *, store: str | None) -> None:
        """See `Transport.compare`."""
        self._check_started()
        await self._reading.start()
        shared = [queue for queue in queues if queue.kind is QueueKind.SHARED]
        marks = [] if store is None else [mark for one in shared for mark in marks_of(one, store)]
        await ExistingEntities(self._reading, self._topology).compare([*queues, *marks])

    async def remove(self, queues: Sequence[Queue]) -> None:
        """Delete those of *queues*, and of their dead-letter queues, that have no consumer."""
        self._check_started()
        await self._reading.start()
        topics = dict.fromkeys(
            queue.topic for queue in queues if queue.kind is not QueueKind.NOTIFICATION
        )
        for name in (*(queue.name for queue in queues), *map(dead_letter_queue, topics)):
            if await self._readers_of(name) == 0:
                await self._declarer.delete(name)

    async def discard(self, queues: Sequence[Queue]) -> None:
        """See `Transport.discard`; queues of a killed process expire after half an hour."""
        self._check_started()
        await self._reading.start()
        for queue in queues:
            with contextlib.suppress(AMQPError):  # without the permission, let it expire
                await self._declarer.delete(queue.name)

    async def publish(self, queue: Queue, message: Message) -> None:
        """See `Transport.publish`.

        Raises:
            Undeliverable: there is no such queue.
            UnconfirmedError: no confirm in time; the message may be in the queue or not.
        """
        await self._check_started().publish(queue, message)

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """See `Transport.publish_fanout`."""
        await self._check_started().publish_fanout(topic, message)

    def _check_started(self) -> Publisher:
        if self._publisher is None:
            raise DependencyError(
                f"the transport on {self.broker.shown} is not started; await its start() first"
            )
        return self._publisher

    # -- receiving -----------------------------------------------------------------------

    async def announce(
        self, queues: Sequence[Queue], *, store: str, label: str
    ) -> list[QueueReader]:
        """See `Transport.announce`.

        A broker reports only how many consumers a queue has. So each gracekit reader of a shared
        queue also consumes from two empty queues, its marks: one is shared by all gracekit
        readers, the other by those with the same store. The difference between the two counts
        is the number of readers with another store. Consumers of the shared queue beyond the
        first count are not gracekit's.
        """
        del label  # a broker has no place to keep it
        found: list[QueueReader] = []
        for queue in queues:
            ours, everybody = marks_of(queue, store)
            await self._consume([ours, everybody], _ignore, prefetch=2)
            for mark in (ours, everybody):  # keep them: siblings read them too, or soon will
                self._owned.pop(mark.name, None)
            # to_read: this process has announced itself, but does not read the queue yet.
            found += await find_foreign(queue, store, self._readers_of, to_read=1)
        return found

    async def keep_mark(self, name: str, mark: int) -> int:  # noqa: ARG002
        """See `Transport.keep_mark`; always 0, as a broker stores only messages."""
        return 0

    async def directed(self, topics: Sequence[str]) -> list[Queue]:  # noqa: ARG002
        """See `Transport.directed`; always empty, as AMQP cannot list queues."""
        return []

    async def depth(self, queues: Sequence[Queue]) -> int:
        """See `Transport.depth`.

        It uses the consuming connection, which an alarm does not block. While reading is paused
        because too many bytes of requests are in memory, no answer can arrive, and the call fails
        by its timeout.
        """
        self._check_started()
        names = list(dict.fromkeys(queue.name for queue in queues))
        asked = self._ask_depth(names)
        return await bounded(asked, DEPTH_TIMEOUT_S, f"question about {', '.join(names)}")

    async def waiting(self, queues: Sequence[Queue]) -> tuple[int, float | None]:
        """See `Transport.waiting`; RabbitMQ does not report ages."""
        return await self.depth(queues), None

    async def _ask_depth(self, names: Sequence[str]) -> int:
        try:
            await self._reading.start()
        except ConfigError as error:
            raise DependencyError(str(error)) from error
        if not self._reading.is_up:
            raise DependencyError(f"the connection to {self.broker.shown} was lost")
        return await self._declarer.depth(names)

    async def prune(self, queues: Sequence[Queue], *, dry_run: bool = False) -> list[Queue]:
        """See `Transport.prune`.

        Raises:
            ConfigError: they are quorum queues, which RabbitMQ cannot delete conditionally.
        """
        self._check_started()
        await self._reading.start()
        idle = [queue for queue in queues if await self._declarer.is_idle(queue.name)]
        if dry_run:
            return idle
        if idle and self.broker.profile.topic.arguments.get("x-queue-type") == "quorum":
            names = shlex.join(queue.name for queue in idle)
            vhost = shlex.quote(self.broker.vhost)
            raise ConfigError(
                "RabbitMQ does not remove quorum queues on the condition that they are empty, and "
                f"a message could come meanwhile; once no client sends there: for q in {names}; do "
                f'rabbitmqctl delete_queue -p {vhost} "$q"; done'
            )
        return [queue for queue in idle if await self._declarer.delete_idle(queue.name)]

    async def _readers_of(self, name: str) -> int:
        return await self._declarer.consumers_of(name) or 0

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> AmqpConsumer:
        """See `Transport.consume`.

        A reply queue is opened when a call needs it. If the broker is away then, this waits for it,
        as a publish does.

        Raises:
            ConfigError: the broker refuses the profile's declaration.
            DependencyError: the broker cannot do it now.
        """
        consume = partial(self._consume, queues, on_delivery, prefetch=prefetch)
        is_of_calls = all(queue.kind is QueueKind.REPLY for queue in queues)
        return await (self._patiently(consume) if is_of_calls else consume())

    async def _patiently(self, consume: Callable[[], Awaitable[AmqpConsumer]]) -> AmqpConsumer:
        timeout_s, why = self.broker.publish_timeout_s, "the broker did not answer"
        pauses = backoff.CONNECTION.pauses(self._clock)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._check_started()
                    try:
                        return await consume()
                    except DependencyError as error:
                        why = str(error)
                    await asyncio.sleep(next(pauses))
        except TimeoutError:
            raise DependencyError(
                f"no reply queue could be opened within {timeout_s:g} s, and nothing was sent: "
                f"{why}; send it again when that is over"
            ) from None

    async def _consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> AmqpConsumer:
        self._check_started()
        await self._reading.start()
        consumer = AmqpConsumer(
            self._reading,
            self._declarer,
            queues,
            on_delivery,
            prefetch=prefetch,
            keep=self._keep,
            on_cancelled=self._leave,
            process=self._process,
            clock=self._clock,
            telemetry=self._telemetry,
        )
        self._owned |= dict.fromkeys(queue.name for queue in queues if queue.kind in OWNED)
        await consumer.start()
        self._consumers.add(consumer)
        return consumer

    def _leave(self, consumer: AmqpConsumer) -> None:
        """Close the channel of a cancelled consumer once all its deliveries are settled."""
        background.run_beside(self._leaving, self._close_when_done(consumer))

    async def _close_when_done(self, consumer: AmqpConsumer) -> None:
        await consumer.wait_done()
        await consumer.close()
        self._consumers.discard(consumer)


def marks_of(queue: Queue, store: str) -> tuple[Queue, Queue]:
    """The mark queues of the shared *queue*: of its readers with *store*, and of all readers.

    See `AmqpTransport.announce`.
    """
    digest = hashlib.sha256(store.encode()).hexdigest()[:16]
    return reply_queue(f"{queue.name}_readers_{digest}"), reply_queue(f"{queue.name}_readers")


async def find_foreign(
    queue: Queue, store: str, readers_of: Callable[[str], Awaitable[int]], *, to_read: int = 0
) -> list[QueueReader]:
    """The readers of *queue* that do not use *store*; siblings that start or stop do not count.

    A reader subscribes to its store's mark first, then to the common mark, then to the queue.
    Here they are counted in the opposite order, so a sibling that starts meanwhile is never
    counted as foreign. One that stops may be counted in only some of them; therefore a finding
    must repeat in `LOOKS` looks.

    Args:
        queue: A shared queue.
        store: Identity of our store.
        readers_of: Returns the number of consumers of a queue by name; 0 if it does not exist.
        to_read: How many of our readers have announced themselves and do not read yet.
    """
    ours, everybody = marks_of(queue, store)
    found: list[QueueReader] = []
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(backoff.FOREIGN_READER_S)
        reading = await readers_of(queue.name)
        announced = await readers_of(everybody.name)
        elsewhere = announced - await readers_of(ours.name)
        strangers = reading - announced + to_read
        found = [
            *[_reader(queue, "a service with another store")] * elsewhere,
            *[_reader(queue, "a consumer that is not gracekit's")] * strangers,
        ]
        if not found:
            break
    return found


def _reader(queue: Queue, label: str) -> QueueReader:
    return QueueReader(queue=queue.name, store="", label=label, pid=None)


def _ignore(delivery: Delivery) -> None:
    """Ignore a delivery: mark queues carry no messages; a stray one stays unsettled."""
