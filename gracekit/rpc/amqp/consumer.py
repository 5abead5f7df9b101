"""A consumer that survives the loss of connections, channels and queues, until it is cancelled.

A background task, the keeper, opens a new intake whenever the present one ends:
the connection is lost, the broker closes the channel, or a queue is deleted. A
cancelled consumer has no keeper, so it stays cancelled after a reconnection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionInternalError,
    ConnectionNotImplemented,
)

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, GracekitError
from gracekit.process import Process
from gracekit.rpc.amqp.bounds import CLOSE_S, bounded, close_channel, said
from gracekit.rpc.amqp.intake import Intake
from gracekit.rpc.amqp.link import Link, is_told
from gracekit.rpc.amqp.profiles import Topology
from gracekit.rpc.transport import OnDelivery, Queue, ReadFailure, is_for_replies
from gracekit.telemetry.telemetry import Telemetry

T = TypeVar("T")

OPEN_TIMEOUT_S: Final = 10.0
LOOK_EVERY_S: Final = 30.0
"""Seconds between two checks that the queues still exist and have a consumer: an open channel
proves neither."""
STALLED_S: Final = 5.0
"""Seconds without a new byte of an incomplete message, after which the intake is replaced."""

_LIMIT_REACHED: Final = re.compile(r"\blimit\b.*\bis reached")
"""A limit on the number of queues or exchanges; RabbitMQ uses the code for differing flags."""
_MISSING: Final = re.compile(r"\bno queue\b")
"""Tells a missing queue from one whose node is down; RabbitMQ uses the same code for both."""


class Declarer:
    """Declares and deletes queues, each time on a new channel, as a refusal closes the channel."""

    def __init__(self, link: Link, topology: Topology) -> None:
        self._link = link
        self._topology = topology

    async def declare(self, queues: Sequence[Queue]) -> None:
        """Make *queues* exist.

        Raises:
            ConfigError: the broker refuses the profile's declaration, and always will.
            DependencyError: the broker cannot do it now; try again.
        """
        for queue in queues:
            async with self._channel() as channel:
                try:
                    declared = self._topology.declare_queue(channel, queue)
                    await bounded(declared, OPEN_TIMEOUT_S, f"declaration of {queue.name}")
                except AMQPError as error:
                    raise self._explained(queue, error) from error

    async def consumers_of(self, name: str) -> int | None:
        """How many consumers read the queue *name*; None if there is no such queue.

        Raises:
            DependencyError: the broker gives no answer.
        """
        answer = await self._look_up(name, Channel.queue_declare)
        return None if answer is None else answer.consumer_count or 0

    async def is_idle(self, name: str) -> bool:
        """Whether the queue *name* exists, without consumers and without ready messages.

        Raises:
            DependencyError: the broker gives no answer.
        """
        answer = await self._look_up(name, Channel.queue_declare)
        return answer is not None and not answer.consumer_count and not answer.message_count

    async def _look_up(self, name: str, declare: Callable[..., Awaitable[T]]) -> T | None:
        """The answer to a passive declaration of *name*; None if there is none of that name."""
        async with self._channel() as channel:
            try:
                asked = declare(channel, name, passive=True)
                return await bounded(asked, OPEN_TIMEOUT_S, f"question about {name}")
            except ChannelNotFoundEntity:
                return None
            except AMQPError as error:
                raise DependencyError(f"question about {name}: {said(error)}") from error

    async def depth(self, names: Sequence[str]) -> int:
        """How many messages wait in all queues *names* together; a missing queue has none.

        All queues are queried on one channel. RabbitMQ closes the channel if a queue is missing;
        then the rest is queried on a new one.

        Raises:
            DependencyError: the broker gives no answer.
        """
        left, depth = [*names], 0
        while left:
            async with self._channel(close_s=CLOSE_S) as channel:
                try:
                    while left:
                        asked = channel.queue_declare(left[-1], passive=True)
                        answer = await bounded(asked, OPEN_TIMEOUT_S, f"question about {left[-1]}")
                        depth += answer.message_count or 0
                        left.pop()
                except AMQPError as error:
                    name, why = left.pop(), said(error)
                    if not isinstance(error, ChannelNotFoundEntity) or not _MISSING.search(why):
                        raise DependencyError(f"question about {name}: {why}") from error
        return depth

    async def bind(self, queue: Queue) -> str:
        """Bind the existing *queue* again.

        Returns:
            The name of its exchange if that was missing and had to be made, otherwise "".

        Raises:
            ConfigError: the broker refuses the profile's exchange or binding, and always will.
            DependencyError: the broker cannot do it now.
        """
        exchange = self._topology.exchange_of(queue)
        if exchange is None:
            return ""
        found = await self._look_up(exchange.name, Channel.exchange_declare)
        async with self._channel() as channel:
            try:
                binding = self._topology.bind(channel, queue)
                await bounded(binding, OPEN_TIMEOUT_S, f"binding of {queue.name}")
            except AMQPError as error:
                raise self._explained(queue, error) from error
        return exchange.name if found is None else ""

    async def delete(self, name: str) -> None:
        """Delete a queue, even if it has consumers."""
        async with self._channel() as channel:
            # Without `if_unused`: for a quorum queue the broker closes the connection at that.
            await bounded(channel.queue_delete(name), OPEN_TIMEOUT_S, f"removal of {name}")

    async def delete_idle(self, name: str) -> bool:
        """Delete a classic queue if it has no consumer and no message; return whether it did."""
        async with self._channel() as channel:
            try:
                asked = channel.queue_delete(name, if_unused=True, if_empty=True)
                await bounded(asked, OPEN_TIMEOUT_S, f"removal of {name}")
            except ChannelPreconditionFailed:
                return False
        return True

    @contextlib.asynccontextmanager
    async def _channel(self, *, close_s: float = OPEN_TIMEOUT_S) -> AsyncIterator[Channel]:
        """A new channel, which is closed after the block."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                channel = await self._link.channel()
        except TimeoutError:
            raise DependencyError(f"no broker within {OPEN_TIMEOUT_S:g} s") from None
        try:
            yield channel
        finally:
            await close_channel(channel, close_s)

    def _durable(self, queue: Queue) -> bool:
        return self._topology.profile.flags_of(queue).durable

    def _explained(self, queue: Queue, error: AMQPError) -> GracekitError:
        profile = self._topology.profile.name
        match error:
            case ChannelPreconditionFailed() if _LIMIT_REACHED.search(said(error)):
                return DependencyError(
                    f"the broker has no room for queue {queue.name!r} or its exchange: "
                    f"{said(error)}; delete unused queues, or raise the limit "
                    "(rabbitmqctl set_vhost_limits)"
                )
            case ChannelPreconditionFailed():
                return ConfigError(
                    f"queue {queue.name!r} or its exchange exists with other flags than profile "
                    f"{profile!r} declares: {said(error)}; choose the profile that fits "
                    "(`gracekit doctor` names it), or delete what exists once it is unused"
                )
            # Code 541, also used for a quorum queue without a majority; and 540, to be safe.
            case ConnectionInternalError() | ConnectionNotImplemented() if not self._durable(queue):
                return ConfigError(
                    f"the broker takes no queue like {queue.name!r} of profile {profile!r}: "
                    f"{said(error)}; RabbitMQ 4.3 and later refuse transient queues: use profile "
                    "durable, quorum or oslo-quorum-all"
                )
            case ChannelAccessRefused() if is_for_replies(queue.name, ()):
                return ConfigError(
                    f"the broker does not let this login read answers: {said(error)}; use the "
                    "login of a client (docs/rabbitmq.md has its permissions), or give this one "
                    f"configure, write and read on {queue.name!r}"
                )
            case ChannelAccessRefused():
                return ConfigError(
                    f"the broker forbids queue {queue.name!r} or its exchange: {said(error)}; "
                    "give the user configure, write and read on it (rabbitmqctl set_permissions)"
                )
            case _:  # 404: a classic queue whose node is down; 405: a dead peer still owns it
                return DependencyError(f"queue {queue.name!r}: {said(error)}")


class AmqpConsumer:
    """See `Consumer`.

    Args:
        link: The connection to read on.
        declarer: Declares the queues each time the consumer is opened.
        queues: The queues to read.
        on_delivery: See `Transport.consume`.
        prefetch: How many deliveries may be unsettled at a time.
        keep: Largest body in bytes to read; of larger ones only the size is kept.
        on_cancelled: Called once, when the consumer delivers no more.
    """

    def __init__(
        self,
        link: Link,
        declarer: Declarer,
        queues: Sequence[Queue],
        on_delivery: OnDelivery,
        *,
        prefetch: int,
        keep: int,
        on_cancelled: Callable[[AmqpConsumer], None],
        process: Process,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self.queues: Final = tuple(queues)
        self._link = link
        self._declarer = declarer
        self._on_delivery = on_delivery
        self._prefetch = prefetch
        self._keep_bytes = keep
        self._on_cancelled = on_cancelled
        self._process = process
        self._clock = clock
        self._telemetry = telemetry
        self._intake: Intake | None = None
        self._failure: ReadFailure | None = None
        self._cancelled = False
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to deliver.

        Raises:
            ConfigError: the broker refuses the profile's declaration of the queues.
            DependencyError: the broker cannot do it now.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                self._intake = await self._open()
        except TimeoutError:
            raise DependencyError(
                f"consuming from {self.queues[0].name}: no broker within {OPEN_TIMEOUT_S:g} s"
            ) from None
        self._keeper = background.start(
            self._keep,
            f"amqp-consumer of {self.queues[0].name}",
            telemetry=self._telemetry,
            clock=self._clock,
        )

    @property
    def failure(self) -> ReadFailure | None:
        """See `Consumer.failure`."""
        return self._failure

    def pause(self) -> None:
        """See `Consumer.pause`; all other consumers of the connection pause too."""
        if self._intake is not None and not self._cancelled:
            self._intake.pause()

    def resume(self) -> None:
        """See `Consumer.resume`."""
        if self._intake is not None:
            self._intake.resume()

    async def cancel(self) -> None:
        """See `Consumer.cancel`."""
        if self._cancelled:
            return
        self._cancelled = True
        try:
            with self._link.asking(f"end of delivery from {self.queues[0].name}"):
                await self._end_keeper()
                if self._intake is not None:
                    await self._intake.cancel()
        finally:
            self._on_cancelled(self)

    async def close(self) -> None:
        """Cancel, and close the channel: the broker requeues unsettled deliveries."""
        self._cancelled = True
        with self._link.asking(f"close of the channel of {self.queues[0].name}"):
            await self._end_keeper()
            if self._intake is not None:
                await self._intake.close()

    async def wait_done(self) -> None:
        """Wait until a cancelled consumer's deliveries are settled."""
        if self._intake is not None:
            await self._intake.wait_idle()

    async def _end_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})

    # -- keeping it open -----------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            assert self._intake is not None
            reason = await self._ended(self._intake)
            self._note_failure(reason)
            self._telemetry.emit("consumer.lost", queue=self.queues[0].name, error=reason)
            await self._intake.close()
            self._intake = await self._open_again()
            self._failure = None
            self._telemetry.emit("consumer.resumed", queue=self.queues[0].name)

    def _note_failure(self, why: str) -> None:
        since = self._clock.loop() if self._failure is None else self._failure.since
        self._failure = ReadFailure(since=since, why=why)

    async def _ended(self, intake: Intake) -> str:
        """Wait until *intake* has ended or no longer works; check it from time to time.

        Returns:
            Why it ended.
        """
        ended = asyncio.ensure_future(intake.wait_ended())
        look_at, unfinished, since = self._next_look(), intake.unfinished, self._clock.loop()
        try:
            while True:
                wait_s = min(STALLED_S, max(0.0, look_at - self._clock.loop()))
                await self._clock.wait_tick(wait_s, unless=ended)
                if ended.done():
                    return ended.result()
                before, unfinished = unfinished, intake.unfinished
                now = self._clock.loop()
                if unfinished is None or unfinished != before:
                    since = now
                elif now - since >= 0.8 * STALLED_S:  # a tick may come up to a second earlier
                    return f"nothing more of a message came for {STALLED_S:g} s"
                if now >= look_at:
                    await self._look(intake)
                    look_at = self._next_look()
        finally:
            ended.cancel()

    def _next_look(self) -> float:
        return self._clock.tick(self._clock.jitter(LOOK_EVERY_S))

    async def _look(self, intake: Intake) -> None:
        for queue in self.queues:
            try:
                readers = await self._declarer.consumers_of(queue.name)
                if readers == 0:
                    await asyncio.sleep(backoff.NO_READER_S)
                    readers = await self._declarer.consumers_of(queue.name)
            except DependencyError:
                return  # proves nothing about the queue; the link notices a lost connection itself
            if not readers:
                what = "is gone" if readers is None else "has no reader any more"
                intake.end(f"queue {queue.name} {what}")
                continue
            await self._look_at_binding(queue)

    async def _look_at_binding(self, queue: Queue) -> None:
        """Bind *queue* again: a peer may have deleted the exchange, and the bindings with it."""
        try:
            lost = await self._declarer.bind(queue)
        except DependencyError:
            return
        except ConfigError as error:
            self._telemetry.emit("binding.refused", queue=queue.name, error=str(error))
            return
        if lost:
            self._telemetry.emit("binding.lost", queue=queue.name, exchange=lost)

    async def _open_again(self) -> Intake:
        pauses, tries = backoff.CONSUMER.pauses(self._clock), 0
        while not self._cancelled:
            await asyncio.sleep(next(pauses))
            tries += 1
            try:
                return await self._open()
            except Exception as error:  # noqa: BLE001 - no other task would try again
                self._note_failure(said(error))
                if is_told(tries):
                    self._telemetry.emit(
                        "consumer.refused",
                        queue=self.queues[0].name,
                        tries=tries,
                        error=str(error),
                    )
        raise asyncio.CancelledError

    async def _open(self) -> Intake:
        await self._declarer.declare(self.queues)
        channel = await self._link.messages()
        intake = Intake(channel, self._on_delivery, self._process, keep=self._keep_bytes)
        try:
            await intake.open(self.queues, prefetch=self._prefetch)
        except AMQPError as error:
            await intake.close()
            raise DependencyError(f"consuming from {self.queues[0].name}: {said(error)}") from error
        except BaseException:
            await intake.close()
            raise
        return intake
