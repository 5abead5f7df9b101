"""Messages through RabbitMQ, in the oslo.messaging wire.

Two connections: one that only reads and declares, opened when something is
first read, and one that only publishes. Each consumer has a channel of its
own, so that a full new-request lane never delays ops.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shlex
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from aiormq.exceptions import AMQPError

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, StoreBrokenError
from gracekit.process import Process
from gracekit.rpc.amqp.bounds import CLOSE_S, TROUBLE, bounded
from gracekit.rpc.amqp.connection import CUT_AFTER_S
from gracekit.rpc.amqp.consumer import AmqpConsumer, Declarer
from gracekit.rpc.amqp.link import CUT_SILENT_AFTER_S, Link
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
        broker: Where and how.
        process: Who this is.
        clock: Loop time and jitter.
        telemetry: Hears of losses and returns.
        keep: Largest body in bytes that is kept; of larger ones only the size is.
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
        """Nothing here is final: a lost broker is connected to again, for ever."""

    # -- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """See `Transport.start`.

        Raises:
            ConfigError: the broker refuses us, or does not prove who it is.
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
                # Where the broker was silent on the one, it need not be waited for on the other.
                cut_after_s = CUT_SILENT_AFTER_S if self._reading.is_silent else CUT_AFTER_S
                await asyncio.gather(*(link.stop(cut_after_s=cut_after_s) for link in links))
            except BaseException:
                # Cut short: no connection is left behind, and whoever cut us is not kept.
                for link in links:
                    self._leave_to_itself(link.stop())
                raise

    def _leave_to_itself(self, end: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(end)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _end_leaving(self) -> None:
        for task in self._leaving:
            task.cancel()
        if self._leaving:
            await asyncio.wait(set(self._leaving), timeout=CLOSE_S)

    async def _delete_owned(self) -> None:
        owned, self._owned = list(self._owned), {}
        if not self._reading.is_up:
            return  # they expire by themselves
        with contextlib.suppress(*TROUBLE, TimeoutError):
            async with asyncio.timeout(DELETE_TIMEOUT_S):
                await asyncio.gather(*map(self._declarer.delete, owned), return_exceptions=True)

    # -- sending -------------------------------------------------------------------------

    async def declare(self, queues: Sequence[Queue]) -> None:
        """See `Transport.declare`.

        Raises:
            ConfigError: the broker will not take them as the profile declares them.
            DependencyError: not now.
        """
        self._check_started()
        await self._reading.start()
        await self._declarer.declare(queues)
        self._owned |= dict.fromkeys(queue.name for queue in queues if queue.kind in OWNED)

    async def remove(self, queues: Sequence[Queue]) -> None:
        """Delete queues that outlive their readers, where nobody reads; their dead letters too."""
        self._check_started()
        await self._reading.start()
        topics = dict.fromkeys(
            queue.topic for queue in queues if queue.kind is not QueueKind.NOTIFICATION
        )
        for name in (*(queue.name for queue in queues), *map(dead_letter_queue, topics)):
            if await self._readers_of(name) == 0:
                await self._declarer.delete(name)

    async def discard(self, queues: Sequence[Queue]) -> None:
        """See `Transport.discard`; those of a process that was killed stay for half an hour."""
        self._check_started()
        await self._reading.start()
        for queue in queues:
            with contextlib.suppress(AMQPError):  # the user may not: then it expires
                await self._declarer.delete(queue.name)

    async def publish(self, queue: Queue, message: Message) -> None:
        """See `Transport.publish`.

        Raises:
            Undeliverable: no such queue.
            UnconfirmedError: the broker did not confirm in time; the message may be there.
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

        A broker tells how many read a queue, and nothing else about them. So whoever reads a
        shared queue also reads two marks, one of all that announce and one of their store: the
        difference are those with another store, and consumers that read the queue without any
        mark are no gracekit.
        """
        del label  # has no place there
        found: list[QueueReader] = []
        for queue in queues:
            ours, everybody = marks_of(queue, store)
            await self.consume([ours, everybody], _ignore, prefetch=2)
            for mark in (ours, everybody):  # siblings read it too, and may just be about to
                self._owned.pop(mark.name, None)
            # We have announced, and do not read yet.
            found += await find_foreign(queue, store, self._readers_of, to_read=1)
        return found

    async def keep_mark(self, name: str, mark: int) -> int:  # noqa: ARG002
        """See `Transport.keep_mark`; a broker keeps nothing but messages."""
        return 0

    async def directed(self, topics: Sequence[str]) -> list[Queue]:  # noqa: ARG002
        """See `Transport.directed`; AMQP has no list of queues."""
        return []

    async def depth(self, queues: Sequence[Queue]) -> int:
        """See `Transport.depth`.

        Asked on the connection that reads, which an alarm does not block. While reading pauses
        for want of room for bodies, there is no answer either, and the call ends by its timeout.
        """
        self._check_started()
        names = list(dict.fromkeys(queue.name for queue in queues))
        asked = self._ask_depth(names)
        return await bounded(asked, DEPTH_TIMEOUT_S, f"question about {', '.join(names)}")

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
            ConfigError: the queues are quorum queues, which a broker does not remove in this way.
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
                f"a message could come meanwhile; once nobody sends there: for q in {names}; do "
                f'rabbitmqctl delete_queue -p {vhost} "$q"; done'
            )
        return [queue for queue in idle if await self._declarer.delete_idle(queue.name)]

    async def _readers_of(self, name: str) -> int:
        return await self._declarer.consumers_of(name) or 0

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> AmqpConsumer:
        """See `Transport.consume`.

        Raises:
            ConfigError: the broker will not take the queues as the profile declares them.
            DependencyError: not now.
        """
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
        """A cancelled consumer keeps its channel until what it delivered is settled."""
        self._leave_to_itself(self._close_when_done(consumer))

    async def _close_when_done(self, consumer: AmqpConsumer) -> None:
        await consumer.wait_done()
        await consumer.close()
        self._consumers.discard(consumer)


def marks_of(queue: Queue, store: str) -> tuple[Queue, Queue]:
    """The queues that are read by whoever reads the shared *queue*: into *store*, and at all."""
    digest = hashlib.sha256(store.encode()).hexdigest()[:16]
    return reply_queue(f"{queue.name}_readers_{digest}"), reply_queue(f"{queue.name}_readers")


async def find_foreign(
    queue: Queue, store: str, readers_of: Callable[[str], Awaitable[int]], *, to_read: int = 0
) -> list[QueueReader]:
    """Who reads *queue* into another store than *store*; a sibling that comes or goes is none.

    A reader begins with its store's mark and ends with the queue itself, and here they are
    counted the other way round: who is counted late was counted early. One that leaves may
    still be seen in a part of them, so what is found must be found again.

    Args:
        queue: A shared queue.
        store: Identity of our store.
        readers_of: Tells how many consumers the queue of a name has, 0 where there is none.
        to_read: How many of us have announced themselves and do not read yet.
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
    """A mark carries no messages; one that comes all the same stays unsettled."""
