"""A reader of notifications: an `async for` loop, which acknowledges as it advances.

A notification is acknowledged only after the loop's body has ended. If the program
dies in the body, the notification is delivered again, so it may arrive twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Self

from gracekit import backoff
from gracekit.background import need_loop
from gracekit.clock import Clock
from gracekit.config.values import (
    DECLARE_PROFILE,
    EXCHANGE,
    HOST,
    LONGEST_QUEUE,
    PATTERN_SAID,
    did_you_mean,
    is_pattern,
)
from gracekit.errors import (
    BadMessageError,
    ConfigError,
    StoreBrokenError,
    StoreError,
    Undeliverable,
)
from gracekit.process import Process
from gracekit.rpc.client_life import ClientLife
from gracekit.rpc.connect import given_or_opened
from gracekit.rpc.envelope import MAX_BODY_BYTES, check_size
from gracekit.rpc.notifications import PRIORITIES, Notification, decode_notification
from gracekit.rpc.transport import (
    Consumer,
    Delivery,
    Transport,
    notification_queue,
)
from gracekit.telemetry.telemetry import Telemetry

_PREFETCH: Final = 10
_LONGEST_TOPIC: Final = LONGEST_QUEUE - len(".critical")  # no exchange is named for it
_MOST_PREFETCH: Final = 65_535  # RabbitMQ's field has two bytes


class NotificationListener:
    """Reads the notifications of one topic, sent by gracekit's services or by oslo.messaging.

        async with NotificationListener(url, "scheduler-notifications") as listener:
            async for notification in listener:
                ...

    Delivery is at least once: a `message_id` may arrive again, and readers must ignore those that
    they have handled. A notification is acknowledged when the loop asks for the next one, or when
    the listener is closed after the body has ended. If the body raises or is cancelled, the
    notification goes back to its queue. A new loop on the same listener first gets the
    notification that the last loop left unacknowledged.

    Listeners of one topic and priority share a queue: each notification goes to one of them. The
    queue outlives them; both listening and publishing declare it. A message that is no
    notification is dead-lettered, if the transport does that for such queues (RabbitMQ does
    not), and logged as `message.unreadable`; nothing is raised.

    A listener cannot tell whether there are publishers: with a misspelt topic, or a priority that
    none of them uses, the loop waits for ever on queues that it declared itself. So take the topic
    from the services' setting `notification_topic`.

    Args:
        transport: A started transport, which the caller stops, or a URL, for which the listener
            makes, starts and stops a transport.
        topic: The topic of the notifications.
        priorities: Which of oslo's priorities to read, in lower case. gracekit's services send
            only `info` and `error`; the others are for publishers that use oslo.messaging.
        clock: Time and ids; None for the real ones.
        process: Stands for another process in tests; None for this one. Used with a URL.
        max_body_bytes: Larger messages are unreadable.
        exchange: Control exchange on RabbitMQ, if the URL names none.
        declare_profile: Declare profile on RabbitMQ, if the URL names none; it must be that of
            the publisher and of the other listeners.
        prefetch: How many notifications this program may have unacknowledged; meanwhile other
            listeners do not get them.

    Attributes:
        unreadable: How many messages were no notifications.

    Raises:
        ConfigError: the URL, the topic, a priority or *prefetch* is invalid.
    """

    def __init__(
        self,
        transport: Transport | str,
        topic: str,
        *,
        priorities: Sequence[str] = ("info", "error"),
        clock: Clock | None = None,
        process: Process | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        exchange: str = EXCHANGE,
        declare_profile: str = DECLARE_PROFILE,
        prefetch: int = _PREFETCH,
    ) -> None:
        _check_topic(topic)
        self.unreadable = 0
        self._queues = [notification_queue(topic, one) for one in _checked(priorities)]
        self._prefetch = _checked_prefetch(prefetch)
        self._max_body_bytes = max_body_bytes
        self._telemetry = Telemetry()
        self._transport = given_or_opened(
            transport,
            process=process,
            clock=clock or Clock(),
            exchange=exchange,
            profile=declare_profile,
            max_body_bytes=max_body_bytes,
        )
        self._transport.on_broken(self._break)
        self._broken: StoreBrokenError | None = None
        self._is_started = False
        self._was_started = False
        self._opening = asyncio.Lock()
        self._consumer: Consumer | None = None
        self._waiting: deque[Delivery] = deque()
        self._in_hand: Delivery | None = None  # the one in the loop's body
        self._news = asyncio.Event()
        self._is_asked = False
        self._life = (
            ClientLife(
                self._begin_connected,
                self._end_connected,
                who="NotificationListener",
                way="async with NotificationListener(...) as listener",
            )
            if isinstance(transport, str)
            else None
        )

    # -- life -----------------------------------------------------------------

    async def start(self) -> None:
        """Connect, and begin to read; may be called twice.

        If no service has created the file of queues yet, the loop waits for it.

        Raises:
            ConfigError: the file or the queues cannot be used, no event loop of asyncio runs, or
                the listener was started in another one.
            DependencyError: the transport cannot be reached.
        """
        need_loop()
        if self._life is not None:
            await self._life.start()
        else:
            await self._begin()

    async def _begin_connected(self) -> None:
        await self._transport.start()
        await self._begin()

    async def _begin(self) -> None:
        self._is_started = self._was_started = True
        try:
            await self._open()
        except Undeliverable:
            pass  # no service has created the file yet; the loop tries again
        except BaseException:
            self._was_started = False
            raise

    async def stop(self) -> None:
        """Stop reading, and give back all unacknowledged notifications; may be called twice.

        A loop that waits for the next notification ends. The notification in a loop's body is
        given back too, and will be delivered again. If the stop is cancelled, it goes on in the
        background.

        Raises:
            ConfigError: the listener was started in another event loop or process.
        """
        if self._life is not None:
            await self._life.stop()
        else:
            await self._end()

    async def _end_connected(self) -> None:
        try:
            await self._end()
        finally:
            await self._transport.stop()

    async def _end(self) -> None:
        self._is_started = False
        self._news.set()
        async with self._opening:
            consumer, self._consumer = self._consumer, None
        try:
            if consumer is not None:
                await consumer.cancel()
        finally:
            await self._give_back_all()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self._ack_in_hand()
        finally:
            await self.stop()

    # -- the loop -------------------------------------------------------------

    def __aiter__(self) -> Self:
        """Begin a loop; the notification that an earlier loop left unacknowledged comes first."""
        if self._in_hand is not None:
            self._waiting.appendleft(self._in_hand)
            self._in_hand = None
        return self

    async def __anext__(self) -> Notification:
        """Acknowledge the last notification, and wait for the next one.

        Raises:
            StopAsyncIteration: the listener is stopped.
            RuntimeError: the listener was never started, or another task waits for a notification
                of it.
            StoreBrokenError: this process can no longer use the transport.
            ConfigError: the listener was started in another event loop or process.
        """
        if self._life is not None:
            self._life.check_loop("read")
        if not self._was_started:
            raise RuntimeError(
                "this NotificationListener is not started, so it reads nothing: write "
                "`async with NotificationListener(...) as listener:` around the loop, or await its "
                "start()"
            )
        if self._is_asked:
            raise RuntimeError(
                "another task waits for a notification of this listener: what is acknowledged "
                "would be left to chance; give each loop a NotificationListener of its own"
            )
        self._is_asked = True
        try:
            await self._ack_in_hand()
            return await self._next()
        finally:
            self._is_asked = False

    async def _next(self) -> Notification:
        while True:
            self._news.clear()
            if self._broken is not None:
                raise self._broken
            if not self._is_started:
                raise StopAsyncIteration
            if self._consumer is None:
                await self._open_patiently()
            elif not self._waiting:
                await self._news.wait()
            elif (notification := await self._take()) is not None:
                return notification

    async def _take(self) -> Notification | None:
        """The next waiting notification; None if it cannot be read."""
        delivery = self._waiting.popleft()
        try:
            check_size(delivery.dropped, max_bytes=self._max_body_bytes)
            notification = decode_notification(delivery.body, max_bytes=self._max_body_bytes)
        except BadMessageError as error:
            self.unreadable += 1
            self._telemetry.emit("message.unreadable", queue=delivery.queue.name, error=error)
            await _settled(delivery.dead_letter(str(error)))
            return None
        self._in_hand = delivery
        return notification

    # -- reading --------------------------------------------------------------

    async def _open(self) -> None:
        async with self._opening:
            if self._consumer is None and self._is_started:
                self._consumer = await self._transport.consume(
                    self._queues, self._on_delivery, prefetch=self._prefetch
                )

    async def _open_patiently(self) -> None:
        """Begin to read; if no service has created the file of queues yet, pause instead."""
        try:
            await self._open()
        except Undeliverable:
            with contextlib.suppress(TimeoutError):  # a stop ends the pause
                await asyncio.wait_for(self._news.wait(), backoff.CONSUME_S)

    def _on_delivery(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._news.set()

    def _break(self, error: StoreBrokenError) -> None:
        self._broken = error
        self._news.set()

    # -- settling -------------------------------------------------------------

    async def _ack_in_hand(self) -> None:
        delivery, self._in_hand = self._in_hand, None
        if delivery is not None:
            await _settled(delivery.ack())

    async def _give_back_all(self) -> None:
        """Give back all unacknowledged notifications in order, the one in the body first."""
        held = [*filter(None, [self._in_hand]), *self._waiting]
        self._in_hand = None
        self._waiting.clear()
        for delivery in held:
            await _settled(delivery.give_back())


async def _settled(settlement: Coroutine[Any, Any, None]) -> None:
    """Settle a delivery; if that fails now, the transport tries again by itself."""
    with contextlib.suppress(StoreError):
        await settlement


def _check_topic(topic: object) -> None:
    """Check that queues can be named for the topic.

    Raises:
        ConfigError: they cannot, or it is a pattern.
    """
    remedy = "give the one that its publishers have"
    if not isinstance(topic, str):
        raise ConfigError(f"topic {topic!r} is no text; {remedy}")
    if not HOST.fullmatch(topic) or len(topic) > _LONGEST_TOPIC:
        raise ConfigError(
            f"topic {topic[:50]!r} of {len(topic)} characters must be 1 to {_LONGEST_TOPIC} of A-Z "
            "a-z 0-9 space and _ . : @ # , / + - because queues are named for it; "
            f"{remedy}"
        )
    if is_pattern(topic):
        raise ConfigError(f"topic {topic!r} {PATTERN_SAID}; {remedy}")


def _checked(priorities: Sequence[str]) -> list[str]:
    """Check *priorities*; return each once.

    Raises:
        ConfigError: one of them does not exist, or none was given.
    """
    if isinstance(priorities, str):
        raise ConfigError(
            f"priorities={priorities!r} is one text and must be several: write "
            f"priorities=({priorities!r},)"
        )
    for one in priorities:
        if one not in PRIORITIES:
            raise ConfigError(
                f"priority {one!r} is none of {', '.join(PRIORITIES)}"
                f"{did_you_mean(str(one).lower(), PRIORITIES)}"
            )
    if not priorities:
        raise ConfigError(
            f"priorities={priorities!r} names no queue to read; give some of "
            f"{', '.join(PRIORITIES)}"
        )
    return list(dict.fromkeys(priorities))


def _checked_prefetch(prefetch: int) -> int:
    if type(prefetch) is int and 1 <= prefetch <= _MOST_PREFETCH:
        return prefetch
    raise ConfigError(
        f"prefetch={prefetch!r} must be a whole number from 1 to {_MOST_PREFETCH}: so many "
        "notifications may be in hand at one time"
    )
