"""The way to one exchange: messages with confirms, over channels that are looked after."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused, ChannelClosed, ChannelNotFoundEntity

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.rpc.amqp.bounds import bounded
from gracekit.rpc.amqp.channels import MessageChannel, ReturnedError
from gracekit.rpc.amqp.link import Link
from gracekit.telemetry.telemetry import Telemetry

DECLARE_S: Final = 10.0
CONFIRM_S: Final = 5.0
"""A broker that is well and has not confirmed within this time never will: RabbitMQ 3.10 forgets
what it was about to hand to the leader of a quorum queue when that leader dies."""
LOOK_EVERY_S: Final = 1.0
NACKS: Final = 4
"""With no confirm between them, after which a queue's word is asked for on another channel."""
REFUSED_WITHIN_S: Final = 1.0
"""A refusal comes at once; who waits longer for an answer is not the one that is sought."""

Declare = Callable[[Channel], Awaitable[None]]


class Outlet:
    """The way to one exchange: a channel with confirms, opened when needed and declared on.

    A refusal ends the channel of all that wait on it, and may mean one of them without
    saying which. Each of those goes on by `apart`, one at a time: a refusal there is its own.

    While messages wait for their confirms it is looked after: one that waits too long closes the
    channel, and all that wait are sent again on the next. Not under an alarm: then the
    broker has what was sent and will confirm it, and sent again each would be there twice.
    """

    def __init__(
        self,
        link: Link,
        exchange: str,
        declare: Declare,
        clock: Clock,
        telemetry: Telemetry,
        timeout_s: float,
        *,
        shared: Outlet | None = None,
    ) -> None:
        self.exchange: Final = exchange
        self.is_apart: Final = shared is not None
        self.shared: Final = shared or self
        self.lock: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Lock() if self.is_apart else contextlib.nullcontext()
        )
        self._apart: Outlet | None = None
        self._link = link
        self._declare = declare
        self._clock = clock
        self._telemetry = telemetry
        self._timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._channel: MessageChannel | None = None
        self._opened_at = 0.0
        self._left: dict[MessageChannel, float] = {}  # what waits there goes on; since when
        self._waiting: dict[asyncio.Future[Any], float] = {}  # since when; the oldest first
        self._well_since = 0.0  # the broker takes messages
        self._silent_since = math.inf  # a wait that ended unanswered began; no confirm came since
        self._watcher: asyncio.Task[None] | None = None
        self._stopped = False
        self._nacks: dict[str, int] = {}  # on this channel, by queue, since its last confirm

    @property
    def apart(self) -> Outlet:
        """Where one message at a time goes to the same exchange."""
        if self._apart is None:
            self._apart = Outlet(
                self._link,
                self.exchange,
                self._declare,
                self._clock,
                self._telemetry,
                self._timeout_s,
                shared=self,
            )
        return self._apart

    @property
    def ready_channel(self) -> MessageChannel | None:
        """The present channel, if a message would leave on it at once."""
        channel = self._channel
        return channel if channel is not None and channel.takes_now else None

    async def channel(self) -> MessageChannel:
        """The present channel, or a new one.

        Raises:
            ReturnedError: there is no such exchange, and we may not make it.
        """
        if self._channel is None or not self._channel.is_open:
            async with self._opening:
                if self._channel is None or not self._channel.is_open:
                    channel = await self._open()
                    self._channel, self._opened_at = channel, self._clock.loop()
                    self._nacks.clear()
                    self._silent_since = math.inf
        return self._channel

    async def _open(self) -> MessageChannel:
        channel = await self._link.messages(confirms=True)
        try:
            await bounded(self._declare(channel.amqp), DECLARE_S, "declaration of an exchange")
        except ChannelAccessRefused:
            return await self._open_as_it_is()
        return channel

    async def _open_as_it_is(self) -> MessageChannel:
        """Who may not make the exchange, and so not delete it either, uses what is there."""
        channel = await self._link.messages(confirms=True)
        asked = channel.amqp.exchange_declare(self.exchange, passive=True)
        try:
            await bounded(asked, DECLARE_S, "question about an exchange")
        except ChannelNotFoundEntity:
            raise ReturnedError from None
        return channel

    def forget(self, channel: MessageChannel | None) -> None:
        """One that has ended: the next message opens another."""
        if self._channel is channel:
            self._channel = None

    def _leave(self, channel: MessageChannel, since: float) -> None:
        """The next message opens another; who waits on this one may still hear of it."""
        if self._channel is channel:
            self._channel, self._left[channel] = None, since
            self._look_after()

    def nacked(self, channel: MessageChannel | None, key: str) -> None:
        """A nack may be the queue's word, or that of a broker's channel whose queue's leader died.

        The latter goes on for good, beside a queue that is well (seen with RabbitMQ 3.10): a
        channel that says nothing else of a queue is left, and the next one finds the new leader.
        """
        if channel is None or channel is not self._channel:
            return
        self._nacks[key] = self._nacks.get(key, 0) + 1
        now = self._clock.loop()
        if self._nacks[key] >= NACKS and now - self._opened_at >= backoff.CHANNEL_S:
            self._leave(channel, now)

    def stop(self) -> None:
        """Look after nothing any more; who waits for a confirm hears a TimeoutError."""
        self._stopped = True
        self._end_waits(before=math.inf)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._apart is not None:
            self._apart.stop()

    async def wait_confirm(self, publishing: asyncio.Future[Any], key: str) -> None:
        """Wait for one confirm.

        Raises:
            TimeoutError: there was none in the time of a publish.
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
        """Wait for the answer to one that is alone on its channel; later ones get another."""
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
        self._watcher = None  # in the same turn as the look that nobody waits

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
