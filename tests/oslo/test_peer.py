"""What oslo.messaging does with itself on a real RabbitMQ: the answers that gracekit must equal."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.oslo.kit import (
    PROFILES,
    OsloClient,
    OsloError,
    OsloServer,
    oslo_client,
    oslo_peer,
    oslo_server,
)
from tests.rabbit.broker import Broker

pytestmark = pytest.mark.process

HEX = re.compile(r"[0-9a-f]{32}")
FAULTS = "tests.oslo.faults"
DISPATCHER = "oslo_messaging.rpc.dispatcher"
TIMEOUT = ("MessagingTimeout", "oslo_messaging.exceptions")

ONE = {"endpoint": {}}
PLACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "newer": {"version": "1.5"},
    "next": {"version": "2.1"},
    "ops": {"namespace": "ops", "version": "1.2.3"},
    "moved": {"namespace": "new", "legacy_namespaces": ["old"], "version": "1.0"},
}


@contextlib.asynccontextmanager
async def pair(
    url: str, endpoints: dict[str, dict[str, Any]] = ONE, **options: Any
) -> AsyncIterator[tuple[OsloServer, OsloClient]]:
    """A server and a client in two processes."""
    async with (
        oslo_server(url, "stock", endpoints=endpoints, **options) as server,
        oslo_client(url, "stock", **options) as client,
    ):
        yield server, client.prepare(timeout=10)


async def refusal(pending: Any) -> OsloError:
    """What a request that fails is told."""
    with pytest.raises(OsloError) as told:
        await pending
    return told.value


def kind(error: OsloError) -> tuple[str, str]:
    return error.kind, error.module


# -- ways to send -----------------------------------------------------------------------


async def test_a_call_brings_arguments_context_and_ids(rabbit_url: str):
    """The context loses two keys and gains one; ids are 32 hex digits, new for each request."""
    args = {"n": None, "list": [1, {"a": 2.5}], "text": "grün\n"}
    ctxt = {"user": "ann", "msg_id": "lost", "reply_q": "lost", "client_timeout": "lost"}
    async with pair(rabbit_url) as (server, client):
        assert await client.call({}, "echo", **args) == args
        assert await client.call(ctxt, "context") == {"user": "ann", "client_timeout": None}
        monitored = client.prepare(call_monitor_timeout=7)
        assert await monitored.call({}, "context") == {"client_timeout": 7}
        first, second, third = await server.begun(3)

    ids = [told[name] for told in (first, second, third) for name in ("unique_id", "msg_id")]
    assert len({*ids}) == 6
    assert all(HEX.fullmatch(each) for each in ids)
    assert first["reply_q"] == third["reply_q"]
    assert re.fullmatch(r"reply_[0-9a-f]{32}", first["reply_q"])
    assert first["message"] == {"method": "echo", "args": args}
    assert (first["client_timeout"], third["client_timeout"]) == (None, 7)


async def test_casts_and_fanouts_go_where_they_should(rabbit_url: str):
    """To one of the servers, to the one that is named, to all; nobody is to be answered."""
    async with (
        pair(rabbit_url) as (one, client),
        oslo_server(rabbit_url, "stock", server="node-2") as two,
    ):
        await client.prepare(server="node-2").cast({}, "echo", to="node-2")
        await client.fanout({}, "echo", to="all")
        for _ in range(4):
            await client.cast({}, "echo", to="any")
        (seen_by_one,) = await one.begun(1, message={"method": "echo", "args": {"to": "all"}})
        await two.begun(1, message={"method": "echo", "args": {"to": "all"}})
        await two.begun(1, message={"method": "echo", "args": {"to": "node-2"}})
        # The shared queue hands out in turn.
        await one.begun(2, message={"method": "echo", "args": {"to": "any"}})
        await two.begun(2, message={"method": "echo", "args": {"to": "any"}})

        assert (seen_by_one["msg_id"], seen_by_one["reply_q"]) == (None, None)
        assert seen_by_one["ctxt"] == {"client_timeout": None}
        assert await client.prepare(server="node-2").call({}, "who") == "endpoint"


async def test_an_exchange_does_not_keep_topics_apart(rabbit_url: str):
    """Queues and fanout exchanges are named for the topic alone: two services of one name mix."""
    async with (
        pair(rabbit_url) as (one, client),
        oslo_server(rabbit_url, "stock", server="node-2", exchange="other") as two,
    ):
        other = client.prepare(exchange="other")
        await other.fanout({}, "echo", to="all")
        for _ in range(4):
            await other.cast({}, "echo", to="other")
        for server in (one, two):
            await server.begun(1, message={"method": "echo", "args": {"to": "all"}})
            await server.begun(2, message={"method": "echo", "args": {"to": "other"}})


async def test_who_is_not_there_is_noticed_only_if_asked_for(rabbit_url: str):
    """A cast is dropped in silence, a call waits for its whole time; `at_least_once` tells at
    once.
    """
    async with oslo_client(rabbit_url, "nobody") as client:
        await client.cast({}, "echo")
        began = time.monotonic()
        assert kind(await refusal(client.prepare(timeout=1).call({}, "echo"))) == TIMEOUT
        assert time.monotonic() - began > 0.9
        sure = client.prepare(at_least_once=True, timeout=30)
        for told in (await refusal(sure.call({}, "echo")), await refusal(sure.cast({}, "echo"))):
            assert kind(told) == ("MessageUndeliverable", "oslo_messaging.exceptions")
            assert told.attributes["routing_key"] == "nobody"
            assert told.attributes["exchange"] == "openstack"
        assert time.monotonic() - began < 20
        error = await refusal(client.prepare(fanout=True).call({}, "echo"))
        assert kind(error) == ("InvalidTarget", "oslo_messaging.exceptions")
        assert "builtins.ValueError" in error.bases


# -- errors -----------------------------------------------------------------------------

# What a client sees of each: class, module, args without the traceback that follows the first.
BUILTIN: dict[str, tuple[str, list[str]]] = {
    "builtin": ("ValueError", ["no such size: 7"]),
    "builtin_two_args": ("FileNotFoundError", ["[Errno 2] No such file: '/lamp'", "No such file"]),
    "builtin_without_args": ("ZeroDivisionError", [""]),
    "key": ("KeyError", ["'lamp'"]),
    "chained": ("ValueError", ["outer"]),
}
# The same, with the text and the attributes of the instance.
APPLICATION: dict[str, tuple[str, str, list[Any], dict[str, Any]]] = {
    "app_with_kwargs": (
        "NotFound",
        "lamp is not in stock",
        ["lamp is not in stock"],
        {"kwargs": {"item": "lamp"}},
    ),
    "app_with_args": ("TooMany", "at most 7 of lamp", ["lamp", 7], {}),
}


@pytest.mark.parametrize("method", ["fail", "fail_as_expected"])
async def test_builtin_errors_keep_their_class(rabbit_url: str, method: str):
    """Text and traceback go into the first of their args; whether it was expected makes no
    difference.
    """
    async with pair(rabbit_url) as (_, client):
        for fault, (name, args) in BUILTIN.items():
            error = await refusal(client.call({}, method, fault=fault))
            text, _, traceback = error.arguments[0].partition("\n")
            assert (kind(error), [text, *error.arguments[1:]]) == ((name, "builtins"), args)
            assert 'File "' in traceback
            assert "raise faults.fault(fault)" in traceback


@pytest.mark.parametrize("method", ["fail", "fail_as_expected"])
async def test_application_errors_are_rebuilt_where_their_module_is_allowed(
    rabbit_url: str, method: str
):
    """As a subclass made for the purpose, whose text has the traceback; elsewhere as
    RemoteError.
    """
    async with (
        pair(rabbit_url) as (_, client),
        oslo_client(rabbit_url, "stock", exception_modules=(FAULTS,)) as trusting,
    ):
        for fault, (name, text, args, attributes) in APPLICATION.items():
            error = await refusal(client.call({}, method, fault=fault))
            assert kind(error) == ("RemoteError", "oslo_messaging.rpc.client")
            assert (error.attributes["exc_type"], error.attributes["value"]) == (name, text)
            assert isinstance(error.attributes["traceback"], list)

            error = await refusal(trusting.call({}, method, fault=fault))
            assert kind(error) == (f"{name}_Remote", f"{FAULTS}_Remote")
            assert error.bases[0] == f"{FAULTS}.{name}"
            assert error.message.startswith(f"{text}\nTraceback")
            assert error.arguments == args
            assert error.attributes == attributes


async def test_what_cannot_be_written_is_never_answered(rabbit_url: str):
    """An exception whose args are no JSON, a SystemExit, a result that is no data: the caller
    waits.
    """
    async with pair(rabbit_url) as (_, client):
        hasty = client.prepare(timeout=2)
        lost = await asyncio.gather(
            refusal(hasty.call({}, "fail", fault="args_not_json")),
            refusal(hasty.call({}, "fail", fault="system_exit")),
            refusal(hasty.call({}, "odd_result")),
        )
        assert [kind(error) for error in lost] == [TIMEOUT] * 3
        assert await client.call({}, "who") == "endpoint"  # and the server lives on


async def test_errors_that_are_passed_on_keep_their_origin(rabbit_url: str):
    """A server that calls another lets through what that raised: rebuilt classes lose their
    suffix.
    """
    failing = {"topic": "stock", "name": "fail"}
    async with (
        pair(rabbit_url, exception_modules=(FAULTS,)) as (_, client),
        oslo_server(rabbit_url, "trusting", exception_modules=(FAULTS,)),
        oslo_server(rabbit_url, "suspicious"),
    ):
        by_one = client.prepare(topic="trusting")
        error = await refusal(by_one.call({}, "forward", **failing, arguments={"fault": "key"}))
        assert kind(error) == ("KeyError", "builtins")
        wanted = {"fault": "app_with_args"}
        error = await refusal(by_one.call({}, "forward", **failing, arguments=wanted))
        assert kind(error) == ("TooMany_Remote", f"{FAULTS}_Remote")
        assert error.arguments == ["lamp", 7]
        assert all(f", in {frame}\n" in error.message for frame in ("fail", "forward"))

        by_other = client.prepare(topic="suspicious")
        error = await refusal(by_other.call({}, "forward", **failing, arguments=wanted))
        assert kind(error) == ("RemoteError", "oslo_messaging.rpc.client")
        assert error.attributes["exc_type"] == "RemoteError"
        assert error.attributes["value"].startswith("Remote error: TooMany at most 7 of lamp\n")


# -- where a request is served ----------------------------------------------------------


async def test_the_first_endpoint_that_fits_answers(rabbit_url: str):
    """Namespace and version decide; which of two refusals it is tells a caller whether to go
    older.
    """
    async with pair(rabbit_url, PLACES) as (_, client):
        for options, endpoint in (
            ({}, "plain"),
            ({"version": "1.0"}, "plain"),
            ({"version": "1.0.0"}, "plain"),
            ({"version": "1.4"}, "newer"),
            ({"version": "1.5.0"}, "newer"),
            ({"version": "2.0.9"}, "next"),
            ({"namespace": "ops"}, "ops"),
            ({"namespace": "ops", "version": "1.2.3"}, "ops"),
            ({"namespace": "old"}, "moved"),
            ({"namespace": "new"}, "moved"),
        ):
            assert await client.prepare(**options).call({}, "who") == endpoint, options
        for options, method, refused in (
            ({}, "nothing", "NoSuchMethod"),
            ({}, "_private", "NoSuchMethod"),
            ({"version": "1.6"}, "who", "UnsupportedVersion"),
            ({"version": "1.6"}, "nothing", "UnsupportedVersion"),
            ({"version": "1.5.1"}, "who", "UnsupportedVersion"),
            ({"version": "3.0"}, "who", "UnsupportedVersion"),
            ({"namespace": "ops", "version": "1.2.4"}, "who", "UnsupportedVersion"),
            ({"namespace": "unknown"}, "who", "UnsupportedVersion"),
            ({"namespace": "ops"}, "nothing", "NoSuchMethod"),
        ):
            error = await refusal(client.prepare(**options).call({}, method))
            # Not `NoSuchMethod`: its module must be allowed like an application's.
            assert kind(error) == ("RemoteError", "oslo_messaging.rpc.client"), options
            assert error.attributes["exc_type"] == refused, (options, method)
        for args in ({}, {"first": 1, "other": 2}):
            assert kind(await refusal(client.call({}, "shape", **args))) == (
                "TypeError",
                "builtins",
            )


async def test_refusals_are_rebuilt_only_where_the_dispatcher_is_allowed(rabbit_url: str):
    """And not even there: the class takes other arguments than the one that it sends."""
    async with pair(rabbit_url, exception_modules=(DISPATCHER,)) as (_, client):
        no_method = await refusal(client.call({}, "nothing"))
        version = await refusal(client.prepare(version="9.0").call({}, "who"))

    assert kind(no_method) == ("NoSuchMethod_Remote", f"{DISPATCHER}_Remote")
    assert no_method.arguments == [
        "Endpoint does not support RPC method Endpoint does not support RPC method nothing"
    ]
    assert kind(version) == ("UnsupportedVersion_Remote", f"{DISPATCHER}_Remote")


async def test_a_version_cap_is_the_clients_own_affair(rabbit_url: str):
    """Nothing is sent above it; without one anything can be sent."""
    async with pair(rabbit_url, PLACES) as (_, client):
        assert await client.can_send("9.9")
        capped = client.prepare(version_cap="1.4")
        asked = {
            version: await capped.can_send(version) for version in ("1.4", "1.5", "1.4.1", "2.0")
        }
        assert asked == {"1.4": True, "1.5": False, "1.4.1": False, "2.0": False}
        assert await capped.prepare(version="1.4").call({}, "who") == "newer"
        for way in ("call", "cast"):
            error = await refusal(capped.prepare(version="1.5").begin(way, {}, "who"))
            assert kind(error) == ("RPCVersionCapError", "oslo_messaging.rpc.client")
            assert error.attributes == {"version": "1.5", "version_cap": "1.4"}
        # A request that names no version is above any cap.
        assert kind(await refusal(capped.call({}, "who")))[0] == "RPCVersionCapError"


# -- time -------------------------------------------------------------------------------


async def test_heartbeats_keep_a_monitored_call_waiting(rabbit_url: str):
    """Every half of the monitor timeout; with one of 1 s there are none, and a dead server is
    noticed.
    """
    async with pair(rabbit_url) as (server, client):
        patient = client.prepare(timeout=30)
        began = time.monotonic()
        kept = patient.prepare(call_monitor_timeout=3).begin("call", {}, "block", gate="a")
        lost = patient.prepare(call_monitor_timeout=1).begin("call", {}, "block", gate="a")
        assert kind(await refusal(lost)) == TIMEOUT
        assert time.monotonic() - began < 8
        await asyncio.sleep(max(0.0, began + 4 - time.monotonic()))  # what heartbeats are about
        assert not kept.done()
        await server.open("a")
        assert await kept == "through a"

        doomed = patient.prepare(call_monitor_timeout=3).begin("call", {}, "block", gate="b")
        await server.begun(3)
        await server.peer.kill()
        assert kind(await refusal(doomed)) == TIMEOUT
    assert time.monotonic() - began < 20


async def test_what_was_taken_is_lost_with_its_server(
    rabbit_url: str, shared_broker: Broker, rabbit_vhost: str
):
    """It is acked before it is dispatched: the next server finds nothing."""
    async with oslo_client(rabbit_url, "stock") as client:
        async with oslo_server(rabbit_url, "stock") as server:
            await client.cast({}, "block", gate="a")
            await server.begun()
            await server.peer.kill()
        queue = shared_broker.queues(rabbit_vhost)["stock"]
        assert (queue.ready, queue.unacked) == (0, 0)


# -- serializers, traces, profiles ------------------------------------------------------


async def test_serializers_write_on_one_side_and_read_on_the_other(rabbit_url: str):
    """Context, each argument, and the result."""
    async with pair(rabbit_url, serializer="labels") as (_, client):
        answer = await client.call({"user": "ann"}, "echo", item="lamp")
        context = await client.call({"user": "ann"}, "context")

    sent = {"sent by": "ann", "entity": "lamp"}
    result = {"item": {"read for": "ann", **sent}}
    assert answer == {"read for": "ann", "sent by": "ann", "entity": result}
    flags = {"serialized": True, "deserialized": True}
    assert context["entity"] == {"user": "ann", "client_timeout": None, **flags}


async def test_traces_travel_in_the_context(rabbit_url: str):
    """By `traceparent` in the RPC context; the server's span is a child of the client's."""
    async with pair(rabbit_url, spans=True) as (server, client):
        seen = await client.call({"request_id": "req-1"}, "context")
        (told,) = await server.ended()
        (sent,) = await client.peer.ask("spans")
        (received,) = await server.peer.ask("spans")

    _, trace, span, _ = seen.pop("traceparent").split("-")
    assert seen == {"request_id": "req-1", "client_timeout": None}
    assert (sent["name"], sent["kind"]) == ("stock.context", "SpanKind.PRODUCER")
    assert (received["name"], received["kind"]) == ("context receive", "SpanKind.CONSUMER")
    assert sent["context"]["trace_id"] == received["context"]["trace_id"] == f"0x{trace}"
    assert sent["context"]["span_id"] == received["parent_id"] == f"0x{span}"
    assert sent["attributes"] == {
        "messaging.system": "rabbitmq",
        "messaging.operation": "call",
        "messaging.destination.name": "stock",
        "rpc.method": "context",
        "openstack.request_id": "req-1",
    }
    assert received["attributes"] == {
        "messaging.system": "rabbitmq",
        "messaging.operation": "receive",
        "rpc.method": "context",
        "messaging.message.id": told["msg_id"],
        "openstack.request_id": "req-1",
    }


# (durable, type, arguments) of the topic's two queues, of the fanout queue, of the reply queue.
Flags = tuple[bool, str, dict[str, Any]]
SHORT_LIVED: Flags = (False, "classic", {"x-expires": 1_800_000})
QUORUM: Flags = (True, "quorum", {"x-queue-type": "quorum"})
QUORUM_SHORT_LIVED: Flags = (True, "quorum", {"x-queue-type": "quorum", "x-expires": 1_800_000})
DECLARED: dict[str, tuple[Flags, Flags]] = {
    "default": ((False, "classic", {}), SHORT_LIVED),
    "durable": ((True, "classic", {}), SHORT_LIVED),
    "quorum": (QUORUM, SHORT_LIVED),
    "all_quorum": (QUORUM, QUORUM_SHORT_LIVED),
}


@pytest.mark.parametrize("profile", PROFILES)
async def test_profiles_decide_how_queues_are_declared(
    rabbit_url: str, shared_broker: Broker, rabbit_vhost: str, profile: str
):
    """The topic's queues by one pair of options, those of fanouts and replies by another."""
    async with pair(rabbit_url, profile=profile) as (server, client):
        assert await client.call({}, "who") == "endpoint"
        await client.fanout({}, "who")
        (answered,) = await server.begun(1, msg_id=None)
        assert answered["message"]["method"] == "who"
        found = {
            re.sub(r"[0-9a-f]{32}", "*", name): (queue.durable, queue.type, dict(queue.arguments))
            for name, queue in shared_broker.queues(rabbit_vhost).items()
        }

    topic, other = DECLARED[profile]
    assert found == {
        "stock": topic,
        "stock.node-1": topic,
        "stock_fanout_*": other,
        "reply_*": other,
    }


async def test_a_peer_that_is_asked_to_leaves_in_order(rabbit_url: str):
    """It stops its servers and ends well."""
    async with oslo_peer(rabbit_url) as peer:
        await peer.ask("serve", server="node-1", topic="stock")
        await peer.close()

        assert peer.process.returncode == 0, peer.log
