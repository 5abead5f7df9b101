"""Publishing to one exchange with confirms, on channels that are replaced when they stall."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any, Final

from aiormq.exceptions import ChannelAccessRefused, ChannelClosed, ChannelNotFoundEntity

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.rpc.amqp.bounds import bounded
from gracekit.rpc.amqp.channels import MessageChannel, ReturnedError
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.profiles import Declaration, Topology
from gracekit.telemetry.telemetry import Telemetry

DECLARE_S: Final = 10.0
CONFIRM_S: Final = 5.0
"""Seconds after which a confirm of a healthy broker will not come any more. RabbitMQ 3.10 forgets
messages that it is about to pass to the leader of a quorum queue if that leader dies."""
LOOK_EVERY_S: Final = 1.0
NACKED_FOR_S: Final = 2.0
"""Seconds for which a queue nacks and confirms nothing, after which it counts as full."""
FIRST_NACK_S: Final = 5.0
"""Seconds after which a first nack is forgotten: a later one may have another cause."""
REFUSED_WITHIN_S: Final = 1.0
"""Seconds to wait for a refusal, which comes at once: a later message was not the refused one."""


class Outlet:
    """Publishes to one exchange, on a channel with confirms that is opened when needed.

    When the broker refuses a message, it closes the channel, and so all unconfirmed messages
    on it fail. The broker usually does not say which one it refused, so they are resent one
    at a time through `apart`, where a refusal can mean only the message just sent.

    A background task watches the waits. If a message waits too long for its confirm, the channel is
    closed and all unconfirmed messages are sent again on a new one. While a memory or disk
    alarm blocks publishers this is not done: the broker has the messages and will
    confirm them, and resending would duplicate each.
    """

    def __init__(
        self,
        link: Link,
        topology: Topology,
        exchange: Declaration | None,
        clock: Clock,
        telemetry: Telemetry,
        timeout_s: float,
        *,
        shared: Outlet | None = None,
    ) -> None:
        self.exchange: Final = "" if exchange is None else exchange.name
        self.is_apart: Final = shared is not None
        self.shared: Final = shared or self
        self.lock: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Lock() if self.is_apart else contextlib.nullcontext()
        )
        self._apart: Outlet | None = None
        self._link = link
        self._topology = topology
        self._declaration = exchange
        self._clock = clock
        self._telemetry = telemetry
        self._timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._channel: MessageChannel | None = None
        self._opened_at = 0.0
        self._left: dict[MessageChannel, float] = {}  # replaced, but awaiting confirms; since when
        self._waiting: dict[asyncio.Future[Any], float] = {}  # since when; the oldest first
        self._well_since = 0.0  # when a block by an alarm was last seen
        self._silent_since = math.inf  # start of the first wait that failed after the last confirm
        self._watcher: asyncio.Task[None] | None = None
        self._stopped = False
        self._nacks: dict[str, float] = {}  # by queue; its first nack since the last confirm

    @property
    def apart(self) -> Outlet:
        """An outlet to the same exchange on which one message is sent at a time."""
        if self._apart is None:
            self._apart = Outlet(
                self._link,
                self._topology,
                self._declaration,
                self._clock,
                self._telemetry,
                self._timeout_s,
                shared=self,
            )
        return self._apart

    @property
    def ready_channel(self) -> MessageChannel | None:
        """The present channel, if a message would be sent on it at once; otherwise None."""
        channel = self._channel
        return channel if channel is not None and channel.takes_now else None

    async def channel(self) -> MessageChannel:
        """The present channel, or a new one.

        Raises:
            ReturnedError: the exchange does not exist, and this login must not declare it.
        """
        if self._channel is None or not self._channel.is_open:
            async with self._opening:
                if self._channel is None or not self._channel.is_open:
                    channel = await self._open()
                    self._channel, self._opened_at = channel, self._clock.loop()
                    self._silent_since = math.inf
        return self._channel

    async def _open(self) -> MessageChannel:
        if self._declaration is None:
            return await self._link.messages(confirms=True)
        try:
            return await self._open_to(self._declaration)
        except ChannelAccessRefused:  # this login must not configure the exchange
            pass
        try:
            return await self._open_to(self._declaration, passive=True)
        except ChannelNotFoundEntity:
            raise ReturnedError from None

    async def _open_to(self, exchange: Declaration, *, passive: bool = False) -> MessageChannel:
        channel = await self._link.messages(confirms=True)
        asked = self._topology.declare(channel.amqp, exchange, passive=passive)
        await bounded(asked, DECLARE_S, "declaration of an exchange")
        return channel

    def forget(self, channel: MessageChannel | None) -> None:
        """Drop a channel that has ended; the next message opens another."""
        if self._channel is channel:
            self._channel = None

    def _leave(self, channel: MessageChannel, since: float) -> None:
        """Send no more on *channel*, but keep it open for confirms that may still come."""
        if self._channel is channel:
            self._channel, self._left[channel] = None, since
            self._look_after()

    def nacked(self, channel: MessageChannel | None, key: str) -> bool:
        """Note a nack; returns whether the queue counts as full.

        A full queue nacks. But a quorum queue also nacks while it elects a leader, and in RabbitMQ
        3.10 a channel nacks for ever after the leader died, though the queue works. Only a new
        channel finds the new leader. Its sender does not know what kind of queue it is.
        """
        now = self._clock.loop()
        is_old = channel is self._channel and now - self._opened_at >= backoff.CHANNEL_S
        if channel is not None and is_old:
            self._leave(channel, now)
        self._nacks = {name: at for name, at in self._nacks.items() if now - at < FIRST_NACK_S}
        return now - self._nacks.setdefault(key, now) >= NACKED_FOR_S

    def stop(self) -> None:
        """Stop watching; all waits for confirms fail with TimeoutError."""
        self._stopped = True
        self._end_waits(before=math.inf)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._apart is not None:
            self._apart.stop()

    async def wait_confirm(self, publishing: asyncio.Future[Any], key: str) -> None:
        """Wait for one confirm.

        Raises:
            TimeoutError: none came within the timeout of a publish.
        """
        self._waiting[publishing] = since = self._clock.loop()
        if self._watcher is None:
            self._look_after()
        try:
            await publishing
            self._silent_since = math.inf
            if self._nacks:
                self._nacks.pop(key, None)
        except (TimeoutError, asyncio.CancelledError):
            self._silent_since = min(self._silent_since, since)
            raise
        finally:
            del self._waiting[publishing]

    async def wait_word(self, channel: MessageChannel, publishing: asyncio.Future[Any]) -> None:
        """Wait for the answer to a message that is alone on its channel.

        If none comes in `REFUSED_WITHIN_S`, later messages get another channel, so that this one
        stays alone.
        """
        try:
            await asyncio.wait({publishing}, timeout=REFUSED_WITHIN_S)
        except asyncio.CancelledError:
            publishing.cancel()
            raise
        finally:
            if not publishing.done() or publishing.cancelled():
                self._leave(channel, self._clock.loop())

    def _look_after(self) -> None:
        if self._watcher is None and not self._stopped:
            self._watcher = background.start(
                self._watch,
                f"watch over exchange {self.exchange!r}",
                telemetry=self._telemetry,
                clock=self._clock,
            )

    async def _watch(self) -> None:
        while self._waiting or self._left or self._silent_since < math.inf:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._look()
        self._watcher = None  # before the loop runs other tasks, which may add a wait

    def _end_waits(self, *, before: float) -> None:
        """Fail the waits that began before the loop time *before* with TimeoutError."""
        for publishing, since in self._waiting.items():
            if since < before and not publishing.done():
                publishing.set_exception(TimeoutError())

    async def _look(self) -> None:
        is_blocked, now = await self._link.is_blocked(), self._clock.loop()
        self._end_waits(before=now - self._timeout_s)
        if is_blocked:
            self._well_since = now
        overdue = now - CONFIRM_S
        on_this_one = (since for since in self._waiting.values() if since >= self._opened_at)
        if self._channel is None:
            self._silent_since = math.inf
        elif max(next(on_this_one, math.inf), self._well_since) < overdue:
            self._leave(self._channel, -math.inf)
        elif max(self._silent_since, self._well_since) < overdue:
            self._leave(self._channel, now)
        for channel, since in list(self._left.items()):
            if max(since, self._well_since) < overdue:
                del self._left[channel]
                await channel.abandon(ChannelClosed(None, f"no confirm for {CONFIRM_S:g} s"))
