"""A reader of notifications: one loop, at whose pace they are acknowledged.

A notification is acknowledged after the loop's body has ended, never before. So
a program that dies in the body is sent it again, and one message may come twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Never, Self

from gracekit import backoff
from gracekit.background import AsyncOnly, need_loop
from gracekit.clock import Clock
from gracekit.config.values import (
    DECLARE_PROFILE,
    EXCHANGE,
    HOST,
    LONGEST_QUEUE,
    PATTERN_SAID,
    did_you_mean,
    is_pattern,
    nearest,
)
from gracekit.errors import (
    BadMessageError,
    ConfigError,
    StoreBrokenError,
    StoreError,
    Undeliverable,
)
from gracekit.process import Process
from gracekit.rpc.connect import given_or_opened
from gracekit.rpc.envelope import MAX_BODY_BYTES, check_size
from gracekit.rpc.notifications import PRIORITIES, Notification, decode_notification
from gracekit.rpc.sqlite import SqliteTransport
from gracekit.rpc.transport import (
    Consumer,
    Delivery,
    QueueKind,
    Transport,
    notification_queue,
)
from gracekit.telemetry.safe_text import Sentence
from gracekit.telemetry.telemetry import Telemetry

_PREFETCH: Final = 10
_LONGEST_TOPIC: Final = LONGEST_QUEUE - len(".critical")  # no exchange is named for it
_MOST_PREFETCH: Final = 65_535  # RabbitMQ's field has two bytes


class NotificationListener(AsyncOnly):
    """Reads the notifications of one topic, from gracekit's services and from oslo.messaging's.

        async with NotificationListener(url, "scheduler-notifications") as listener:
            async for notification in listener:
                ...

    Delivery is at least once: the same `message_id` may come again, and readers drop what they
    have done already. A notification is acknowledged when the loop asks for the next one, or when
    the listener is left after the body has ended. If an exception leaves the body, or it is
    cancelled, the notification goes back to its queue. A loop that is begun anew on the same
    listener gets first what the last one left in hand.

    Listeners of one topic and priority share a queue: each notification goes to one of them. The
    queue outlives them; listening declares it, as publishing does. What is no notification is set
    aside with the dead letters, where the transport keeps those of such queues (RabbitMQ does
    not), is logged as `message.unreadable` and is never raised.

    With a misspelt topic, and with a priority that nobody uses, the loop waits for ever, on queues
    that it has made. Where they are in a file and nobody had made them, that is logged once as
    `notifications.awaited`; a broker does not say who made a queue. So take the topic from the
    services' setting `notification_topic`.

    Args:
        transport: A started transport, which stays the caller's, or a URL, whose transport this
            listener starts and stops.
        topic: The notifications'.
        priorities: Which of oslo's priorities to read, in lower case. gracekit's services send
            with `info` and `error` alone; the others are for publishers of oslo.messaging.
        clock: Time and ids; None for the real ones.
        process: Who this is; None for this process. Used with a URL.
        max_body_bytes: Messages above this are unreadable.
        exchange: Control exchange on RabbitMQ, where the URL names none.
        declare_profile: How queues are declared there, where the URL does not say; the
            publisher's, and that of its other listeners.
        prefetch: Notifications that may be in this program's hands at one time; others of the
            same queue do not get them meanwhile.

    Attributes:
        unreadable: Messages that were no notifications.

    Raises:
        ConfigError: the URL, the topic, a priority or *prefetch* cannot be.
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
        **unknown: Never,
    ) -> None:
        for name in unknown:
            known = inspect.signature(NotificationListener).parameters
            raise ConfigError(
                f"NotificationListener has no option {name}{did_you_mean(name, known)}"
            )
        _check_topic(topic)
        self.unreadable = 0
        self._topic = topic
        self._queues = [notification_queue(topic, one) for one in _checked(priorities)]
        self._prefetch = _checked_prefetch(prefetch)
        self._max_body_bytes = max_body_bytes
        self._telemetry = Telemetry()
        self._owned = isinstance(transport, str)
        self._transport = given_or_opened(
            transport,
            process=process,
            clock=clock or Clock(),
            exchange=exchange,
            profile=declare_profile,
            max_body_bytes=max_body_bytes,
        )
        self._transport.on_broken(self._end)
        self._broken: StoreBrokenError | None = None
        self._is_started = False
        self._was_started = False
        self._is_doubtful = False  # it was logged that nobody has made the queues
        self._opening = asyncio.Lock()
        self._consumer: Consumer | None = None
        self._waiting: deque[Delivery] = deque()
        self._in_hand: Delivery | None = None  # the one that the loop's body has
        self._news = asyncio.Event()
        self._is_asked = False

    # -- life -----------------------------------------------------------------

    async def start(self) -> None:
        """Connect, and begin to read; may be called twice.

        A file of queues that no service has made yet is waited for by the loop.

        Raises:
            ConfigError: the file or the queues cannot be used, or no event loop of asyncio runs.
            DependencyError: the transport cannot be reached.
        """
        need_loop()
        if self._owned:
            await self._transport.start()
        self._is_started = self._was_started = True
        try:
            await self._open()
        except Undeliverable as error:
            self._doubt(str(error))

    async def stop(self) -> None:
        """Read no more, and give back what the loop has not done; may be called twice.

        A loop that waits for the next notification ends. What its body has in hand goes back too,
        and comes again.
        """
        self._is_started = False
        self._news.set()
        async with self._opening:
            consumer, self._consumer = self._consumer, None
        try:
            if consumer is not None:
                await consumer.cancel()
        finally:
            await self._give_back_all()
            if self._owned:
                await self._transport.stop()

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
        """Begin a loop; what an earlier one has left in hand comes first."""
        if self._in_hand is not None:
            self._waiting.appendleft(self._in_hand)
            self._in_hand = None
        return self

    async def __anext__(self) -> Notification:
        """Acknowledge the last notification, and wait for the next one.

        Raises:
            StopAsyncIteration: the listener is stopped.
            RuntimeError: it was never started, or another task waits here already.
            StoreBrokenError: this process can no longer use the transport.
        """
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
        """The next one that has come; None if it cannot be read, or the listener was stopped."""
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
        if self._is_doubtful:
            self._is_doubtful = False
            self._telemetry.emit("notifications.found", topic=self._topic)
        return notification

    # -- reading --------------------------------------------------------------

    async def _open(self) -> None:
        async with self._opening:
            if self._consumer is None and self._is_started:
                await self._look_for_queues()
                self._consumer = await self._transport.consume(
                    self._queues, self._on_delivery, prefetch=self._prefetch
                )

    async def _look_for_queues(self) -> None:
        """Log whether anybody has made the queues; reading makes them, so it is asked before."""
        if not isinstance(self._transport, SqliteTransport):
            return
        known = await self._transport.declared(QueueKind.NOTIFICATION)
        if set(known) & set(self._queues):
            if self._is_doubtful:
                self._telemetry.emit("notifications.found", topic=self._topic)
                self._is_doubtful = False
            return
        names = " or ".join(queue.name for queue in self._queues)
        topics = {queue.topic for queue in known}
        usual = f"{self._topic}-notifications"
        near = usual if usual in topics else nearest(self._topic, topics)
        hint = "" if near is None else f" (did you mean topic {near!r}?)"
        self._doubt(
            f"nobody has sent to {names} in {self._transport.path} yet{hint}: if a service has "
            "parked a task, compare the topic with its notification_topic, and the file with its "
            "transport_url"
        )

    def _doubt(self, text: str) -> None:
        if not self._is_doubtful:
            self._is_doubtful = True
            topic = self._topic
            self._telemetry.emit("notifications.awaited", topic=topic, text=Sentence(text))

    async def _open_patiently(self) -> None:
        """Open, or pause where no service has made the file of queues yet."""
        try:
            await self._open()
        except Undeliverable:
            with contextlib.suppress(TimeoutError):  # a stop ends the pause
                await asyncio.wait_for(self._news.wait(), backoff.CONSUME_S)

    def _on_delivery(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._news.set()

    def _end(self, error: StoreBrokenError) -> None:
        self._broken = error
        self._news.set()

    # -- settling -------------------------------------------------------------

    async def _ack_in_hand(self) -> None:
        delivery, self._in_hand = self._in_hand, None
        if delivery is not None:
            await _settled(delivery.ack())

    async def _give_back_all(self) -> None:
        """In their order, the one in hand first."""
        held = [*filter(None, [self._in_hand]), *self._waiting]
        self._in_hand = None
        self._waiting.clear()
        for delivery in held:
            await _settled(delivery.give_back())


async def _settled(settlement: Coroutine[Any, Any, None]) -> None:
    """Settle a delivery; where the transport cannot now, it is the transport that tries again."""
    with contextlib.suppress(StoreError):
        await settlement


def _check_topic(topic: object) -> None:
    """See that queues can be named for it.

    Raises:
        ConfigError: they cannot.
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
    """Each of *priorities* once.

    Raises:
        ConfigError: one of them is none, or there is none.
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
