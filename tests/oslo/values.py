"""Values that are no plain JSON, by name, so that all four sides of the wire can send them."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import ipaddress
import json
import math
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple


class Point(NamedTuple):
    x: int
    y: int


class Size(enum.IntEnum):
    SMALL = 1


class Colour(enum.StrEnum):
    RED = "red"


class Text(str):
    """As translated messages are."""

    __slots__ = ()


_MORNING: Final = dt.datetime(2024, 5, 17, 9, 30, 1, 250_000)  # noqa: DTZ001 - naive, as most are
_EAST: Final = dt.timezone(dt.timedelta(hours=3))

ODD: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "tuple": (1, ("two", [3])),
        "named_tuple": Point(1, 2),
        "set": {"only"},
        "frozen_set": frozenset([7]),
        "ordered_dict": collections.OrderedDict([("b", 1), ("a", 2)]),
        "default_dict": collections.defaultdict(list, a=[1]),
        "mapping_proxy": MappingProxyType({"a": (1,)}),
        "int_keys": {1: "one", -2: {3: "three"}},
        "uuid": uuid.UUID("12345678-1234-5678-1234-567812345678"),
        "bytes": "grün".encode(),
        "int_enum": Size.SMALL,
        "str_enum": Colour.RED,
        "text_subclass": Text("text"),
        "datetime": _MORNING,
        "datetime_whole_second": _MORNING.replace(microsecond=0),
        "datetime_aware": _MORNING.replace(tzinfo=_EAST),
        "date": _MORNING.date(),
        "decimal": decimal.Decimal("1.50"),
        "ip_address": ipaddress.ip_address("192.0.2.1"),
        "deque": collections.deque([1, 2]),
        "range": range(3),
        "dict_values": {"a": 1}.values(),
        "exception": ValueError("odd"),
        "bool_keys": {True: "yes"},
        "none_key": {None: 1},
        "float_keys": {1.5: "x"},
    }
)

ABOVE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "deep": json.loads(40 * "[" + 40 * "]"),
        "many_keys": dict.fromkeys(map(str, range(10_001))),
        "large": "x" * (1 << 20),
        "surrogate": "\ud800",
        "nan": math.nan,
        "infinity": math.inf,
    }
)
"""JSON for oslo, and above the limits of gracekit."""

VALUES: Final[Mapping[str, Any]] = MappingProxyType({**ODD, **ABOVE})
