"""The frames of one channel: which may follow which, and what becomes of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from gracekit.rpc.amqp.contents import Contents
from gracekit.rpc.amqp.frames import Delivered, Properties
from gracekit.rpc.amqp.wire import FaultError, Wire

Basic, Channel = commands.Basic, commands.Channel

CHANNEL = 2
TAG = "1.2.compute"


def deliver(tag: int, consumer: str = TAG) -> Any:
    return Basic.Deliver(consumer, tag, False, "x", "compute")


def header(size: int) -> Any:
    return ContentHeader(body_size=size)


class Ear:
    """A channel's end that notes what it is given."""

    def __init__(self, *, keep: int = 1000) -> None:
        self.wire = Wire(asyncio.StreamReader())
        self.contents = Contents(self.wire, CHANNEL)
        self.contents.keep = keep
        self.contents.on_message = self._note
        self.heard: list[tuple[int, bytes, int]] = []

    def _note(self, delivered: Delivered, properties: Properties, body: bytes) -> None:
        self.heard.append((delivered.delivery_tag, body, properties.dropped))

    def take(self, *frames: Any) -> list[bool]:
        """Returns which of them were not left to aiormq."""
        return [self._take(pamqp.frame.marshal(frame, CHANNEL)) for frame in frames]

    def fault_of(self, frame: Any) -> str:
        """What is wrong with it; empty if nothing is."""
        try:
            self.take(frame)
        except FaultError as fault:
            return str(fault)
        return ""

    def _take(self, data: bytes) -> bool:
        return self.contents.take(data[0], data, 7, len(data) - 1)


@pytest.fixture
async def ear() -> Ear:
    made = Ear()
    made.contents.consumers.add(TAG)
    return made


async def test_messages_come_whole_and_in_order(ear: Ear):
    """In one piece, in several, and without any."""
    ear.take(deliver(1), header(3), ContentBody(b"abc"))
    ear.take(deliver(2), header(6), ContentBody(b"ab"), ContentBody(b"cd"), ContentBody(b"ef"))
    ear.take(deliver(3), header(0))

    assert ear.heard == [(1, b"abc", 0), (2, b"abcdef", 0), (3, b"", 0)]


def named(value: Any) -> str:
    """The names of frames, for the id of a case: the same in each process."""
    frames = value if isinstance(value, list) else [value]
    return "+".join(getattr(frame, "name", type(frame).__name__) for frame in frames) or "nothing"


@pytest.mark.parametrize("tag", [0, 1, 3, 4, (1 << 63) - 1])
async def test_a_tag_that_is_not_the_next_is_a_fault(ear: Ear, tag: int):
    """An ack may stand for all deliveries before it: one that we have not seen would be lost."""
    ear.take(deliver(1), header(1), ContentBody(b"a"))

    assert f"delivery {tag} after delivery 1" in ear.fault_of(deliver(tag))


@pytest.mark.parametrize(
    ("before", "frame"),
    [
        ([], header(1)),
        ([], ContentBody(b"a")),
        ([], Heartbeat()),
        ([deliver(1)], deliver(2)),
        ([deliver(1)], ContentBody(b"a")),
        ([deliver(1), header(1)], header(1)),
        ([deliver(1), header(1)], deliver(2)),
        ([deliver(1), header(4), ContentBody(b"ab")], deliver(2)),
        ([deliver(1), header(4), ContentBody(b"ab")], ContentBody(b"abc")),
        ([deliver(1), header(1)], ContentBody(b"ab")),
        ([deliver(1), header(0)], ContentBody(b"a")),
        ([deliver(1), header(1), ContentBody(b"a")], ContentBody(b"a")),
        ([], deliver(1, "1.3.compute")),
        ([], Basic.Ack(1, False)),
        ([], Basic.Nack(1, False)),
        ([], Basic.Return(312, "NO_ROUTE", "x", "y")),
        ([], Basic.QosOk()),
        ([], Basic.CancelOk(TAG)),
        ([], Channel.CloseOk()),
        ([], commands.Queue.DeclareOk("q", 0, 0)),
        ([], commands.Connection.Close(200, "", 0, 0)),
    ],
    ids=named,
)
async def test_a_frame_that_is_not_due_is_a_fault(ear: Ear, before: list[Any], frame: Any):
    """Something before it was lost or changed: nothing stale is put together with it."""
    ear.take(*before)
    told = len(ear.heard)

    assert ear.fault_of(frame)
    assert len(ear.heard) == told


@given(st.integers(0, 60), st.integers(0, 255))
def test_a_delivery_with_a_wrong_byte_is_a_fault_or_the_same(at: int, byte: int):
    """Nothing reads beyond its frame, and nothing is taken for another delivery."""

    async def play() -> None:
        ear = Ear()
        ear.contents.consumers.add(TAG)
        data = bytearray(pamqp.frame.marshal(deliver(1), CHANNEL))
        data[7 + at % (len(data) - 8)] = byte
        try:
            taken = ear._take(bytes(data))
        except FaultError:
            return
        assert taken  # exchange and key are not looked at, nor the bits beside `redelivered`
        ear.take(header(1), ContentBody(b"a"))
        assert ear.heard == [(1, b"a", 0)]

    asyncio.run(play())


async def test_what_was_asked_is_answered_once(ear: Ear):
    """A stray close-ok looked like the end of a channel that the broker goes on to fill."""
    ear.wire.heed(pamqp.frame.marshal(Basic.Qos(0, 10, False), CHANNEL))
    ear.wire.heed(pamqp.frame.marshal(Basic.Ack(1, False), CHANNEL))  # which is no question
    assert ear.take(Basic.QosOk()) == [False]
    assert "method 60.11" in ear.fault_of(Basic.QosOk())

    ear.wire.heed(pamqp.frame.marshal(Channel.Close(200, "", 0, 0), CHANNEL))
    assert ear.take(Channel.CloseOk()) == [False]


@pytest.mark.parametrize("before", [[], [deliver(1)], [deliver(1), header(2)]], ids=named)
async def test_a_broker_may_close_a_channel_at_any_moment(ear: Ear, before: list[Any]):
    """That is no fault of its frames; aiormq hears of it."""
    ear.take(*before)

    assert ear.take(Channel.Close(406, "PRECONDITION_FAILED", 0, 0)) == [False]
    assert ear.contents.is_over


async def test_a_body_above_the_bound_is_dropped_as_it_comes(ear: Ear):
    """Its header says its size: what nobody may parse is not kept in memory either."""
    ear.take(deliver(1), header(1001), ContentBody(bytes(600)))
    assert ear.contents._pieces == []
    ear.take(ContentBody(bytes(401)))
    ear.take(deliver(2), header(1001), ContentBody(bytes(1001)))
    ear.take(deliver(3), header(1000), ContentBody(bytes(1000)))

    assert ear.heard == [(1, b"", 1001), (2, b"", 1001), (3, bytes(1000), 0)]


async def test_how_far_a_message_has_come_can_be_asked(ear: Ear):
    """One of which nothing more comes for long has lost a piece."""
    seen = []
    for frame in (deliver(1), header(4), ContentBody(b"ab"), ContentBody(b"cd")):
        seen.append(ear.contents.unfinished)
        ear.take(frame)

    assert len(set(seen)) == 4
    assert ear.contents.unfinished is None


class Socket(asyncio.Transport):
    """One that is always open."""

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def test_a_message_does_not_stall_while_we_do_not_read(ear: Ear):
    """That nothing more of it comes is our doing, and after a pause its time begins anew."""
    loop = asyncio.get_running_loop()
    ear.wire.connection_made(Socket())
    ear.take(deliver(1), header(4))
    before = ear.contents.unfinished
    ear.wire.hold(ear)
    paused, paused_at = ear.contents.unfinished, loop.time()
    while loop.time() == paused_at:  # uvloop counts milliseconds
        await asyncio.sleep(0)
    ear.wire.let_go(ear)

    assert paused is None
    assert ear.contents.unfinished not in {None, before}
