"""The oslo wire: golden bytes, what is refused and how it is said, and round trips."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import ipaddress
import json
import threading
import uuid
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekit.errors import BadMessageError, MessageTooLargeError, UnserialisableError
from gracekit.rpc import plain
from gracekit.rpc.message import Failure, Reply, ReplyAddress, Request
from gracekit.rpc.oslo_wire import decode_reply, decode_request, encode_reply, encode_request
from gracekit.rpc.plain import (
    MAX_DEPTH,
    MAX_FAR_NUMBERS,
    MAX_KEYS,
    MAX_LONG_DIGITS,
    MAX_NODES,
    excess_of,
)
from tests.scale import scale

CALL = Request(
    request_id="u" * 32,
    method="migrate",
    args={"vm": "vm-1", "dest": "n2"},
    namespace="compute",
    version="1.2",
    context={"user_id": "joe", "traceparent": "00-1-2-01"},
    reply=ReplyAddress(queue="reply_q", msg_id="m" * 32),
)
CAST = Request(request_id="u1", method="ping", args={})


def envelope(message: object) -> bytes:
    """*message* as a peer in Python would send it."""
    return json.dumps({"oslo.version": "2.0", "oslo.message": json.dumps(message)}).encode()


def nested(levels: int) -> object:
    """A list inside a list, *levels* deep."""
    value: list[object] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def refusal(decode: Callable[[bytes], object], body: bytes) -> BadMessageError | None:
    """Why *body* is refused; None if it is read; any other error passes through."""
    try:
        decode(body)
    except BadMessageError as error:
        return error
    return None


# -- golden bytes -----------------------------------------------------------------


def test_a_call_has_these_bytes():
    """The keys of a call come in a fixed order, inside the 2.0 envelope, as JSON text."""
    assert encode_request(CALL) == (
        rb'{"oslo.version":"2.0","oslo.message":"{\"method\":\"migrate\",'
        rb"\"args\":{\"vm\":\"vm-1\",\"dest\":\"n2\"},\"namespace\":\"compute\","
        rb"\"version\":\"1.2\",\"_unique_id\":\"uuuuuuuuuuuuuuuuuuuuuuuuuuuuuuuu\","
        rb"\"_context_user_id\":\"joe\",\"_context_traceparent\":\"00-1-2-01\","
        rb"\"_msg_id\":\"mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm\",\"_reply_q\":\"reply_q\","
        rb'\"_timeout\":null}"}'
    )


def test_a_caller_that_knows_pending_says_so_beside_its_address():
    """Not in the context, which handlers pass on; and whoever does not know it sends no such
    key.
    """
    reply = ReplyAddress(queue="reply_q", msg_id="m1", knows_pending=True)
    knowing = Request(request_id="u1", method="ping", args={}, reply=reply)
    inner = json.loads(json.loads(encode_request(knowing))["oslo.message"])

    assert inner["_gracekit_pending"] is True
    assert decode_request(encode_request(knowing)) == knowing
    assert b"pending" not in encode_request(CALL)


@pytest.mark.parametrize("value", [False, None, 1, "true", [True], {"a": True}])
def test_only_true_says_that_a_caller_knows_pending(value):
    """Anything else is not understood, and must not change the answer, nor refuse the request."""
    message = {"method": "m", "_msg_id": "a", "_reply_q": "reply_q", "_gracekit_pending": value}
    request = decode_request(envelope(message))

    assert request.reply == ReplyAddress(queue="reply_q", msg_id="a", knows_pending=False)


def test_a_cast_has_these_bytes():
    """A cast carries no reply keys, and neither namespace nor version where they are the
    default.
    """
    assert encode_request(CAST) == (
        rb'{"oslo.version":"2.0","oslo.message":'
        rb'"{\"method\":\"ping\",\"args\":{},\"_unique_id\":\"u1\"}"}'
    )


def test_a_reply_has_all_five_keys():
    """Oslo clients break on a reply without failure or ending, so every reply has every key."""
    assert encode_reply(Reply(msg_id="m1", reply_id="r1", result={"host": "n2"})) == (
        rb'{"oslo.version":"2.0","oslo.message":"{\"result\":{\"host\":\"n2\"},'
        rb'\"failure\":null,\"ending\":true,\"_msg_id\":\"m1\",\"_unique_id\":\"r1\"}"}'
    )


def test_a_result_that_is_json_text_already_is_put_in_as_it_is():
    """The journal has it as text that was checked when the task ended."""
    text = msgspec.Raw(b'{"host":"n2"}')
    written = encode_reply(Reply(msg_id="m1", reply_id="r1", result={"host": "n2"}))

    assert encode_reply(Reply(msg_id="m1", reply_id="r1", result=text)) == written


def test_a_failure_is_json_text_inside():
    """Oslo parses the failure a second time: it is text with class, module, message, tb, args,
    kwargs.
    """
    failure = Failure(
        exc_class="NotFound", module="app", message="no vm", args=("no vm",), tb=("l",)
    )

    body = encode_reply(Reply(msg_id="m", reply_id="r", failure=failure))

    inner = json.loads(json.loads(body)["oslo.message"])
    assert json.loads(inner["failure"]) == {
        "class": "NotFound",
        "module": "app",
        "message": "no vm",
        "tb": ["l"],
        "args": ["no vm"],
        "kwargs": {},
    }


# -- what peers send ----------------------------------------------------------------


def test_a_request_as_oslo_spells_it_is_read():
    """The message of an oslo client becomes a Request; its context loses the prefix."""
    body = envelope(
        {
            "method": "migrate",
            "args": {"vm": "é"},
            "version": "1.2",
            "_unique_id": "u",
            "_context_request_id": "req-7",
            "_msg_id": "m",
            "_reply_q": "reply_x",
            "_timeout": 4,
        }
    )

    assert decode_request(body) == Request(
        request_id="u",
        method="migrate",
        args={"vm": "é"},
        version="1.2",
        context={"request_id": "req-7"},
        reply=ReplyAddress(queue="reply_x", msg_id="m"),
        monitor_timeout_s=4,
    )


def test_a_bare_object_is_the_message():
    """Without envelope, unique id, version and args a request is still one."""
    assert decode_request(b'{"method": "ping"}') == Request(request_id="", method="ping", args={})


def test_of_two_equal_keys_the_last_wins():
    """Duplicate keys are not refused; the choice is fixed."""
    assert decode_request(b'{"method": "a", "method": "b"}').method == "b"


def test_a_reply_without_failure_and_ending_is_an_answer():
    """A peer that leaves keys out is understood rather than waited for."""
    assert decode_reply(b'{"_msg_id": "m", "result": 1}') == Reply(
        msg_id="m", reply_id="", result=1
    )


@pytest.mark.parametrize("failure", ["no json", '["list"]', '{"class": 5}', 7, True])
def test_an_unreadable_failure_is_still_a_failure(failure):
    """A caller is told that it failed, even if the reason cannot be read."""
    reply = decode_reply(envelope({"_msg_id": "m", "failure": failure}))

    assert reply.failure is not None
    assert reply.failure.message


# -- limits -------------------------------------------------------------------------


def test_an_oversize_body_is_refused_unparsed():
    """Size is checked before anything else, so that the limit bounds the work."""
    with pytest.raises(MessageTooLargeError, match="body of 11 bytes exceeds the limit of 10"):
        decode_request(b"{" * 11, max_bytes=10)


@pytest.mark.parametrize("version", ["2.1", "3.0", "1.0", "2", 2.0, None, [2]])
def test_another_envelope_version_is_refused(version):
    """Only 2.0 is spoken: same major, minor 0."""
    body = json.dumps({"oslo.version": version, "oslo.message": '{"method": "m"}'}).encode()

    with pytest.raises(BadMessageError, match="envelope version"):
        decode_request(body)


def test_nesting_is_allowed_up_to_its_limit():
    """32 levels, the message and its arguments included; one more is refused."""
    assert decode_request(envelope({"method": "m", "args": {"a": nested(MAX_DEPTH - 2)}}))
    with pytest.raises(BadMessageError, match="more than 32 levels"):
        decode_request(envelope({"method": "m", "args": {"a": nested(MAX_DEPTH - 1)}}))


def test_what_can_be_sent_can_be_read():
    """The sender's limit of nesting is the reader's."""
    deepest = {"a": nested(MAX_DEPTH - 2)}

    assert decode_request(encode_request(Request(request_id="", method="m", args=deepest)))
    with pytest.raises(UnserialisableError, match="nested deeper than 32 levels"):
        encode_request(Request(request_id="", method="m", args={"a": nested(MAX_DEPTH - 1)}))


def test_keys_are_counted():
    """10,000 keys in the whole message; one more is refused on both sides."""
    args = {str(n): n for n in range(MAX_KEYS - 1)}

    with pytest.raises(BadMessageError, match="more than 10000 keys"):
        decode_request(envelope({"method": "m", "args": args}))
    with pytest.raises(UnserialisableError, match="more than 10000 keys"):
        encode_request(Request(request_id="", method="m", args=args))


FAR, LONG = "1.500000000000000000e308", "9" * 3000


@pytest.mark.parametrize(
    ("item", "number", "said"),
    [
        ("[]", MAX_NODES - 2, "30000 lists and objects"),
        (FAR, MAX_FAR_NUMBERS, "300 numbers with an exponent of three digits"),
        (LONG, MAX_LONG_DIGITS // len(LONG), "50000 digits in numbers of 300 digits or more"),
    ],
)
def test_what_takes_long_to_read_is_counted(item: str, number: int, said: str):
    """Lists and objects, far exponents, digits of long numbers: one more than the limit is refused
    on both sides, by a text that says which.
    """
    at_most = f'{{"m": [{", ".join([item] * number)}]}}'
    more = f'{{"m": [{", ".join([item] * (number + 1))}]}}'

    assert (excess_of(at_most), excess_of(more.encode())) == (None, f"more than {said}")
    with pytest.raises(BadMessageError, match=said):
        decode_request(more.encode())
    if item != FAR:  # Python writes such a number in another way
        with pytest.raises(UnserialisableError, match=said):
            encode_reply(Reply(msg_id="m", reply_id="r", result=json.loads(more)["m"]))


def test_text_in_strings_is_not_counted():
    """A script, a template or a hex dump may hold any number of brackets, colons, digits and
    quotes.
    """
    text = ('{"a": [1e308, \\"[[{{::"]}\\\\' + FAR + LONG + "\n\t\u00e9") * 50
    args = {"script": text * 2, text: [{"deep": [text]}]}

    assert (
        decode_request(encode_request(Request(request_id="", method="m", args=args))).args == args
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[1]",
        '"text"',
        "null",
        '{"method": "m", "args": {"a": NaN}}',
        '{"method": "m", "args": {"a": -Infinity}}',
        '{"method": "m", "args": {"a": 1e999}}',
        '{"method": "m", "args": {"a": ' + "9" * 5000 + "}}",
        '{"method": "m", "args": {"a": ' + "9" * 900_000 + "}}",
        '{"method": "m", "args": {"a": ' + "[" * 500_000,
        '{"method": "m", "args": {"a": ' + '{"a":' * 100_000,
        '{"method": "m"',
        '{"method": "\\ud800"}',
        '{"method": 5}',
        '{"method": ""}',
        '{"method": null}',
        '{"args": {}}',
        '{"method": "m", "args": null}',
        '{"method": "m", "args": []}',
        '{"method": "' + "m" * 256 + '"}',
        '{"method": "m", "namespace": {}}',
        '{"method": "m", "version": 1.0}',
        '{"method": "m", "version": "' + "1" * 40 + '"}',
        '{"method": "m", "_unique_id": 7}',
        '{"method": "m", "_msg_id": true, "_reply_q": "q"}',
        '{"method": "m", "_timeout": "4"}',
        '{"method": "m", "_timeout": true}',
        '{"oslo.version": "2.0", "oslo.message": {"method": "m"}}',
        '{"oslo.version": "2.0", "oslo.message": "{"}',
        "\ufeff{}",
    ],
)
def test_what_is_no_request_is_refused_briefly(text):
    """Everything unreadable becomes one kind of error, whose text stays short and printable."""
    with pytest.raises(BadMessageError) as refused:
        decode_request(text.encode("utf-8", "surrogatepass"))

    assert len(str(refused.value)) < 400
    assert str(refused.value).isprintable()


def test_wire_text_is_escaped_in_errors():
    """A name with newlines, escapes and direction marks cannot forge a log line."""
    evil = "x\n\x1b[31m\u202e" + "y" * 5000

    with pytest.raises(BadMessageError) as refused:
        decode_request(envelope({"method": evil}))

    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


# -- what may be sent -----------------------------------------------------------------


class Colour(str, enum.Enum):  # noqa: UP042 - the older spelling is what peers use
    RED = "red"


def test_values_are_written_as_oslo_does():
    """Tuples and sets become lists, integer keys, UUIDs, decimals, addresses and bytes text, dates
    and datetimes ISO text.
    """
    args = {
        "tuple": (1, 2),
        "set": {"b", "a"},
        "keys": {1: "one"},
        "when": dt.datetime(2024, 5, 1, 12, 30, tzinfo=dt.UTC),
        "day": dt.date(2024, 5, 1),
        "amount": decimal.Decimal("1.10"),
        "address": ipaddress.ip_address("127.0.0.1"),
        "id": uuid.UUID(int=1),
        "bytes": b"text",
        "enum": Colour.RED,
        "big": 2**70,
    }

    assert decode_request(encode_request(Request(request_id="", method="m", args=args))).args == {
        "tuple": [1, 2],
        "set": ["a", "b"],
        "keys": {"1": "one"},
        "when": "2024-05-01T12:30:00.000000+00:00",
        "day": "2024-05-01",
        "amount": "1.10",
        "address": "127.0.0.1",
        "id": "00000000-0000-0000-0000-000000000001",
        "bytes": "text",
        "enum": "red",
        "big": 2**70,
    }


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"vm": threading.Lock()}, "result.vm: object of type lock"),
        ([1, object()], r"result\[1\]: object of type object"),
        (float("nan"), "result: nan cannot be written in JSON"),
        (b"\xff", "result: bytes that are not UTF-8"),
        ("\ud800", "result: text with a lone surrogate"),
        ({1.5: 1}, "result: key 1.5 of type float"),
        ({1: "a", "1": "b"}, "result: two keys are both written as '1'"),
    ],
)
def test_anything_else_is_refused_by_path_and_type(result, said):
    """Who returns what cannot be sent is told where it is and what it is."""
    with pytest.raises(UnserialisableError, match=said):
        encode_reply(Reply(msg_id="m", reply_id="r", result=result))


def test_a_circle_is_refused():
    """A structure that contains itself ends in an error, not in a full stack."""
    circle: list[object] = []
    circle.append(circle)

    with pytest.raises(UnserialisableError, match="in a circle"):
        encode_reply(Reply(msg_id="m", reply_id="r", result=circle))


# -- properties -----------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# Names, ids and versions reach columns of text, and no store takes a NUL there.
_STORABLE = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
NAME = st.text(_STORABLE, min_size=1, max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
ODD_TEXT = st.text(st.sampled_from('[]{}:,"\\u0e é'), max_size=12)
ODD_JSON = st.recursive(
    st.none() | st.integers() | ODD_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_TEXT, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=scale(200, 20000), deadline=None)
@given(ODD_JSON, st.booleans())
def test_limits_count_what_the_parser_finds(value: object, compact: bool):
    """Lists, objects, keys and levels are counted in the text, and are those of the parsed
    value.
    """
    text = json.dumps(value, ensure_ascii=compact, separators=(",", ":") if compact else None)

    outside = plain._outside_strings(text.encode())
    nodes = outside.translate(None, plain._NOT_NODES)

    assert (plain._depth(nodes), len(nodes), outside.count(b":")) == sizes(value)


def sizes(value: object) -> tuple[int, int, int]:
    """Levels, brackets and keys of a value."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [sizes(one) for one in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + max((depth for depth, _, _ in inner), default=0),
        2 + sum(brackets for _, brackets, _ in inner),
        sum(keys for _, _, keys in inner) + (len(value) if isinstance(value, dict) else 0),
    )


REQUESTS = st.builds(
    Request,
    request_id=st.just("") | NAME,
    method=NAME,
    args=st.dictionaries(TEXT, JSON, max_size=4),
    namespace=st.none() | NAME,
    version=st.sampled_from(["1.0", "1.2", "2.14"]),
    context=st.dictionaries(TEXT, JSON, max_size=3),
    reply=st.none() | st.builds(ReplyAddress, queue=NAME, msg_id=NAME),
)
REPLIES = st.builds(
    Reply,
    msg_id=NAME,
    reply_id=st.just("") | NAME,
    result=JSON,
    failure=st.none()
    | st.builds(
        Failure,
        exc_class=TEXT,
        module=TEXT,
        message=TEXT,
        args=st.lists(JSON, max_size=3).map(tuple),
        kwargs=st.dictionaries(TEXT, JSON, max_size=2),
        tb=st.lists(TEXT, max_size=3).map(tuple),
    ),
    ending=st.booleans(),
)


@settings(max_examples=scale(100, 5000), deadline=None)
@given(REQUESTS)
def test_requests_come_back_as_they_were(request):
    """Decoding undoes encoding."""
    assert decode_request(encode_request(request)) == request


@settings(max_examples=scale(100, 5000), deadline=None)
@given(REPLIES)
def test_replies_come_back_as_they_were(reply):
    """Decoding undoes encoding, failures included."""
    assert decode_reply(encode_reply(reply)) == reply


@settings(max_examples=scale(200, 20000), deadline=None)
@given(
    st.binary(max_size=200) | REQUESTS.map(encode_request) | JSON.map(msgspec.json.encode),
    st.data(),
)
def test_junk_is_refused_or_read_and_nothing_else(body, data):
    """No bytes, whole or damaged, raise anything but BadMessageError."""
    if body:
        place = data.draw(st.integers(0, len(body) - 1))
        body = body[:place] + data.draw(st.binary(max_size=3)) + body[place + 1 :]
    for decode in (decode_request, decode_reply):
        refused = refusal(decode, body)
        assert len(str(refused)) < 600


MESSAGES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            *("method", "args", "namespace", "version", "failure", "ending", "result"),
            *("_unique_id", "_msg_id", "_reply_q", "_timeout", "_context_x"),
        ),
        JSON,
    ),
)


@settings(max_examples=scale(200, 20000), deadline=None)
@given(MESSAGES)
def test_wrong_shapes_are_refused_or_read_and_nothing_else(message):
    """Any JSON value under any known key is survived."""
    for decode in (decode_request, decode_reply):
        refused = refusal(decode, envelope(message))
        assert len(str(refused)) < 600
