"""Every statement of the package can be prepared on SQLite and on PostgreSQL."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from typing import Final

import apsw
import pytest

from gracekit.store.files import open_memory
from gracekit.store.migrate import MIGRATIONS, load_migrations, migrate
from tests.store.postgres import Postgres, tables_of
from tests.test_architecture import PACKAGE

_VERB: Final = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM)\s")
_INLINE: Final = re.compile(r"\s*(SELECT .|INSERT INTO .|UPDATE \w+ SET |DELETE FROM .)", re.DOTALL)
# What may stand in the braces of a text that is completed when it is used.
_FILLED: Final = {
    "marks": "?, ?",
    "owners": "?, ?",
    "others": ", ?, ?",
    "where": "1 = 1",
}
# Where SQLite may be spoken: the engine; the queue that is a SQLite file; checks of such files.
_SPEAKS_SQLITE: Final = ("store/", "rpc/sqlite", "doctor/", "testing/")


def texts() -> dict[str, str]:
    """Each statement by module and name, as it is sent."""
    found = {}
    for path in sorted(PACKAGE.rglob("*_sql.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for constant, value in vars(importlib.import_module(name)).items():
            if constant[0].isupper() and isinstance(value, str) and _VERB.match(value):
                text = value.format(**_FILLED) if "{" in value else value
                found[f"{path.stem}.{constant}"] = text
    return found


@pytest.fixture
def database() -> Iterator[apsw.Connection]:
    """An empty store of SQLite."""
    made = open_memory()
    migrate(made, load_migrations(MIGRATIONS), path="memory")
    yield made
    made.close()


def numbered(text: str) -> str:
    """*text* with `$n` for `?n`, and for each `?` the next number."""
    count = 0

    def number(mark: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"${mark[1] or count}"

    return re.sub(r"\?(\d*)", number, text)


def test_there_are_texts():
    """
    The collection finds what it is to find: an empty one would pass all the others.
    """
    found = texts()

    assert len(found) > 100
    assert {"tasks_sql.ACCEPT", "claims_sql.CLAIM", "leases_sql.TAKE"} <= found.keys()


def test_no_text_mixes_both_ways_to_number_its_parameters():
    """
    `?` or `?n`, or nobody can say which parameter is meant.
    """
    mixed = [name for name, text in texts().items() if len(set(map(len, marks(text)))) > 1]

    assert mixed == []


def marks(text: str) -> list[str]:
    return ["n" if number else "" for number in re.findall(r"\?(\d*)", text)]


def test_every_text_can_be_prepared_on_sqlite(database):
    """
    Names and places of all columns and tables are right.
    """
    for name, text in texts().items():
        number = len(set(re.findall(r"\$\d+", numbered(text))))
        try:
            database.execute(f"EXPLAIN {text}", (None,) * number).fetchall()
        except apsw.Error as error:
            raise AssertionError(f"{name}: {error}\n{text}") from error


@pytest.mark.server
def test_every_text_can_be_prepared_on_postgresql(database):
    """
    The same words mean something to a second engine, with a type for each parameter.
    """
    found = texts()
    with Postgres().running() as server:
        assert server.execute(tables_of(database)) == {}
        prepared = [f"PREPARE p{n} AS {numbered(one)}" for n, one in enumerate(found.values())]
        errors = server.execute(prepared)

    names = list(found)
    assert [f"{names[number]}: {error}" for number, error in errors.items()] == []


def test_no_statement_stands_outside_of_the_modules_of_texts():
    """
    One that is put together elsewhere is prepared by no test.
    """
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(_SPEAKS_SQLITE) or name.endswith("_sql.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)) if _INLINE.match(text):
                    wrong.append(f"{name}:{node.lineno}: {text[:40]!r}")

    assert wrong == []


def test_sqlite_is_spoken_of_in_the_store_and_its_queue_alone():
    """
    Another engine is one more module there, and none of the others changes.
    """
    found = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path.relative_to(PACKAGE)).startswith(_SPEAKS_SQLITE)
        and re.search(r"^\s*(import apsw|from apsw)", path.read_text(), re.MULTILINE)
    ]

    assert found == []
