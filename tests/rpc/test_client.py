"""Callers: options, addresses, answers, errors and timeouts, in virtual time."""

from __future__ import annotations

import asyncio
import enum
import gc
import inspect
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

from gracekit import Context, Service, Settings
from gracekit.clock import Clock
from gracekit.errors import (
    CallTimeoutError,
    ConfigError,
    DependencyError,
    Draining,
    HeartbeatTimeoutError,
    InvalidArgumentsError,
    MessageTooLargeError,
    NoSuchMethodError,
    Parked,
    RemoteError,
    RpcError,
    UnconfirmedError,
    Undeliverable,
    UnserialisableError,
    UnsupportedVersionError,
    VersionCapError,
)
from gracekit.process import Process
from gracekit.rpc.client import RpcClient
from gracekit.rpc.connect import open_transport
from gracekit.rpc.failures import failure_of
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.message import Reply, Request
from gracekit.rpc.method_options import options_from
from gracekit.rpc.methods import Method
from gracekit.rpc.oslo_wire import decode_request, encode_reply, write_result
from gracekit.rpc.replies import Replies
from gracekit.rpc.transport import (
    Delivery,
    Message,
    Queue,
    QueueKind,
    directed_queue,
    reply_queue,
    shared_queue,
)
from tests.rpc.kit import Inbox

pytestmark = pytest.mark.looptime

Answer = Callable[[Request], Any]


class Lost(Exception):  # noqa: N818
    """An application's error."""


class Echo:
    """A service of a few lines: answers with the request's arguments, or as told."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.requests: list[Request] = []
        self.deliveries: list[Delivery] = []
        self.answer: Answer = lambda request: request.args
        self.is_silent = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, *queues: Queue) -> None:
        await self.transport.consume(queues, self._take, prefetch=100)

    def _take(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._reply(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, delivery: Delivery) -> None:
        request = decode_request(delivery.body)
        self.requests.append(request)
        self.deliveries.append(delivery)
        await delivery.ack()
        if request.reply is None or self.is_silent:
            return
        try:
            reply = Reply(msg_id=request.reply.msg_id, reply_id="r", result=self.answer(request))
        except Exception as error:  # noqa: BLE001
            reply = Reply(msg_id=request.reply.msg_id, reply_id="r", failure=failure_of(error))
        await self.send(request, encode_reply(reply))

    async def send(self, request: Request, body: bytes) -> None:
        assert request.reply is not None
        await self.transport.publish(reply_queue(request.reply.queue), Message(body=body))


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def echo(broker: MemoryBroker) -> AsyncIterator[Echo]:
    transport = MemoryTransport(broker, Process())
    await transport.start()
    echo = Echo(transport)
    await echo.serve(
        shared_queue("compute"),
        directed_queue("compute", "node-1"),
        shared_queue("compute-ops"),
        Queue("compute_fanout_1", QueueKind.FANOUT, "compute"),
    )
    yield echo
    await transport.stop()


@pytest.fixture
async def client(broker: MemoryBroker, echo: Echo) -> AsyncIterator[RpcClient]:
    transport = MemoryTransport(broker, Process())
    await transport.start()
    async with RpcClient(transport, "compute", exceptions={"app.Lost": Lost}) as client:
        yield client
    await transport.stop()


async def migrate(ctx: object, vm: str, dest: str = "any") -> dict[str, str]:
    return {"vm": vm, "dest": dest}


async def done(ctx: object, vm: str) -> Any: ...


MIGRATE: Method[..., Any] = Method(migrate, options_from(resource="vm", version="1.4"), skip=1)
DONE: Method[..., Any] = Method(done, options_from(ops=True, namespace="late"), skip=1)


# -- calls ---------------------------------------------------------------------------


async def test_a_call_returns_the_answer(client, echo):
    """Arguments go out by name, plain data comes back."""
    assert await client.call("echo", a=1, b=[None, "é"]) == {"a": 1, "b": [None, "é"]}


async def test_arguments_may_have_any_name(client):
    """No argument's name collides with the client's own."""
    odd = {"method": 1, "self": 2, "timeout": 3, "host": 4, "options": 5}

    assert await client.call("echo", **odd) == odd


async def test_calls_find_their_own_answers(client, echo):
    """Many calls over one reply queue are not mixed up, whatever the order of the answers."""
    echo.answer = lambda request: request.args["n"]

    answers = await asyncio.gather(*(client.call("echo", n=n) for n in range(100)))

    assert answers == list(range(100))
    assert len({request.reply.queue for request in echo.requests}) == 1
    assert len({request.reply.msg_id for request in echo.requests}) == 100
    assert len({request.request_id for request in echo.requests}) == 100


async def test_a_method_brings_its_version_namespace_and_topic(client, echo):
    """Passing the method itself sends what it declares, to the topic that it is marked for."""
    assert await client.call(MIGRATE, vm="vm-1") == {"vm": "vm-1"}
    await client.call(DONE, vm="vm-1")

    assert [(r.method, r.version, r.namespace) for r in echo.requests] == [
        ("migrate", "1.4", None),
        ("done", "1.0", "late"),
    ]
    assert [d.queue.name for d in echo.deliveries] == ["compute", "compute-ops"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "vm"),
        ({"vm": "a", "dst": "b"}, "did you mean 'dest'"),
        ({"vm": ""}, "needs a value for 'vm'"),
    ],
)
async def test_wrong_arguments_of_a_known_method_are_not_sent(client, echo, arguments, said):
    """Where the signature is at hand, the mistake is told before anything is sent."""
    with pytest.raises(InvalidArgumentsError, match=said):
        await client.call(MIGRATE, **arguments)

    assert echo.requests == []


async def test_positional_arguments_are_refused(client, echo):
    """Requests carry their arguments by name."""
    with pytest.raises(
        InvalidArgumentsError, match=r"echo\(\) takes its arguments by name; 2 came"
    ):
        await client.call("echo", 1, 2)


# -- options --------------------------------------------------------------------------


async def test_options_choose_address_and_headers(client, echo):
    """Host, ops, version, namespace and context reach the request; views add up and stay apart."""
    node = client.prepare(host="node-1", context={"user_id": "joe"})
    await node.prepare(version="2.1", namespace="n").call("echo")
    await node.call("echo")
    await client.prepare(ops=True).call("echo")

    assert [d.queue.name for d in echo.deliveries] == [
        "compute.node-1",
        "compute.node-1",
        "compute-ops",
    ]
    assert [(r.version, r.namespace, r.context) for r in echo.requests] == [
        ("2.1", "n", {"user_id": "joe"}),
        ("1.0", None, {"user_id": "joe"}),
        ("1.0", None, {}),
    ]


async def test_a_context_is_copied_when_prepared(client, echo):
    """What happens to the caller's mapping later changes no prepared view."""
    context = {"user_id": "joe"}
    view = client.prepare(context=context)

    context["user_id"] = "eve"
    await view.call("echo")

    assert echo.requests[0].context == {"user_id": "joe"}


class Field(str, enum.Enum):  # noqa: UP042 - the kind that is meant
    """As programs of before Python 3.11 write it: `str()` of a member is not its text."""

    USER = "user_id"
    OTHER = "user_id\u00e9"


class Text(str):
    """Text of another class, as frameworks have it."""

    __slots__ = ()

    def __str__(self) -> str:
        return "not what it is"


@pytest.mark.parametrize(
    ("context", "arrives"),
    [
        (
            {Field.USER: "ann", Field.OTHER: Field.USER},
            {"user_id": "ann", "user_id\u00e9": "user_id"},
        ),
        ({Text("user_id"): Text("joe")}, {"user_id": "joe"}),
        ({1: {Field.USER: (1, 2)}}, {"1": {"user_id": [1, 2]}}),
        (MappingProxyType({"a": "b"}), {"a": "b"}),
    ],
)
async def test_a_context_arrives_like_arguments(client, echo, context, arrives):
    """Who may get a recorded answer is decided by `user_id`, which must not become `Field.USER`."""
    await client.prepare(context=context).call("echo")

    assert echo.requests[0].context == arrives


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({1: "a", "1": "b"}, "context: two keys are both written as '1'"),
        ({True: "a"}, "context: key True of type bool; keys are text or integers"),
        ({None: "a"}, "context: key None of type NoneType; keys are text or integers"),
        ({"\ud800": "a"}, "a key of context: text with a lone surrogate is not Unicode"),
        ({"a": {"b": object()}}, "context.a.b: object of type object"),
    ],
)
async def test_a_context_that_is_no_plain_data_is_not_sent(client, echo, context, said):
    """As with arguments: no value is lost without a word."""
    with pytest.raises(UnserialisableError, match=re.escape(said)):
        await client.prepare(context=context).call("echo")

    assert echo.requests == []


@pytest.mark.parametrize("option", ["", "namespace", "version"])
async def test_half_a_character_is_refused_with_where_it_is(client, echo, option):
    """As in arguments. The error can be printed: it does not quote the half."""
    said = f"{option or 'method'}: text with a lone surrogate is not Unicode"
    prepared = client.prepare(**{option: "\ud800"}) if option else client

    with pytest.raises(UnserialisableError) as caught:
        await prepared.call("echo" if option else "\ud800")

    assert str(caught.value) == said
    assert echo.requests == []


async def test_text_of_another_class_is_sent_as_its_text(client, echo):
    """A framework's own kind of text names a method, a namespace or a request as plain text
    does.
    """
    prepared = client.prepare(request_id=Text("r"), namespace=Text("late"), version=Text("1.2"))

    await prepared.call(Text("echo"), a=Text("b"))

    (request,) = echo.requests
    named = (request.request_id, request.method, request.namespace, request.version)
    assert named == ("r", "echo", "late", "1.2")
    assert request.args == {"a": "b"}


async def test_an_unknown_option_is_refused_with_a_hint(client):
    """A mistyped option does not become an argument or vanish."""
    with pytest.raises(TypeError, match="no option 'timout'; did you mean timeout"):
        client.prepare(timout=3)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": "soon"},
        {"timeout": "-1s"},
        {"timeout": math.nan},
        {"timeout": False},
        {"monitor_timeout": 0},
        {"monitor_timeout": 1.9},
        {"monitor_timeout": "soon"},
        {"request_id": ""},
        {"host": ""},
        *({"version_cap": wrong} for wrong in ("", "6", "6.x", "6.4.1.0", "-6.4", "\u0666.4", 6.4)),
        {"ops_since": "auto"},
    ],
)
async def test_impossible_options_are_refused(client, options):
    """A value that cannot work is refused where it is given."""
    with pytest.raises(ConfigError):
        client.prepare(**options)


# -- casts and fanouts ---------------------------------------------------------------


async def test_a_cast_returns_the_id_that_was_sent(client, echo):
    """The id names the request in every record of it, and each send draws a new one."""
    ids = [await client.cast("echo", n=n) for n in range(2)]
    await client.call("echo")

    assert [request.request_id for request in echo.requests[:2]] == ids
    assert ids[0] != ids[1]
    assert echo.requests[0].reply is None
    assert echo.deliveries[0].expires_in_s is None


async def test_a_prepared_request_id_is_sent_as_it_is(client, echo):
    """The caller's own idempotency key stays the same over repeated sends."""
    view = client.prepare(request_id="order-7")

    assert [await view.cast("echo"), await view.cast("echo")] == ["order-7", "order-7"]


async def test_a_fanout_goes_to_the_fanout_queues(client, echo):
    """Every instance gets its copy; a fanout to one host makes no sense and is refused."""
    await client.fanout("echo", a=1)
    await client.call("echo")

    assert echo.deliveries[0].queue.name == "compute_fanout_1"
    with pytest.raises(InvalidArgumentsError, match="goes to every host"):
        await client.prepare(host="node-1").fanout("echo")


async def test_an_unread_topic_is_undeliverable(broker, client):
    """A topic that no service ever read fails at once, for calls and casts."""
    nobody = client.prepare(host="node-9")

    with pytest.raises(Undeliverable):
        await nobody.call("echo")
    with pytest.raises(Undeliverable):
        await nobody.cast("echo")


# -- time -----------------------------------------------------------------------------


async def test_a_call_times_out_after_a_minute(client, echo):
    """Silence ends with an error that names method, topic and seconds, and says what may still
    come.
    """
    echo.is_silent = True
    loop = asyncio.get_running_loop()
    begin = loop.time()

    with pytest.raises(
        CallTimeoutError,
        match=r"no reply to echo\(\) from 'compute' within 60 s: request \w+ runs on if a service "
        r"has read it; if none has, it has expired and never runs; call again with the same "
        r"request id for its answer",
    ) as caught:
        await client.call("echo")

    assert loop.time() - begin == pytest.approx(60)
    assert caught.value.request_id == echo.requests[0].request_id


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        (
            "publish",
            "r1 is not confirmed by the broker, so it may be in the queue, or not; call ag",
        ),
        ("consume", "r1 was not sent, as its time was over before; call again, and give it mor"),
    ],
)
async def test_a_call_that_timed_out_says_how_far_its_request_came(
    client, echo, monkeypatch: pytest.MonkeyPatch, slow: str, said: str
):
    """In the queue, perhaps in the queue, or not sent at all, are three things."""

    async def hangs(*_: Any, **__: Any) -> None:
        await asyncio.sleep(1000)

    monkeypatch.setattr(client._transport, slow, hangs)
    with pytest.raises(CallTimeoutError, match=f"within 5 s: request {said}") as caught:
        await client.prepare(timeout=5, request_id="r1").call("echo")

    assert caught.value.request_id == "r1"


async def test_a_call_that_waits_unread_expires_with_its_caller(broker, client, echo):
    """Once its caller has left, a queued call is dropped and counted."""
    await echo.transport.stop()

    with pytest.raises(CallTimeoutError, match="within 5 s"):
        await client.prepare(timeout="5s").call("echo")

    assert broker.expired() == {"compute": 1}


@pytest.mark.parametrize("left", [0, 0.0, "0s", -0.2, -math.inf])
async def test_a_call_whose_time_is_over_is_not_sent(client, echo, left):
    """Code that computes `deadline - now` meets the time-out that it handles anyway."""
    loop = asyncio.get_running_loop()
    view, begin = client.prepare(timeout=left, fail_fast=True), loop.time()

    with pytest.raises(CallTimeoutError, match=r"echo\(\) was not sent: its time-out of .* over"):
        await view.call("echo")

    assert loop.time() == begin
    assert echo.requests == []
    await view.prepare(fail_fast=False).cast("echo")
    await client.call("echo")
    assert len(echo.requests) == 2, "a cast has no time-out"


async def test_a_late_or_repeated_reply_is_ignored_and_counted(client, echo):
    """Replies that no call waits for change nothing."""
    echo.is_silent = True
    with pytest.raises(CallTimeoutError):
        await client.prepare(timeout=1).call("echo")
    echo.is_silent = False
    late = encode_reply(Reply(msg_id=echo.requests[0].reply.msg_id, reply_id="r", result="late"))

    await echo.send(echo.requests[0], late)
    await echo.send(echo.requests[0], late)

    assert await client.call("echo", a=1) == {"a": 1}
    assert client._replies.ignored == 2


async def test_foreign_and_unreadable_replies_are_survived(broker, client, echo):
    """Junk in the reply queue is counted and kept aside; the next answer is found."""
    await client.call("echo")
    for junk in (b"junk", b'{"_msg_id": "unknown"}', b'{"_msg_id": "m", "ending": false}'):
        await echo.send(echo.requests[0], junk)

    assert await client.call("echo", a=1) == {"a": 1}
    assert client._replies.ignored == 2
    assert [letter.body for letter in broker.dead_letters] == [b"junk"]


async def test_a_heartbeat_is_no_answer(client, echo):
    """A reply that is no ending leaves the call waiting for the one that is."""
    echo.is_silent = True
    calling = asyncio.create_task(client.call("echo"))
    while not echo.requests:
        await asyncio.sleep(0)
    msg_id = echo.requests[0].reply.msg_id

    for ending in (False, True):
        reply = Reply(msg_id=msg_id, reply_id="r", result=ending, ending=ending)
        await echo.send(echo.requests[0], encode_reply(reply))

    assert await calling is True


async def test_stopping_ends_waiting_calls_with_an_error(client, echo):
    """A caller is told that its client was stopped; it is not cancelled in its place."""
    echo.is_silent = True
    calling = asyncio.create_task(client.call("echo"))
    while not echo.requests:
        await asyncio.sleep(0)

    await client.stop()

    with pytest.raises(RpcError, match="the client was stopped") as stopped:
        await calling
    assert stopped.value.request_id == echo.requests[0].request_id
    assert str(stopped.value).endswith(f"with the same request id: {stopped.value.request_id}")


async def test_a_stop_ends_waiting_calls_before_it_waits_for_the_broker(
    client, echo, monkeypatch: pytest.MonkeyPatch
):
    """A broker that stands still confirms the end of the reply queue late, if at all."""
    echo.is_silent = True
    calling = asyncio.create_task(client.call("echo"))
    while not echo.requests:
        await asyncio.sleep(0)
    consumer, confirmed = client._replies._consumer, asyncio.Event()
    cancel = consumer.cancel

    async def late() -> None:
        await confirmed.wait()
        await cancel()

    monkeypatch.setattr(consumer, "cancel", late)

    stopping = asyncio.create_task(client.stop())
    with pytest.raises(RpcError, match="the client was stopped"):
        await calling

    assert not stopping.done()
    confirmed.set()
    await stopping


@pytest.mark.parametrize("turns", range(8))
async def test_a_stop_at_any_moment_of_a_first_call_ends_it(
    client, echo, monkeypatch: pytest.MonkeyPatch, turns: int
):
    """Also just as its reply queue has been opened."""
    echo.is_silent = True
    consume = client._transport.consume

    async def later(*given: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return await consume(*given, **more)

    monkeypatch.setattr(client._transport, "consume", later)
    calling = asyncio.create_task(client.call("echo"))
    for _ in range(turns):
        await asyncio.sleep(0)

    await client.stop()

    if turns:
        with pytest.raises((DependencyError, RpcError), match="the client was stopped before"):
            await calling
    calling.cancel()


def live_timers() -> int:
    scheduled = asyncio.get_running_loop()._scheduled
    return sum(not handle.cancelled() for handle in scheduled)


@pytest.mark.parametrize("ends", ["the client is stopped", "the answer comes"])
async def test_a_client_that_has_been_stopped_leaves_no_timer(broker, echo, ends):
    """Also of a call that waited when it was stopped, and would have waited for a day."""
    transport, echo.is_silent = MemoryTransport(broker, Process()), True
    await transport.start()
    before = live_timers()
    for _ in range(10):
        client = RpcClient(transport, "compute")
        await client.start()
        calling = asyncio.create_task(client.prepare(timeout="1d").call("echo"))
        while not echo.requests:
            await asyncio.sleep(0)
        assert live_timers() > before
        request = echo.requests.pop()
        if ends == "the answer comes":
            await echo.send(request, encode_reply(Reply(msg_id=request.reply.msg_id, reply_id="r")))
            await calling
        await client.stop()
        await asyncio.wait([calling])
        assert isinstance(calling.exception(), RpcError | None)

    assert live_timers() == before
    await transport.stop()


async def test_a_client_that_is_stopped_while_calls_are_being_sent_says_nothing_else(broker, echo):
    """Their answers will not be looked at, which is no error for the log."""
    said: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))

    class Slow(MemoryTransport):
        async def publish(self, queue: Queue, message: Message) -> None:
            await asyncio.sleep(1)
            raise UnconfirmedError("the transport was stopped")

    transport = Slow(broker, Process())
    await transport.start()
    client = RpcClient(transport, "compute")
    await client.start()
    calls = [asyncio.create_task(client.call("echo")) for _ in range(3)]
    await asyncio.sleep(0.5)

    await client.stop()
    await asyncio.wait(calls)

    assert all(isinstance(call.exception(), UnconfirmedError) for call in calls)
    del calls
    gc.collect()
    assert said == []
    await transport.stop()


# -- a monitored call ------------------------------------------------------------------


async def beat(echo: Echo, *, ending: bool = False) -> None:
    """A heartbeat to the last caller, or its answer."""
    msg_id = echo.requests[-1].reply.msg_id
    reply = Reply(msg_id=msg_id, reply_id="r", result="done" if ending else None, ending=ending)
    await echo.send(echo.requests[-1], encode_reply(reply))


@pytest.mark.parametrize(("asked", "sent"), [(None, None), (30, 30), ("1m", 60), (2.5, 2.5)])
async def test_heartbeats_are_asked_for_in_the_request(client, echo, asked, sent):
    """Null when nobody asked: a server must send none then. Whole seconds go as oslo's integers."""
    await client.prepare(monitor_timeout=asked).call("echo")
    await client.prepare(monitor_timeout=asked).cast("echo")
    await asyncio.sleep(0.1)

    call, cast = (json.loads(json.loads(d.body)["oslo.message"]) for d in echo.deliveries)
    assert call["_timeout"] == sent
    assert type(call["_timeout"]) is type(sent)
    assert "_timeout" not in cast


async def test_each_heartbeat_renews_the_monitor_and_nothing_else(client, echo):
    """A call lives as long as its server does, but never beyond its total time-out."""
    echo.is_silent = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    calling = asyncio.create_task(client.prepare(timeout=100, monitor_timeout=10).call("echo"))
    for _ in range(11):
        await asyncio.sleep(9)
        await beat(echo)

    with pytest.raises(CallTimeoutError, match="within 100 s") as caught:
        await calling

    assert type(caught.value) is CallTimeoutError
    assert loop.time() - began == pytest.approx(100, abs=0.1)


async def test_silence_ends_a_monitored_call(client, echo):
    """The error says that it was the monitor, names method, topic and request, and promises
    nothing.
    """
    echo.is_silent = True
    loop = asyncio.get_running_loop()
    calling = asyncio.create_task(client.prepare(timeout="1h", monitor_timeout=10).call("echo"))
    await asyncio.sleep(9)
    await beat(echo)
    began = loop.time()

    with pytest.raises(
        HeartbeatTimeoutError,
        match=r"no heartbeat from 'compute' about echo\(\) within 10 s \(monitor_timeout; the "
        r"time-out of 3600 s is not over\).*; request \w+ may still run; call again with the same "
        r"request id for its answer",
    ) as caught:
        await calling

    assert loop.time() - began == pytest.approx(10, abs=0.1)
    assert isinstance(caught.value, CallTimeoutError)
    assert caught.value.request_id == echo.requests[0].request_id


async def test_an_answer_in_time_ends_the_monitor(client, echo):
    """Nothing is left behind: neither a timer, nor a call that a late heartbeat could find."""
    calling = asyncio.create_task(client.prepare(monitor_timeout=10).call("echo", a=1))
    while not client._replies._monitors:
        await asyncio.sleep(0)
    (monitor,) = client._replies._monitors.values()

    assert await calling == {"a": 1}
    assert monitor._timer.cancelled()
    await beat(echo)
    await asyncio.sleep(20)

    assert client._replies._monitors == {}
    assert client._replies.ignored == 0


async def test_a_call_that_is_not_monitored_waits_in_silence(client, echo):
    """Heartbeats that it did not ask for change nothing either."""
    echo.is_silent = True
    calling = asyncio.create_task(client.call("echo"))
    await asyncio.sleep(20)
    await beat(echo)
    await asyncio.sleep(30)
    await beat(echo, ending=True)

    assert await calling == "done"


# -- versions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "version", "fits"),
    [
        (None, "9.9", True),
        ("6.4", "6.4", True),
        ("6.4", "6.3", True),
        ("6.4", "6.3.9", True),
        ("6.4", "6.5", False),
        ("6.4", "6.4.1", False),
        ("6.4.2", "6.4.2", True),
        ("6.4.2", "6.4.3", False),
        ("6.4", "5.0", False),
        ("6.4", "7.0", False),
        ("6.10", "6.9", True),
        ("6.4", "nonsense", False),
    ],
)
async def test_a_cap_says_what_can_be_sent(client, echo, cap, version, fits):
    """Same major, minor not above, as oslo has it; what does not fit is refused before it is
    sent.
    """
    view = client.prepare(version_cap=cap)
    asking = view.prepare(version=version)

    assert view.can_send_version(version) is fits
    assert asking.can_send_version() is fits
    for send in (asking.call, asking.cast, asking.fanout):
        if fits:
            await send("echo")
        else:
            with pytest.raises(VersionCapError, match=f"at {version} and version_cap='{cap}'"):
                await send("echo")
    await asyncio.sleep(0.1)
    assert len(echo.requests) == (3 if fits else 0)


async def test_a_cap_counts_what_the_method_declares(client, echo):
    """`migrate` is served at 1.4; without a version a name means 1.0."""
    old = client.prepare(version_cap="1.3")

    with pytest.raises(VersionCapError, match=r"migrate\(\) is asked for at 1.4"):
        await old.call(MIGRATE, vm="vm-1")
    await old.prepare(version="1.2").call(MIGRATE, vm="vm-1")
    await old.call("echo")

    assert [request.version for request in echo.requests] == ["1.2", "1.0"]
    assert old.can_send_version()
    assert not client.prepare(version_cap="2.0").can_send_version()


# -- peers without an ops server --------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "since", "topic"),
    [
        (None, None, "compute-ops"),
        (None, "6.5", "compute-ops"),
        ("6.4", None, "compute-ops"),
        ("6.4", "6.5", "compute"),
        ("6.5", "6.5", "compute-ops"),
        ("6.10", "6.5", "compute-ops"),
        ("6.5.0", "6.5", "compute-ops"),
        ("6.5", "6.5.0", "compute-ops"),
        ("7.0", "6.5", "compute-ops"),
        ("5.9", "6.5", "compute"),
    ],
)
async def test_a_cap_below_the_ops_server_sends_to_the_other_topic(client, echo, cap, since, topic):
    """The receiver listens to new requests only; whatever came after the ops server has it."""
    version = cap or "6.0"
    view = client.prepare(ops=True, version_cap=cap, ops_since=since, version=version)
    await echo.serve(
        directed_queue("compute-ops", "node-1"),
        Queue("compute-ops_fanout_1", QueueKind.FANOUT, "compute-ops"),
    )

    await view.call("echo")
    await view.cast("echo")
    await view.fanout("echo")
    await view.prepare(host="node-1").call("echo")

    assert [d.queue.topic for d in echo.deliveries] == [topic] * 4


async def test_new_requests_do_not_ask_for_the_ops_server(client, echo):
    """The cap moves ops requests only."""
    await client.prepare(version_cap="1.4", ops_since="2.0").call(MIGRATE, vm="vm-1")

    assert echo.deliveries[0].queue.name == "compute"


async def test_an_unroutable_ops_request_goes_to_the_other_topic_once(client, echo):
    """With the same id and to the same host; the answer finds its caller."""
    view = client.prepare(ops=True, host="node-1")

    assert await view.call("echo", a=1) == {"a": 1}
    sent = await view.cast("echo")
    await asyncio.sleep(0.1)

    assert [d.queue.name for d in echo.deliveries] == ["compute.node-1"] * 2
    assert echo.requests[1].request_id == sent
    assert echo.deliveries[0].expires_in_s == pytest.approx(60, abs=0.1)


async def test_what_no_topic_takes_is_undeliverable(client, echo):
    """A fallback is no retry: the second refusal ends it, and names both queues."""
    view = client.prepare(ops=True, host="node-9")

    for send in (view.call, view.cast):
        with pytest.raises(
            Undeliverable, match=r"-ops.node-9'.*nor is there 'compute.node-9', .*check the name"
        ):
            await send("echo")


async def test_new_requests_and_control_verbs_have_no_fallback(broker, client, echo):
    """A new request belongs on its own topic, and a verb is understood on the ops topic alone."""
    await echo.serve(directed_queue("compute-ops", "node-2"), directed_queue("compute", "node-3"))

    with pytest.raises(Undeliverable) as told:
        await client.prepare(host="node-2").call("echo")
    assert "nor is there" not in str(told.value)
    with pytest.raises(Undeliverable):
        await client.prepare(host="node-3", ops=True, namespace="gracekit").call("status")

    assert echo.requests == []


async def test_a_queue_without_a_reader_is_no_fallback(broker, client, echo):
    """The service will be back, and answers there: the request waits."""
    await echo.transport.declare([directed_queue("compute-ops", "node-1")])

    await client.prepare(ops=True, host="node-1").cast("echo")

    assert broker.waiting("compute-ops.node-1") == 1
    assert echo.requests == []


# -- asking ahead -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        UnsupportedVersionError("namespace 'gracekit' is not served"),  # an oslo server
        NoSuchMethodError("no control verb 'state'"),
        None,
        "closed",
        {},
        {"open": False},
        {"open": 0, "instance": "i", "state": "s", "host": "h"},
        {"open": False, "instance": 1, "state": "s"},
        {"open": True, "instance": "i", "state": "draining", "host": "h"},
    ],
)
async def test_an_odd_answer_is_no_reason_not_to_send(client, echo, answer):
    """Only who says in so many words that it is closed is taken at its word."""

    def say(request: Request) -> Any:
        if request.namespace != "gracekit":
            return "done"
        if isinstance(answer, Exception):
            raise answer
        return answer

    echo.answer = say

    assert await client.prepare(fail_fast=True).call("echo") == "done"
    assert [(r.namespace, r.method) for r in echo.requests] == [
        ("gracekit", "state"),
        (None, "echo"),
    ]


@pytest.mark.parametrize("host", [None, "node-1"])
async def test_whoever_reads_the_request_is_asked_first(client, echo, host):
    """A directed request is its host's affair, any other is anybody's."""
    await echo.serve(directed_queue("compute-ops", "node-1"))
    await client.prepare(fail_fast=True, host=host).call("echo")

    suffix = f".{host}" if host else ""
    assert [d.queue.name for d in echo.deliveries] == [f"compute-ops{suffix}", f"compute{suffix}"]


async def test_what_a_closed_service_calls_itself_is_cut(client, echo):
    """Names from the wire go into an error that somebody logs."""
    echo.answer = lambda _: {"open": False, "instance": "i" * 5000, "state": "s" * 5000}

    with pytest.raises(Draining) as caught:
        await client.prepare(fail_fast=True).call("echo")

    assert len(str(caught.value)) < 400


async def test_a_stopped_question_is_forgotten(client, echo):
    """A caller that is cancelled while it asks leaves nothing behind."""
    echo.is_silent = True
    calling = asyncio.create_task(client.prepare(fail_fast=True).call("echo"))
    while not echo.requests:
        await asyncio.sleep(0)

    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling

    assert client._replies._hearing == {}


# -- errors ---------------------------------------------------------------------------


def raising(error: Exception) -> Answer:
    def answer(request: Request) -> Any:
        raise error

    return answer


@pytest.mark.parametrize("error", [ValueError("bad", 5), KeyError("k"), NoSuchMethodError("no m")])
async def test_known_errors_are_raised_as_themselves(client, echo, error):
    """A builtin or gracekit error there is the same error here."""
    echo.answer = raising(error)

    with pytest.raises(type(error)) as caught:
        await client.call("echo")

    assert caught.value.args == error.args
    assert "remote traceback" in caught.value.__notes__[0]


async def test_registered_errors_are_raised_as_the_application_asked(client, echo):
    """`exceptions=` maps names on the wire to classes of the caller."""
    echo.answer = raising(type("Lost", (Exception,), {"__module__": "app"})("vm-1"))

    with pytest.raises(Lost, match="vm-1"):
        await client.call("echo")


async def test_other_errors_are_remote_errors_with_text(client, echo):
    """What is not registered keeps its name, message and traceback as text."""
    echo.answer = raising(Lost("vm-1"))

    with pytest.raises(RemoteError, match="Lost: vm-1") as caught:
        await client.call("echo")

    assert (caught.value.exc_class, caught.value.exc_module) == ("Lost", Lost.__module__)
    assert "raise error" in caught.value.traceback


async def test_what_cannot_be_sent_is_refused_by_name(client, echo):
    """The sender learns which argument is no plain data, or that the message is too large."""
    with pytest.raises(UnserialisableError, match=r"args.a\[0\].b: object of type object"):
        await client.cast("echo", a=[{"b": object()}])
    with pytest.raises(MessageTooLargeError, match=r"echo.. makes a message of .* bytes"):
        await client.cast("echo", a="x" * (1 << 20))

    assert echo.requests == []


async def test_what_is_surely_too_large_to_be_sent_is_not_copied_first(client, echo):
    """Millions of numbers would hold up the loop of the caller for seconds."""

    class Large(list[int]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("walked through")

    with pytest.raises(MessageTooLargeError, match=r"a message of more than 1048576 bytes"):
        await client.cast("echo", a=Large([1] * 600_000))
    with pytest.raises(MessageTooLargeError, match="result of more than"):
        write_result({"a": Large([1] * 600_000)})


async def test_a_client_of_a_service_sends_what_its_settings_take(tmp_path):
    """As large as the service's own `max_body_bytes`, where both are told."""
    tmp_path.chmod(0o700)
    svc, url = Service("compute"), f"sqlite:///{tmp_path / 'queue.db'}"
    process, clock = Process(), Clock()
    transport = open_transport(url, process=process, clock=clock)  # clients make no queue
    await transport.start()
    await transport.declare([shared_queue("compute")])

    async with svc.client(url, Settings(max_body_bytes=1 << 22)) as large:
        await large.cast("echo", a="x" * (1 << 21))
    async with svc.client(url) as small:
        with pytest.raises(MessageTooLargeError, match="a larger max_body_bytes"):
            await small.cast("echo", a="x" * (1 << 21))
    await transport.stop()


async def test_only_exceptions_can_be_registered(client):
    """A map to something else is refused at construction."""
    for kind in (SystemExit, "Lost", object):
        with pytest.raises(ConfigError, match="not a subclass of Exception"):
            RpcClient("sqlite:///x.db", "compute", exceptions={"app.Lost": kind})


@pytest.mark.parametrize("topic", ["", "x" * 121, "café", "a\nb", "\udcff"])
def test_a_topic_that_names_no_queue_is_refused(topic):
    """At construction, on every transport: a broker's names are bounded, in length and letters."""
    with pytest.raises(ConfigError, match=r"topic '.*' of \d+ characters must be 1 to 120 of A-Z"):
        RpcClient("sqlite:///x.db", topic)
    with pytest.raises(ConfigError, match=r"give the one that its service has|give another ops_"):
        RpcClient("sqlite:///x.db", "compute", ops_topic=topic or "é")


@pytest.mark.parametrize("host", ["", "a\nb", "\udcff"])
async def test_a_host_that_names_no_queue_is_refused(client, host):
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=r"host='.*' names no host; leave it out"):
        client.prepare(host=host)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": 5}, r"host=5 is no text; write host='\.\.\.' or leave it out"),
        ({"request_id": 7}, "request_id=7 is no text"),
        ({"version": 1.0}, r"version=1\.0 is no text"),
        ({"namespace": b"x"}, "namespace=b'x' is no text"),
        ({"context": "ann"}, "context='ann' is no mapping; write context={'user_id'"),
        ({"ops": "no"}, "ops='no' must be True or False"),
        ({"fail_fast": None}, "fail_fast=None must be True or False"),
        ({"pending": 1}, "pending=1 must be True or False"),
    ],
)
async def test_an_option_of_a_wrong_type_is_a_sentence(client, options, said):
    """It names the option and its value; nothing is sent."""
    with pytest.raises(ConfigError, match=said):
        client.prepare(**options)


@pytest.mark.parametrize(
    ("transport", "topic", "said"),
    [
        (None, "compute", "transport=None is neither a URL nor a transport; write it as 'sqlite"),
        ("sqlite:///x.db", None, "topic None is no text; give the one that its service has"),
        ("sqlite:///x.db", 5, "topic 5 is no text"),
    ],
)
def test_a_client_of_nothing_is_refused(transport, topic, said):
    """At construction, with the value."""
    with pytest.raises(ConfigError, match=said):
        RpcClient(transport, topic)


# -- parked tasks -----------------------------------------------------------------------


async def test_a_call_says_that_its_client_knows_pending(client, echo):
    """Where that was prepared, and beside its address: the handler's context has nothing of it."""
    await client.prepare(pending=True).cast("echo")
    await client.call("echo")
    await client.prepare(pending=True).call("echo")
    await client.prepare(pending=True).prepare(pending=False).call("echo")

    knowing = [request.reply and request.reply.knows_pending for request in echo.requests]
    assert knowing == [None, False, True, False]
    assert [dict(request.context) for request in echo.requests] == [{}] * 4


async def test_a_call_of_a_parked_task_ends_with_parked(client, echo):
    """The exception says under which id the task waits, until when, and in which version."""

    def park(request: Request) -> None:
        raise Parked(request.request_id, 1e9, 2)

    echo.answer = park
    with pytest.raises(Parked) as parked:
        await client.prepare(pending=True, request_id="t1").call("echo")

    assert (parked.value.task_id, parked.value.deadline, parked.value.version) == ("t1", 1e9, 2)


# -- life -----------------------------------------------------------------------------


async def test_a_transport_passed_in_stays_the_callers(broker, echo):
    """A client stops only what it opened."""
    transport = MemoryTransport(broker, Process())
    await transport.start()
    for _ in range(2):
        async with RpcClient(transport, "compute") as client:
            await client.call("echo")

    await transport.declare([shared_queue("still open")])
    await transport.stop()


async def test_an_unstarted_client_says_so():
    """Forgetting to start is told with the remedy."""
    client = RpcClient("sqlite:///never.db", "compute")

    with pytest.raises(DependencyError, match="await its start"):
        await client.call("echo")


def test_call_and_cast_take_the_method_by_position_only():
    """So that a method may have an argument named `method`."""
    for name in ("call", "cast", "fanout"):
        first = list(inspect.signature(getattr(RpcClient, name)).parameters.values())[1]
        assert first.kind is inspect.Parameter.POSITIONAL_ONLY


@pytest.mark.looptime(False)
async def test_a_client_opens_a_url_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a relative sqlite URL, file and queues are shared by name with the service."""
    monkeypatch.chdir(tmp_path)
    inbox = Inbox()
    service = open_transport("sqlite:///gracekit.db", process=Process(), clock=Clock())
    await service.start()
    try:
        await service.consume([shared_queue("compute")], inbox.put, prefetch=1)
        async with RpcClient(f"sqlite:///{tmp_path}/gracekit.db", "compute") as client:
            sent = await client.cast("echo", a=1)
        delivery = await inbox.next()
    finally:
        await service.stop()

    assert decode_request(delivery.body) == Request(request_id=sent, method="echo", args={"a": 1})


@pytest.mark.looptime(False)
async def test_a_client_makes_no_file_and_waits_for_its_service(tmp_path: Path):
    """A wrong path is told at the first request, with what to do, and leaves nothing behind; after
    the first start of the service the same client is understood.
    """
    url = f"sqlite:///{tmp_path}/gracekit.db"
    async with RpcClient(url, "compute") as client:
        for send in (client.call, client.cast, client.fanout):
            with pytest.raises(Undeliverable, match="start the service first, which makes the"):
                await send("echo", a=1)
        assert list(tmp_path.iterdir()) == []

        service = open_transport(url, process=Process(), clock=Clock())
        await service.start()
        try:
            with pytest.raises(Undeliverable, match="no service ever declared queue 'compute'"):
                await client.cast("echo", a=1)
            await service.declare([shared_queue("compute")])
            assert await client.cast("echo", a=1)
        finally:
            await service.stop()


def test_a_client_needs_the_loop_of_asyncio():
    """Under trio nothing of it could work: it says so before anything is opened."""
    opening = RpcClient("sqlite:///x.db", "compute").start()

    with pytest.raises(ConfigError, match=r"no event loop of asyncio runs here.*trio"):
        opening.send(None)


async def test_a_function_that_is_no_method_is_told_to_be_decorated(client):
    """With the name by which it can be called all the same."""

    async def render(ctx: object, album: str) -> None: ...

    for send in (client.call, client.cast, client.fanout):
        with pytest.raises(InvalidArgumentsError, match=r"render\(\) is a plain func.*@svc.rpc"):
            await send(render, album="a")
    with pytest.raises(InvalidArgumentsError, match="3 is no method: pass a service's, or"):
        await client.call(3)


async def test_a_reply_queue_that_cannot_be_opened_keeps_its_name():
    """A transport has to remember each queue that it may have made: failures add none."""
    asked: list[str] = []

    class Refusing(MemoryTransport):
        async def consume(self, queues: Any, on_delivery: Any, *, prefetch: int) -> Any:
            asked.extend(queue.name for queue in queues)
            if len(asked) < 4:
                raise DependencyError("not now")
            return await super().consume(queues, on_delivery, prefetch=prefetch)

    transport = Refusing(MemoryBroker(), Process())
    await transport.start()
    replies = Replies(transport, Clock(), max_body_bytes=1000)
    for _ in range(3):
        with pytest.raises(DependencyError):
            await replies.expect()
    address, _ = await replies.expect()

    assert asked == [address.queue] * 4


@pytest.mark.parametrize("own", [{"pending": True}, {"timeout": 5}, {"request_id": "r"}])
async def test_options_among_the_arguments_are_told_where_they_belong(client, own):
    """They look like arguments, and call() takes those alone."""
    svc = Service("compute")

    @svc.rpc
    async def build(ctx: Context, vm: str) -> None: ...

    (name,) = own
    with pytest.raises(
        InvalidArgumentsError,
        match=rf"options of a call are given by client.prepare\({name}=...\).call\(...\)",
    ):
        await client.call(build, vm="1", **own)
    with pytest.raises(InvalidArgumentsError) as other:
        await client.call(build, vn="1")
    assert "options of a call" not in str(other.value)


async def test_a_client_that_is_not_started_says_how(tmp_path):
    """Before its first call and after its stop; the transport of another is its own affair."""
    svc = Service("compute")
    client = svc.client(f"sqlite:///{tmp_path / 'queues.db'}")

    for send in (client.call, client.cast, client.prepare(timeout=1).call):
        with pytest.raises(
            DependencyError, match=r"write `async with svc.client\(...\) as client:`"
        ):
            await send("echo")
    await client.start()
    await client.stop()
    with pytest.raises(DependencyError, match=r"echo\(\) was not sent"):
        await client.call("echo")
