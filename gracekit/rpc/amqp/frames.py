"""The few frames that every message needs, parsed and packed without pamqp.

pamqp parses and packs any frame, in about 4 us each. A delivery is three frames, and so is a
reply; this module does all three in 2 us. Rare frames are left to pamqp.

A frame is type, channel, size, payload and an end (AMQP 0-9-1, 4.2.3). `offset` and `end`
below bound a payload.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import msgspec
from pamqp import decode, header
from pamqp.commands import Basic

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
END: Final = 0xCE
OVERHEAD: Final = 8
"""Bytes of a frame around its payload."""

DELIVER: Final = 60 << 16 | 60
RETURN: Final = 60 << 16 | 50
ACK: Final = 60 << 16 | 80
NACK: Final = 60 << 16 | 120
CANCEL: Final = 60 << 16 | 30
FLOW: Final = 20 << 16 | 20
CHANNEL_OPEN: Final = 20 << 16 | 10
CHANNEL_CLOSE: Final = 20 << 16 | 40
CHANNEL_CLOSE_OK: Final = 20 << 16 | 41
CONNECTION_CLOSE: Final = 10 << 16 | 50
CONNECTION_CLOSE_OK: Final = 10 << 16 | 51
TUNE: Final = 10 << 16 | 30
BLOCKED: Final = 10 << 16 | 60
UNBLOCKED: Final = 10 << 16 | 61
UNANSWERED: Final = frozenset(
    {20 << 16 | 21, *(60 << 16 | method for method in (31, 40, 80, 90, 120))}
)
"""No broker answers these: flow-ok, cancel-ok, publish, ack, reject, nack."""

HEAD: Final = struct.Struct(">BHI")
"""Type, channel, size of the payload."""
_END: Final = bytes([END])
HEARTBEAT: Final = HEAD.pack(8, 0, 0) + _END

METHOD_ID: Final = struct.Struct(">I")
_SETTLED: Final = struct.Struct(">QB")
_SETTLE: Final = struct.Struct(">BHIIQBB")
_PUBLISH: Final = struct.Struct(">IH")
_CONTENT: Final = struct.Struct(">BHIHHQ")
_SIZE: Final = struct.Struct(">Q")
_SETTLE_SIZE: Final = 13
HEADER_FIXED: Final = 12
"""Bytes of a content header before its properties."""
_MULTIPLE: Final = 1
_REQUEUE: Final = 2

_FLAGS: Final = struct.Struct(">H")
_UINT: Final = struct.Struct(">I")
_CONTENT_TYPE: Final = 1 << 15
_CONTENT_ENCODING: Final = 1 << 14
_HEADERS: Final = 1 << 13
_DELIVERY_MODE: Final = 1 << 12
_PRIORITY: Final = 1 << 11
_CORRELATION_ID: Final = 1 << 10
_REPLY_TO: Final = 1 << 9
_EXPIRATION: Final = 1 << 8
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Delivered(msgspec.Struct, gc=False):
    """The fields of a `Basic.Deliver`.

    Attributes:
        key: The routing key, which may be no UTF-8.
    """

    consumer_tag: str
    delivery_tag: int
    redelivered: bool
    key: bytes


class Properties(msgspec.Struct, gc=False):
    """The properties of one message that are used here.

    Attributes:
        expires_in_s: The expiration that the sender set, counted from its sending; how long the
            message has waited in the queue is not in it.
        headers: Those whose values are text.
        dropped: Size in bytes of a body that was too large to keep; otherwise 0.
    """

    expires_in_s: float | None = None
    headers: Mapping[str, str] = _NO_HEADERS
    dropped: int = 0


# -- read ---------------------------------------------------------------------------------


def read_deliver(data: bytes, offset: int, end: int) -> Delivered:
    """Parse a `Basic.Deliver`.

    Raises:
        ValueError: its fields do not end where the frame does.
    """
    start = offset + 5
    after = start + data[offset + 4]
    tag, redelivered = _SETTLED.unpack_from(data, after)
    exchange = after + 9
    key = exchange + 1 + data[exchange]
    if key + 1 + data[key] != end:
        raise ValueError("its fields do not fill it")
    return Delivered(data[start:after].decode(), tag, redelivered & 1 == 1, data[key + 1 : end])


def read_confirm(data: bytes, offset: int, end: int) -> tuple[int, bool]:
    """Delivery tag and `multiple` of a `Basic.Ack` or `Basic.Nack`.

    Raises:
        ValueError: its fields do not end where the frame does.
    """
    if end - offset != _SETTLE_SIZE:
        raise ValueError("its fields do not fill it")
    tag, bits = _SETTLED.unpack_from(data, offset + 4)
    return tag, bits & _MULTIPLE == 1


def read_returned_key(data: bytes, offset: int, end: int) -> str:
    """The routing key of a `Basic.Return`.

    Raises:
        ValueError: its fields do not end where the frame does.
    """
    at = offset + 6  # after the reply code
    for _ in range(2):  # the reply text and the exchange
        at += 1 + data[at]
    after = at + 1 + data[at]
    if after != end:
        raise ValueError("its fields do not fill it")
    return data[at + 1 : after].decode()


def read_close(data: bytes, offset: int) -> tuple[int, str]:
    """Code and text of a `Connection.Close`."""
    text = data[offset + 7 : offset + 7 + data[offset + 6]]  # the broker truncates it at 255 bytes
    return int.from_bytes(data[offset + 4 : offset + 6]), text.decode(errors="replace")


def read_frame_max(data: bytes, offset: int) -> int:
    """Bytes of the largest frame, from a `Connection.Tune`; 0 for no limit."""
    size: int = _UINT.unpack_from(data, offset + 6)[0]
    return size


def read_body_size(data: bytes, offset: int) -> int:
    """Bytes of the body that follows a content header."""
    size: int = _SIZE.unpack_from(data, offset + 4)[0]
    return size


def read_properties(data: bytes, offset: int, end: int) -> Properties:
    """The properties in a content header, as far as they are used here.

    RabbitMQ passes on properties that pamqp cannot parse, for example a time after the year 9999.
    An error here would end the connection at each redelivery of that message, so such a message
    is treated as one without properties.
    """
    try:
        return _read_properties(data, offset, end)
    except Exception:  # noqa: BLE001 - an error would recur at each redelivery
        return Properties(None, _NO_HEADERS)


def _read_properties(data: bytes, offset: int, end: int) -> Properties:
    """Parse properties, which come in the order of their flags, highest first (4.2.6.1)."""
    at = offset + HEADER_FIXED
    (flags,) = _FLAGS.unpack_from(data, at)
    if flags & 1:  # more flags follow, which no known client sends
        read = header.ContentHeader()
        read.unmarshal(data[offset:end])
        return properties_of(read.properties)
    at += 2
    if flags & _CONTENT_TYPE:
        at += 1 + data[at]
    if flags & _CONTENT_ENCODING:
        at += 1 + data[at]
    headers: Mapping[str, str] = _NO_HEADERS
    if flags & _HEADERS:
        after = _inside(at + 4 + _UINT.unpack_from(data, at)[0], end)
        if after > at + 4:
            headers = _texts(decode.field_table(data[at:after])[1])
        at = after
    if not flags & _EXPIRATION:
        return Properties(None, headers)
    at += (flags & _DELIVERY_MODE > 0) + (flags & _PRIORITY > 0)
    for text in (_CORRELATION_ID, _REPLY_TO):
        if flags & text:
            at += 1 + data[at]
    after = _inside(at + 1 + data[at], end)
    return Properties(_seconds(data[at + 1 : after].decode()), headers)


def _inside(at: int, end: int) -> int:
    if at > end:
        raise ValueError("it ends behind its frame")
    return at


def properties_of(read: Basic.Properties) -> Properties:
    """Convert pamqp's properties, as far as they are used here."""
    return Properties(_seconds(read.expiration), _texts(read.headers))


def _seconds(expiration: str | None) -> float | None:
    try:
        return None if expiration is None else max(0.0, int(expiration) / 1000)
    except ValueError:
        return None


def _texts(headers: Any) -> dict[str, str]:
    if not headers:
        return {}
    return {key: value for key, value in headers.items() if isinstance(value, str)}


# -- pack ---------------------------------------------------------------------------------


def ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    """A `Basic.Ack`."""
    return _SETTLE.pack(METHOD, channel, _SETTLE_SIZE, ACK, tag, multiple, END)


def nack(channel: int, tag: int, *, requeue: bool) -> bytes:
    """A `Basic.Nack` of one delivery."""
    return _SETTLE.pack(METHOD, channel, _SETTLE_SIZE, NACK, tag, _REQUEUE * requeue, END)


def publish(
    channel: int,
    exchange: str,
    key: str,
    properties: bytes,
    body: bytes,
    *,
    mandatory: bool,
    frame_max: int,
) -> bytes:
    """A `Basic.Publish` with its content: packed *properties*, frames of *frame_max* bytes."""
    method = _publish_frame(channel, exchange, key, mandatory)
    size = len(body)
    content = _CONTENT.pack(HEADER, channel, HEADER_FIXED + len(properties), 60, 0, size)
    most = frame_max - OVERHEAD
    if 0 < size <= most:
        head = HEAD.pack(BODY, channel, size)
        return b"%b%b%b\xce%b%b\xce" % (method, content, properties, head, body)
    bodies = [_frame(BODY, channel, body[at : at + most]) for at in range(0, size, most)]
    return b"".join([method, content, properties, _END, *bodies])


def pack_properties(properties: Basic.Properties) -> bytes:
    """The part of a content header that follows the body's size."""
    packed: bytes = header.ContentHeader(properties=properties).marshal()
    return packed[HEADER_FIXED:]


@lru_cache(maxsize=256)
def _publish_frame(channel: int, exchange: str, key: str, mandatory: bool) -> bytes:  # noqa: FBT001 - a cache takes no keywords for less
    method = [_PUBLISH.pack(60 << 16 | 40, 0), _short(exchange), _short(key), bytes([mandatory])]
    return _frame(METHOD, channel, b"".join(method))


def _short(text: str) -> bytes:
    raw = text.encode()
    return bytes([len(raw)]) + raw


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"%b%b\xce" % (HEAD.pack(kind, channel, len(payload)), payload)
