"""Statements and values as PostgreSQL takes them, and its values as rows have them.

Statements have `?` or `?n`, PostgreSQL takes `$n`. Each text is rewritten once. Values are sent
with the type that their column has in the schema, so that the server need not guess one: a number
that it takes for an `int4` would be too small for a token, and refuse a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from gracekit.store.batch import Row, Value

_KEPT: Final = 1024  # texts; those with a list of values are made when they are used

_PLACEHOLDER: Final = re.compile(r"\?(\d*)")
_NUMBERED: Final = re.compile(r"\$(\d+)")
_CHANGE: Final = re.compile(r"\s*((?:UPDATE|DELETE FROM)\s.*?\sWHERE\s)(.*)", re.DOTALL)
_TABLE: Final = re.compile(r"\s*INSERT INTO (\w+)")


@lru_cache(_KEPT)
def numbered(sql: str) -> str:
    """*sql* with `$n` for `?n`, and for each `?` the next number."""
    count = 0

    def number(mark: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"${mark[1] or count}"

    return _PLACEHOLDER.sub(number, sql)


@lru_cache(_KEPT)
def returning_id(sql: str) -> str:
    """An INSERT that returns the id of its row; each table into which ids are asked for has one."""
    return f"{numbered(sql)} RETURNING id"


@lru_cache(_KEPT)
def with_id_of(sql: str, insert: str) -> str:
    """*sql* with the id of the row of *insert* in the place of its first value.

    If *insert* found its row there, it used up an id that no row has: look at its count.
    """
    table = _TABLE.match(insert)
    assert table is not None, insert
    made = f"currval('{table[1]}_id_seq')"
    return _NUMBERED.sub(
        lambda mark: made if mark[1] == "1" else f"${int(mark[1]) - 1}", numbered(sql)
    )


@lru_cache(_KEPT)
def only_if(sql: str, asked: str) -> str | None:
    """*sql* as a change that is made only if the SELECT *asked* returns a row.

    The values of *asked* follow those of *sql*. None if the texts cannot be joined.
    """
    change = _CHANGE.fullmatch(numbered(sql))
    is_plain = sql.count("WHERE") == 1 and "RETURNING" not in sql
    if change is None or not is_plain or not asked.lstrip().startswith("SELECT"):
        return None
    number = max((int(mark) for mark in _NUMBERED.findall(numbered(sql))), default=0)
    asked = _NUMBERED.sub(lambda mark: f"${int(mark[1]) + number}", numbered(asked))
    return f"{change[1]}EXISTS ({asked}) AND ({change[2]})"


_INT8: Final = 20
_FLOAT8: Final = 701
_TEXT: Final = 25
_BYTEA: Final = 17
_UNTYPED: Final = 0
_AS_TEXT: Final = 0
_AS_BYTES: Final = 1  # a zero byte would end a text; so the server sees it, and refuses it


def encoded(value: Value) -> tuple[int, int, bytes | None]:
    """The type, the format and the bytes of *value*.

    Raises:
        ValueError: it is a text with half a character.
        TypeError: it is no value of a store.
    """
    match value:
        case None:
            return _UNTYPED, _AS_TEXT, None
        case str():
            return _TEXT, _AS_BYTES, value.encode()
        case int():
            return _INT8, _AS_TEXT, b"%d" % value
        case float():
            return _FLOAT8, _AS_TEXT, repr(value).encode()
        case bytes():
            return _BYTEA, _AS_BYTES, value
        case _:
            raise TypeError(f"{type(value).__name__} is no type of a store's values")


def _number(text: bytes) -> int | float:
    """A `numeric`, the type of a sum of integers."""
    return int(text) if text.isdigit() or text[1:].isdigit() else float(text)


_DECODERS: Final[Mapping[int, Callable[[bytes], Value]]] = {
    16: lambda text: int(text == b"t"),  # bool
    _BYTEA: lambda text: bytes.fromhex(text[2:].decode()),
    _INT8: int,
    21: int,  # int2
    23: int,  # int4
    700: float,  # float4
    _FLOAT8: float,
    1700: _number,
}


def rows_of(types: Sequence[int], values: Sequence[Sequence[bytes | None]]) -> list[Row]:
    """Rows of Python's values; *types* are those of the columns."""
    decoders = [_DECODERS.get(one, bytes.decode) for one in types]
    return [
        tuple(
            None if value is None else decode(value)
            for decode, value in zip(decoders, row, strict=True)
        )
        for row in values
    ]
