"""Plain data: what may stand in a message, and JSON with limits.

Outgoing values are turned into None, bool, int, float, str, list and dict, or
refused with the path to the culprit. Incoming text is parsed strictly; of two
equal keys in one object the last wins.
"""

from __future__ import annotations

import datetime as dt
import decimal
import ipaddress
import math
import uuid
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gracekit.errors import BadMessageError, UnserialisableError

MAX_DEPTH: Final = 32  # nested lists and objects, the message itself being the first
MAX_KEYS: Final = 10_000  # of all objects of one message together
_SHORTEST_KEY: Final = 4  # characters of one and its value, `"":0`
MAX_SHOWN: Final = 256  # characters of wire text that may reach a log


def excerpt(value: object) -> str:
    """Text from the wire, escaped and cut, so that it can be shown or logged."""
    try:
        text = ascii(value)
    except ValueError:  # an integer too long to be written
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


# -- incoming -----------------------------------------------------------------


def loads(text: str | bytes, what: str) -> Any:
    """Parse JSON; integers of more than 4300 digits, NaN and Infinity are refused.

    Args:
        text: At most as long as the transport's limit; checked by the caller.
        what: Names the text in errors.

    Raises:
        BadMessageError: it is no JSON, or deeper or larger than the limits.
    """
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode errors are ValueErrors
        raise BadMessageError(f"{what} is no readable JSON: {excerpt(str(error))}") from None
    excess = over_limit(text, value)
    if excess:
        raise BadMessageError(f"{what} has {excess}")
    return value


def over_limit(text: str | bytes, value: object) -> str | None:
    """What of *value*, the parsed form of *text*, is beyond the limits; None if nothing."""
    if _surely_small(text):
        return None
    depth, keys = 0, 0
    level = [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        keys += sum(len(node) for node in level if isinstance(node, dict))
        if depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} levels of nesting"
        if keys > MAX_KEYS:
            return f"more than {MAX_KEYS} keys"
        level = [child for node in level for child in _children(node)]
    return None


def _surely_small(text: str | bytes) -> bool:
    # Counting characters costs a tenth of walking the value, and nearly every message passes.
    has_few_keys = len(text) <= _SHORTEST_KEY * MAX_KEYS
    if isinstance(text, str):
        nested = text.count("[") + text.count("{")
        return nested <= MAX_DEPTH and (has_few_keys or text.count(":") <= MAX_KEYS)
    nested = text.count(b"[") + text.count(b"{")
    return nested <= MAX_DEPTH and (has_few_keys or text.count(b":") <= MAX_KEYS)


def _children(node: Any) -> list[Any]:
    members = node.values() if isinstance(node, dict) else node
    return [member for member in members if isinstance(member, dict | list)]


# -- outgoing -----------------------------------------------------------------


def dumps(value: object, what: str) -> str:
    """Write plain data as compact JSON text.

    Raises:
        UnserialisableError: a receiver would refuse it as too deep or too large.
    """
    try:
        text = msgspec.json.encode(value).decode()
    except ValueError as error:  # an integer too long to be written
        raise UnserialisableError(f"{what}: {excerpt(str(error))}") from None
    excess = over_limit(text, value)
    if excess:
        raise UnserialisableError(f"{what} has {excess}; send less, or a reference to the data")
    return text


def plain(value: object, path: str, depth: int = 1) -> Any:  # noqa: C901, PLR0911, PLR0912 - one table
    """Turn *value* into plain data, as oslo.messaging does.

    Tuples and sets become lists (sets in a fixed order, so that a repeated
    request has equal content), integer keys, UUIDs, decimals, IP addresses and
    bytes text, and dates and datetimes ISO text.

    Args:
        value: The value.
        path: How errors name it, for example `result.vm`.
        depth: Levels of nesting around it.

    Raises:
        UnserialisableError: something in it is of another type.
    """
    match value:
        case None | bool():
            return value
        case str():
            return _text(value, path)
        case int():
            return int(value)
        case float():
            return _number(value, path)
        case Mapping() | list() | tuple() | set() | frozenset() if depth >= MAX_DEPTH:
            raise UnserialisableError(
                f"{path[:MAX_SHOWN]}: nested deeper than {MAX_DEPTH} levels, or in a circle"
            )
        case Mapping():
            return _object(value, path, depth + 1)
        case list() | tuple():
            return [plain(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
        case set() | frozenset():
            items = [plain(item, f"{path}{{}}", depth + 1) for item in value]
            return sorted(items, key=msgspec.json.encode)
        case dt.datetime():
            return value.isoformat(timespec="microseconds")  # oslo's readers insist on them
        case dt.date():
            return value.isoformat()
        case uuid.UUID() | decimal.Decimal() | ipaddress.IPv4Address() | ipaddress.IPv6Address():
            return str(value)
        case bytes():
            return _decoded(value, path)
        case _:
            raise UnserialisableError(
                f"{path}: object of type {type(value).__name__}; a message carries only plain data"
            )


def _object(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for key, member in value.items():
        name = _key(key, path)
        if name in written:
            raise UnserialisableError(f"{path}: two keys are both written as {excerpt(name)}")
        written[name] = plain(member, f"{path}.{name}", depth)
    return written


def _key(key: object, path: str) -> str:
    if isinstance(key, str):
        return _text(key, f"a key of {path}")
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    raise UnserialisableError(
        f"{path}: key {excerpt(key)} of type {type(key).__name__}; keys are text or integers"
    )


def _text(value: str, path: str) -> str:
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        raise UnserialisableError(f"{path}: text with a lone surrogate is not Unicode") from None
    return str.__str__(value)  # the plain text of a StrEnum member too


def _number(value: float, path: str) -> float:
    if not math.isfinite(value):
        raise UnserialisableError(f"{path}: {value} cannot be written in JSON; send None or text")
    return float(value)


def _decoded(value: bytes, path: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UnserialisableError(
            f"{path}: bytes that are not UTF-8 text; encode them, for example as base64"
        ) from None
