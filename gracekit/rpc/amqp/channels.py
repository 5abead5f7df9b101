"""Messages on one channel: deliveries in, acks and publishes out.

gracekit reads and writes the frames of messages itself, on aiormq's socket. aiormq opens and closes
the channel, sets the prefetch, starts consumers and declares queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import AMQPError
from pamqp.commands import Basic

from gracekit.errors import DependencyError
from gracekit.rpc.amqp import frames
from gracekit.rpc.amqp.bounds import CLOSE_S, close_channel
from gracekit.rpc.amqp.contents import Contents, OnMessage
from gracekit.rpc.amqp.wire import MOST, Wire
from gracekit.rpc.transport import Message

_PERSISTENT: Final = 2
_LONGEST_S: Final = 10 * 365 * 86_400
"""The longest expiration of a message in seconds; RabbitMQ refuses longer ones (rabbit.hrl)."""
_FRAME_MAX: Final = 131_072
"""Bytes of the largest frame, if the broker sets no limit."""


class ReturnedError(Exception):
    """The broker returned a message: no queue is bound for it."""


class NackedError(Exception):
    """The broker nacked a message: it could not take it now."""


class MessageChannel:
    """One channel.

    Attributes:
        amqp: The channel of aiormq, for everything that this class lacks.
    """

    def __init__(self, amqp: Channel, wire: Wire) -> None:
        self.amqp: Final = amqp
        self._wire = wire
        self._number = amqp.number
        self._frame_max = amqp.connection.connection_tune.frame_max or _FRAME_MAX
        self._ended = False
        self._last = 0  # number of the last publish; confirms refer to it
        self._unconfirmed: dict[int, _Publish] = {}
        self._contents = Contents(wire, amqp.number)
        self._contents.on_return = self._was_returned
        self._contents.on_confirm = self._confirmed
        amqp.closing.add_done_callback(self._closed)

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent on it, as far as we know."""
        ended = self._ended or self._contents.is_over
        return not (ended or self._wire.is_lost or self.amqp.is_closed)

    @property
    def takes_now(self) -> bool:
        """Whether a message would be sent at once."""
        return self.is_open and self._wire.takes_messages

    # -- in ------------------------------------------------------------------------------

    def deliver_to(self, on_message: OnMessage, *, keep: int = MOST) -> None:
        """Call *on_message* for each delivery, in order; it must not block.

        A body of more than *keep* bytes is dropped, and only its size is reported.
        """
        self._contents.on_message = on_message
        self._contents.keep = keep

    def pause(self) -> None:
        """Stop reading from the connection until `resume`."""
        self._wire.hold(self)

    def resume(self) -> None:
        """Read again, unless another channel of the connection is paused."""
        self._wire.let_go(self)

    async def consume(self, queue: str, consumer_tag: str) -> None:
        """Start a consumer on a queue."""
        self._contents.consumers.add(consumer_tag)
        await self.amqp.basic_consume(queue, _never, consumer_tag=consumer_tag)

    async def cancel(self, consumer_tag: str) -> None:
        """Stop a consumer; earlier deliveries have all been passed on when this returns."""
        await self.amqp.basic_cancel(consumer_tag)

    @property
    def unfinished(self) -> object:
        """A value that changes with each part of an incomplete message; None if none is."""
        return self._contents.unfinished

    # -- settling ------------------------------------------------------------------------

    def ack(self, groups: Sequence[tuple[int, bool]]) -> None:
        """Send acks, each as (delivery tag, multiple); acks and nacks keep the order of calls."""
        if self.is_open:
            self._wire.send(
                b"".join([frames.ack(self._number, tag, multiple=many) for tag, many in groups])
            )

    def nack(self, tag: int, *, requeue: bool) -> None:
        """Give a delivery back, or have it dead-lettered."""
        if self.is_open:
            self._wire.send(frames.nack(self._number, tag, requeue=requeue))

    # -- publishing ----------------------------------------------------------------------

    def publish(
        self, exchange: str, key: str, message: Message, *, mandatory: bool
    ) -> asyncio.Future[Any]:
        """Send a persistent message; the future is done when the broker confirms it.

        The future fails with ReturnedError (no queue takes it), NackedError, an AMQPError of the
        channel, or DependencyError (the connection was lost). After the last two the message may
        have been delivered or not.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self.is_open:
            future.set_exception(_lost())
            return future
        self._wire.send_soon(
            frames.publish(
                self._number,
                exchange,
                key,
                _packed_properties(message),
                message.body,
                mandatory=mandatory,
                frame_max=self._frame_max,
            )
        )
        self._last += 1
        self._unconfirmed[self._last] = _Publish(future, key, message.body)
        return future

    async def wait_room(self) -> None:
        """Wait until the socket accepts more data."""
        await self._wire.wait_room()

    def _confirmed(self, number: int, multiple: bool, taken: bool) -> None:  # noqa: FBT001 - as it is read
        error = None if taken else NackedError()
        numbers = [number]
        if multiple:  # they are numbered in the order of the dictionary
            numbers = []
            for one in self._unconfirmed:
                if one > number:
                    break
                numbers.append(one)
        for one in numbers:
            publish = self._unconfirmed.pop(one, None)
            if publish is not None:
                publish.end(error)

    def _was_returned(self, key: str, body: bytes) -> None:
        """Fail the publish that the broker returned.

        A return does not carry the publish's number, and comes before its confirm. Among publishes
        with the same key and body it belongs to the first, even if nothing waits for that any more.
        """
        for publish in self._unconfirmed.values():
            if not publish.is_back and publish.key == key and publish.body == body:
                publish.is_back = True
                publish.end(ReturnedError())
                return

    async def abandon(self, why: AMQPError) -> None:
        """Close the channel; all unconfirmed publishes fail with *why*."""
        self._end(why)  # first, as a broker that confirms nothing may not answer a close either
        await close_channel(self.amqp, CLOSE_S, why)

    def _closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self._end(error if isinstance(error, AMQPError) else _lost())

    def _end(self, error: Exception) -> None:
        self._ended = True
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        for publish in unconfirmed.values():
            publish.end(error)


class _Publish:
    """A publish that waits for its confirm."""

    __slots__ = ("body", "future", "is_back", "key")

    def __init__(self, future: asyncio.Future[Any], key: str, body: bytes) -> None:
        self.future = future
        self.key = key
        self.body = body
        self.is_back = False

    def end(self, error: Exception | None) -> None:
        """Report the confirm, or the error, to the future."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


# -- parts --------------------------------------------------------------------------------


def _lost() -> DependencyError:
    return DependencyError("publish: the connection to the broker was lost")


def _expiration_ms(message: Message) -> int | None:
    expires = message.expires_in_s
    return None if expires is None or expires > _LONGEST_S else max(0, round(expires * 1000))


def _packed_properties(message: Message) -> bytes:
    if message.headers:
        return _packed(_expiration_ms(message), message.headers)
    return _packed_by_expiration(_expiration_ms(message))


@lru_cache(maxsize=256)
def _packed_by_expiration(expiration_ms: int | None) -> bytes:
    return _packed(expiration_ms, {})


def _packed(expiration_ms: int | None, headers: Mapping[str, str]) -> bytes:
    return frames.pack_properties(
        Basic.Properties(
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=_PERSISTENT,
            expiration=None if expiration_ms is None else str(expiration_ms),
            headers=dict(headers) or None,
        )
    )


async def _never(message: DeliveredMessage) -> None:
    """Never called: the tap takes all deliveries before aiormq sees them."""
