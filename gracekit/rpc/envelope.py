"""The envelope of oslo.messaging 2.0, and the shape of what is in it.

    {"oslo.version":"2.0","oslo.message":"<JSON text of the message>"}

Requests, replies and notifications are sent in it. Reading raises only BadMessageError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from gracekit.errors import BadMessageError, MessageTooLargeError
from gracekit.rpc.message import JsonObject
from gracekit.rpc.plain import dumps, excerpt, loads, plain

MAX_BODY_BYTES: Final = 1 << 20
MAX_NAME: Final = 255  # characters of a method, namespace, id or queue name

_VERSION_KEY: Final = "oslo.version"
_MESSAGE_KEY: Final = "oslo.message"
_ENVELOPE_VERSION: Final = "2.0"  # _Envelope says it too
_CONTEXT: Final = "_context_"
_CONTEXT_AT: Final = len(_CONTEXT)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """The form of nearly all bodies, which is decoded in one step."""

    version: Literal["2.0"] = msgspec.field(name=_VERSION_KEY)
    message: str = msgspec.field(name=_MESSAGE_KEY)


_envelope_of: Final = msgspec.json.Decoder(_Envelope).decode


# -- the envelope -------------------------------------------------------------


def enveloped(message: JsonObject, what: str) -> bytes:
    """Write a message and the envelope around it.

    Args:
        message: Plain data.
        what: Names the message in errors.

    Raises:
        UnserialisableError: a receiver would refuse it as too deep or too large.
    """
    outer = {_VERSION_KEY: _ENVELOPE_VERSION, _MESSAGE_KEY: dumps(message, what)}
    return msgspec.json.encode(outer)


def check_size(size: int, *, max_bytes: int) -> None:
    """Check the size of a body in bytes before it is parsed.

    Raises:
        MessageTooLargeError: it is above *max_bytes*.
    """
    if size > max_bytes:
        raise MessageTooLargeError(f"body of {size} bytes exceeds the limit of {max_bytes}")


def open_message(body: bytes, *, max_bytes: int = MAX_BODY_BYTES) -> JsonObject:
    """The message in the envelope, or without one (oslo's format 1.0); its keys are not checked.

    Raises:
        MessageTooLargeError: the body exceeds *max_bytes*; it was not parsed.
        BadMessageError: it is no JSON object, or the envelope is wrong.
    """
    check_size(len(body), max_bytes=max_bytes)
    try:
        text = _envelope_of(body).message
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        message = _open_any(body)
    else:
        message = loads(text, _MESSAGE_KEY)
    if not isinstance(message, dict):
        raise BadMessageError(f"message is {type_word(message)}, not an object")
    return message


def _open_any(body: bytes) -> Any:
    """The message of a body that is no plain `_Envelope`: a bare message, or more keys."""
    message = loads(body, "body")
    if isinstance(message, dict) and _VERSION_KEY in message and _MESSAGE_KEY in message:
        version, text = message[_VERSION_KEY], message[_MESSAGE_KEY]
        if version != _ENVELOPE_VERSION:
            raise BadMessageError(
                f"envelope version {excerpt(version)} is not {_ENVELOPE_VERSION!r}, "
                "the only one spoken here"
            )
        if not isinstance(text, str):
            raise BadMessageError(f"{_MESSAGE_KEY} holds {type_word(text)}, not JSON text")
        message = loads(text, _MESSAGE_KEY)
    return message


# -- its shape ----------------------------------------------------------------


def text_in(message: Mapping[str, Any], key: str, longest: int = MAX_NAME) -> str | None:
    """The text under *key*; None if it is missing or null.

    Raises:
        BadMessageError: it is no text, or longer than *longest*.
    """
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadMessageError(f"{key} is {type_word(value)}, not text: {excerpt(value)}")
    if len(value) > longest:
        raise BadMessageError(f"{key} is longer than {longest} characters: {excerpt(value)}")
    return value


def name_in(message: Mapping[str, Any], key: str, longest: int = MAX_NAME) -> str | None:
    """As `text_in`, for a name or id that the journal stores.

    Raises:
        BadMessageError: it is no text, is too long, or has a NUL, which stores refuse.
    """
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > longest:
        return text_in(message, key, longest)  # which refuses it, and says why
    if "\0" in value:
        raise BadMessageError(f"{key} has a NUL character, which no store takes: {excerpt(value)}")
    return value


def required_in(message: JsonObject, key: str) -> str:
    """As `name_in`, for text that must not be missing or empty.

    Raises:
        BadMessageError: it is missing or empty, or as for `name_in`.
    """
    value = name_in(message, key)
    if not value:
        raise BadMessageError(f"message has no {key}")
    return value


def object_in(message: JsonObject, key: str) -> JsonObject:
    """The object under *key*; an empty one if it is missing.

    Raises:
        BadMessageError: it is something else. Its value may be secret, and is not shown.
    """
    value = message.get(key, {})
    if not isinstance(value, dict):
        raise BadMessageError(f"{key} is {type_word(value)}, not an object")
    return value


def type_word(value: object) -> str:
    """The JSON type of a value, for errors."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# -- the context --------------------------------------------------------------


def put_context(message: JsonObject, context: Mapping[str, Any]) -> None:
    """Add a context to a message: one `_context_…` key for each of its keys.

    Raises:
        UnserialisableError: a value is no plain data, a key is neither text nor an integer, or two
            keys are written alike.
    """
    if context:
        for key, value in plain(context, "context", 0).items():
            message[f"{_CONTEXT}{key}"] = value


def context_in(message: JsonObject) -> JsonObject:
    """The context of an opened message, collected from its `_context_…` keys."""
    return {key[_CONTEXT_AT:]: value for key, value in message.items() if key.startswith(_CONTEXT)}
