"""Assemble messages from the frames of one channel, and check that each frame is the expected one.

One of our acks may cover all deliveries up to its tag, so it could cover a delivery that we never
saw. To exclude that, every frame is checked: delivery tags rise by one, a message is a method, a
header and exactly the announced number of bytes, and each answer belongs to a request. After
any other frame the connection is cut, and the broker redelivers everything unacknowledged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from gracekit.rpc.amqp import frames
from gracekit.rpc.amqp.frames import BODY, HEADER, METHOD, Delivered, Properties
from gracekit.rpc.amqp.wire import MOST, FaultError, Wire

OnMessage = Callable[[Delivered, Properties, bytes], None]
OnReturn = Callable[[str, bytes], None]
OnConfirm = Callable[[int, bool, bool], None]

_UNREADABLE: Final = (struct.error, IndexError, ValueError)


class Contents:
    """The frames of one channel, see `Tap`.

    Args:
        wire: The socket that the frames come from.
        channel: Number of the channel.

    Attributes:
        on_message: Called for each delivery, in order.
        on_return: Called with routing key and body of a message that the broker returned.
        on_confirm: Called with number, `multiple`, and True for an ack, False for a nack.
        keep: Largest body in bytes that is kept; the frames of a larger body are dropped as they
            arrive.
        consumers: The consumer tags of this channel; no delivery may name another.
        is_over: Either side is closing the channel; later deliveries are dropped.
    """

    def __init__(self, wire: Wire, channel: int) -> None:
        self.on_message: OnMessage = _drop
        self.on_return: OnReturn = _drop
        self.on_confirm: OnConfirm = _drop
        self.keep = MOST
        self.consumers: set[str] = set()
        self.is_over = False
        self._wire = wire
        self._channel = channel
        self._due = METHOD  # the expected kind of the next frame
        self._last = 0  # delivery tag
        self._answer = 0  # the method that answers aiormq's last request
        # State of an incomplete message; `_delivered` is None for a returned message.
        self._delivered: Delivered | None = None
        self._returned = ""
        self._properties = Properties()
        self._missing = 0  # bytes
        self._is_first = False  # the body is to be kept, and no frame of it has come
        self._pieces: list[bytes] = []
        wire.tap(channel, self)

    @property
    def unfinished(self) -> object:
        """See `MessageChannel.unfinished`; also None while reading is paused.

        After a pause the value differs even without a new byte, as data that was sent meanwhile
        is still on its way: a message is not stalled only because we did not read.
        """
        read_since = self._wire.read_since
        if self._due == METHOD or read_since is None:
            return None
        return self._last, self._due, self._missing, self._wire.missing, read_since

    def take(self, kind: int, data: bytes, offset: int, end: int) -> bool:
        """See `Tap`.

        Raises:
            FaultError: another frame was expected.
        """
        if kind != self._due:
            return self._take_unexpected(kind, data, offset)
        if kind == METHOD:
            return self._take_method(data, offset, end)
        if kind == HEADER:
            self._take_header(data, offset, end)
        elif end - offset == self._missing and self._is_first:  # nearly all come in one piece
            self._complete(data[offset:end])
        else:
            self._take_piece(data, offset, end)
        return True

    def end(self) -> None:
        """See `Tap`."""
        self.is_over = True

    def ask(self, method: int) -> None:
        """See `Tap`."""
        self._answer = method + 1

    # -- methods -------------------------------------------------------------------------

    def _take_method(self, data: bytes, offset: int, end: int) -> bool:
        try:
            (method,) = frames.METHOD_ID.unpack_from(data, offset)
            if method == frames.DELIVER:
                self._delivered = delivered = frames.read_deliver(data, offset, end)
                if delivered.delivery_tag != self._last + 1 or (
                    delivered.consumer_tag not in self.consumers
                ):
                    raise self._fault_of(delivered)
                self._last += 1
                self._due = HEADER
            elif method in _CONFIRMS:
                self._check_publishing()
                number, multiple = frames.read_confirm(data, offset, end)
                self.on_confirm(number, multiple, method == frames.ACK)
            elif method == frames.RETURN:
                self._check_publishing()
                self._returned = frames.read_returned_key(data, offset, end)
                self._due = HEADER
            else:
                return self._take_rare(method)
        except _UNREADABLE as error:
            raise FaultError(f"a method that cannot be read ({error})") from None
        return True

    def _fault_of(self, delivered: Delivered) -> FaultError:
        if delivered.consumer_tag not in self.consumers:
            return FaultError(f"a delivery for {delivered.consumer_tag!r}, which reads nothing")
        return FaultError(
            f"delivery {delivered.delivery_tag} after delivery {self._last} of a channel"
        )

    def _check_publishing(self) -> None:
        if self.consumers:
            raise FaultError("a confirm or a return on a channel that publishes nothing")

    def _take_rare(self, method: int) -> bool:
        """Check a method that aiormq handles: a close, an answer, or a notice of the broker."""
        if method == frames.CHANNEL_CLOSE or (method == frames.CHANNEL_CLOSE_OK and self.is_over):
            self.is_over = True
            self._wire.tap(self._channel, None)  # aiormq may soon reuse the number
        elif method == self._answer:
            self._answer = 0
        elif method not in _UNASKED:
            raise FaultError(f"method {method >> 16}.{method & 0xFFFF}, which answers no request")
        return False

    def _take_unexpected(self, kind: int, data: bytes, offset: int) -> bool:
        """Check a frame of an unexpected kind: only a channel may be closed inside a message."""
        if kind == METHOD and data[offset : offset + 4] in _CLOSES:
            return self._take_rare(frames.METHOD_ID.unpack_from(data, offset)[0])
        raise FaultError(f"a frame of type {kind} where one of type {self._due} is due")

    # -- messages ------------------------------------------------------------------------

    def _take_header(self, data: bytes, offset: int, end: int) -> None:
        if end - offset < frames.HEADER_FIXED:
            raise FaultError("a header without a size")
        self._missing = size = frames.read_body_size(data, offset)
        self._properties = frames.read_properties(data, offset, end)
        self._due = BODY
        self._is_first = size <= self.keep
        if not self._is_first:
            self._properties.dropped = size
        if size == 0:
            self._complete(b"")

    def _take_piece(self, data: bytes, offset: int, end: int) -> None:
        size = end - offset
        if size > self._missing:
            raise FaultError(f"a piece of {size} bytes where {self._missing} of a body are missing")
        self._missing -= size
        self._is_first = False
        if not self._properties.dropped:
            self._pieces.append(data[offset:end])
        if not self._missing:
            body, self._pieces = b"".join(self._pieces), []
            self._complete(body)

    def _complete(self, body: bytes) -> None:
        self._due = METHOD
        delivered, self._delivered = self._delivered, None
        if delivered is None:
            self.on_return(self._returned, body)
        elif not self.is_over:  # otherwise drop it: the broker requeues it
            self.on_message(delivered, self._properties, body)


_CONFIRMS: Final = frozenset({frames.ACK, frames.NACK})
_UNASKED: Final = frozenset({frames.CANCEL, frames.FLOW})
_CLOSES: Final = frozenset(
    frames.METHOD_ID.pack(method) for method in (frames.CHANNEL_CLOSE, frames.CHANNEL_CLOSE_OK)
)


def _drop(*_: object) -> None:
    """The callback until another is set; drops everything."""
