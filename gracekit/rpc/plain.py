"""Plain data: the values that a message may contain, and JSON with limits.

Outgoing values are converted to None, bool, int, float, str, list and dict, or
refused with the path of the wrong value. Incoming text is parsed strictly; if an
object has a key twice, the last value counts.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
import ipaddress
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Final

import msgspec

from gracekit.errors import BadMessageError, UnserialisableError
from gracekit.telemetry.safe_text import MOST_HOLDERS, counted

MAX_DEPTH: Final = 32  # nested lists and objects, the message itself being the first
MAX_KEYS: Final = 10_000  # in all objects of one message together
MAX_NODES: Final = MOST_HOLDERS  # lists and objects of one message together
MAX_FAR_NUMBERS: Final = 300  # with a 3-digit exponent, which take up to 10 us to parse
MAX_LONG_DIGITS: Final = 50_000  # in all numbers of at least `_LONG` digits
MAX_SMALL: Final = 262_144  # bytes of data that is written often, such as a cursor
_LONG: Final = 300
_FEW: Final = 4_096  # bytes of text that is always quick to parse
MAX_SHOWN: Final = 256  # characters of wire text that may reach a log


def excerpt(value: object) -> str:
    """A value from the wire, escaped and shortened, so that it can be shown or logged."""
    if isinstance(value, dict | list):
        return "[...]" if isinstance(value, list) else "{...}"  # it may be long, and secret
    try:
        text = ascii(value[:MAX_SHOWN] if isinstance(value, str) else value)
    except ValueError:  # an integer too long to be written
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


# -- incoming -----------------------------------------------------------------


def loads(text: str | bytes, what: str) -> Any:
    """Parse JSON; integers of more than 4300 digits, NaN and Infinity are refused.

    Args:
        text: The caller has checked that it is within the size limit of messages.
        what: Names the text in errors.

    Raises:
        BadMessageError: it is no JSON, or deeper or larger than the limits.
    """
    if excess := excess_of(text):
        raise BadMessageError(f"{what} has {excess}")
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode errors are ValueErrors
        raise BadMessageError(f"{what} is no readable JSON: {excerpt(str(error))}") from None


def excess_of(text: str | bytes) -> str | None:
    """Which limit the JSON *text* exceeds, as words; None if none.

    This is counted before parsing, because one message must not block the event loop for more than
    about 50 ms: 1 MiB can hold 350,000 lists.
    """
    if isinstance(text, str):
        # Nearly all texts are short; they need no conversion to bytes.
        if len(text) <= _FEW and text.count("[") + text.count("{") <= MAX_DEPTH:
            return None
        text = text.encode(errors="surrogatepass")
    if _is_small(text):
        return None
    raw = _outside_strings(text)
    nodes = raw.translate(None, _NOT_NODES)
    if len(nodes) > 2 * MAX_NODES:  # each has a bracket at either end
        return f"more than {MAX_NODES} lists and objects"
    if _depth(nodes) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} levels of nesting"
    if raw.count(b":") > MAX_KEYS:
        return f"more than {MAX_KEYS} keys"
    return _excess_of_numbers(raw)


def _is_small(raw: bytes) -> bool:
    """A quick check, which nearly all messages pass, that no limit can be exceeded.

    It also counts characters inside strings, so it may be false for a message within the limits.
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        return False
    return len(raw) <= _FEW or (raw.count(b":") <= MAX_KEYS and not _excess_of_numbers(raw))


_NOT_NODES: Final = bytes(set(range(256)) - set(b"[]{}"))


def _depth(nodes: bytes) -> int:
    depth = deepest = 0
    for bracket in nodes:
        if bracket in b"[{":
            depth += 1
            deepest = max(depth, deepest)
        else:
            depth -= 1
    return deepest


_SIMPLER: Final = bytes.maketrans(b"123456789E", b"0" * 9 + b"e")


def _excess_of_numbers(raw: bytes) -> str | None:
    simpler = raw.translate(_SIMPLER, b"+-")
    if simpler.count(b"e000") > MAX_FAR_NUMBERS:
        return f"more than {MAX_FAR_NUMBERS} numbers with an exponent of three digits"
    if simpler.count(b"0" * _LONG) * _LONG > MAX_LONG_DIGITS:
        return f"more than {MAX_LONG_DIGITS} digits in numbers of {_LONG} digits or more"
    return None


def _outside_strings(raw: bytes) -> bytes:
    """*raw* without its strings; correct up to the first byte that is no valid JSON."""
    return b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


# -- outgoing -----------------------------------------------------------------


def is_too_long(value: object, what: str, most: int) -> bool:
    """Whether *value* surely takes more than *most* bytes; asked before it is copied and written.

    Raises:
        UnserialisableError: it has too many lists and objects, or one that holds itself.
    """
    left, holders = counted(value, most)
    if holders > MAX_NODES:
        raise UnserialisableError(_excess(what, f"more than {MAX_NODES} lists and objects"))
    return left < 0


def dumps(value: object, what: str, within: str = "") -> str:
    """Write plain data as compact JSON text, which is to stand in the place of {} in *within*.

    Raises:
        UnserialisableError: a receiver would refuse it as too deep or too large.
    """
    try:
        text = msgspec.json.encode(value).decode()
    except ValueError as error:  # an integer too long to be written
        raise UnserialisableError(f"{what}: {excerpt(str(error))}") from None
    if excess := excess_of(within.format(text) if within else text):
        raise UnserialisableError(_excess(what, excess))
    return text


def _excess(what: str, excess: str) -> str:
    return f"{what} has {excess}; send less, or a reference to the data"


def small_plain(value: object, what: str, why: str) -> Any:
    """`plain`, for data of which at most `MAX_SMALL` bytes are kept; *why* is told if it is more.

    Raises:
        UnserialisableError: it is no plain data, or too large.
    """
    if not is_too_long(value, what, MAX_SMALL):
        written = plain(value, what)
        if len(dumps(written, what).encode()) <= MAX_SMALL:
            return written
    raise UnserialisableError(
        f"{what} has more than {MAX_SMALL} bytes as JSON, and {why}: keep the data elsewhere, and "
        "a reference to it here"
    )


def plain(value: object, path: str, depth: int = 1) -> Any:  # noqa: C901, PLR0911, PLR0912 - one table
    """Turn *value* into plain data, as oslo.messaging does.

    Tuples and sets become lists (sets in a fixed order, so that a repeated
    request has equal content). Integer keys, UUIDs, decimals, IP addresses and
    bytes become text, and dates, times and durations become ISO text. Members of
    an enum become their value; Structs, dataclasses and models of pydantic become
    what `gracekit.rpc.typed` reads.

    Args:
        value: The value.
        path: Names the value in errors, for example `result.vm`.
        depth: Levels of nesting around it.

    Raises:
        UnserialisableError: something in it is of another type.
    """
    if type(value) is dict and depth < MAX_DEPTH:  # the table below takes longer
        return _object(value, path, depth + 1)
    if isinstance(value, _ROWS) and depth < MAX_DEPTH and _are_scalars(value):
        return [*value]
    match value:
        case None | bool():
            return value
        case str():
            return _text(value, path)
        case int():
            return int(value)
        case float():
            return _number(value, path)
        case dt.datetime():
            return value.isoformat(timespec="microseconds")  # required by oslo's readers
        case dt.date():
            return value.isoformat()
        case uuid.UUID() | decimal.Decimal() | ipaddress.IPv4Address() | ipaddress.IPv6Address():
            return str(value)
        case dt.time() | dt.timedelta():
            return msgspec.to_builtins(value)
        case bytes():
            return _decoded(value, path)
        case enum.Enum():
            return plain(value.value, path, depth)
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
        case _:
            return plain(_fields_of(value, path), path, depth)


def _fields_of(value: object, path: str) -> Any:
    """An object with fields as its class says that it is written; bytes in it become base64.

    Raises:
        UnserialisableError: it is none, or holds something that cannot be written.
    """
    is_type = isinstance(value, type)
    if not is_type and callable(dump := getattr(type(value), "model_dump", None)):
        return _dumped(value, dump, path)
    has_fields = isinstance(value, msgspec.Struct) or is_dataclass(value)
    if is_type or not (has_fields or hasattr(type(value), "__attrs_attrs__")):
        raise UnserialisableError(
            f"{path}: object of type {type(value).__name__}; a message carries only plain data"
        )
    other = functools.partial(plain, path=path)
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=other, order="deterministic")
    except UnserialisableError:
        raise
    except (TypeError, ValueError, RecursionError) as error:  # such as a key that is no text
        raise UnserialisableError(f"{path}: {excerpt(str(error))}") from None


def _dumped(model: object, dump: Callable[..., Any], path: str) -> Any:
    """A model of pydantic as it writes itself for JSON."""
    try:
        written = dump(model, mode="json", by_alias=True, round_trip=True)
    except Exception as error:  # noqa: BLE001 - of a serializer of the application, too
        raise UnserialisableError(f"{path}: {excerpt(str(error))}") from None
    if "'**********'" in str(written):
        raise UnserialisableError(
            f"{path}: {type(model).__name__} writes asterisks for a SecretStr or SecretBytes: give "
            "the field a serializer that writes its value, or send a reference to the secret"
        )
    return written


def _are_scalars(items: Sequence[object]) -> bool:
    """Whether all are plain data as they are: many numbers must not take a call each."""
    kinds = set(map(type, items))
    if not kinds <= _SCALARS:
        return False
    if str in kinds:
        try:
            "".join([one for one in items if type(one) is str]).encode()
        except UnicodeEncodeError:
            return False
    return float not in kinds or all(math.isfinite(one) for one in items if type(one) is float)


_ROWS: Final = (list, tuple)
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})


def _object(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for key, member in value.items():
        name = key if type(key) is str and key.isascii() else _key(key, path)
        if name in written:
            raise UnserialisableError(f"{path}: two keys are both written as {excerpt(name)}")
        # Most members are short text, for which no path is needed.
        is_text = type(member) is str and member.isascii()
        written[name] = member if is_text else plain(member, f"{path}.{name}", depth)
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
    return str.__str__(value)  # turns a StrEnum member into a str


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
