"""Bad input of every kind: a clear error each, nothing lost, and the service stays up.

Only a disk that fails ends a service: intake stops, what was not accepted stays in its queue,
and the exit is orderly.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import gzip
import json
import random
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import apsw
import looptime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gracekit import (
    ConfigError,
    Context,
    RpcClient,
    RpcError,
    Runtime,
    Service,
    Settings,
    backoff,
    ops_method,
    rpc_method,
)
from gracekit.config.loading import load
from gracekit.errors import (
    DeclarationError,
    GracekitError,
    InvalidArgumentsError,
    MessageTooLargeError,
    NoSuchMethodError,
    SchemaTooNewError,
    UnserialisableError,
    UnsupportedVersionError,
)
from gracekit.exits import ExitCode
from gracekit.process import Process
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.oslo_wire import MAX_RESULT_BYTES, decode_reply
from gracekit.rpc.plain import MAX_FAR_NUMBERS, MAX_LONG_DIGITS, MAX_NODES
from gracekit.rpc.transport import Message, reply_queue, shared_queue
from gracekit.runtime.process_life import run_service
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from tests.rpc.kit import Inbox
from tests.scale import scale
from tests.service.kit import Life, PlayedProcess, World


def a_service(done: list[int] | None = None) -> Service:
    """A method that adds, one on a resource, one whose result cannot be sent."""
    svc = Service("compute", version="1.2")

    @svc.rpc
    async def add(ctx: Context, a: int, b: int = 0) -> int:
        if done is not None:
            done.append(a)
        return a + b

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str) -> str:
        return vm

    @svc.rpc
    async def odd(ctx: Context) -> object:
        return object()

    @svc.ops
    async def ping(ctx: Context) -> str:
        return "pong"

    return svc


class Site:
    """A service in virtual time, and a caller that knows methods by name only."""

    def __init__(self, world: World, life: Life, client: RpcClient) -> None:
        self.world = world
        self.life = life
        self.client = client

    async def check_up(self) -> None:
        """Both lanes answer, nothing is in flight, the accounts are right."""
        view = self.client.prepare(timeout=5)
        assert await view.call("add", a=1, b=2) == 3
        assert await view.prepare(ops=True).call("ping") == "pong"
        await self.world.settle()
        assert len(self.life.runtime.wired.tracker) == 0
        await self.world.until(lambda: self.world.rows("SELECT * FROM reply") == [])
        assert self.world.rows("SELECT * FROM reply") == []
        self.world.check_accounts()
        assert self.life.told("dispatch.failed") == []

    def rejected(self) -> list[str]:
        sql = "SELECT reason FROM task WHERE state = 'rejected' ORDER BY id"
        return [row["reason"] for row in self.world.rows(sql)]


async def make_site() -> Site:
    world = World()
    svc = a_service()
    life = await world.start(svc, max_body_bytes=10_000)
    return Site(world, life, await world.client(svc))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = await make_site()
    yield made
    await made.check_up()
    await made.world.close()


# -- requests -------------------------------------------------------------------------------


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("options", "method", "args", "error", "words", "reason"),
    [
        ({}, "ad", {}, NoSuchMethodError, "did you mean 'add'", "unknown_method"),
        ({}, "__init__", {}, NoSuchMethodError, "not served", "unknown_method"),
        ({}, "_add", {}, NoSuchMethodError, "not served", "unknown_method"),
        ({}, "add", {}, TypeError, "missing a required argument: 'a'", "arguments"),
        ({}, "add", {"a": 1, "bb": 2}, TypeError, "did you mean 'b'", "arguments"),
        ({}, "change", {"vm": ""}, TypeError, "needs a value for 'vm'", "arguments"),
        ({}, "change", {"vm": None}, TypeError, "needs a value for 'vm'", "arguments"),
        ({"version": "2.0"}, "add", {"a": 1}, UnsupportedVersionError, "served at 1.2", ""),
        ({"version": "1.3"}, "add", {"a": 1}, UnsupportedVersionError, "minor not be above", ""),
        ({"version": "x"}, "add", {"a": 1}, UnsupportedVersionError, "not at 'x'", ""),
        ({"namespace": "ns"}, "add", {"a": 1}, UnsupportedVersionError, "'ns' is not served", ""),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_with_the_reason(
    site: Site,
    options: dict[str, Any],
    method: str,
    args: dict[str, Any],
    error: type[Exception],
    words: str,
    reason: str,
):
    """Its caller is told what is wrong and what would be right; the refusal is on record."""
    with pytest.raises(error, match=words):
        await site.client.prepare(timeout=5, **options).call(method, **args)

    assert site.rejected() == [reason or "unknown_method"]
    assert site.world.tally()["rejected"] == 1


@pytest.mark.looptime
async def test_a_refused_id_stays_free(site: Site):
    """The same id may come again, mended."""
    view = site.client.prepare(request_id="r", timeout=5)
    for _ in range(2):
        with pytest.raises(TypeError, match="missing"):
            await view.call("add")

    assert await view.call("add", a=4) == 4


@pytest.mark.looptime
async def test_an_oversize_message_is_refused_before_it_is_parsed(site: Site):
    """Counted, recorded and kept aside; a caller of ours is told before anything is sent."""
    await site.world.deliver("compute", b'{"method": "add", "args": {"a": ' + b"1" * 20_000 + b"}}")
    await site.world.until(lambda: site.rejected() == ["oversize"])

    (letter,) = site.world.broker.dead_letters
    assert "exceeds the limit of 10000" in letter.reason
    with pytest.raises(MessageTooLargeError, match="pass a reference"):
        await site.client.cast("add", a="x" * 2_000_000)


LEFT_OUT = {
    "an object": (object(), UnserialisableError, "result: object of type object"),
    "too long": ("x" * 2_000_000, MessageTooLargeError, "result of more than 1044480 bytes in a"),
    "too long in a reply": ('"' * 400_000, MessageTooLargeError, r"of 16000\d\d bytes in a reply"),
    "too many keys": ({str(n): n for n in range(10_001)}, UnserialisableError, "10000 keys"),
    "too many for a reply": (
        {str(n): n for n in range(9_998)},
        UnserialisableError,
        "000 keys",
    ),
    "too many lists": ([[]] * 40_000, UnserialisableError, "30000 lists and objects"),
    "too deep": (functools.reduce(lambda v, _: [v], range(40), 0), UnserialisableError, "deeper"),
}


@pytest.mark.looptime
@pytest.mark.parametrize("policy", ["error", "requeue"])
@pytest.mark.parametrize(("result", "error", "said"), LEFT_OUT.values(), ids=LEFT_OUT)
async def test_work_whose_result_cannot_be_sent_is_done(
    result: object, error: type[Exception], said: str, policy: Any
):
    """The task has SUCCEEDED, the record says what was left out, and keeps none of it. Its caller
    is told at once, and so is who asks later; the work is not done again.
    """
    world, svc, done = World(), Service("compute"), list[str]()

    @svc.rpc(on_interrupt=policy)
    async def work(ctx: Context) -> Any:
        done.append(ctx.request_id)
        return result

    life = await world.start(svc)
    view = (await world.client(svc)).prepare(timeout=5, request_id="r")
    words = rf"work\(\) has succeeded, but its result is left out: result.*{said.strip('result')}"
    for _ in range(2 if policy == "error" else 1):
        with pytest.raises(error, match=words):
            await view.call("work")

    assert done == ["r"]
    (told,) = life.told("task.result_left_out")
    assert re.search(words, str(told["error"]))
    if policy == "error":
        row = world.task("r")
        assert (row["state"], row["result"]) == ("succeeded", None)
        assert re.search(words, row["detail"])
        assert len(row["failure"]) < 10_000
    await world.close()


@pytest.mark.looptime
async def test_the_largest_result_is_sent():
    """What is kept can be sent, whatever the ids of its call are."""
    world, svc = World(), Service("compute")
    largest = "x" * (MAX_RESULT_BYTES - 6)

    @svc.rpc
    async def work(ctx: Context) -> str:
        return largest

    await world.start(svc)
    inbox, name = Inbox(), "reply_" + "\u0001" * 249
    transport = MemoryTransport(world.broker, Process())
    await transport.start()
    await transport.consume([reply_queue(name)], inbox.put, prefetch=1)
    asked = {"method": "work", "args": {}, "_msg_id": "\u0001" * 255, "_reply_q": name}
    await world.deliver("compute", json.dumps(asked).encode())

    assert decode_reply((await inbox.next()).body).result == largest
    await transport.stop()
    await world.close()


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("kept", "error"),
    [
        ("x" * 2_000_000, MessageTooLargeError),
        (dict.fromkeys(map(str, range(10_001))), UnserialisableError),
    ],
    ids=["too long", "too many keys"],
)
async def test_a_kept_result_that_cannot_be_sent_is_left_out_of_the_answer(
    kept: object, error: type[Exception]
):
    """An earlier version stored results of any size; who asks for one waits for nothing."""
    world, svc = World(), Service("compute")

    @svc.rpc
    async def work(ctx: Context) -> None: ...

    await world.start(svc)
    view = (await world.client(svc)).prepare(timeout=5, request_id="r")
    await view.call(work)
    world.disk.execute("UPDATE task SET result = ?", (json.dumps(kept),))

    with pytest.raises(error, match="has succeeded, but its result is left out"):
        await view.call(work)
    await world.close()


@pytest.mark.looptime
async def test_a_control_verb_is_refused_in_a_short_text(site: Site):
    """Whatever stands in its arguments."""
    for verb, args in (("drain", {"timeout": "9" * 9000}), ("cancel", {"task_id": ["x" * 9000]})):
        with pytest.raises((GracekitError, TypeError)) as told:
            await site.world.verb(site.life, verb, **args)
        assert len(str(told.value)) < 200


JUNK: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"method": "add"',
    "no JSON": b"\x00\x01\x02",
    "no UTF-8": b'{"method": "\xff\xfe"}',
    "null": b"null",
    "a list": b"[1, 2]",
    "text": b'"add"',
    "NaN": b'{"method": "add", "args": {"a": NaN}}',
    "NUL in the id": b'{"method": "add", "args": {"a": 1}, "_unique_id": "u\\u0000"}',
    "NUL in the method": b'{"method": "ad\\u0000d"}',
    "NUL in the version": b'{"method": "add", "version": "1.\\u00000"}',
    "surrogate in the id": b'{"method": "add", "_unique_id": "\\ud800"}',
    "no method": b'{"args": {}}',
    "method is no text": b'{"method": 5}',
    "method is empty": b'{"method": ""}',
    "endless method": json.dumps({"method": "m" * 5000}).encode(),
    "args are a list": b'{"method": "add", "args": [1]}',
    "id is a number": b'{"method": "add", "args": {"a": 1}, "_unique_id": 7}',
    "version is a list": b'{"method": "add", "args": {"a": 1}, "version": [1]}',
    "timeout is text": b'{"method": "add", "args": {"a": 1}, "_msg_id": "m", "_reply_q": "q",'
    b' "_timeout": "x"}',
    "too deep": b'{"method": "add", "args": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}",
    "envelope of tomorrow": b'{"oslo.version": "3.0", "oslo.message": "{}"}',
    "envelope with an object": b'{"oslo.version": "2.0", "oslo.message": {}}',
    "lone surrogate": b'{"method": "add", "args": {"a": "\\ud800"}}',
    "long number": b'{"method": "add", "args": {"a": ' + b"9" * 6000 + b"}}",
}


@pytest.mark.looptime
@pytest.mark.parametrize("queue", ["compute", "compute-ops"])
@pytest.mark.parametrize("body", JUNK.values(), ids=JUNK)
async def test_junk_is_kept_aside(site: Site, body: bytes, queue: str):
    """Recorded as unreadable, in the dead letters with the reason, and never seen again."""
    await site.world.deliver(queue, body)
    await site.world.until(lambda: len(site.rejected()) == 1)

    assert site.rejected() == ["unreadable"]
    (letter,) = site.world.broker.dead_letters
    assert letter.body == body
    assert letter.reason.startswith("unreadable: ")


@pytest.mark.looptime
async def test_a_compressed_message_is_called_that(site: Site):
    """Clients of oslo.messaging write into a header how they have compressed it
    (kombu_compression).
    """
    queue, headers = shared_queue("compute"), {"compression": "application/x-gzip"}
    transport = MemoryTransport(site.world.broker, Process())
    await transport.start()
    await transport.publish(queue, Message(body=gzip.compress(b"{}"), headers=headers))
    await site.world.until(lambda: len(site.rejected()) == 1)
    await transport.stop()

    (letter,) = site.world.broker.dead_letters
    assert letter.reason == (
        "unreadable: body is compressed (application/x-gzip), and gracekit reads only what is not: "
        "switch compression off where it is sent, in oslo.messaging kombu_compression"
    )


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"args": None}, "args is null, not an object"),
        ({"args": [1]}, "args is a list, not an object"),
        ({"method": None}, "message has no method"),
        ({"version": 1.2}, "version is a number, not text"),
        ({"_timeout": "x"}, "_timeout is text, not seconds"),
        ({"_unique_id": "u\0v"}, "_unique_id has a NUL character, which no store takes: 'u\\x00v'"),
    ],
)
async def test_the_caller_of_junk_is_told(site: Site, wrong: dict[str, Any], said: str):
    """What can be read of it says who waits: an error now is better than no answer till a
    timeout.
    """
    inbox = Inbox()
    transport = MemoryTransport(site.world.broker, Process())
    await transport.start()
    await transport.consume([reply_queue("reply_1")], inbox.put, prefetch=1)
    request = {"method": "add", "args": {"a": 1}, "_msg_id": "m", "_reply_q": "reply_1"}

    await site.world.deliver("compute", json.dumps({**request, **wrong}).encode())
    reply = decode_reply((await inbox.next()).body)
    await transport.stop()
    await site.world.until(lambda: len(site.world.broker.dead_letters) == 1)

    assert (reply.msg_id, reply.ending) == ("m", True)
    assert reply.failure is not None
    assert (reply.failure.exc_class, said in reply.failure.message) == ("BadMessageError", True)
    assert site.rejected() == ["unreadable"]


VALID = {
    "method": "add",
    "args": {"a": 1, "b": 2},
    "version": "1.0",
    "_unique_id": "u",
    "_msg_id": "m",
    "_reply_q": "reply_nowhere",
    "_context_user": "ann",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
ODD_REQUESTS = st.fixed_dictionaries(
    {}, optional={key: st.just(value) | JSON for key, value in VALID.items()}
).map(lambda request: json.dumps(request).encode())


TWICE = json.dumps(VALID).encode()


@given(bodies=st.lists(st.binary(max_size=60) | ODD_REQUESTS, min_size=1, max_size=12))
@example(bodies=[b"", b"", b"", TWICE, TWICE])
@settings(max_examples=scale(60, 5000))
def test_no_bytes_whatever_stop_the_service(bodies: list[bytes]):
    """Each delivery is accepted, refused or kept aside; none is left, none comes twice."""

    async def feed() -> None:
        site = await make_site()
        for number, body in enumerate(bodies):
            await site.world.deliver(("compute", "compute-ops")[number % 2], body)
        await asyncio.sleep(2 * backoff.GIVE_BACK_S)  # of a copy that overtook its first delivery
        await site.world.settle()
        await site.check_up()
        counted = site.world.tally()
        seen = sum(counted.get(what, 0) for what in ("accepted", "rejected", "duplicate"))
        assert seen == len(bodies) + 2  # and the two of the check
        await site.life.drain()
        await site.world.close()

    loop = looptime.new_event_loop(noop_cycles=4)
    try:
        loop.run_until_complete(feed())
    finally:
        loop.close()


# -- messages that are made to keep a service busy ----------------------------------------------

HELD_S = 0.05
BUSY_TRIES = 20  # a machine that does much else makes the same work cost twice as much
REFERENCE = json.dumps([{"a": [1.5, "x" * 10, None, {"b": n}]} for n in range(8000)])
REFERENCE_S = 0.016  # of an idle machine: where it takes longer now, so may a message

LONGEST_REFUSAL = 2000
REPLIES = f"reply_{'a' * 32}"
MIB = (1 << 20) - 2000


def filled(unit: str, *, around: str = "[]") -> str:
    """A list, or an object, of as many units as one message has room for."""
    room = MIB // (len(json.dumps(unit)) - 1)  # within an envelope too, where quotes are escaped
    return around[0] + ",".join([unit] * room) + around[1]


def names(beginning: str) -> str:
    """The inside of an object with almost as many keys as a message may have."""
    return ",".join(f'"{beginning}{number}":0' for number in range(9980))


def mixed() -> str:
    """As much as the limits allow of everything that takes long to read."""
    parts = [
        *["[" * 20 + "]" * 20] * (MAX_NODES // 21),
        *["1.7976931348623157e308"] * (MAX_FAR_NUMBERS - 1),
        *["9" * 4200] * (MAX_LONG_DIGITS // 4200),
    ]
    room = MIB - sum(map(len, parts)) - len(parts)
    return "[" + ",".join(parts) + ",0" * (room // 2) + "]"


HEAVY = {
    "unknown names": lambda: args_of("{" + names("alph" * 10) + "}"),
    "short unknown names": lambda: args_of("{" + names("alph") + "}"),
    "one endless name": lambda: args_of('{"' + "a" * MIB + '":0}'),
    "equal names": lambda: args_of(filled('"a":0', around="{}")),
    "lists": lambda: args_of('{"vm":' + filled("[]") + "}"),
    "lists that never end": lambda: args_of('{"vm":' + filled("[]"))[:-1],
    "objects": lambda: args_of('{"vm":' + filled("{}") + "}"),
    "deep lists": lambda: args_of('{"vm":' + filled("[" * 28 + "]" * 28) + "}"),
    "numbers": lambda: args_of('{"vm":' + filled("0") + "}"),
    "long numbers": lambda: args_of('{"vm":' + filled("9" * 4300) + "}"),
    "tiny numbers": lambda: args_of('{"vm":' + filled("2.2250738585072011e-308") + "}"),
    "huge numbers": lambda: args_of('{"vm":' + filled("1.7976931348623157E+308") + "}"),
    "a long number for a name": lambda: args_of('{"vm":' + "9" * 4300 + "}"),
    "texts": lambda: args_of('{"vm":' + filled('""') + "}"),
    "escapes": lambda: args_of('{"vm":"' + "\\u0001" * (MIB // 7) + '"}'),
    "everything": lambda: args_of('{"alpha":' + mixed() + "}"),
    "everything, accepted": lambda: args_of('{"vm":"a","alpha":' + mixed() + "}"),
    "an id of lists": lambda: '{"method":"change","_unique_id":' + filled("[]") + "}",
    "an id of numbers": lambda: '{"method":"change","_unique_id":' + filled("0") + "}",
    "a long id": lambda: '{"method":"change","_unique_id":"' + "x" * MIB + '"}',
    "args of numbers": lambda: args_of(filled("0")),
    "an unknown method": lambda: '{"method":"change_the_size_of_numbr_1"}',
    "a long method": lambda: '{"method":"' + "change" * 42 + '"}',
    "contexts": lambda: '{"method":"change",' + names("_context_") + "}",
}


def args_of(text: str) -> str:
    """A request with these arguments."""
    return '{"method":"change","args":' + text + "}"


def busy_service() -> Service:
    """Hundreds of methods, whose names resemble each other."""
    svc = Service("compute")

    @svc.rpc(resource="vm")
    async def change(ctx: Context, vm: str, alpha: object = None, beta: int = 0) -> None: ...

    for number in range(1000):

        async def one_of_many(ctx: Context, a: int = 0) -> None: ...

        one_of_many.__name__ = f"change_the_size_of_number_{number}"
        svc.rpc(one_of_many)
    return svc


def as_call(message: str, *, enveloped: bool) -> bytes:
    """A request as a call's body."""
    message = '{"_msg_id":"m","_reply_q":"' + REPLIES + '",' + message[1:]
    if not enveloped:
        return message.encode()
    return json.dumps({"oslo.version": "2.0", "oslo.message": message}).encode()


def reference_s() -> float:
    """Processor seconds of work of the same kind that is always the same."""
    began = time.thread_time()
    sum(len(str(entry)) for entry in json.loads(REFERENCE))
    return time.thread_time() - began


async def its_time_s(world: World, body: bytes) -> float:
    """Processor seconds of this thread from a delivery to its record."""
    count = "SELECT count(*) AS n FROM task"
    before, began = world.rows(count), time.thread_time()
    await world.deliver("compute", body)
    await world.until(lambda: world.rows(count) != before)
    return time.thread_time() - began


@pytest.mark.looptime
@pytest.mark.parametrize("shape", HEAVY)
@pytest.mark.parametrize("enveloped", [False, True], ids=["bare", "enveloped"])
async def test_no_message_within_the_limits_holds_the_loop(shape: str, enveloped: bool):
    """Whatever fits into 1 MiB: from its delivery to its refusal, or to its end, it takes the
    loop's thread less than 50 ms of processor time, and no text about it is long.
    """
    await check_is_light(HEAVY[shape](), enveloped=enveloped)


UNITS = [
    *("0", "1.5", "[]", "{}", '""', "null", "[[[[[]]]]]", '{"a":0}', '{"a":0,"a":[0]}', '"]"'),
    *("2.2250738585072011e-308", "1.7976931348623157E+308", "9007199254740993.0", "9" * 299),
    *(
        "9" * 300,
        "9" * 599,
        "9" * 4300,
        "0." + "9" * 900,
        '"\\u0001\\""',
        "-1e-99",
        "[" * 20 + "]" * 20,
    ),
]
PLACES = (
    '"args":{"vm":',
    '"args":{"alpha":',
    '"_context_a":{"b":',
    '"_unique_id":{"a":',
    '"x":{"a":',
)


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(scale(10, 500)))
async def test_no_mixture_holds_the_loop(seed: int):
    """Nor does any mixture of what takes long to read, wherever it stands."""
    draw = random.Random(seed)
    chosen = draw.sample(UNITS, draw.randint(1, 4))
    room = MIB // len(chosen)
    numbers = [
        min(room // len(json.dumps(unit)), draw.choice([300, 3000, 10**6])) for unit in chosen
    ]
    parts = [unit for unit, number in zip(chosen, numbers, strict=True) for _ in range(number)]
    draw.shuffle(parts)
    text = '{"method":"change",' + draw.choice(PLACES) + "[" + ",".join(parts) + "]}}"
    await check_is_light(text, enveloped=draw.random() < 0.5)


async def check_is_light(message: str, *, enveloped: bool) -> None:
    """Processor time and texts of one message."""
    world = World()
    life = await world.start(busy_service())
    inbox = Inbox()
    transport = MemoryTransport(world.broker, Process())
    await transport.start()
    await transport.consume([reply_queue(REPLIES)], inbox.put, prefetch=10)
    body = as_call(message, enveloped=enveloped)
    assert len(body) <= 1 << 20

    gc.disable()  # a full collection looks at all that the tests before this one have left
    try:
        took_s, bound_s, same_s = [], HELD_S, []
        while len(took_s) < 3 or (min(took_s) >= bound_s and len(took_s) < BUSY_TRIES):
            took_s.append(await its_time_s(world, body))
            same_s.append(reference_s())
            bound_s = HELD_S * max(1.0, min(same_s) / REFERENCE_S)
    finally:
        gc.enable()

    assert min(took_s) < bound_s
    for row in world.rows("SELECT detail FROM task"):
        assert len(row["detail"] or "") < LONGEST_REFUSAL
    for letter in world.broker.dead_letters:
        assert len(letter.reason) < LONGEST_REFUSAL
    for delivery in inbox.all:
        failure = decode_reply(delivery.body).failure
        assert failure is None or len(failure.message) < LONGEST_REFUSAL
    assert all(len(str(fields)) < LONGEST_REFUSAL for _, fields in life.events)
    await transport.stop()
    await world.close()


# -- declarations, options, settings -----------------------------------------------------------


def test_the_place_of_a_function_is_said_to_its_decorator_and_that_of_a_class_to_include():
    """`version` and `namespace` of a method's mark had no effect; a wrong one is refused at
    once.
    """
    svc = Service("compute")

    async def work(ctx: Context) -> None: ...

    method = svc.rpc(version="2.1", namespace="admin")(work)
    assert (method.version, method.namespace) == ("2.1", "admin")
    for option, value in (("version", "2.1"), ("namespace", "admin")):
        said = f"work: {option} is said where the object is served: svc.include(..., {option}="
        for mark in (rpc_method, ops_method):
            with pytest.raises(DeclarationError, match=re.escape(said)):
                mark(**{option: value})(work)
    for version in ("two", "", 2.0, None):
        said = f"work: version={version!r} is no version: write X.Y, such as version='1.0'"
        with pytest.raises(DeclarationError, match=re.escape(said)):
            svc.ops(version=version)(work)
    with pytest.raises(DeclarationError, match="work: namespace=1 must be text, or left out"):
        svc.rpc(namespace=1)(work)


def test_the_lane_of_a_method_is_said_by_its_decorator_alone():
    """`@svc.rpc(ops=True)` served a new request, and did not say so."""
    svc = Service("compute")

    async def work(ctx: Context) -> None: ...

    with pytest.raises(DeclarationError, match=r"work: ops is no option: write @svc\.ops"):
        svc.rpc(ops=True)(work)
    with pytest.raises(DeclarationError, match=r"work: ops is no option: .*@ops_method"):
        rpc_method(ops=True)(work)


def test_an_unknown_option_of_a_decorator_is_refused():
    """With the option that was meant."""
    svc = Service("compute")

    async def work(ctx: Context) -> None: ...

    with pytest.raises(DeclarationError, match=r"work: unknown option 'on_interupt'.*on_interrupt"):
        svc.rpc(on_interupt="retry")(work)
    with pytest.raises(DeclarationError, match="none of error, retry, probe, requeue"):
        svc.rpc(on_interrupt="restart")(work)
    with pytest.raises(DeclarationError, match=r"requeue.*lease"):
        svc.rpc(on_interrupt="requeue", resource="vm")(work)

    async def _work(ctx: Context) -> None: ...

    with pytest.raises(DeclarationError, match="_work: a name that begins with '_' is private"):
        svc.ops(_work)
    with pytest.raises(DeclarationError, match="'vm' is not in"):
        svc.rpc(resource="vm")(work)
    for option in ("timeout", "settle", "max_wait", "probe_timeout", "pending_timeout"):
        with pytest.raises(DeclarationError, match=f"work: {option}='5 min' is not a duration; w"):
            svc.rpc(**{option: "5 min"})(work)
    for option in ("max_running", "max_attempts"):
        for number in (0, -1, True, 1.5, "3"):
            said = re.escape(f"work: {option}={number!r} must be a whole number from 1")
            with pytest.raises(DeclarationError, match=said):
                svc.rpc(**{option: number})(work)
    for option in ("timeout", "probe_timeout"):
        with pytest.raises(DeclarationError, match=f"work: {option}='0s' leaves no time"):
            svc.rpc(**{option: "0s"})(work)

    async def lists(ctx: Context, *names: str) -> None: ...

    with pytest.raises(DeclarationError, match=r"\*names: .* is passed by position"):
        svc.rpc(lists)
    with pytest.raises(DeclarationError, match="every='5 min' is not a duration"):
        svc.periodic(every="5 min")
    for topic in ("a*b", "", "x" * 121, "\udcff"):
        with pytest.raises(DeclarationError, match=r"topic '.*' of \d+ characters must be 1"):
            Service(topic)


def test_a_kind_in_the_place_of_its_name_is_refused():
    """`after=` of a kind takes one, so it looks as if `resource=` did."""
    svc = Service("compute")
    volume = svc.kind("volume")
    wrong: list[tuple[Any, str]] = [
        (volume, "work: resource=<ResourceKind volume> is no name: write resource='volume'"),
        (("vm",), "resource=('vm',) is no name"),
        (5, "resource=5 is no name: write resource='kind'"),
    ]

    async def work(ctx: Context, volume: str) -> None: ...

    for resource, said in wrong:
        for decorate in (svc.rpc, svc.ops):
            with pytest.raises(DeclarationError, match=re.escape(said)):
                decorate(resource=resource)(work)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"task_api": "yes"}, "task_api='yes' must be 'callers', True or False"),
        ({"queues": "host"}, "queues='host' must be 'all' or 'directed'"),
        (
            {"use_pending_state": True},
            "'use_pending_state': it is a setting: write defaults={'use_pending_state': True}",
        ),
        ({"task_apy": True}, "version; did you mean task_api?"),
        ({"drain_timout": "5s"}, "did you mean drain_timeout?"),
        ({"transport_url": "amqp://u:canary@h"}, "write defaults={'transport_url': ...}"),
        (
            {"defaults": {"task_api": True}},
            "task_api in the service's defaults is an argument of Service: write task_api=True",
        ),
        (
            {"exceptions": [ValueError]},
            "is no mapping: write exceptions={'myapp.errors.Refused': Refused}",
        ),
        ({"exceptions": ValueError}, "write exceptions={'myapp.errors.Refused': Refused}"),
        ({"exceptions": {"m.Refused": "Refused"}}, "not a subclass of Exception"),
    ],
)
def test_an_argument_of_a_service_in_the_wrong_place_is_told_the_right_one(
    arguments: dict[str, Any], said: str
):
    """Settings, arguments of Service and methods' options look alike."""
    with pytest.raises(DeclarationError, match=re.escape(said)) as caught:
        Service("s", **arguments)
    assert "canary" not in str(caught.value)


def forgets_it(n: int) -> None: ...


def forgets_it_by_default(n=1) -> None: ...


def lists(albums: list[str]) -> None: ...


class Manager:
    async def forgets_it(self, vm: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("decorate", "function", "said"),
    [
        (Service("s").rpc, forgets_it, r"write def forgets_it\(ctx: Context, n: 'int', ...\)"),
        (Service("s").ops, forgets_it_by_default, r"gets the Context in 'n'.*ctx: Context, n=1"),
        (Service("s").rpc, lists, "gets the Context in 'albums'"),
        (rpc_method, Manager.forgets_it, r"def forgets_it\(self, ctx: Context, vm: "),
    ],
)
def test_a_forgotten_context_is_told_where_it_was_forgotten(decorate, function, said):
    """Otherwise the first argument would be taken for it, and each request be refused for its
    name.
    """
    with pytest.raises(DeclarationError, match=said):
        decorate(function)


def test_a_forgotten_context_without_annotations_is_told_by_the_first_request():
    """Before that, nothing says that the first argument was not meant for it."""
    svc = Service("compute")

    @svc.rpc
    async def add(a, b): ...

    with pytest.raises(InvalidArgumentsError, match=r"'a' gets the Context: write def add\(ctx, "):
        add.bind({"a": 1, "b": 2})
    add.bind({"b": 2})


def test_a_context_is_known_by_whatever_name_and_type_it_has():
    """What is not certain is let through."""
    svc = Service("compute")

    def a(context): ...
    def b(ctx: Context): ...
    def c(ctx: Any): ...
    def d(ctx: object): ...
    def e(ctx: Unknown): ...  # noqa: F821
    def f(ctx: Context | None): ...
    def g(ctx: Annotated[Context, "mine"]): ...
    def i(*args, **more: int): ...

    for function in (a, b, c, d, e, f, g, i):
        svc.rpc(function)
    assert len(list(svc.methods)) == 8


async def sends_parts(ctx: Context) -> AsyncIterator[int]:
    yield 1


def sends_parts_plainly(ctx: Context) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [sends_parts, sends_parts_plainly])
def test_a_generator_is_no_handler(function):
    """To call it runs nothing: neither as a method, nor as its probe, a job or a hook."""
    svc = Service("compute")

    @svc.rpc
    def work(ctx: Context) -> None: ...

    for register in (svc.rpc, svc.ops, svc.periodic(every="1s"), svc.on_start, svc.on_stop):
        with pytest.raises(DeclarationError, match=f"{function.__name__}.. has a yield, so to"):
            register(function)
    with pytest.raises(DeclarationError, match=f"probe hook of work, {function.__name__}.. has a"):
        work.probe(function)


def test_a_job_has_a_pause_and_no_parameters_of_its_own():
    """Forgotten parentheses, a forgotten pause and a parameter are told at the declaration."""
    svc = Service("compute")

    async def tidy(ctx: Context) -> None: ...
    async def tidy_bare() -> None: ...
    async def tidy_one(ctx: Context, album: str) -> None: ...

    for forget in (lambda: svc.periodic(tidy), svc.periodic):
        with pytest.raises(DeclarationError, match=r"write @svc.periodic\(every='60s'\), parenthe"):
            forget()
    for wrong in (tidy_bare, tidy_one):
        with pytest.raises(
            DeclarationError, match=rf"job {wrong.__name__}\(\) is called with \(ctx"
        ):
            svc.periodic(every="1s")(wrong)
    svc.periodic(every="1s")(tidy)
    assert [job.name for job in svc.jobs] == ["tidy"]


def test_a_hook_of_start_or_stop_takes_nothing():
    """It is told at the declaration, and not by a start that fails."""
    svc = Service("compute")

    async def connect(ctx: Context) -> None: ...

    with pytest.raises(DeclarationError, match=r"on_start hook connect\(\) is called with no argu"):
        svc.on_start(connect)
    with pytest.raises(DeclarationError, match=r"on_stop hook connect\(\) is called with no argum"):
        svc.on_stop(connect)
    assert svc.on_start(print) is print


@pytest.mark.looptime
async def test_an_unknown_option_of_prepare_is_refused(site: Site):
    """Before anything is sent; options are never taken for arguments."""
    with pytest.raises(TypeError, match=r"no option 'timout'; did you mean timeout"):
        site.client.prepare(timout=5)
    with pytest.raises(ConfigError, match="'soon' is not a duration"):
        site.client.prepare(timeout="soon")
    with pytest.raises(InvalidArgumentsError, match="by name"):
        await site.client.call(a_service_method(site), 1)


def a_service_method(site: Site) -> Any:
    return next(m for m in site.life.runtime.service.methods if m.name == "add")


def test_settings_are_checked_as_a_whole():
    """Every fault is told at once, each with its remedy."""
    env = {
        "GRACEKIT_DRAIN_TIMEOUT": "soon",
        "GRACEKIT_MAX_RUNING": "5",
        "GRACEKIT_STORE_URL": "redis://x",
    }
    with pytest.raises(ConfigError) as caught:
        load({}, env)

    text = str(caught.value)
    for words in ("'soon' is not a duration", "did you mean GRACEKIT_MAX_RUNNING", "sqlite:///"):
        assert words in text


def test_timeouts_that_contradict_each_other_are_refused():
    """The message adds up the sum, names what it collides with, and says what to set."""
    with pytest.raises(ConfigError) as caught:
        Settings(drain_timeout_s=60.0, kill_after_s=30.0)

    text = str(caught.value)
    for words in ("= 64s must be below kill_after = 30s", "TimeoutStopSec", "DRAIN_TIMEOUT=25s"):
        assert words in text


# -- stores and disks ----------------------------------------------------------------------------


def files(place: Path, **more: Any) -> Settings:
    return Settings(
        transport_url=f"sqlite:///{place / 'q.db'}",
        store_url=f"sqlite:///{place / 'store.db'}",
        host="node-1",
        **more,
    )


def test_a_store_of_a_newer_gracekit_is_refused_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Exit 78, the versions named, not a byte of the file changed, and no lock left behind."""
    place = tmp_path / "store.db"
    asyncio.run(_make_store(place))
    connection = apsw.Connection(str(place))
    connection.execute("PRAGMA user_version = 4711")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    before = place.read_bytes()

    for _ in range(2):
        assert run_service(a_service(), files(tmp_path)) == ExitCode.CONFIG
        assert "4711" in capsys.readouterr().err
    assert place.read_bytes() == before
    with pytest.raises(SchemaTooNewError):
        asyncio.run(_make_store(place))


async def _make_store(place: Path) -> None:
    engine = SqliteEngine(place, load_migrations(MIGRATIONS), process=Process())
    await engine.start()
    await engine.stop()


@pytest.mark.process
def test_a_read_only_disk_is_refused_at_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Exit 78, before any request is taken."""
    place = str(tmp_path)
    asyncio.run(_make_store(tmp_path / "store.db"))
    mount = subprocess.run(["mount", "--bind", place, place], capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip("this user may not mount, and permission bits do not stop root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        assert run_service(a_service(), files(tmp_path)) == ExitCode.CONFIG
    finally:
        subprocess.run(["umount", place], check=True)
    assert "store.db" in capsys.readouterr().err


async def test_a_disk_that_fills_up_ends_the_service_in_order_and_loses_nothing(tmp_path: Path):
    """Exit 70; each request has run and is on record, or is still in its queue for the next
    start.
    """
    done: list[int] = []
    svc = a_service(done)
    config = files(tmp_path, drain_timeout_s=5.0)
    living = {Process().identify()}  # the caller's
    process = PlayedProcess(living, 1)
    engine = SqliteEngine(
        tmp_path / "store.db", load_migrations(MIGRATIONS), process=process, max_page_count=75
    )
    async with svc.client(config.transport_url) as client:
        runtime = Runtime(svc, config, engine=engine, process=process)
        async with runtime:
            serving = asyncio.create_task(runtime.serve())
            for number in range(REQUESTS):
                view = client.prepare(request_id=f"r{number}")
                await view.cast("add", a=number, b=pad(number))
                while not (done or serving.done()):  # all of them in one commit would fit nowhere
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(60):
                report = await serving

    assert report.exit_code == ExitCode.INTERNAL
    assert f"the disk of {tmp_path / 'store.db'} is full: make room" in (report.failure or "")
    assert 0 < len(set(done)) < REQUESTS

    living.discard(process.identity)
    async with Runtime(svc, config, process=PlayedProcess(living, 2)) as second:
        serving = asyncio.create_task(second.serve())
        async with svc.client(config.transport_url) as client:
            ends = await asyncio.gather(
                *(
                    client.prepare(request_id=f"r{n}", timeout=60).call("add", a=n, b=pad(n))
                    for n in range(REQUESTS)
                ),
                return_exceptions=True,
            )
    assert (await serving).exit_code == 0
    for number, end in enumerate(ends):
        # From the record, or run now; ERRORED where its end could not be written.
        assert end == number + pad(number) or "ERRORED" in str(end)
    assert sorted(done) == list(range(REQUESTS))


REQUESTS = 150


def pad(number: int) -> int:
    """A number with many digits, so that a small disk is soon full."""
    return random.Random(number).getrandbits(4000)


@pytest.mark.looptime
async def test_a_caller_of_a_service_that_refuses_all_gets_only_our_errors(site: Site):
    """Whatever is wrong, what arrives is an error that names it: never silence."""
    for method, args in (("nope", {}), ("add", {"x": 1}), ("change", {}), ("odd", {})):
        with pytest.raises((RpcError, TypeError)):
            await site.client.prepare(timeout=5).call(method, **args)


@pytest.mark.looptime
async def test_a_nul_reaches_no_column_of_text():
    """PostgreSQL has no such character: refused where it is named, escaped where a handler says
    it.
    """
    world, svc = World(), a_service()

    @svc.rpc
    async def hold(ctx: Context, key: Any) -> None:
        await ctx.hold("migration", key, at_most="1h")

    @svc.rpc
    async def fail(ctx: Context) -> None:
        raise ValueError("no disk \0 there")

    @svc.rpc(resource="vm")
    async def resize(ctx: Context, vm: str) -> None:
        """Do nothing."""

    await world.start(svc)
    client = await world.client(svc)
    for wrong in ("u\0", "\ud800"):
        with pytest.raises(ConfigError, match=r"request_id=.* no store takes"):
            client.prepare(request_id=wrong)
    with pytest.raises(TypeError, match=r"the id of a hold is text .* none of them NUL"):
        await client.call(hold, key="vm\0")
    with pytest.raises(TypeError, match="the id of a hold is text"):
        await client.call("hold", key=["vm"])
    with pytest.raises(TypeError, match="none of them NUL"):
        await client.call("resize", vm="vm\0")
    with pytest.raises(ValueError, match="no disk"):
        await client.prepare(request_id="r").call(fail)

    assert world.task("r")["detail"] == r"no disk \0 there"
    values = [value for row in world.rows("SELECT * FROM task") for value in row.values()]
    assert not any("\0" in value for value in values if isinstance(value, str))
    await world.close()
