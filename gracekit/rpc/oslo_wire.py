"""The oslo.messaging 2.0 wire: bytes to requests and replies, and back.

The envelope is that of `gracekit.rpc.envelope`. Decoding checks size, envelope, JSON
limits and shape, in that order, and raises only BadMessageError. Names from the wire
are only data; errors show at most 256 escaped characters of them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gracekit.errors import BadMessageError, MessageTooLargeError
from gracekit.rpc.envelope import (
    MAX_BODY_BYTES,
    MAX_NAME,
    check_size,
    context_in,
    enveloped,
    name_in,
    object_in,
    open_message,
    put_context,
    required_in,
    text_in,
    type_word,
)
from gracekit.rpc.failures import failure_of, rebuild
from gracekit.rpc.message import Failure, JsonObject, Reply, ReplyAddress, Request
from gracekit.rpc.plain import dumps, excerpt, is_too_long, loads, plain

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_NAME",
    "caller_in",
    "check_size",
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

MAX_RESULT_BYTES: Final = MAX_BODY_BYTES - 4096  # leaves room for a reply's two ids
_SURELY_FITS: Final = 4096  # characters of a result that needs no size check
MAX_VERSION: Final = 32  # characters
MAX_SECONDS: Final = 1e9  # a sender may give an integer too large for timers

LATEST: Final = 1e11  # seconds since the epoch; a year of four digits
_DELAY: Final = "_gracekit_delay"
_AT: Final = "_gracekit_at"
_PENDING: Final = "_gracekit_pending"  # not in the context, which handlers pass on; oslo ignores it


# -- requests -----------------------------------------------------------------


def encode_request(request: Request) -> bytes:
    """Write a request, with its keys in a fixed order.

    Raises:
        UnserialisableError: a name, argument or context value is no plain data.
    """
    method = plain(request.method, "method")
    message: JsonObject = {"method": method, "args": plain(request.args, "args")}
    if request.namespace is not None:
        message["namespace"] = plain(request.namespace, "namespace")
    if request.version != "1.0":  # what readers assume
        message["version"] = plain(request.version, "version")
    if request.request_id:
        message["_unique_id"] = request.request_id
    put_context(message, request.context)
    if request.delay_s is not None:
        message[_DELAY] = request.delay_s
    if request.at is not None:
        message[_AT] = request.at
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
    """The request in an opened message.

    Raises:
        BadMessageError: it is no request.
    """
    return Request(
        request_id=name_in(message, "_unique_id") or "",
        method=required_in(message, "method"),
        args=object_in(message, "args"),
        namespace=name_in(message, "namespace"),
        version=name_in(message, "version", MAX_VERSION) or "1.0",
        context=context_in(message),
        reply=_address(message),
        monitor_timeout_s=_seconds(message, "_timeout"),
        delay_s=_seconds(message, _DELAY) if _DELAY in message else None,
        at=_seconds(message, _AT, LATEST) if _AT in message else None,
    )


def caller_in(message: JsonObject) -> ReplyAddress | None:
    """The reply address in a message that may be no valid request; None if it has none."""
    try:
        return _address(message)
    except BadMessageError:
        return None


def _address(message: JsonObject) -> ReplyAddress | None:
    if "_msg_id" not in message and "_reply_q" not in message:
        return None  # a cast, as most requests are
    msg_id, queue = name_in(message, "_msg_id"), name_in(message, "_reply_q")
    if not msg_id or not queue:
        return None
    knows_pending = message.get(_PENDING) is True  # any other value means no
    return ReplyAddress(queue=queue, msg_id=msg_id, knows_pending=knows_pending)


def _seconds(message: JsonObject, key: str, most: float = MAX_SECONDS) -> float | None:
    value = message.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadMessageError(f"{key} is {type_word(value)}, not seconds: {excerpt(value)}")
    return min(value, most) if value > 0 else None


# -- replies ------------------------------------------------------------------


def encode_reply(reply: Reply) -> bytes:
    """Write a reply with all five keys, as oslo clients require them.

    Raises:
        UnserialisableError: the result is no plain data.
    """
    result = reply.result
    message = {
        "result": result if type(result) is msgspec.Raw else plain(result, "result"),
        "failure": None if reply.failure is None else _write_failure(reply.failure),
        "ending": reply.ending,
        "_msg_id": reply.msg_id,
        "_unique_id": reply.reply_id,
    }
    return enveloped(message, "reply")


def write_result(result: object) -> str:
    """A result as JSON text, checked to fit into a reply to any caller.

    Raises:
        UnserialisableError: it is no plain data, or beyond the limits of JSON in `plain`.
        MessageTooLargeError: the reply would exceed the size that callers read.
    """
    if is_too_long(result, "result", MAX_RESULT_BYTES):
        raise _too_large(f"more than {MAX_RESULT_BYTES}")
    text = dumps(plain(result, "result"), "result", '{{"result":{},"":0,"":0,"":0,"":0}}')
    if len(text) <= _SURELY_FITS:
        return text
    size = len(msgspec.json.encode(text))
    if size > MAX_RESULT_BYTES:
        raise _too_large(str(size))
    return text


def _too_large(size: str) -> MessageTooLargeError:
    return MessageTooLargeError(
        f"result of {size} bytes in a reply is above {MAX_RESULT_BYTES}; "
        "return a reference to the data instead"
    )


def decode_reply(body: bytes, *, max_bytes: int = MAX_BODY_BYTES) -> Reply:
    """Read a reply; all keys but `_msg_id` may be missing. Without `ending` it is the answer.

    An unreadable failure becomes one without a class name: for the caller an
    unclear error is better than a timeout.

    Raises:
        MessageTooLargeError: the body exceeds *max_bytes*; it was not parsed.
        BadMessageError: it is no reply.
    """
    message = open_message(body, max_bytes=max_bytes)
    failure = message.get("failure")
    return Reply(
        msg_id=required_in(message, "_msg_id"),
        reply_id=text_in(message, "_unique_id") or "",
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
    """Text unchanged; an excerpt of any other value."""
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
            exc_class=text_in(content, "class") or "",
            module=text_in(content, "module") or "",
            message=_words(content.get("message")),
            args=tuple(args) if isinstance(args, list) else (),
            kwargs=kwargs if isinstance(kwargs, dict) else {},
            tb=tuple(map(_words, tb)) if isinstance(tb, list) else (),
        )
    except BadMessageError as error:
        return Failure(exc_class="", module="", message=f"{error}: {excerpt(text)}")
