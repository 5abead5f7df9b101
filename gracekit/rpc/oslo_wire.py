"""The oslo.messaging 2.0 wire: bytes to requests and replies, and back.

    {"oslo.version":"2.0","oslo.message":"<JSON text of the message>"}

Decoding goes size, envelope, JSON with limits, shape, and raises nothing but
BadMessageError. Names from the wire stay data; errors show at most 256
escaped characters of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from gracekit.errors import BadMessageError, MessageTooLargeError, UnserialisableError
from gracekit.rpc.failures import failure_of, rebuild
from gracekit.rpc.message import Failure, JsonObject, Reply, ReplyAddress, Request
from gracekit.rpc.plain import dumps, excerpt, excess_of, loads, plain

__all__ = [
    "MAX_BODY_BYTES",
    "caller_in",
    "decode_reply",
    "decode_request",
    "encode_reply",
    "encode_request",
    "failure_of",
    "open_message",
    "rebuild",
    "request_in",
    "write_result",
]

MAX_BODY_BYTES: Final = 1 << 20
MAX_RESULT_BYTES: Final = MAX_BODY_BYTES - 4096  # beside it a reply has two ids of any text
_SURELY_FITS: Final = 4096  # characters of a result
MAX_NAME: Final = 255  # characters of a method, namespace, id or queue name
MAX_VERSION: Final = 32  # characters
MAX_SECONDS: Final = 1e9  # anybody may send an integer that no timer takes

_VERSION_KEY: Final = "oslo.version"
_MESSAGE_KEY: Final = "oslo.message"
_ENVELOPE_VERSION: Final = "2.0"  # _Envelope says it too
_PENDING: Final = "_gracekit_pending"  # oslo's servers pass over it; handlers pass a context on
_CONTEXT: Final = "_context_"
_CONTEXT_AT: Final = len(_CONTEXT)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """What nearly all bodies are, read in one go."""

    version: Literal["2.0"] = msgspec.field(name=_VERSION_KEY)
    message: str = msgspec.field(name=_MESSAGE_KEY)


_envelope_of: Final = msgspec.json.Decoder(_Envelope).decode


# -- requests -----------------------------------------------------------------


def encode_request(request: Request) -> bytes:
    """Write a request; its keys come in a fixed order.

    Raises:
        UnserialisableError: an argument or context value is no plain data.
    """
    message: JsonObject = {"method": request.method, "args": plain(request.args, "args")}
    if request.namespace is not None:
        message["namespace"] = request.namespace
    if request.version != "1.0":  # what readers assume
        message["version"] = request.version
    if request.request_id:
        message["_unique_id"] = request.request_id
    for key, value in request.context.items():
        message[f"{_CONTEXT}{key}"] = plain(value, f"context.{key}")
    if request.reply is not None:
        message["_msg_id"] = request.reply.msg_id
        message["_reply_q"] = request.reply.queue
        message["_timeout"] = request.monitor_timeout_s
        if request.reply.knows_pending:
            message[_PENDING] = True
    return enveloped(message, f"request {request.method}")


def decode_request(body: bytes, *, max_bytes: int = MAX_BODY_BYTES) -> Request:
    """Read a request.

    `_unique_id`, `version`, `args` and the envelope itself may be missing. A
    `_msg_id` without `_reply_q` cannot be answered and reads as a cast.

    Raises:
        MessageTooLargeError: the body exceeds *max_bytes*; it was not parsed.
        BadMessageError: it is no request.
    """
    return request_in(open_message(body, max_bytes=max_bytes))


def request_in(message: JsonObject) -> Request:
    """The request that an opened message is.

    Raises:
        BadMessageError: it is none.
    """
    return Request(
        request_id=_name(message, "_unique_id") or "",
        method=_required(message, "method"),
        args=_object(message, "args"),
        namespace=_name(message, "namespace"),
        version=_name(message, "version", MAX_VERSION) or "1.0",
        context={
            key[_CONTEXT_AT:]: value for key, value in message.items() if key.startswith(_CONTEXT)
        },
        reply=_address(message),
        monitor_timeout_s=_seconds(message, "_timeout"),
    )


def caller_in(message: JsonObject) -> ReplyAddress | None:
    """Whom to tell that an opened message is no request; None where nobody can be found in it."""
    try:
        return _address(message)
    except BadMessageError:
        return None


def _address(message: JsonObject) -> ReplyAddress | None:
    msg_id, queue = _name(message, "_msg_id"), _name(message, "_reply_q")
    if not msg_id or not queue:
        return None
    knows_pending = message.get(_PENDING) is True  # any other value is not understood
    return ReplyAddress(queue=queue, msg_id=msg_id, knows_pending=knows_pending)


# -- replies ------------------------------------------------------------------


def encode_reply(reply: Reply) -> bytes:
    """Write a reply with all five keys, which oslo clients insist on.

    Raises:
        UnserialisableError: the result is no plain data.
    """
    message = {
        "result": plain(reply.result, "result"),
        "failure": None if reply.failure is None else _write_failure(reply.failure),
        "ending": reply.ending,
        "_msg_id": reply.msg_id,
        "_unique_id": reply.reply_id,
    }
    return enveloped(message, "reply")


def write_result(result: object) -> str:
    """A result as JSON text that fits into a reply, whoever asks for it.

    Raises:
        UnserialisableError: it is no plain data, or more than callers read.
        MessageTooLargeError: a reply with it is above what callers read.
    """
    text = dumps(plain(result, "result"), "result")
    if len(text) <= _SURELY_FITS:
        return text
    if excess := excess_of(f'{{"result":{text},"":0,"":0,"":0,"":0}}'):  # as it is in a reply
        raise UnserialisableError(f"result has {excess}; send less, or a reference to the data")
    size = len(msgspec.json.encode(text))
    if size > MAX_RESULT_BYTES:
        raise MessageTooLargeError(
            f"result of {size} bytes in a reply is above {MAX_RESULT_BYTES}; "
            "return a reference to the data instead"
        )
    return text


def decode_reply(body: bytes, *, max_bytes: int = MAX_BODY_BYTES) -> Reply:
    """Read a reply; everything but `_msg_id` may be missing, and then it is an ending.

    A failure that cannot be read becomes one without a name, because its
    caller is better served by an odd error than by silence.

    Raises:
        MessageTooLargeError: the body exceeds *max_bytes*; it was not parsed.
        BadMessageError: it is no reply.
    """
    message = open_message(body, max_bytes=max_bytes)
    failure = message.get("failure")
    return Reply(
        msg_id=_required(message, "_msg_id"),
        reply_id=_text(message, "_unique_id") or "",
        result=message.get("result"),
        failure=None if failure is None else _read_failure(failure),
        ending=message.get("ending", True) is not False,
    )


def _write_failure(failure: Failure) -> str:
    content = {
        "class": failure.exc_class,
        "module": failure.module,
        "message": failure.message,
        "tb": list(failure.tb),
        "args": plain(failure.args, "failure.args"),
        "kwargs": plain(failure.kwargs, "failure.kwargs"),
    }
    return dumps(content, "failure")


def _words(value: object) -> str:
    """Text as it is; of anything else an excerpt."""
    if isinstance(value, str):
        return value
    return "" if value is None else excerpt(value)


def _read_failure(text: object) -> Failure:
    try:
        content = loads(text, "failure") if isinstance(text, str) else text
        if not isinstance(content, dict):
            raise BadMessageError("failure is no object")  # noqa: TRY301 - one way out
        args, kwargs, tb = content.get("args"), content.get("kwargs"), content.get("tb")
        return Failure(
            exc_class=_text(content, "class") or "",
            module=_text(content, "module") or "",
            message=_words(content.get("message")),
            args=tuple(args) if isinstance(args, list) else (),
            kwargs=kwargs if isinstance(kwargs, dict) else {},
            tb=tuple(map(_words, tb)) if isinstance(tb, list) else (),
        )
    except BadMessageError as error:
        return Failure(exc_class="", module="", message=f"{error}: {excerpt(text)}")


# -- envelope and shape -------------------------------------------------------


def enveloped(message: JsonObject, what: str) -> bytes:
    """A message in the envelope that all of them travel in."""
    outer = {_VERSION_KEY: _ENVELOPE_VERSION, _MESSAGE_KEY: dumps(message, what)}
    return msgspec.json.encode(outer)


def check_size(size: int, *, max_bytes: int) -> None:
    """See that a body of so many bytes may be parsed.

    Raises:
        MessageTooLargeError: it may not.
    """
    if size > max_bytes:
        raise MessageTooLargeError(f"body of {size} bytes exceeds the limit of {max_bytes}")


def open_message(body: bytes, *, max_bytes: int = MAX_BODY_BYTES) -> JsonObject:
    """The message in the envelope, whatever is in it; for `request_in` and `caller_in`.

    Raises:
        MessageTooLargeError: the body exceeds *max_bytes*; it was not parsed.
        BadMessageError: nothing can be read of it.
    """
    check_size(len(body), max_bytes=max_bytes)
    try:
        text = _envelope_of(body).message
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        message = _open_any(body)
    else:
        message = loads(text, _MESSAGE_KEY)
    if not isinstance(message, dict):
        raise BadMessageError(f"message is {_kind(message)}, not an object")
    return message


def _open_any(body: bytes) -> Any:
    """The message of any other body: a bare one, an envelope with more keys, or a wrong one."""
    message = loads(body, "body")
    if isinstance(message, dict) and _VERSION_KEY in message and _MESSAGE_KEY in message:
        version, text = message[_VERSION_KEY], message[_MESSAGE_KEY]
        if version != _ENVELOPE_VERSION:
            raise BadMessageError(
                f"envelope version {excerpt(version)} is not {_ENVELOPE_VERSION!r}, "
                "the only one spoken here"
            )
        if not isinstance(text, str):
            raise BadMessageError(f"{_MESSAGE_KEY} holds {_kind(text)}, not JSON text")
        message = loads(text, _MESSAGE_KEY)
    return message


def _text(message: Mapping[str, Any], key: str, longest: int = MAX_NAME) -> str | None:
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadMessageError(f"{key} is {_kind(value)}, not text: {excerpt(value)}")
    if len(value) > longest:
        raise BadMessageError(f"{key} is longer than {longest} characters: {excerpt(value)}")
    return value


def _name(message: Mapping[str, Any], key: str, longest: int = MAX_NAME) -> str | None:
    """Text that a request goes by, which the journal keeps as it is."""
    value = _text(message, key, longest)
    if value is not None and "\0" in value:
        raise BadMessageError(f"{key} has a NUL character, which no store takes: {excerpt(value)}")
    return value


def _required(message: JsonObject, key: str) -> str:
    value = _name(message, key)
    if not value:
        raise BadMessageError(f"message has no {key}")
    return value


def _object(message: JsonObject, key: str) -> JsonObject:
    value = message.get(key, {})
    if not isinstance(value, dict):
        raise BadMessageError(f"{key} is {_kind(value)}, not an object")  # what it holds is secret
    return value


def _seconds(message: JsonObject, key: str) -> float | None:
    value = message.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadMessageError(f"{key} is {_kind(value)}, not seconds: {excerpt(value)}")
    return min(value, MAX_SECONDS) if value > 0 else None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
