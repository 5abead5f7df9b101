"""Exceptions with more than a message: what they take, what they refuse, and copies of them."""

from __future__ import annotations

import copy
import pickle

import pytest

from gracekit import NoCapacity, Parked
from gracekit.errors import (
    MOST_REQUESTED,
    ConfigError,
    GracekitError,
    InvalidArgumentsError,
    RemoteError,
    StoreError,
)

CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


class Flavour(dict[str, int]):
    """A mapping of an application's."""


def nested(levels: int) -> object:
    """A list inside a list, *levels* deep."""
    value: list[object] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    "made",
    [GracekitError, ConfigError, StoreError, InvalidArgumentsError, RemoteError],
)
def test_an_error_that_quotes_half_a_character_can_be_printed(made):
    """It is escaped in the text, and unchanged in `args`. Otherwise printing the error would raise
    another one, which hides it.
    """
    error = made("no method 'caf\u00e9' or '\ud800'")

    assert str(error).encode() == b"no method 'caf\xc3\xa9' or '\\ud800'"
    assert error.args == ("no method 'caf\u00e9' or '\ud800'",)


def test_what_is_missing_is_kept_as_plain_data():
    """As a copy: what the handler does with its own later changes nothing."""
    disks = [{"gb": 10}]
    error = NoCapacity("no room", requested=Flavour(memory_mb=8192, disks=disks, pair=(1, 2)))
    disks.clear()

    assert str(error) == "no room"
    assert error.requested == {"memory_mb": 8192, "disks": [{"gb": 10}], "pair": [1, 2]}
    assert type(error.requested) is dict


@pytest.mark.parametrize("arguments", [(), ("no room",)])
def test_nothing_need_be_said_of_what_is_missing(arguments):
    """A client rebuilds it from its message alone."""
    assert NoCapacity(*arguments).requested == {}


@pytest.mark.parametrize(
    "error",
    [NoCapacity("no room", requested={"memory_mb": 8192}), NoCapacity(), Parked("t1", 1e9, 2)],
)
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_a_copy_says_the_same(error, copied):
    """Also one that went through a pool of processes."""
    other = copied(error)

    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize(
    ("requested", "why"),
    [
        ([], "is no mapping; write requested="),
        ("memory", "is no mapping"),
        ({7: 1}, "the key 7, which is no text"),
        ({"a": float("nan")}, "at 'a' what is no plain data: .*; use None"),
        ({"a": float("inf")}, "at 'a' what is no plain data"),
        ({"a": {1, 2}}, "at 'a' what is no plain data: .* set "),
        ({"a": object()}, "at 'a' what is no plain data: .* object "),
        ({"a": b"b"}, "at 'a' what is no plain data: .* bytes "),
        ({"a": {"b": {3: 4}}}, "at 'a' .* a mapping with a key that is no text"),
        ({"a": "\ud800"}, "at 'a' what is no plain data: .* surrogates not allowed"),
        ({"\ud800": 1}, "what is no plain data: .* surrogates not allowed"),
        ({"a": CIRCLE}, "at 'a' .* more than 16 levels, or a circle"),
        ({"a": nested(16)}, "at 'a' .* more than 16 levels"),
    ],
)
def test_what_cannot_be_kept_is_refused_where_it_is_raised(requested, why):
    """In the handler, and not when its task is parked; the error names the key."""
    with pytest.raises(InvalidArgumentsError, match=why):
        NoCapacity("no room", requested=requested)


def test_the_limit_counts_bytes_of_compact_json():
    """Of UTF-8, and without spaces; 15 levels below the mapping are allowed."""
    most = (MOST_REQUESTED - len('{"a":""}')) // len("ü".encode())

    assert NoCapacity(requested={"a": "ü" * most}).requested == {"a": "ü" * most}
    with pytest.raises(InvalidArgumentsError, match=r"has 4098 bytes as JSON, and at most 4096"):
        NoCapacity(requested={"a": "ü" * (most + 1)})
    assert NoCapacity(requested={"a": nested(15)}).requested == {"a": nested(15)}


def test_a_requested_that_is_no_mapping_is_refused_however_deep_it_is():
    """The text shows its beginning, and does not fall into it."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    with pytest.raises(InvalidArgumentsError, match=r"NoCapacity\(requested=\[.*is no mapping"):
        NoCapacity(requested=deep)  # type: ignore[arg-type]


def test_a_parked_says_when_and_under_which_id():
    """In a sentence with UTC; the values are its arguments and attributes."""
    error = Parked("t1", 1_795_578_871.5)

    assert str(error).startswith(
        "task t1 waits for capacity until 2026-11-25 03:54:31 UTC (version 1): until then a "
        "resolver or an operator may let it run or give it up"
    )
    assert error.args == ("t1", 1_795_578_871.5, 1)
    assert (error.task_id, error.deadline, error.version) == error.args


@pytest.mark.parametrize("deadline", [0, 253_402_300_799])
def test_any_date_can_be_said(deadline):
    """From 1970 to the year 9999; a whole number becomes one with a point."""
    assert "UTC" in str(Parked("t1", deadline))
    assert type(Parked("t1", deadline).deadline) is float


def test_a_key_that_is_no_text_is_shown_as_it_is():
    """1 and not '1', which would be right."""
    with pytest.raises(InvalidArgumentsError, match="has the key 1, which is no text"):
        NoCapacity("no room", requested={1: 1})
