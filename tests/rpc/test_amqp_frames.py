"""Frames of our own beside pamqp's: both read what the other writes, however the bytes come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat
from yarl import URL

from gracekit.rpc.amqp import frames
from gracekit.rpc.amqp.wire import LIFE_SIGN_S, Wire, WireFactory
from tests.loops import LOOPS

Basic = commands.Basic

names = st.text(max_size=60)
exchanges = st.text("abcXYZ019._-:", max_size=60)  # pamqp takes no others
tags = st.integers(1, 2**63 - 1)
channels = st.integers(1, 65535)


def payload(frame: Any) -> bytes:
    """What `frames` calls data, with its payload from 7 on."""
    return pamqp.frame.marshal(frame, 1)


# -- one frame ----------------------------------------------------------------------------


@given(names, tags, st.booleans(), exchanges, names)
def test_a_delivery_is_read_as_it_was_written(consumer, tag, redelivered, exchange, key):
    """The tag that is settled later must be the one that the broker means."""
    written = payload(Basic.Deliver(consumer, tag, redelivered, exchange, key))

    assert frames.read_deliver(written, 7, len(written) - 1) == frames.Delivered(
        consumer, tag, redelivered, key.encode()
    )


@given(tags, st.booleans(), st.sampled_from([Basic.Ack, Basic.Nack]))
def test_a_confirm_is_read_as_it_was_written(tag, multiple, kind):
    """One confirm may stand for many publishes."""
    written = payload(kind(tag, multiple))

    assert frames.read_confirm(written, 7, len(written) - 1) == (tag, multiple)


@given(names, exchanges, names)
def test_a_return_names_its_routing_key(text, exchange, key):
    """By it and the body the publish is found."""
    written = payload(Basic.Return(312, text, exchange, key))

    assert frames.read_returned_key(written, 7, len(written) - 1) == key


METHODS = st.sampled_from(
    [
        (Basic.Deliver("1", 5, False, "x", "y"), frames.read_deliver),
        (Basic.Ack(5, True), frames.read_confirm),
        (Basic.Return(312, "NO_ROUTE", "x", "y"), frames.read_returned_key),
    ]
)


@given(METHODS, st.integers(-30, 30).filter(bool))
def test_a_method_is_read_inside_its_frame(method, more):
    """Beside it lies the next frame, whose bytes are not its own."""
    written, read = payload(method[0]), method[1]

    with pytest.raises((ValueError, IndexError)):
        read(written + written, 7, len(written) - 1 + more)


properties = st.builds(
    Basic.Properties,
    content_type=st.none() | names,
    content_encoding=st.none() | names,
    headers=st.none()
    | st.dictionaries(st.text(min_size=1, max_size=20), names | st.integers(0, 2**31)),
    delivery_mode=st.none() | st.sampled_from([1, 2]),
    priority=st.none() | st.integers(0, 9),
    correlation_id=st.none() | names,
    reply_to=st.none() | names,
    expiration=st.none() | st.integers(0, 10**9).map(str) | st.just("soon"),
    message_id=st.none() | names,
)


@given(properties, st.integers(0, 2**40))
def test_a_header_says_size_patience_and_texts(written, size):
    """Headers of other kinds are not ours, and an odd expiration is none."""
    header = payload(ContentHeader(body_size=size, properties=written))

    read = frames.read_properties(header, 7, len(header) - 1)

    assert frames.read_body_size(header, 7) == size
    texts = {key: text for key, text in (written.headers or {}).items() if isinstance(text, str)}
    assert read.headers == texts
    known = written.expiration is not None and written.expiration.isdecimal()
    assert read.expires_in_s == (int(written.expiration) / 1000 if known else None)


@given(channels, tags, st.booleans())
def test_settlements_are_what_pamqp_reads(channel, tag, yes):
    """A wrong bit here gives a message up, or holds it for ever."""
    _, on, ack = pamqp.frame.unmarshal(frames.ack(channel, tag, multiple=yes))
    assert (on, ack.delivery_tag, ack.multiple) == (channel, tag, yes)
    _, on, nack = pamqp.frame.unmarshal(frames.nack(channel, tag, requeue=yes))
    assert (on, nack.delivery_tag, nack.requeue, nack.multiple) == (channel, tag, yes, False)


@given(exchanges, names, st.binary(max_size=300), st.booleans(), properties)
def test_a_publish_is_what_pamqp_reads(exchange, key, body, mandatory, written):
    """Method, header and as many bodies as the largest frame asks for; none for an empty one."""
    packed = frames.publish(
        3,
        exchange,
        key,
        frames.pack_properties(written),
        body,
        mandatory=mandatory,
        frame_max=64,
    )

    method, header, *bodies = read_all(packed)
    assert (method.exchange, method.routing_key, method.mandatory) == (exchange, key, mandatory)
    assert header.body_size == len(body)
    assert (header.properties.headers or None) == (written.headers or None)
    assert b"".join(one.value for one in bodies) == body
    assert all(0 < len(one.value) <= 64 - frames.OVERHEAD for one in bodies)


@pytest.mark.parametrize(
    "field",
    [
        b"\x01\xffS\x00\x00\x00\x01a",
        b"\x01aT" + (1 << 63).to_bytes(8),
        b"\x01a?",
        b"\x01aF\x00\x00\x00\x09",
    ],
    ids=["name that is no text", "time after the last year", "unknown kind", "table with no end"],
)
def test_a_header_that_cannot_be_read_costs_its_properties_alone(field):
    """The broker lets some of them pass: the connection would end again at each new delivery."""
    fields = len(field).to_bytes(4) + field
    header = payload(ContentHeader(body_size=3)).removesuffix(b"\x00\x00\xce")
    header += b"\x20\x00" + fields + b"\xce"

    assert frames.read_properties(header, 7, len(header) - 1) == frames.Properties(None, {})
    assert frames.read_body_size(header, 7) == 3


def test_a_farewell_that_is_cut_in_a_letter_is_read():
    """A broker cuts its reason to 255 bytes, be it in the midst of the name of a vhost."""
    text = ("NOT_ALLOWED - vhost x" + "ü" * 127).encode()[:252] + b"..."
    written = bytearray(payload(commands.Connection.Close(530, "?" * 255, 0, 0)))
    written[14 : 14 + 255] = text

    code, read = frames.read_close(bytes(written), 7)

    assert code == 530
    assert read.startswith("NOT_ALLOWED - vhost xüü")
    assert read.endswith("ü\ufffd...")


def read_all(data: bytes) -> list[Any]:
    found = []
    while data:
        size, _, frame = pamqp.frame.unmarshal(data)
        found.append(frame)
        data = data[size:]
    return found


# -- a stream of them ---------------------------------------------------------------------


class Noting:
    """A tap that takes methods and contents of its channel, but no closes."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def take(self, kind: int, data: bytes, offset: int, end: int) -> bool:
        wanted = data[offset : offset + 4] != b"\x00\x14\x00\x28"
        if wanted:
            self.taken.append(bytes([kind]) + data[offset:end])
        return wanted

    def ask(self, method: int) -> None:
        self.taken.append(b"ask")

    def end(self) -> None:
        self.taken.append(b"end")


FRAMES = st.sampled_from(
    [
        (channel, frame)
        for channel in (1, 2)
        for frame in (
            Basic.Deliver("1", 5, False, "x", "y"),
            ContentHeader(body_size=3, properties=Basic.Properties(headers={"a": "b"})),
            ContentBody(b"abc"),
            ContentBody(b"\xce" * 40),
            commands.Channel.Close(404, "no", 0, 0),
            commands.Queue.DeclareOk("q", 0, 0),
        )
    ]
    + [(0, Heartbeat()), (0, commands.Connection.Blocked("memory"))]
)


@given(st.lists(FRAMES, max_size=12), st.lists(st.integers(1, 200), max_size=30))
def test_each_frame_goes_to_one_place_however_the_bytes_are_cut(sent, cuts):
    """What the tapped channel wants comes there whole and in order; all else reaches aiormq as
    sent.
    """

    async def play() -> None:
        reader = asyncio.StreamReader()
        wire, tap = Wire(reader), Noting()
        wire.heed(pamqp.frame.marshal(commands.Channel.Open(), 1))
        wire.tap(2, tap)
        data = b"".join(pamqp.frame.marshal(frame, channel) for channel, frame in sent)
        for piece in pieces(data, cuts):
            feed(wire, piece)
        reader.feed_eof()
        passed = [frame for frame in read_all(await reader.read()) if not is_life_sign(frame)]

        closes = commands.Channel.Close
        ours = [f for channel, f in sent if channel == 2 and not isinstance(f, closes)]
        others = [f for channel, f in sent if channel != 2 or isinstance(f, closes)]
        assert len(tap.taken) == len(ours)
        for taken, frame in zip(tap.taken, ours, strict=True):
            marshalled = pamqp.frame.marshal(frame, 2)
            assert taken == marshalled[:1] + marshalled[7:-1]
        assert [type(one) for one in passed] == [
            type(one) for one in others if not is_life_sign(one)
        ]

    asyncio.run(play())


def feed(wire: Wire, data: bytes) -> None:
    """As a socket does: into the wire's buffer, as much as it takes at a time."""
    while data:
        buffer = wire.get_buffer(-1)
        now, data = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(now)] = now
        wire.buffer_updated(len(now))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    found = []
    for cut in cuts:
        found.append(data[:cut])
        data = data[cut:]
    return [piece for piece in (*found, data) if piece]


def is_life_sign(frame: Any) -> bool:
    return isinstance(frame, Heartbeat)


async def test_who_reads_only_deliveries_is_not_taken_for_stuck(looptime):
    """aiormq cuts a connection that brings it nothing for long; a busy broker sends no
    heartbeats.
    """
    reader = asyncio.StreamReader()
    wire = Wire(reader)
    wire.tap(2, Noting())
    delivery = pamqp.frame.marshal(Basic.Deliver("1", 5, False, "x", "y"), 2)
    for _ in range(10):
        await asyncio.sleep(LIFE_SIGN_S + 0.1)
        feed(wire, delivery)
        feed(wire, delivery)
    reader.feed_eof()
    signs = len(read_all(await reader.read()))

    assert signs == 10


@pytest.mark.parametrize(
    "garbage",
    [
        b"AMQP\x00\x00\x09\x01",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x01\x00\x01\x00\x00\x00\x01xy",
    ],
    ids=["other version", "no broker", "no end"],
)
async def test_what_is_no_frame_is_left_to_aiormq(garbage):
    """It ends the connection with its own error, and nothing waits for bytes that never come."""
    reader = asyncio.StreamReader()
    wire = Wire(reader)
    feed(wire, garbage)
    feed(wire, b"more")
    reader.feed_eof()

    assert await reader.read() == garbage + b"more"


async def test_a_frame_in_pieces_is_not_taken_for_a_silence():
    """A sign of life before the greeting would be an answer that aiormq does not expect."""
    reader = asyncio.StreamReader()
    wire = Wire(reader)
    greeting = pamqp.frame.marshal(commands.Connection.Start(0, 9, {}, "PLAIN", "en_US"), 0)
    for byte in greeting:
        feed(wire, bytes([byte]))
    reader.feed_eof()

    assert await reader.read() == greeting


async def test_a_frame_as_large_as_a_message_may_be_is_taken():
    """A broker whose frames have no bound sends a body in one."""
    wire, tap = Wire(asyncio.StreamReader()), Noting()
    wire.tap(2, tap)
    feed(wire, pamqp.frame.marshal(commands.Connection.Tune(0, 0, 0), 0))
    body = bytes(17 << 20)
    feed(wire, pamqp.frame.marshal(ContentBody(body), 2))

    assert tap.taken == [bytes([frames.BODY]) + body]


async def test_a_frame_is_no_longer_than_was_agreed():
    """One wrong bit in a size, and a reader would wait for half a gigabyte that never comes."""
    reader = asyncio.StreamReader()
    wire, tap = Wire(reader), Noting()
    wire.tap(2, tap)
    feed(wire, pamqp.frame.marshal(commands.Connection.Tune(0, 4096, 0), 0))
    feed(wire, pamqp.frame.marshal(ContentBody(bytes(4096 - frames.OVERHEAD)), 2))
    longer = pamqp.frame.marshal(ContentBody(bytes(4097 - frames.OVERHEAD)), 2)
    feed(wire, longer[:8])

    assert len(tap.taken) == 1
    assert wire.is_lost


@pytest.mark.parametrize("frame_max", [7, 8, 4095])
async def test_a_broker_that_takes_less_than_amqp_asks_for_is_refused(peer, frame_max):
    """With frames of 8 bytes there is no room for a body: it would be dropped without a word."""
    wires = WireFactory()
    reader, writer = await wires.create(peer.url, ssl_context_provider=None)
    tune = pamqp.frame.marshal(commands.Connection.Tune(0, frame_max, 0), 0)

    assert await peer.say(tune) == b""
    with pytest.raises(ConnectionError, match=f"frame_max is {frame_max} bytes"):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("channel", [1, 3])
async def test_a_frame_for_a_channel_that_is_not_open_ends_the_connection(channel):
    """It is missing on the channel that it was meant for."""
    wire = Wire(asyncio.StreamReader())
    open_, close = commands.Channel.Open(), commands.Channel.CloseOk()
    wire.heed(pamqp.frame.marshal(open_, 1))
    wire.heed(pamqp.frame.marshal(open_, 2))
    feed(wire, pamqp.frame.marshal(commands.Channel.OpenOk(), 1))
    feed(wire, pamqp.frame.marshal(commands.Channel.OpenOk(), 2))
    feed(wire, pamqp.frame.marshal(close, 1))
    feed(wire, pamqp.frame.marshal(close, 1))  # of two closes that met on their way
    assert not wire.is_lost

    feed(wire, pamqp.frame.marshal(Basic.Cancel("1"), channel))

    assert wire.is_lost


CLOSES = commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk()


@pytest.mark.parametrize("frame", CLOSES, ids=["close", "close-ok"])
async def test_a_tap_hears_of_the_end_before_aiormq_sends_it(peer, frame):
    """What it sent before goes before; what it sent later would cost the whole connection."""
    wires = WireFactory()
    _, writer = await wires.create(peer.url, ssl_context_provider=None)
    wire, taps = wires.wire, [Noting(), Noting()]
    assert wire is not None
    for channel, tap in enumerate(taps, 1):
        wire.tap(channel, tap)
    ack = frames.ack(2, 7, multiple=False)
    wire.send_soon(ack)
    writer.write(pamqp.frame.marshal(commands.Queue.Purge(0, "q"), 2))
    writer.write(pamqp.frame.marshal(frame, 2))

    assert [tap.taken for tap in taps] == [[], [b"ask", b"end"]]
    writer.close()
    names = [type(one).__name__ for one in read_all(await peer.heard())]
    assert names == ["Ack", "Purge", type(frame).__name__]


async def test_what_comes_behind_the_end_of_a_connection_is_dropped(peer):
    """aiormq closes the socket while acks and replies are about to leave: nobody may fail of it."""
    wires = WireFactory()
    _, writer = await wires.create(peer.url, ssl_context_provider=None)
    wire = wires.wire
    assert wire is not None
    writer.write_eof()
    writer.close()
    wire.send(frames.ack(2, 7, multiple=False))

    assert await peer.heard() == b""


async def test_who_waits_for_room_does_not_wait_for_a_connection_that_ends(peer):
    """aiormq may wait for half a minute until its farewell has left."""
    wires = WireFactory()
    _, writer = await wires.create(peer.url, ssl_context_provider=None)
    wire = wires.wire
    assert wire is not None
    wire.pause_writing()
    writer.write(pamqp.frame.marshal(commands.Connection.Close(200, "", 0, 0), 0))

    await asyncio.wait_for(wire.wait_room(), 1)
    assert wire.is_lost
    writer.close()
    await peer.heard()


async def test_a_connection_that_brings_garbage_ends_at_once(peer):
    """aiormq would wait for the bytes that it takes to be announced, as long as the peer stays."""
    wires = WireFactory()
    reader, writer = await wires.create(peer.url, ssl_context_provider=None)
    garbage = b"HTTP/1.1 400 Bad Request\r\n\r\n"

    assert await peer.say(garbage) == b""
    assert await reader.read() == garbage
    writer.close()


class Peer:
    """Whom a wire is connected to."""

    def __init__(self, port: int, streams: asyncio.Queue[Any]) -> None:
        self.url = URL(f"amqp://127.0.0.1:{port}")
        self._streams = streams

    async def heard(self) -> bytes:
        """All that came until the wire's end; then it ends too."""
        reader, writer = await self._streams.get()
        heard: bytes = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
        return heard

    async def say(self, data: bytes) -> bytes:
        """Say something, and hear what came until the wire's end."""
        reader, writer = await self._streams.get()
        self._streams.put_nowait((reader, writer))
        writer.write(data)
        return await self.heard()


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Peer]:
    streams: asyncio.Queue[Any] = asyncio.Queue()
    server = await asyncio.start_server(lambda *pair: streams.put_nowait(pair), "127.0.0.1", 0)
    async with server:
        yield Peer(server.sockets[0].getsockname()[1], streams)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with listening() as made:
        yield made


@pytest.mark.parametrize("loop", LOOPS)
def test_a_delivery_goes_to_its_tap_on_each_loop(loop):
    """Each loop has its own rule by which it fills a buffer of ours: aiormq would drop a
    delivery.
    """
    delivery = pamqp.frame.marshal(Basic.Deliver("1", 5, False, "x", "y"), 2)

    async def play() -> tuple[list[bytes], bytes]:
        async with asyncio.timeout(10), listening() as peer:
            wires, tap = WireFactory(), Noting()
            reader, writer = await wires.create(peer.url, ssl_context_provider=None)
            wire = wires.wire
            assert wire is not None
            wire.tap(2, tap)
            wire.send(b"abc")
            heard = asyncio.create_task(peer.say(delivery + b"HTTP/1.1 400"))  # no frame
            await reader.read()
            writer.close()
            return tap.taken, await heard

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        taken, heard = runner.run(play())

    assert taken == [delivery[:1] + delivery[7:-1]]
    assert heard == b"abc"
