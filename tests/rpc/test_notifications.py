"""Notifications: what is on the wire, and what a listener does with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracekit import Notification, NotificationListener
from gracekit.clock import Clock
from gracekit.errors import (
    BadMessageError,
    ConfigError,
    MessageTooLargeError,
    StoreBrokenError,
    UnserialisableError,
)
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.notifications import (
    PRIORITIES,
    decode_notification,
    encode_notification,
    timestamp_of,
)
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Message, Queue, notification_queue
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine

TOPIC = "scheduler-notifications"
INFO, ERROR = (notification_queue(TOPIC, priority) for priority in ("info", "error"))
SECRET = "s3cret"


def a_notification(message_id: str = "m1", priority: str = "INFO") -> Notification:
    return Notification(
        message_id=message_id,
        publisher_id="compute.node-1",
        event_type="task.update",
        priority=priority,
        payload={"task_id": "t1", "state": "pending", "requested": {"memory_mb": 8192}},
        timestamp="2026-11-25 03:54:31.123456",
        context={"user_id": "ann"},
    )


def encoded(notification: Notification) -> bytes:
    return encode_notification(notification, unique_id="u1")


def bare(**changes: object) -> bytes:
    """A notification in format 1.0, with changes; `...` leaves a key out."""
    fields = {
        "message_id": "m1",
        "publisher_id": "nova.node-1",
        "event_type": "instance.update",
        "priority": "INFO",
        "payload": {"a": 1},
        "timestamp": "2026-11-25 03:54:31",
        "_unique_id": "u1",
        "_context_user": "ann",
        **changes,
    }
    return json.dumps({key: value for key, value in fields.items() if value is not ...}).encode()


# -- the wire -----------------------------------------------------------------------------


def test_a_notification_has_these_bytes():
    """The keys of oslo's format 2.0 in a fixed order, with the context as in a request."""
    assert encoded(a_notification()) == (
        rb'{"oslo.version":"2.0","oslo.message":"{\"message_id\":\"m1\",'
        rb"\"publisher_id\":\"compute.node-1\",\"event_type\":\"task.update\","
        rb"\"priority\":\"INFO\",\"payload\":{\"task_id\":\"t1\",\"state\":\"pending\","
        rb"\"requested\":{\"memory_mb\":8192}},\"timestamp\":\"2026-11-25 03:54:31.123456\","
        rb'\"_unique_id\":\"u1\",\"_context_user_id\":\"ann\"}"}'
    )


def test_a_wall_time_is_written_as_oslo_writes_it():
    """UTC, a space in the middle, and microseconds also where there are none."""
    assert timestamp_of(1_795_578_871.25) == "2026-11-25 03:54:31.250000"
    assert timestamp_of(0) == "1970-01-01 00:00:00.000000"


NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=255)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
OBJECTS = st.dictionaries(st.text(max_size=10), PLAIN, max_size=5)
NOTIFICATIONS = st.builds(
    Notification,
    message_id=NAMES,
    publisher_id=NAMES,
    event_type=NAMES,
    priority=NAMES,
    payload=OBJECTS,
    timestamp=NAMES,
    context=OBJECTS,
)


@given(NOTIFICATIONS)
def test_what_is_written_is_read_back(notification: Notification):
    """Every field, whatever text and plain data is in it."""
    assert decode_notification(encoded(notification)) == notification


def test_the_format_without_an_envelope_is_read():
    """It is oslo's 1.0, for the driver `messaging`."""
    assert decode_notification(bare()) == Notification(
        message_id="m1",
        publisher_id="nova.node-1",
        event_type="instance.update",
        priority="INFO",
        payload={"a": 1},
        timestamp="2026-11-25 03:54:31",
        context={"user": "ann"},
    )


@pytest.mark.parametrize("publisher_id", [None, ...])
def test_a_publisher_may_have_no_name(publisher_id):
    """An oslo notifier that was given no publisher_id sends null."""
    assert decode_notification(bare(publisher_id=publisher_id)).publisher_id == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"message_id": ...}, "message has no message_id"),
        ({"message_id": ""}, "message has no message_id"),
        ({"message_id": None}, "message has no message_id"),
        ({"message_id": 7}, "message_id is a number, not text: 7"),
        ({"message_id": "m" * 256}, "message_id is longer than 255 characters"),
        ({"message_id": "m\0"}, "message_id has a NUL character"),
        ({"publisher_id": ["a"]}, r"publisher_id is a list, not text: \[...\]"),
        ({"event_type": {"a": 1}}, "event_type is an object, not text: {...}"),
        ({"event_type": ...}, "message has no event_type"),
        ({"priority": True}, "priority is a boolean, not text: True"),
        ({"priority": ...}, "message has no priority"),
        ({"timestamp": 1.5}, "timestamp is a number, not text: 1.5"),
        ({"timestamp": ...}, "message has no timestamp"),
        ({"payload": ...}, "message has no payload"),
        ({"payload": None}, "payload is null, not an object"),
        ({"payload": [SECRET]}, "payload is a list, not an object"),
        ({"payload": SECRET}, "payload is text, not an object"),
    ],
)
def test_what_is_no_notification_is_refused(changes, why):
    """The error names the field and shows an excerpt of it; of payloads, which may be secret,
    none.
    """
    with pytest.raises(BadMessageError, match=why) as refused:
        decode_notification(bare(**changes))

    assert SECRET not in str(refused.value)


def test_a_body_that_is_too_large_is_not_parsed():
    """The limit is that of its reader."""
    with pytest.raises(MessageTooLargeError, match="body of 6 bytes exceeds the limit of 5"):
        decode_notification(b"{{{{{{", max_bytes=5)


@given(st.binary(max_size=200) | OBJECTS.map(lambda one: json.dumps(one).encode()))
def test_nothing_else_is_raised_by_any_bytes(body: bytes):
    """Whoever may publish there must not be able to end a listener's loop."""
    with pytest.raises(BadMessageError):
        decode_notification(body)


VALUES = PLAIN | st.floats(allow_nan=False, allow_infinity=False)


@given(st.fixed_dictionaries({}, optional={**dict.fromkeys(json.loads(bare()), VALUES)}))
def test_nothing_else_is_raised_by_any_fields(fields):
    """The same of messages that have the right keys, and anything in them."""
    try:
        said = str(decode_notification(json.dumps(fields).encode()).priority)
    except BadMessageError as error:
        said = str(error)

    assert len(said) < 1000  # excerpts


def test_what_is_no_plain_data_is_not_written():
    """The error names the place."""
    odd = Notification(
        message_id="m1", publisher_id="p", event_type="e", priority="INFO",
        payload={"a": {"b": object()}}, timestamp="t",
    )  # fmt: skip

    with pytest.raises(UnserialisableError, match=r"payload\.a\.b: object of type object"):
        encoded(odd)


# -- the listener -------------------------------------------------------------------------


class Publisher:
    """Declares and publishes, as an outbox does."""

    def __init__(self, transport: MemoryTransport | SqliteTransport) -> None:
        self.transport = transport

    async def send(self, *message_ids: str, queue: Queue = INFO) -> None:
        await self.transport.declare([queue])
        for message_id in message_ids:
            body = encoded(a_notification(message_id, queue.name.rpartition(".")[2].upper()))
            await self.transport.publish(queue, Message(body=body))

    async def send_raw(self, body: bytes) -> None:
        await self.transport.declare([INFO])
        await self.transport.publish(INFO, Message(body=body))


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


async def connected(broker: MemoryBroker) -> MemoryTransport:
    transport = MemoryTransport(broker, Process())
    await transport.start()
    return transport


@pytest.fixture
async def transport(broker: MemoryBroker) -> AsyncIterator[MemoryTransport]:
    transport = await connected(broker)
    yield transport
    await transport.stop()


@pytest.fixture
async def publisher(broker: MemoryBroker) -> AsyncIterator[Publisher]:
    transport = await connected(broker)
    yield Publisher(transport)
    await transport.stop()


async def read(listener: NotificationListener, number: int) -> list[str]:
    """The ids of the next so many; the last one is left in hand."""
    return [(await anext(listener)).message_id for _ in range(number)]


@pytest.mark.looptime
async def test_what_waited_and_what_comes_later_is_read(transport, publisher):
    """A listener may start before the publisher and after it."""
    await publisher.send("m1", "m2")
    async with NotificationListener(transport, TOPIC) as listener:
        assert await anext(listener) == a_notification("m1")
        assert await read(listener, 1) == ["m2"]
        reading = asyncio.create_task(read(listener, 1))
        await asyncio.sleep(10)
        assert not reading.done()
        await publisher.send("m3")
        assert await reading == ["m3"]

    assert listener.unreadable == 0


@pytest.mark.looptime
async def test_a_listener_makes_its_queues(transport, publisher):
    """What is published between its start and its first notification, nobody has to declare."""
    async with NotificationListener(transport, TOPIC, priorities=("warn",)) as listener:
        queue = notification_queue(TOPIC, "warn")
        await publisher.transport.publish(queue, Message(body=encoded(a_notification("m1"))))

        assert await read(listener, 1) == ["m1"]


@pytest.mark.looptime
async def test_priorities_are_chosen(transport, publisher, broker):
    """Others stay in their queues."""
    await publisher.send("m1")
    await publisher.send("m2", queue=ERROR)
    async with NotificationListener(transport, TOPIC, priorities=("error",)) as listener:
        notification = await anext(listener)

    assert (notification.message_id, notification.priority) == ("m2", "ERROR")
    assert broker.waiting(INFO.name) == 1


@pytest.mark.looptime
async def test_it_is_acknowledged_when_the_next_one_is_asked_for(transport, publisher, broker):
    """Not before: until then its body runs."""
    await publisher.send("m1", "m2")
    async with NotificationListener(transport, TOPIC) as listener:
        async for notification in listener:
            in_hand = broker.in_hand[INFO.name]
            if notification.message_id == "m2":
                break
            assert in_hand == 2
        assert in_hand == 1

    assert (broker.in_hand[INFO.name], broker.waiting(INFO.name)) == (0, 0)


@pytest.mark.looptime
async def test_what_was_not_begun_goes_back_in_its_order(transport, publisher, broker):
    """A listener that is left acknowledges the one that it has done, and no other."""
    await publisher.send("m1", "m2", "m3")
    async with NotificationListener(transport, TOPIC) as listener:
        assert await read(listener, 1) == ["m1"]

    async with NotificationListener(transport, TOPIC) as other:
        assert await read(other, 2) == ["m2", "m3"]


@pytest.mark.looptime
async def test_it_goes_back_if_the_body_raises(transport, publisher):
    """The exception passes; the notification comes again, before those behind it."""
    await publisher.send("m1", "m2")
    with pytest.raises(ZeroDivisionError):
        await _fail_in_the_body(transport)

    async with NotificationListener(transport, TOPIC) as other:
        assert await read(other, 2) == ["m1", "m2"]


async def _fail_in_the_body(transport: MemoryTransport) -> None:
    async with NotificationListener(transport, TOPIC) as listener:
        async for _ in listener:
            raise ZeroDivisionError


@pytest.mark.looptime
async def test_it_goes_back_if_the_body_is_cancelled(transport, publisher):
    """As at the end of the program that listens."""
    await publisher.send("m1")
    begun = asyncio.Event()

    async def listen() -> None:
        async with NotificationListener(transport, TOPIC) as listener:
            async for _ in listener:
                begun.set()
                await asyncio.sleep(3600)

    listening = asyncio.create_task(listen())
    await begun.wait()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening

    async with NotificationListener(transport, TOPIC) as other:
        assert await read(other, 1) == ["m1"]


@pytest.mark.looptime
async def test_a_wait_that_is_cancelled_loses_nothing(transport, publisher):
    """As by a time-out around it."""
    async with NotificationListener(transport, TOPIC) as listener:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await anext(listener)
        await publisher.send("m1")

        assert await read(listener, 1) == ["m1"]


@pytest.mark.looptime
async def test_a_loop_that_is_begun_anew_gets_first_what_was_in_hand(transport, publisher):
    """Its body may have raised: only who asks for the next one has done the last."""
    await publisher.send("m1", "m2")
    seen: list[str] = []
    async with NotificationListener(transport, TOPIC) as listener:
        with contextlib.suppress(ZeroDivisionError):
            async for notification in listener:
                seen.append(notification.message_id)
                raise ZeroDivisionError
        async for notification in listener:
            seen.append(notification.message_id)
            if notification.message_id == "m2":
                break

    assert seen == ["m1", "m1", "m2"]


@pytest.mark.looptime
async def test_two_listeners_share_a_queue(broker, publisher):
    """Each notification goes to one of them; what one leaves undone, the other one gets."""
    one, other = await connected(broker), await connected(broker)
    async with NotificationListener(one, TOPIC, prefetch=1) as remaining:
        async with NotificationListener(other, TOPIC, prefetch=1) as leaving:
            await publisher.send("m1", "m2")
            first, second = await read(remaining, 1), await read(leaving, 1)
            assert sorted(first + second) == ["m1", "m2"]
            await leaving.stop()
        assert await read(remaining, 1) == second

    for transport in (one, other):
        await transport.stop()


@pytest.mark.looptime
async def test_a_listener_that_dies_has_acknowledged_nothing(broker, publisher, transport):
    """Its transport gives back what it held."""
    await publisher.send("m1", "m2")
    dying = await connected(broker)
    listener = NotificationListener(dying, TOPIC)
    await listener.start()
    assert await read(listener, 1) == ["m1"]
    dying.crash()

    async with NotificationListener(transport, TOPIC) as other:
        assert await read(other, 2) == ["m1", "m2"]


@pytest.mark.looptime
async def test_what_is_no_notification_is_set_aside(transport, publisher, broker, caplog):
    """It is counted and logged, kept with its reason, and the loop goes on."""
    await publisher.send_raw(b"{}")
    await publisher.send_raw(bare(payload=[SECRET]))
    await publisher.send("m1")
    async with NotificationListener(transport, TOPIC) as listener:
        assert await read(listener, 1) == ["m1"]

    assert listener.unreadable == 2
    assert [letter.reason for letter in broker.dead_letters] == [
        "message has no payload",
        "payload is a list, not an object",
    ]
    assert caplog.text.count("message.unreadable") >= 1
    assert SECRET not in caplog.text


@pytest.mark.looptime
async def test_what_is_too_large_is_set_aside(transport, publisher, broker):
    """`max_body_bytes` bounds what is parsed."""
    await publisher.send("m1")
    async with NotificationListener(transport, TOPIC, max_body_bytes=100) as listener:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await anext(listener)

    assert listener.unreadable == 1
    assert "exceeds the limit of 100" in broker.dead_letters[0].reason


@pytest.mark.looptime
async def test_a_stop_ends_the_loop(transport, publisher, broker):
    """One that waits ends; what a body has in hand comes again. Both ends may be repeated."""
    listener = NotificationListener(transport, TOPIC)
    await listener.stop()
    await listener.start()
    await listener.start()
    waiting = asyncio.create_task(_all_of(listener))
    await publisher.send("m1")
    await asyncio.sleep(1)
    await listener.stop()
    await listener.stop()

    assert await waiting == ["m1"]
    async with listener:
        await publisher.send("m2")
        assert await read(listener, 1) == ["m2"]
        await listener.stop()
    assert broker.waiting(INFO.name) == 1


async def _all_of(listener: NotificationListener) -> list[str]:
    return [notification.message_id async for notification in listener]


@pytest.mark.looptime
async def test_one_task_at_a_time_may_wait(transport):
    """With two of them, one would acknowledge what the other one still has in hand."""
    async with NotificationListener(transport, TOPIC) as listener:
        waiting = asyncio.create_task(_all_of(listener))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="NotificationListener of its own"):
            await anext(listener)
        await listener.stop()
        assert await waiting == []


@pytest.mark.looptime
async def test_a_loop_ends_with_its_file(broker):
    """When the process can no longer use its transport, nothing would ever come again."""
    transport = Breaking(broker, Process())
    await transport.start()
    async with NotificationListener(transport, TOPIC) as listener:
        waiting = asyncio.create_task(anext(listener))
        await asyncio.sleep(1)
        transport.tell(StoreBrokenError("disk"))
        with pytest.raises(StoreBrokenError, match="disk"):
            await waiting
    await transport.stop()


class Breaking(MemoryTransport):
    """One that breaks, as a file may."""

    def on_broken(self, callback: Callable[[StoreBrokenError], None]) -> None:
        self.tell = callback


# -- by a URL -----------------------------------------------------------------------------


async def test_a_file_that_no_service_has_made_is_waited_for(tmp_path: Path):
    """A listener makes no file: a mistyped path would be silence for ever. It may start first,
    though.
    """
    tmp_path.chmod(0o700)
    path = tmp_path / "queues.db"
    async with NotificationListener(f"sqlite:///{path}", TOPIC) as listener:
        reading = asyncio.create_task(read(listener, 2))
        await asyncio.sleep(0.1)
        assert not path.exists()
        transport = SqliteTransport(path, process=Process(), clock=Clock())
        await transport.start()
        await Publisher(transport).send("m1", "m2")
        async with asyncio.timeout(30):
            assert await reading == ["m1", "m2"]

    assert await transport.depth([INFO]) == 0
    await transport.stop()


async def test_a_wait_for_a_file_ends_with_the_listener(tmp_path: Path):
    """At once, not after the pause between two looks."""
    tmp_path.chmod(0o700)
    listener = NotificationListener(f"sqlite:///{tmp_path / 'queues.db'}", TOPIC)
    await listener.start()
    waiting = asyncio.create_task(_all_of(listener))
    await asyncio.sleep(0.05)
    await listener.stop()

    assert await waiting == []


async def test_a_listener_that_was_never_started_says_how(transport):
    """A loop without `async with` would end at once and look as if nothing had come."""
    listener = NotificationListener(transport, TOPIC)

    with pytest.raises(RuntimeError, match="write `async with NotificationListener"):
        await _all_of(listener)


async def test_a_store_is_no_file_of_queues(tmp_path: Path):
    """Whoever gives the listener the store's URL reads that it is one, and not that it is too
    new.
    """
    tmp_path.chmod(0o700)
    path = tmp_path / "store.db"
    engine = SqliteEngine(path, load_migrations(MIGRATIONS), process=Process())
    await engine.start()
    await engine.stop()

    with pytest.raises(ConfigError, match="is a store of gracekit, and a file of queues is needed"):
        await NotificationListener(f"sqlite:///{path}", TOPIC).start()


# -- wrong arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"priorities": ("eror",)}, "priority 'eror' is none of audit, .*; did you mean error?"),
        ({"priorities": ("INFO",)}, "priority 'INFO' is none of .*; did you mean info?"),
        ({"priorities": (7,)}, "priority 7 is none of"),
        ({"priorities": "info"}, r"write priorities=\('info',\)"),
        ({"priorities": ()}, "names no queue to read; give some of audit"),
        ({"prefetch": 0}, "prefetch=0 must be a whole number from 1 to 65535"),
        ({"prefetch": True}, "prefetch=True must be"),
        ({"prefetch": 70_000}, "prefetch=70000 must be"),
        ({"topic": "a/ü"}, "must be 1 to 246 of"),
        ({"topic": ""}, "must be 1 to 246 of"),
        ({"topic": "t" * 247}, "of 247 characters must be 1 to 246 of"),
        ({"topic": "a.#"}, "has '#' as a word of its own"),
        ({"topic": None}, "topic None is no text"),
        ({"transport": 7}, "transport=7 is neither a URL nor a transport"),
        ({"transport": "amqq://host"}, "its scheme is none of .*; did you mean amqp?"),
        ({"transport": "memory://"}, "needs the MemoryBroker"),
        ({"transport": "amqp://localhost", "declare_profile": "durabel"}, "did you mean durable?"),
    ],
)
def test_a_wrong_argument_is_refused(options, why):
    """The error has the value, the rule and the remedy."""
    given_ = {"transport": "sqlite:////tmp/queues.db", "topic": TOPIC, **options}

    with pytest.raises(ConfigError, match=why):
        NotificationListener(**given_)


def test_a_topic_may_be_as_long_as_queues_allow(transport):
    """No exchange is named for it, so that of a service with a long topic fits too."""
    NotificationListener(transport, "t" * 246, priorities=("critical",))


@pytest.mark.looptime
async def test_a_priority_that_is_named_twice_is_read_once(transport, publisher):
    """All of oslo's are known."""
    priorities = [*PRIORITIES, "info"]
    for priority in PRIORITIES:
        await publisher.send(priority, queue=notification_queue(TOPIC, priority))

    async with NotificationListener(transport, TOPIC, priorities=priorities) as listener:
        assert sorted(await read(listener, len(PRIORITIES))) == sorted(PRIORITIES)
