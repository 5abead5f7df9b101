"""Messages out: confirmed, mandatory and bounded, on a connection that reads nothing.

A broker under an alarm stops reading from connections that publish; nothing that
a drain needs (acks, cancels) goes by this one. A publish whose confirm got lost
is sent again under the same request id, which the receiver's journal knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)
from pamqp.commands import Basic

from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, UnconfirmedError, Undeliverable
from gracekit.rpc.amqp.link import TROUBLE, Link, bounded, said
from gracekit.rpc.amqp.profiles import Topology, fanout_exchange
from gracekit.rpc.transport import Message, Queue, QueueKind
from gracekit.telemetry import Telemetry

AGAIN_S: Final = 0.25
"""Pause before a publish that failed is sent again."""
DECLARE_S: Final = 10.0
CONFIRM_S: Final = 5.0
"""A broker that is well and has not confirmed within this time never will: RabbitMQ 3.10 forgets
what it was about to hand to the leader of a quorum queue when that leader dies."""
LOOK_EVERY_S: Final = 1.0
LONGEST_NAME: Final = 255
"""Bytes of a queue's name on the wire."""
REPLY_AGAIN_FOR_S: Final = 2.0
"""A caller whose reply queue is missing may be connecting anew; so long we try again."""
GONE_FOR_S: Final = 60.0
"""A reply queue that was given up is tried once only, for so long."""
_MOST_GONE: Final = 1000

_REFUSED: Final = (ChannelPreconditionFailed, ChannelAccessRefused)

_PERSISTENT: Final = 2


class Publisher:
    """The way out of one transport.

    Args:
        link: The connection to publish on.
        topology: Names and flags of the exchanges.
        timeout_s: Bound of one publish, reconnections included.
    """

    def __init__(
        self,
        link: Link,
        topology: Topology,
        *,
        timeout_s: float,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._link = link
        self._topology = topology
        self._timeout_s = timeout_s
        self._clock = clock
        self._telemetry = telemetry
        # A missing fanout exchange closes its channel: that must not hit the others' messages.
        self._direct = _Lane(link, topology.declare_control_exchange, clock)
        self._fanouts: dict[str, _Lane] = {}
        self._stopped = False
        self._under_way: set[asyncio.Timeout] = set()
        self._gone: dict[str, float] = {}  # reply queues that were given up, and until when

    def stop(self) -> None:
        """Publish nothing more; what is under way fails at once, with a DependencyError."""
        self._stopped = True
        for bound in self._under_way:
            if not bound.expired():
                bound.reschedule(0.0)
        for lane in (self._direct, *self._fanouts.values()):
            lane.stop()

    async def publish(self, queue: Queue, message: Message) -> None:
        """See `Transport.publish`."""
        if len(queue.name.encode()) > LONGEST_NAME:
            raise Undeliverable(f"no queue has a name as long as {queue.name[:50]!r}...")
        if queue.kind is QueueKind.REPLY:
            await self._reply(queue.name, message)
            return
        # What one reader owns is bound to the default exchange alone.
        exchange = "" if queue.kind is QueueKind.FANOUT else self._topology.exchange
        try:
            await self._send(self._direct, exchange, queue.name, message)
        except PublishError:
            raise self._undeliverable(queue.name) from None

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """See `Transport.publish_fanout`."""
        if topic not in self._fanouts:

            async def declare(channel: Channel) -> None:
                await self._topology.declare_fanout_exchange(channel, topic)

            self._fanouts[topic] = _Lane(self._link, declare, self._clock)
        await self._send(
            self._fanouts[topic], fanout_exchange(topic), topic, message, mandatory=False
        )

    async def _reply(self, name: str, message: Message) -> None:
        """To a caller's own queue, on the default exchange; it may be gone for ever."""
        now = self._clock.loop()
        patient = self._gone.get(name, 0.0) <= now
        until = now + REPLY_AGAIN_FOR_S if patient else now
        while True:
            try:
                await self._send(self._direct, "", name, message)
            except PublishError:
                if self._clock.loop() >= until:
                    self._remember_gone(name)
                    raise self._undeliverable(name) from None
                await asyncio.sleep(AGAIN_S)
            else:
                self._gone.pop(name, None)
                return

    def _remember_gone(self, name: str) -> None:
        self._gone[name] = self._clock.loop() + GONE_FOR_S
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]

    async def _send(
        self, lane: _Lane, exchange: str, key: str, message: Message, *, mandatory: bool = True
    ) -> None:
        """Publish until the broker has confirmed it.

        Raises:
            PublishError: no queue takes it.
            ConfigError: the exchange exists otherwise than we declare it.
            UnconfirmedError: no confirm in time.
            DependencyError: no connection in time, and nothing was sent; or it was stopped.
        """
        properties = _properties(message)
        sent = False
        bound = asyncio.timeout(self._timeout_s)
        self._under_way.add(bound)
        try:
            async with bound:
                while not self._stopped:
                    channel: Channel | None = None
                    try:
                        channel = await lane.channel()
                        await self._link.wait_unblocked()  # else each try would be there once
                        publishing = channel.basic_publish(
                            message.body,
                            exchange=exchange,
                            routing_key=key,
                            properties=properties,
                            mandatory=mandatory,
                            wait=False,
                        )
                        sent = True
                        with lane.awaiting_confirm():
                            await bounded(publishing, self._timeout_s, "publish")
                    except PublishError:
                        raise
                    except _REFUSED as error:
                        raise self._refused(exchange, error) from error
                    except (AMQPError, DependencyError) as error:
                        if not isinstance(error, DeliveryError):  # that is a nack: try again
                            lane.give_up(channel)
                        self._telemetry.emit("publish.repeated", queue=key, error=said(error))
                        await asyncio.sleep(self._clock.jitter(AGAIN_S))
                    else:
                        return
            raise _stopped_before(key)
        except TimeoutError:
            if self._stopped:
                raise _stopped_before(key) from None
            if not sent:
                raise DependencyError(
                    f"there was no connection to the broker for {self._timeout_s:g} s, and nothing "
                    f"was sent to {key!r}; send it again when the broker is back"
                ) from None
            raise UnconfirmedError(
                f"the broker did not confirm a message to {key!r} within {self._timeout_s:g} s: "
                "it may be in the queue, or not; send it again under the same request id"
            ) from None
        finally:
            self._under_way.discard(bound)

    def _refused(self, exchange: str, error: AMQPError) -> ConfigError:
        return ConfigError(
            f"exchange {exchange!r} cannot be used with profile "
            f"{self._topology.profile.name!r}: {said(error)}; choose the profile and the exchange "
            "that the service's peers use, and see the user's permissions"
        )

    def _undeliverable(self, queue: str) -> Undeliverable:
        return Undeliverable(
            f"no service ever declared queue {queue!r} on exchange {self._topology.exchange!r} "
            f"here, or its owner is gone; start the service once or check the topic, and on both "
            f"sides GRACEKIT_EXCHANGE and the URL's vhost"
        )


def _stopped_before(key: str) -> DependencyError:
    return DependencyError(f"the transport was stopped before a message to {key!r} was confirmed")


class _Lane:
    """A channel with confirms, opened when needed, whose exchange is declared before.

    While messages wait for their confirms it is looked after: one that waits too long closes the
    channel, and all that wait are sent again on the next. Not under an alarm: then the
    broker has what was sent and will confirm it, and sent again each would be there twice.
    """

    def __init__(
        self, link: Link, declare: Callable[[Channel], Awaitable[None]], clock: Clock
    ) -> None:
        self._link = link
        self._declare = declare
        self._clock = clock
        self._opening = asyncio.Lock()
        self._channel: Channel | None = None
        self._waiting: dict[object, float] = {}  # since when, in loop time; the oldest first
        self._watcher: asyncio.Task[None] | None = None

    async def channel(self) -> Channel:
        """The present channel, or a new one."""
        if self._channel is None or self._channel.is_closed:
            async with self._opening:
                if self._channel is None or self._channel.is_closed:
                    channel = await self._link.channel(confirms=True)
                    await bounded(self._declare(channel), DECLARE_S, "declaration of an exchange")
                    self._channel = channel
        return self._channel

    def give_up(self, channel: Channel | None) -> None:
        """Open a new one for the next message; what waits on this one goes on waiting there."""
        if self._channel is channel:
            self._channel = None

    def stop(self) -> None:
        """Look after nothing any more."""
        if self._watcher is not None:
            self._watcher.cancel()

    @contextlib.contextmanager
    def awaiting_confirm(self) -> Iterator[None]:
        """Around the wait for one confirm."""
        message = object()
        self._waiting[message] = self._clock.loop()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._waiting[message]

    async def _watch(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(LOOK_EVERY_S)
                await self._look()
        finally:
            self._watcher = None

    async def _look(self) -> None:
        if await self._link.is_blocked():
            self._waiting = dict.fromkeys(self._waiting, self._clock.loop())
            return
        oldest = next(iter(self._waiting.values()), math.inf)
        channel = self._channel
        if channel is not None and self._clock.loop() - oldest > CONFIRM_S:
            self._channel = None
            with contextlib.suppress(*TROUBLE):
                why = ChannelClosed(None, f"no confirm for {CONFIRM_S:g} s")
                await bounded(channel.close(why), DECLARE_S, "close")


def _properties(message: Message) -> Basic.Properties:
    expires = message.expires_in_s
    return Basic.Properties(
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode=_PERSISTENT,
        expiration=None if expires is None else str(max(0, round(expires * 1000))),
        headers=dict(message.headers) or None,
    )
