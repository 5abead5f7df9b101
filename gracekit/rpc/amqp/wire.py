"""One socket to the broker, shared by aiormq and gracekit.

aiormq reads each frame through a stream, a queue and a task, which is half of a message's cost
for a worker. So this module splits the incoming bytes into frames itself. The tap of a channel
takes the frames of messages directly; all others are passed on to aiormq, which manages the
connection and its channels. Both write whole frames only, so their output never mixes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, Protocol, cast

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from gracekit.rpc.amqp.frames import (
    BLOCKED,
    CHANNEL_CLOSE,
    CHANNEL_CLOSE_OK,
    CHANNEL_OPEN,
    CONNECTION_CLOSE,
    CONNECTION_CLOSE_OK,
    END,
    HEAD,
    HEARTBEAT,
    METHOD,
    METHOD_ID,
    OVERHEAD,
    TUNE,
    UNANSWERED,
    UNBLOCKED,
    read_close,
    read_frame_max,
)

CONNECT_S: Final = 10.0  # for each address of a host
LIFE_SIGN_S: Final = 1.0
"""Seconds between heartbeats that we feed to aiormq: it closes a connection on which it receives
nothing, even while we receive messages."""
MOST: Final = 1 << 29
"""Bytes of the largest message that any RabbitMQ accepts, and of the largest payload of a frame if
the broker sets no limit."""
_AT_FIRST: Final = (1 << 17) - OVERHEAD
"""Bytes of the largest payload until the broker announces its limit; RabbitMQ's default."""
_LEAST: Final = 4096
"""Bytes that each side must accept in one frame (AMQP 0-9-1, `frame-min-size`)."""
_BUFFER: Final = 1 << 16
"""Bytes of the read buffer, which is reused. asyncio would allocate 256 KiB for each read, which
glibc mostly maps and unmaps each time: 8 % of the cost of a cast."""
_CLOSE_OK: Final = METHOD_ID.pack(CHANNEL_CLOSE_OK)
_ENDS: Final = frozenset({CHANNEL_CLOSE, CHANNEL_CLOSE_OK, CONNECTION_CLOSE, CONNECTION_CLOSE_OK})


class FaultError(Exception):
    """The broker violated the protocol, so no data of the connection can be trusted any more."""


class CloseReason(NamedTuple):
    """The code and text of a broker's `Connection.Close`, which aiormq does not always report."""

    code: int
    text: str


class Tap(Protocol):
    """Takes the frames of one channel that it handles, before aiormq."""

    def take(self, kind: int, data: bytes, offset: int, end: int) -> bool:
        """Handle one frame, whose payload lies between *offset* and *end*; must not block.

        Returns:
            True if the frame is done with, False to pass it to aiormq.

        Raises:
            FaultError: such a frame must not come now.
        """
        ...

    def ask(self, method: int) -> None:
        """Note that aiormq sends *method*, which the broker will answer."""
        ...

    def end(self) -> None:
        """Note that aiormq closes the channel: a later frame on it would end the connection."""
        ...


class Wire(asyncio.BufferedProtocol):
    """Splits the bytes of one socket into frames.

    It has aiormq's protocol, and is none itself: uvloop does not ask an `asyncio.Protocol` for a
    buffer, and would pass all bytes to aiormq.

    Attributes:
        stream: The protocol of aiormq's streams.
        is_lost: Whether the connection has ended, so that nothing can be sent.
        heard_at: Loop time at which the last bytes arrived.
        goodbye: Why the broker closed the connection; None if it did not.
        read_since: Loop time at which reading began or was resumed; None while it is paused.
        missing: At least so many bytes are missing of a frame that has arrived in part.
        is_foreign: Whether the first bytes that arrived are no frame: the peer does not speak AMQP.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.stream: Final = asyncio.StreamReaderProtocol(reader)
        self.is_lost = False
        self.goodbye: CloseReason | None = None
        self._event_loop = asyncio.get_running_loop()
        self.heard_at = self._event_loop.time()
        self.read_since: float | None = self.heard_at
        self._socket: asyncio.Transport | None = None
        self._taps: dict[int, Tap] = {0: self}
        self._open: set[int] = set()  # numbers of open channels
        self._shut: set[int] = set()  # numbers of channels that we have closed
        self._largest = _AT_FIRST  # bytes of a payload
        self._fault: ConnectionError | None = None
        self._buffer = memoryview(bytearray(_BUFFER))
        self._come: list[bytes] = []  # pieces of a frame that has arrived in part
        self.missing = 0
        self._is_garbled = False
        self.is_foreign = False
        self._is_blocked = False
        self._holders: set[object] = set()
        self._sign: asyncio.TimerHandle | None = None
        self._passed_at = 0.0
        self._waiting: list[bytes] = []  # to be sent
        self._room = asyncio.Event()
        self._room.set()

    def tap(self, channel: int, tap: Tap | None) -> None:
        """From now on pass the frames of *channel* to *tap* first; None removes its tap."""
        if tap is None:
            self._taps.pop(channel, None)
            self._open.discard(channel)
        else:
            self._taps[channel] = tap

    def abort(self) -> None:
        """Close the socket at once, dropping unsent data."""
        if self._socket is not None:
            self._socket.abort()

    # -- in ------------------------------------------------------------------------------

    def hold(self, holder: object) -> None:
        """Stop reading until *holder* calls `let_go`; TCP flow control then stops the broker."""
        self._holders.add(holder)
        if self._socket is not None and not self.is_lost and not self._socket.is_closing():
            self._socket.pause_reading()
            self.read_since = None
            if self._sign is None:
                self._sign_of_life()

    def let_go(self, holder: object) -> None:
        """Read again, unless there are other holders."""
        self._holders.discard(holder)
        if self._sign is not None and not self._holders:
            self._sign.cancel()
            self._sign = None
            self.read_since = self._event_loop.time()
            if self._socket is not None and not self._socket.is_closing():
                self._socket.resume_reading()

    def _sign_of_life(self) -> None:
        """While reading is paused, feed heartbeats to aiormq, lest it close the connection."""
        self._sign = self._event_loop.call_later(LIFE_SIGN_S, self._sign_of_life)
        self._pass(HEARTBEAT)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._socket = cast(asyncio.Transport, transport)  # uvloop's is of another class
        self.stream.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_lost = True
        self._room.set()
        if self._sign is not None:
            self._sign.cancel()
        self.stream.connection_lost(self._fault or exc)

    def eof_received(self) -> bool | None:
        """See `asyncio.Protocol`."""
        return self.stream.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - as asyncio calls it
        """See `asyncio.BufferedProtocol`."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.heard_at = self._event_loop.time()
        data = bytes(self._buffer[:nbytes])
        if self._is_garbled:
            self.stream.data_received(data)
            return
        self._come.append(data)
        self.missing -= nbytes
        if self.missing <= 0 and self._fault is None:
            data = b"".join(self._come)
            try:
                rest = data[self._cut(data) :]
            except FaultError as fault:
                self._fail(fault)
                rest = b""
            self._come = [rest] if rest else []

    def _fail(self, fault: FaultError) -> None:
        """Abort the connection: read nothing more, and send no acks for earlier deliveries."""
        self._fault = ConnectionError(f"the broker broke the protocol: {fault}")
        self.end()
        self.abort()

    def _cut(self, data: bytes) -> int:
        """Dispatch the complete frames in *data*; return the offset of the incomplete rest.

        Raises:
            FaultError: a frame must not come now.
        """
        self.missing = 0
        at = passed = 0  # the bytes between them are for aiormq
        whole = len(data)
        while whole - at >= OVERHEAD:
            kind, channel, size = HEAD.unpack_from(data, at)
            end = at + size + OVERHEAD
            if end > whole and size <= self._largest:
                self.missing = end - whole
                break
            if size > self._largest or data[end - 1] != END:
                self._is_garbled = True  # aiormq gets the rest, and reports the error
                self.is_foreign = not (at or self._passed_at)
                self.end()
                self.abort()  # it must not wait for more
                at = whole
                break
            tap = self._taps.get(channel)
            if tap is None:
                self._check_open(channel, data, at + 7)
            elif tap.take(kind, data, at + 7, end - 1):
                if passed < at:
                    self._pass(data[passed:at])
                passed = end
            at = end
        if passed < at:
            self._pass(data[passed:at])
        elif at and self._event_loop.time() - self._passed_at > LIFE_SIGN_S:
            self._pass(HEARTBEAT)
        return at

    def _check_open(self, channel: int, data: bytes, offset: int) -> None:
        """Refuse a frame for a channel that is not open: it may belong to another channel."""
        is_close_ok = data[offset : offset + 4] == _CLOSE_OK  # two closes may have crossed
        if channel not in self._open and not is_close_ok:
            raise FaultError(f"a frame for channel {channel}, which is not open")
        if is_close_ok:
            self._open.discard(channel)

    def _pass(self, frames: bytes) -> None:
        self._passed_at = self._event_loop.time()
        self.stream.data_received(frames)

    def take(self, kind: int, data: bytes, offset: int, end: int) -> bool:  # noqa: ARG002 - as any tap
        """Handle channel 0: note blocks, the close and the frame size; aiormq gets them too."""
        if kind != METHOD:
            return False
        try:
            (method,) = METHOD_ID.unpack_from(data, offset)
            if method in {BLOCKED, UNBLOCKED}:
                self._is_blocked = method == BLOCKED
            elif method == CONNECTION_CLOSE:
                self.goodbye = CloseReason(*read_close(data, offset))
            elif method == TUNE:
                self._tune(read_frame_max(data, offset))
        except (struct.error, IndexError) as error:
            raise FaultError(f"a method that cannot be read ({error})") from None
        return False

    def _tune(self, frame_max: int) -> None:
        if 0 < frame_max < _LEAST:
            raise FaultError(
                f"its frame_max is {frame_max} bytes, and the least in AMQP is {_LEAST}"
            )
        self._largest = frame_max - OVERHEAD if frame_max else MOST

    # -- out -----------------------------------------------------------------------------

    def send(self, frames: bytes) -> None:
        """Send at once, after frames that already wait."""
        self._waiting.append(frames)
        self.flush()

    def send_soon(self, frames: bytes) -> None:
        """Send together with all other frames of this iteration of the loop, in one write."""
        if not self._waiting:
            self._event_loop.call_soon(self.flush)
        self._waiting.append(frames)

    def flush(self) -> None:
        """Send the waiting frames."""
        if self._waiting:
            frames, self._waiting = self._waiting, []
            if self._socket is not None and not self.is_lost and not self._socket.is_closing():
                self._socket.write(b"".join(frames))

    def heed(self, frames: bytes | bytearray | memoryview) -> bool:
        """Inspect a frame that aiormq sends, and notify the tap of its channel.

        Returns:
            Whether to send it. aiormq repeats the close of a channel if no answer comes within a
            heartbeat; the broker, which has closed it already, would close the connection for
            that.
        """
        kind, channel, _ = HEAD.unpack_from(frames)
        if kind != METHOD:
            return True
        (method,) = METHOD_ID.unpack_from(frames, 7)
        if method == CHANNEL_OPEN:
            self._open.add(channel)
            self._shut.discard(channel)
        elif method == CHANNEL_CLOSE:
            if channel in self._shut:
                return False
            self._shut.add(channel)
        elif method == CHANNEL_CLOSE_OK:
            self._open.discard(channel)
        tap = self._taps.get(channel)
        if tap is None:
            return True
        if method in _ENDS:
            tap.end()
        elif method not in UNANSWERED:
            tap.ask(method)
        return True

    def ask(self, method: int) -> None:
        """See `Tap`; does nothing, as answers on channel 0 are not checked."""

    def end(self) -> None:
        """See `Tap`; the connection is being closed, so nothing more may be sent."""
        self.is_lost = True
        self._room.set()

    @property
    def takes_messages(self) -> bool:
        """Whether no alarm blocks publishers, and the socket has room."""
        return not self._is_blocked and self._room.is_set()

    async def wait_room(self) -> None:
        """Wait until the socket's buffer has room; returns at once if the connection is lost."""
        await self._room.wait()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._room.clear()
        self.stream.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._room.set()
        self.stream.resume_writing()


class WireFactory(TransportFactory):
    """Makes the socket of one aiormq connection.

    Attributes:
        wire: The socket; None before `create`.
    """

    def __init__(self) -> None:
        self.wire: Wire | None = None

    @property
    def goodbye(self) -> CloseReason | None:
        """Why the broker closed the connection; None if it did not."""
        return None if self.wire is None else self.wire.goodbye

    @property
    def is_foreign(self) -> bool:
        """See `Wire.is_foreign`."""
        return self.wire is not None and self.wire.is_foreign

    def abort(self) -> None:
        """See `Wire.abort`."""
        if self.wire is not None:
            self.wire.abort()

    async def create(
        self, url: URL, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `TransportFactory`."""
        provider, host = options["ssl_context_provider"], str(url.host)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        wire = Wire(reader)
        try:
            tls = await provider.get_context() if url.scheme == "amqps" else None
            made, name = await _connected(host, int(url.port or 0)), host if tls else None
            transport, _ = await loop.create_connection(
                lambda: wire, sock=made, ssl=tls, server_hostname=name
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self.wire = wire
        return reader, _Writer(transport, wire, reader, loop)


async def _connected(host: str, port: int) -> socket.socket:
    """Connect in a thread: asyncio resolves names in the application's, the default executor."""
    made: Future[socket.socket] = Future()
    made.set_running_or_notify_cancel()  # so that a cancelled wait does not break the thread

    def connect() -> None:
        try:
            made.set_result(socket.create_connection((host, port), CONNECT_S))
        except Exception as error:  # noqa: BLE001 - raised by the wait
            made.set_exception(error)

    threading.Thread(target=connect, name="gracekit-connect", daemon=True).start()
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        made.add_done_callback(_close)
        raise


def _close(made: Future[socket.socket]) -> None:
    """Close what was connected for nobody."""
    if made.exception() is None:
        made.result().close()


class _Writer(asyncio.StreamWriter):
    """aiormq's writer; it sends our own waiting frames first."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        wire: Wire,
        reader: asyncio.StreamReader,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(transport, wire.stream, reader, loop)
        self._wire = wire

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.StreamWriter`."""
        self._wire.flush()
        if self._wire.heed(data):
            super().write(data)
