"""Messages out: confirmed, mandatory and bounded, on a connection that reads nothing.

A broker under an alarm stops reading from connections that publish; nothing that
a drain needs (acks, cancels) goes by this one. A publish whose confirm got lost
is sent again under the same request id, which the receiver's journal knows.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiormq.channel import Channel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelPreconditionFailed,
)

from gracekit.clock import Clock
from gracekit.errors import ConfigError, DependencyError, UnconfirmedError, Undeliverable
from gracekit.rpc.amqp.bounds import bounded, said
from gracekit.rpc.amqp.channels import MessageChannel, NackedError, ReturnedError
from gracekit.rpc.amqp.link import Link
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
NACKS: Final = 4
"""In a row, after which their channel is not believed any more."""
LONGEST_NAME: Final = 255
"""Bytes of a queue's name on the wire."""
REPLY_AGAIN_FOR_S: Final = 2.0
"""A caller whose reply queue is missing may be connecting anew; so long we try again."""
GONE_FOR_S: Final = 60.0
"""A reply queue that was given up is tried once only, for so long."""
_MOST_GONE: Final = 1000

_REFUSED: Final = (ChannelPreconditionFailed, ChannelAccessRefused)
_PASSING: Final = (AMQPError, DependencyError, NackedError)
"""After these a message is sent again, unless it was refused."""
_EXCHANGE: Final = re.compile("exchange '([^']*)'")
_DEFAULT_EXCHANGE: Final = "amq.default"
"""Its name in a broker's refusals."""


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
        self._direct = _Outlet(link, topology.declare_control_exchange, clock, timeout_s)
        self._fanouts: dict[str, _Outlet] = {}
        self._stopped = False
        self._under_way: set[asyncio.Timeout] = set()
        self._gone: dict[str, float] = {}  # reply queues that were given up, and until when

    def stop(self) -> None:
        """Publish nothing more; what is under way fails at once."""
        self._stopped = True
        for bound in self._under_way:
            if not bound.expired():
                bound.reschedule(0.0)
        for outlet in (self._direct, *self._fanouts.values()):
            outlet.stop()

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
        except ReturnedError:
            raise self._undeliverable(queue.name) from None

    async def publish_fanout(self, topic: str, message: Message) -> None:
        """See `Transport.publish_fanout`."""
        if topic not in self._fanouts:

            async def declare(channel: Channel) -> None:
                await self._topology.declare_fanout_exchange(channel, topic)

            self._fanouts[topic] = _Outlet(self._link, declare, self._clock, self._timeout_s)
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
            except ReturnedError:
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
        self, outlet: _Outlet, exchange: str, key: str, message: Message, *, mandatory: bool = True
    ) -> None:
        """Publish until the broker has confirmed it.

        Raises:
            ReturnedError: no queue takes it.
            ConfigError: the exchange exists otherwise than we declare it.
            UnconfirmedError: no confirm in time.
            DependencyError: no connection in time; nothing was sent.
        """
        until = self._clock.loop() + self._timeout_s
        channel = None if self._stopped else outlet.ready_channel
        if channel is not None:
            # What nearly every message needs; its bound is the outlet's, as a timer costs 4 us.
            try:
                await outlet.wait_confirm(
                    channel.publish(exchange, key, message, mandatory=mandatory)
                )
            except TimeoutError:
                raise self._not_in_time(key, sent=True) from None
            except _PASSING as error:
                await self._pause_after(error, outlet, channel, exchange, key)
            else:
                return
        await self._send_patiently(
            outlet,
            exchange,
            key,
            message,
            mandatory=mandatory,
            sent=channel is not None,
            until=until,
        )

    async def _send_patiently(
        self,
        outlet: _Outlet,
        exchange: str,
        key: str,
        message: Message,
        *,
        mandatory: bool,
        sent: bool,
        until: float,
    ) -> None:
        """Try until it is confirmed, or the time is up."""
        bound = asyncio.timeout_at(until)
        self._under_way.add(bound)
        try:
            async with bound:
                while not self._stopped:
                    channel: MessageChannel | None = None
                    try:
                        channel = await outlet.channel()
                        await self._link.wait_unblocked()  # else each try would be there once
                        await channel.wait_room()
                        publishing = channel.publish(exchange, key, message, mandatory=mandatory)
                        sent = True
                        await outlet.wait_confirm(publishing)
                    except _PASSING as error:
                        await self._pause_after(error, outlet, channel, exchange, key)
                    else:
                        return
            raise self._not_in_time(key, sent=sent)
        except TimeoutError:
            raise self._not_in_time(key, sent=sent) from None
        finally:
            self._under_way.discard(bound)

    async def _pause_after(
        self,
        error: Exception,
        outlet: _Outlet,
        channel: MessageChannel | None,
        exchange: str,
        key: str,
    ) -> None:
        if isinstance(error, _REFUSED) and (channel is None or _is_meant(exchange, error)):
            raise self._refused(exchange, error) from error
        if isinstance(error, NackedError):
            await outlet.nacked(channel)
        else:
            outlet.give_up(channel)
        self._telemetry.emit("publish.repeated", queue=key, error=said(error))
        await asyncio.sleep(self._clock.jitter(AGAIN_S))

    def _not_in_time(self, key: str, *, sent: bool) -> UnconfirmedError | DependencyError:
        bound = (
            "before the transport was stopped" if self._stopped else f"within {self._timeout_s:g} s"
        )
        if sent:
            return UnconfirmedError(
                f"the broker did not confirm a message to {key!r} {bound}: it may be in the queue, "
                "or not; send it again under the same request id"
            )
        return DependencyError(
            f"there was no connection to the broker {bound}, and nothing was sent to {key!r}; "
            "send it again when the broker is back"
        )

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


def _is_meant(exchange: str, error: AMQPError) -> bool:
    """Whether a refusal is of *exchange*: it ends the channel for all that wait on it."""
    named = _EXCHANGE.search(said(error))
    return named is None or named[1] == (exchange or _DEFAULT_EXCHANGE)


class _Outlet:
    """A channel with confirms, opened when needed, whose exchange is declared before.

    While messages wait for their confirms it is looked after: one that waits too long closes the
    channel, and all that wait are sent again on the next. Not under an alarm: then the
    broker has what was sent and will confirm it, and sent again each would be there twice.
    """

    def __init__(
        self,
        link: Link,
        declare: Callable[[Channel], Awaitable[None]],
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._link = link
        self._declare = declare
        self._clock = clock
        self._timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._channel: MessageChannel | None = None
        self._waiting: dict[asyncio.Future[Any], float] = {}  # since when; the oldest first
        self._well_since = 0.0  # the broker takes messages
        self._watcher: asyncio.Task[None] | None = None
        self._nacks = 0  # in a row

    @property
    def ready_channel(self) -> MessageChannel | None:
        """The present channel, if a message would leave on it at once."""
        channel = self._channel
        return channel if channel is not None and channel.takes_now else None

    async def channel(self) -> MessageChannel:
        """The present channel, or a new one."""
        if self._channel is None or not self._channel.is_open:
            async with self._opening:
                if self._channel is None or not self._channel.is_open:
                    channel = await self._link.messages(confirms=True)
                    declaring = self._declare(channel.amqp)
                    await bounded(declaring, DECLARE_S, "declaration of an exchange")
                    self._channel = channel
        return self._channel

    def give_up(self, channel: MessageChannel | None) -> None:
        """Open a new one for the next message; what waits on this one goes on waiting there."""
        if self._channel is channel:
            self._channel = None

    async def nacked(self, channel: MessageChannel | None) -> None:
        """A nack may be the queue's word, or that of a broker's channel whose queue's leader died.

        The latter goes on for good, beside a queue that is well (seen with RabbitMQ 3.10): a
        channel that does nothing else is closed, and the next one finds the new leader.
        """
        self._nacks += 1
        if self._nacks >= NACKS and channel is not None and channel is self._channel:
            self._nacks, self._channel = 0, None
            await channel.abandon(ChannelClosed(None, f"{NACKS} nacks in a row"))

    def stop(self) -> None:
        """Look after nothing any more; who waits for a confirm hears a TimeoutError."""
        self._end_waits(before=math.inf)
        if self._watcher is not None:
            self._watcher.cancel()

    async def wait_confirm(self, publishing: asyncio.Future[Any]) -> None:
        """Wait for one confirm.

        Raises:
            TimeoutError: there was none in the time of a publish.
        """
        self._waiting[publishing] = self._clock.loop()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            await publishing
            self._nacks = 0
        finally:
            del self._waiting[publishing]

    async def _watch(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(LOOK_EVERY_S)
                await self._look()
        finally:
            self._watcher = None

    def _end_waits(self, *, before: float) -> None:
        """Of what was sent before that moment, of the loop's time."""
        for publishing, since in self._waiting.items():
            is_aiormqs = isinstance(publishing, asyncio.Task)  # bounded by who sent it
            if since < before and not is_aiormqs and not publishing.done():
                publishing.set_exception(TimeoutError())

    async def _look(self) -> None:
        is_blocked, now = await self._link.is_blocked(), self._clock.loop()
        self._end_waits(before=now - self._timeout_s)
        if is_blocked:
            self._well_since = now
        oldest = next(iter(self._waiting.values()), math.inf)
        channel = self._channel
        if channel is not None and now - max(oldest, self._well_since) > CONFIRM_S:
            self._channel = None
            await channel.abandon(ChannelClosed(None, f"no confirm for {CONFIRM_S:g} s"))
