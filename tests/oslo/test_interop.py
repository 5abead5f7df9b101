"""One question to three servers, by both clients: what oslo with oslo gives, gracekit gives too.

The servers are oslo's own, gracekit's, and gracekit with oslo's endpoint objects. oslo's client of
oslo's server is the reference; what our client makes of an answer is the same whoever serves.
"""

from __future__ import annotations

import asyncio
import builtins
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gracekit import RemoteError, VersionCapError
from tests.oslo import faults
from tests.oslo.kit import OsloError
from tests.oslo.meeting import (
    ADAPTED,
    HOST,
    NATIVE,
    OSLO,
    OSLO_TRUSTING,
    SERVERS,
    Data,
    Meeting,
    Met,
    Raised,
    Returned,
    by_oslo,
    by_us,
    check_ways,
    meet,
    private,
    settings_of,
    widened_peer,
)
from tests.oslo.values import ABOVE, ODD
from tests.rabbit.broker import Broker

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

REMOTE = "oslo_messaging.rpc.client.RemoteError"
TIMEOUT = "oslo_messaging.exceptions.MessagingTimeout"
FAULTS = [name for name in faults.FAULTS if name not in {"args_not_json", "system_exit"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["durable", "oslo-transient"])
async def meeting(
    request: pytest.FixtureRequest,
    shared_broker: Broker,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Meeting]:
    """All of them on a virtual host, for all questions on one profile."""
    vhost, folder = shared_broker.fresh_vhost(), tmp_path_factory.mktemp("meeting")
    async with meet(shared_broker.url_of(vhost), request.param, folder) as made:
        yield made
    shared_broker.delete_vhost(vhost)


def kinds(met: Sequence[Met]) -> set[tuple[str, Any]]:
    """By what callers tell errors apart: their class, or the one that a RemoteError names."""
    found = set()
    for each in met:
        assert isinstance(each, Raised), each
        name = each.more.get("exc_type", each.more.get("exc_class", ("",)))
        found.add((each.kind, name[0]))
    return found


# -- results ------------------------------------------------------------------------------

SHAPES: list[Any] = [
    *(None, True, False, 0, -1, 2**53 + 1, 2**63, 2**64, 10**30, -(2**70)),
    *(0.1, 1.0, -0.0, 1e22, 1e308, 5e-324),
    *("", "grün 🎉", "\u0000\u001f\u2028\u007f", '\\"/\n', "a" * 100_000),
    *([], {}, [[]], {"": {}}, [None, [1, {"a": {"b": [{}]}}]], {"z": 1, "a": 2}, {"ü": 1}),
    {"deep": json.loads(28 * "[" + 28 * "]")},
]


async def test_results_are_the_same(meeting: Meeting):
    """Every shape of JSON, there and back: types, order of keys and digits included."""
    args = [{"value": shape} for shape in SHAPES]
    for client in (by_oslo, by_us):
        answers = await asyncio.gather(*(client(meeting, "echo", each) for each in args))
        for sent, met in zip(args, answers, strict=True):
            assert {*met} == {Returned(json.dumps(sent))}


UNLIKE = {
    "datetime_aware": "oslo leaves the offset out",
    "exception": "oslo writes it as text",
    **dict.fromkeys(("deque", "range", "dict_values"), "oslo writes whatever can be iterated"),
    **dict.fromkeys(("bool_keys", "none_key", "float_keys"), "oslo writes such keys as text"),
}
VALUES = [
    pytest.param(name, marks=pytest.mark.xfail(reason=UNLIKE[name], raises=AssertionError))
    if name in UNLIKE
    else name
    for name in ODD
]


@pytest.mark.parametrize("value", VALUES)
async def test_odd_values_are_written_alike(meeting: Meeting, value: str):
    """What is no plain JSON, as a result and as an argument, on both sides."""
    theirs, *ours = await by_oslo(meeting, "give", {"value": value})
    assert isinstance(theirs, Returned)
    assert ours == [theirs] * 2
    assert {*await by_us(meeting, "give", {"value": value})} == {theirs}

    sent = Returned(json.dumps({"value": json.loads(theirs.text)}))
    assert {*await by_oslo(meeting, "echo", {"value": {"odd": value}})} == {sent}
    assert {*await by_us(meeting, "echo", {"value": ODD[value]})} == {sent}


async def test_what_is_above_the_limits_is_not_taken(meeting: Meeting):
    """On purpose: oslo has no limits. gracekit records such a request and does not read it, and
    says that it cannot send such a result.
    """
    args = [{"value": {"odd": name}} for name in ABOVE]
    theirs = [await meeting.asked_by_oslo(OSLO, "echo", each) for each in args]
    assert theirs == [Returned(json.dumps({"value": value})) for value in ABOVE.values()]
    ours = await asyncio.gather(
        *(meeting.asked_by_oslo(NATIVE, "echo", each, timeout=1) for each in args),
        *(meeting.asked_by_oslo(ADAPTED, "echo", each, timeout=1) for each in args),
    )
    assert kinds(ours) == {(TIMEOUT, "")}

    for name, value in ABOVE.items():
        answer, *answers = await by_oslo(meeting, "give", {"value": name})
        assert answer == Returned(json.dumps(value))
        error = "MessageTooLargeError" if name == "large" else "UnserialisableError"
        assert kinds(answers) == {(REMOTE, error)}


@pytest.mark.xfail(reason="it waits for its whole time", raises=AssertionError)
async def test_our_client_is_told_of_an_answer_above_the_limits(meeting: Meeting):
    """Of an oslo server; of gracekit's the caller is told at once."""
    args = [{"value": name} for name in ABOVE]
    asked = (meeting.asked_by_us(OSLO, "give", each, timeout=1) for each in args)

    assert ("gracekit.errors.CallTimeoutError", "") not in kinds(await asyncio.gather(*asked))


# -- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fail", "fail_as_expected"])
@pytest.mark.parametrize("trusting", [False, True])
async def test_failures_are_the_same(meeting: Meeting, method: str, trusting: bool):
    """Builtins, an application's classes where they may be imported and where not, causes,
    `expected_exceptions`: class, bases, text, args and attributes.
    """
    for client in (by_oslo, by_us):
        asked = (client(meeting, method, {"fault": name}, trusting=trusting) for name in FAULTS)
        for theirs, *ours in await asyncio.gather(*asked):
            assert isinstance(theirs, Raised)
            assert ours == [theirs] * 2


ARGS: dict[str, list[Any]] = {
    "ExceptionGroup": ["several", []],
    "UnicodeDecodeError": ["utf-8", "x", 0, 1, "bad"],
    "UnicodeEncodeError": ["utf-8", "x", 0, 1, "bad"],
    "UnicodeTranslateError": ["x", 0, 1, "bad"],
}
BUILTINS = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and name != "StopIteration"
}


async def test_all_builtin_exceptions_are_the_same(meeting: Meeting):
    """With several args, of several types, with several lines, with none."""
    errors = [(name, ARGS.get(name, ["größer", "2"])) for name in sorted(BUILTINS)]
    errors += [("ValueError", args) for args in ([], [1, None, {"a": [1.5]}], ["one\ntwo\n\nx"])]
    for client in (by_oslo, by_us):
        asked = (client(meeting, "fail_as", {"name": name, "args": args}) for name, args in errors)
        for theirs, *ours in await asyncio.gather(*asked):
            assert isinstance(theirs, Raised)
            assert ours == [theirs] * 2


@pytest.mark.xfail(reason="raised in a coroutine it becomes a RuntimeError", raises=AssertionError)
async def test_stop_iteration_is_the_same(meeting: Meeting):
    """As of a forgotten `next()` in a plain method."""
    theirs, *ours = await by_oslo(meeting, "fail_as", {"name": "StopIteration", "args": []})

    assert ours == [theirs] * 2


async def test_our_client_rebuilds_builtins_and_what_is_registered(meeting: Meeting):
    """Whoever serves; everything else is a RemoteError that has class, module, message and
    traceback.
    """
    for topic in SERVERS:
        client = await meeting.our_client(topic)
        trusting = await meeting.our_client(topic, trusting=True)
        with pytest.raises(ValueError) as told:
            await client.call("fail", fault="builtin")
        assert told.value.args == ("no such size: 7",)
        assert "in fail" in told.value.__notes__[0]

        with pytest.raises(faults.TooMany) as many:
            await trusting.call("fail", fault="app_with_args")
        assert many.value.args == ("lamp", 7)

        with pytest.raises(RemoteError, match=r"^TooMany: at most 7 of lamp$") as remote:
            await client.call("fail", fault="app_with_args")
        assert (remote.value.exc_class, remote.value.exc_module) == ("TooMany", faults.__name__)
        assert "in fail" in remote.value.traceback


async def test_tracebacks_are_lines_of_the_same_form(meeting: Meeting):
    """oslo's client keeps them in a list, whose items are what `format_exception` makes."""
    for topic in SERVERS:
        with pytest.raises(OsloError) as told:
            await meeting.oslo_client(topic).call({}, "fail", fault="app_with_args")
        lines = told.value.attributes["traceback"]
        assert all(line.endswith("\n") for line in lines), topic


async def test_our_client_shows_tracebacks_without_empty_lines(meeting: Meeting):
    """Also those of an oslo server."""
    for topic in SERVERS:
        with pytest.raises(RemoteError) as told:
            await (await meeting.our_client(topic)).call("fail", fault="app_with_args")
        assert "\n\n" not in told.value.traceback, topic


async def test_what_oslo_leaves_unanswered_is_answered(meeting: Meeting):
    """Args that are no JSON, a SystemExit, a result that is no data: with oslo the caller waits."""
    for method, args, kind in (
        ("fail", {"fault": "args_not_json"}, ("builtins.ValueError", "")),
        ("fail", {"fault": "system_exit"}, (REMOTE, "SystemExit")),
        ("odd_result", {}, (REMOTE, "UnserialisableError")),
    ):
        theirs, *ours = await asyncio.gather(
            meeting.asked_by_oslo(OSLO, method, args, timeout=1),
            meeting.asked_by_oslo(NATIVE, method, args),
            meeting.asked_by_oslo(ADAPTED, method, args),
        )
        assert kinds([theirs]) == {(TIMEOUT, "")}
        assert kinds(ours) == {kind}


def passed_on(origin: str, fault: str) -> Data:
    """Arguments of `forward`, for a call of *origin* that fails."""
    return {"topic": origin, "name": "fail", "arguments": {"fault": fault}}


@pytest.mark.parametrize("origin", SERVERS)
async def test_errors_that_are_passed_on_keep_their_origin(meeting: Meeting, origin: str):
    """A method that calls another service lets through builtins, and the classes that are allowed
    there or registered.
    """
    for fault in ("builtin", "chained", "key"):
        assert len(kinds(await by_oslo(meeting, "forward", passed_on(origin, fault)))) == 1
    for fault in ("app_with_args", "app_with_kwargs"):
        args = passed_on(origin, fault)
        theirs = await meeting.asked_by_oslo(OSLO_TRUSTING, "forward", args, trusting=True)
        ours = await meeting.asked_by_oslo(NATIVE, "forward", args, trusting=True)
        assert isinstance(theirs, Raised)
        assert isinstance(ours, Raised)
        assert (ours.kind, ours.text[0]) == (theirs.kind, theirs.text[0])
        # On purpose: no class is called here with keyword arguments from the wire.
        without = {"kwargs": {}} if "kwargs" in theirs.more else {}
        assert ours.more == {**theirs.more, **without}

    args = passed_on(origin, "builtin")
    for topic in (OSLO, NATIVE):
        with pytest.raises(OsloError) as told:
            await meeting.oslo_client(topic).call({}, "forward", **args)
        assert all(f", in {frame}\n" in told.value.message for frame in ("fail", "forward"))


async def test_remote_errors_are_passed_on_under_their_own_name(meeting: Meeting):
    """On purpose: with oslo a class that is not allowed on the way ends as a RemoteError of a
    RemoteError; gracekit keeps class and module for a caller who knows them.
    """
    options = {"namespace": "ops", "trusting": True}
    args = passed_on(NATIVE, "app_with_kwargs")

    theirs = await meeting.asked_by_oslo(OSLO, "forward", args, **options)
    ours = await meeting.asked_by_oslo(NATIVE, "forward", args, **options)

    assert kinds([theirs]) == {(REMOTE, "RemoteError")}
    assert kinds([ours]) == {(f"{faults.__name__}_Remote.NotFound_Remote", "")}


@pytest.mark.xfail(reason="each hop puts the class before the text", raises=AssertionError)
async def test_remote_errors_that_are_passed_on_keep_their_words(meeting: Meeting):
    """Text, args and kwargs, for a caller who knows the class."""
    args, trusting = passed_on(NATIVE, "app_with_kwargs"), {"trusting": True}

    theirs = await meeting.asked_by_oslo(OSLO_TRUSTING, "forward", args, **trusting)
    ours = await meeting.asked_by_oslo(NATIVE, "forward", args, namespace="ops", **trusting)

    assert isinstance(theirs, Raised)
    assert isinstance(ours, Raised)
    assert (ours.text[0], ours.more) == (theirs.text[0], theirs.more)


# -- where a request is served ------------------------------------------------------------


async def test_namespaces_and_versions_find_the_same_endpoint(meeting: Meeting):
    """Same major version, minor and revision not above; a legacy namespace is served too."""
    served: list[tuple[dict[str, Any], str]] = [
        ({}, "newer"),
        ({"version": "1.0"}, "newer"),
        ({"version": "1.5"}, "newer"),
        ({"version": "1.5.0"}, "newer"),
        ({"version": "2.0.9"}, "next"),
        ({"version": "2.1"}, "next"),
        ({"namespace": "ops"}, "ops"),
        ({"namespace": "ops", "version": "1.2.3"}, "ops"),
        ({"namespace": "old"}, "moved"),
        ({"namespace": "new", "version": "1.0"}, "moved"),
    ]
    for client in (by_oslo, by_us):
        answers = await asyncio.gather(
            *(client(meeting, "who", **options) for options, _ in served)
        )
        for (options, name), met in zip(served, answers, strict=True):
            assert {*met} == {Returned(json.dumps(name))}, options


REFUSED: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    ({}, "nothing", {}, "NoSuchMethod"),
    ({}, "_private", {}, "NoSuchMethod"),
    ({}, "__init__", {}, "NoSuchMethod"),
    ({"namespace": "ops"}, "nothing", {}, "NoSuchMethod"),
    ({"version": "1.6"}, "who", {}, "UnsupportedVersion"),
    ({"version": "1.6"}, "nothing", {}, "UnsupportedVersion"),
    ({"version": "1.5.1"}, "who", {}, "UnsupportedVersion"),
    ({"version": "2.2"}, "who", {}, "UnsupportedVersion"),
    ({"version": "3.0"}, "who", {}, "UnsupportedVersion"),
    ({"version": "0.9"}, "who", {}, "UnsupportedVersion"),
    ({"namespace": "ops", "version": "1.2.4"}, "who", {}, "UnsupportedVersion"),
    ({"namespace": "unknown"}, "who", {}, "UnsupportedVersion"),
    ({"namespace": "unknown"}, "nothing", {}, "UnsupportedVersion"),
    ({}, "shape", {}, "TypeError"),
    ({}, "shape", {"first": 1, "other": 2}, "TypeError"),
    ({}, "shape", {"first": 1, "self": 2}, "TypeError"),
    ({}, "who", {"first": 1}, "TypeError"),
]


async def test_refusals_are_the_same(meeting: Meeting):
    """By their class, as which of them it is tells a caller whether to go older; ours say more."""
    for client, prefix in ((by_oslo, REMOTE), (by_us, "gracekit.errors.")):
        answers = await asyncio.gather(
            *(client(meeting, method, args, **options) for options, method, args, _ in REFUSED)
        )
        for (*question, name), met in zip(REFUSED, answers, strict=True):
            kind = (prefix, name) if client is by_oslo else (f"{prefix}{name}Error", "")
            kind = ("builtins.TypeError", "") if name == "TypeError" else kind
            assert kinds(met) == {kind}, question


async def test_refusals_are_rebuilt_where_the_dispatcher_is_allowed(meeting: Meeting):
    """By the class that oslo sends, with its bases."""
    asked = (
        by_oslo(meeting, method, args, trusting=True, **options)
        for options, method, args, _ in REFUSED
    )
    for met in await asyncio.gather(*asked):
        assert len(kinds(met)) == 1
        theirs, *ours = (each.more["bases"] for each in met if isinstance(each, Raised))
        assert ours == [theirs] * 2


async def test_attributes_that_are_no_methods_are_not_served(meeting: Meeting):
    """On purpose: oslo calls them, whatever comes of it."""
    theirs, *ours = await by_oslo(meeting, "not_callable")

    assert kinds([theirs]) == {("builtins.TypeError", "")}
    assert kinds(ours) == {(REMOTE, "NoSuchMethod")}


# -- version caps -------------------------------------------------------------------------

CAPS = (None, "1.0", "1.4", "1.4.1", "2.0")
VERSIONS = ("0.9", "1.0", "1.3", "1.3.7", "1.4", "1.4.0", "1.4.1", "1.4.2", "1.5", "1.10", "2.0")


async def test_caps_let_the_same_versions_out(meeting: Meeting):
    """Same major version, minor and revision not above; without a cap everything."""
    theirs, ours = meeting.oslo_client(OSLO), await meeting.our_client(OSLO)
    for cap in CAPS:
        capped = theirs.prepare(version_cap=cap)
        answers = await asyncio.gather(*map(capped.can_send, VERSIONS))
        view = ours.prepare(version_cap=cap)
        assert [*map(view.can_send_version, VERSIONS)] == answers, cap


@pytest.mark.parametrize("topic", [OSLO, NATIVE])
async def test_nothing_is_sent_above_a_cap(meeting: Meeting, topic: str):
    """It is refused in the client, with both versions; below the cap it goes out."""
    theirs = meeting.oslo_client(topic).prepare(version="1.5", version_cap="1.4")
    ours = (await meeting.our_client(topic)).prepare(version="1.5", version_cap="1.4")
    for refused in (theirs.call, theirs.cast, theirs.fanout):
        with pytest.raises(OsloError) as told:
            await refused({}, "echo", sent="too high")
        assert told.value.kind == "RPCVersionCapError"
        assert told.value.attributes == {"version": "1.5", "version_cap": "1.4"}
    for refused in (ours.call, ours.cast, ours.fanout):
        with pytest.raises(VersionCapError, match=r"1\.5 and version_cap='1\.4'"):
            await refused("echo", sent="too high")

    assert await theirs.prepare(version="1.4").call({}, "who") == "newer"
    assert await ours.prepare(version="1.4").call("who") == "newer"
    assert not any("too high" in repr(event) for event in meeting.peer.events)
    assert not any("too high" in repr(request) for request in meeting.stock.begun)


async def test_a_request_without_a_version_is_one_for_1_0(meeting: Meeting):
    """On purpose: for oslo's client it is above any cap, although each server reads it as 1.0."""
    theirs = await meeting.asked_by_oslo(NATIVE, "who", version_cap="1.4")
    ours = await meeting.asked_by_us(OSLO, "who", version_cap="1.4")

    assert kinds([theirs]) == {("oslo_messaging.rpc.client.RPCVersionCapError", "")}
    assert ours == Returned('"newer"')


# -- contexts -----------------------------------------------------------------------------

OF_OSLO = {"client_timeout", "msg_id", "reply_q"}
"""What oslo puts into the dictionary that a method gets, or takes away; no context of ours."""
CONTEXTS: list[dict[str, Any]] = [
    {},
    {"user": "ann", "Roles": ["admin", {"of": None}], "größe": 1.5, "is_admin": False, "x": None},
    {"msg_id": "lost", "reply_q": "lost", "client_timeout": "lost", "kept": ""},
]


async def test_contexts_are_the_same(meeting: Meeting):
    """An endpoint under gracekit is given what oslo gives it; a method of ours what a caller
    sends.
    """
    for ctxt in CONTEXTS:
        for client in (by_oslo, by_us):
            theirs, native, adapted = await client(meeting, "context", {}, ctxt)
            assert isinstance(theirs, Returned)
            assert isinstance(native, Returned)
            assert adapted == theirs
            kept = {key: value for key, value in ctxt.items() if key not in OF_OSLO}
            assert json.loads(theirs.text) == {**kept, "client_timeout": None}
            assert json.loads(native.text) == ctxt


async def test_an_endpoint_is_told_the_monitor_timeout(meeting: Meeting):
    """oslo says in `client_timeout` how long the caller bears silence."""
    theirs, _, adapted = await by_oslo(meeting, "context", call_monitor_timeout=7)

    assert theirs == Returned('{"client_timeout": 7}')
    assert adapted == theirs


# -- ways to send, and time ---------------------------------------------------------------


async def test_calls_casts_and_fanouts_go_where_they_should(meeting: Meeting):
    """To any host, to one that is named, to all."""
    await check_ways(meeting)


async def test_calls_time_out_and_late_answers_hurt_nobody(meeting: Meeting):
    """The same error whoever serves, and the next call of the same client is answered."""
    oslo, us = await asyncio.gather(
        by_oslo(meeting, "block", {"gate": "late"}, timeout=1),
        by_us(meeting, "block", {"gate": "late"}, timeout=1),
    )
    assert len({repr(each) for each in oslo}) == len({repr(each) for each in us}) == 1
    assert kinds(oslo) == {(TIMEOUT, "")}
    assert kinds(us) == {("gracekit.errors.CallTimeoutError", "")}

    await meeting.peer.ask("open", gate="late")
    meeting.stock.open("late")
    for client in (by_oslo, by_us):
        answers = await client(meeting, "block", {"gate": "late"})
        assert {*answers} == {Returned('"through late"')}


async def test_an_ops_topic_is_a_topic_like_any_other(meeting: Meeting):
    """oslo's client reaches ours, and our client one of oslo; where oslo has none, our requests go
    to the other, and no answer to the question before is no reason not to send.
    """
    assert await meeting.asked_by_oslo(f"{NATIVE}-ops", "who") == Returned('"newer"')

    for options in ({"ops": True}, {"fail_fast": True}):
        assert await meeting.asked_by_us(OSLO, "who", **options) == Returned('"newer"')
    for topic in ("shop-4", "shop-4-ops"):
        await meeting.peer.ask("serve", server=topic, topic=topic, endpoints={topic: {}})
    assert await meeting.asked_by_us("shop-4", "who", ops=True) == Returned('"shop-4-ops"')
    assert await meeting.asked_by_us("shop-4", "who", fail_fast=True) == Returned('"shop-4"')


async def test_pings_are_answered(meeting: Meeting):
    """By the built-in method, where it is enabled."""
    for client in (by_oslo, by_us):
        assert {*await client(meeting, "oslo_rpc_server_ping")} == {Returned('"pong"')}


# -- heartbeats ---------------------------------------------------------------------------


async def test_heartbeats_keep_monitored_calls_waiting(meeting: Meeting):
    """Beyond the monitor timeout, and nobody else is sent any: a client of oslo would crash. With a
    timeout of 1 s there are none.
    """
    block = (meeting, "block", {"gate": "beats"})
    kept = asyncio.gather(
        by_oslo(*block, timeout=30, call_monitor_timeout=4),
        by_us(*block, timeout=30, monitor_timeout=4),
        by_oslo(*block, timeout=30),
        by_us(*block, timeout=30),
    )
    assert kinds(await by_oslo(meeting, "nothing", call_monitor_timeout=2)) == {
        (REMOTE, "NoSuchMethod")
    }  # oslo's server goes on and sends heartbeats for it
    assert kinds(await by_us(meeting, "nothing", monitor_timeout=2)) == {
        ("gracekit.errors.NoSuchMethodError", "")
    }
    assert kinds(await by_oslo(*block, timeout=30, call_monitor_timeout=1)) == {(TIMEOUT, "")}
    await by_us(*block, timeout=4)  # with the second before longer than silence is borne
    assert not kept.done()

    await meeting.peer.ask("open", gate="beats")
    meeting.stock.open("beats")
    for answers in await kept:
        assert {*answers} == {Returned('"through beats"')}


async def test_silence_ends_monitored_calls(meeting: Meeting, tmp_path: Path):
    """Of a server that is killed, long before the call's time is up."""
    topics, place = ("shop-2", "shop-3"), {"endpoint": {}}
    settings = settings_of(meeting.ours, private(tmp_path / "doomed"))
    options = {"timeout": 60, "call_monitor_timeout": 3}
    async with widened_peer(meeting.url, meeting.profile) as doomed, asyncio.timeout(30):
        await doomed.ask("serve", server=HOST, topic=topics[0], endpoints=place)
        await doomed.ask("adapt", topic=topics[1], endpoints=place, settings=settings)
        block = ("block", {"gate": "never"})
        theirs = [meeting.asked_by_oslo(topic, *block, **options) for topic in topics]
        options = {"timeout": 60, "monitor_timeout": 3}
        ours = [meeting.asked_by_us(topic, *block, **options) for topic in topics]
        pending = asyncio.gather(*theirs, *ours)
        for topic in topics:
            assert await meeting.asked_by_oslo(topic, "who") == Returned('"endpoint"')
        assert not pending.done()
        await doomed.kill()
        met = await pending

    assert kinds(met[:2]) == {(TIMEOUT, "")}
    assert kinds(met[2:]) == {("gracekit.errors.HeartbeatTimeoutError", "")}
