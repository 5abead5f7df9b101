"""Every statement of the package can be prepared on SQLite and on PostgreSQL."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Final

import apsw
import pytest

from gracekit.store.files import open_memory
from gracekit.store.migrate import MIGRATIONS, load_migrations, migrate
from gracekit.store.postgres.postgres_migrate import POSTGRES_MIGRATIONS, statements_of
from gracekit.store.postgres.postgres_texts import numbered
from tests.store.postgres import Postgres
from tests.test_architecture import PACKAGE

_VERB: Final = re.compile(r"\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM)\s")
_INLINE: Final = re.compile(r"\s*(SELECT .|INSERT INTO .|UPDATE \w+ SET |DELETE FROM .)", re.DOTALL)
# What may stand in the braces of a text that is completed when it is used.
_FILLED: Final = {
    "ids": "SELECT 1",
    "marks": "?, ?",
    "owners": "?, ?",
    "others": ", ?, ?",
    "where": "1 = 1",
}
# Where SQLite may be spoken: the engine; the queue that is a SQLite file; checks of such files.
_SPEAKS_SQLITE: Final = ("store/", "rpc/sqlite", "doctor/")
_HAS_STATEMENTS: Final = (*_SPEAKS_SQLITE, "testing/")  # the suite for engines has a table
_SQLITE: Final = re.compile("sqlite|apsw", re.IGNORECASE)
# What names it elsewhere, and why.
_NAMED: Final = {
    # The table of schemes, and the defaults of the two URLs.
    "config/urls.py": {
        "sqlite",
        "sqlite:///",
        "sqlite:///gracekit.db",
        "sqlite:///gracekit-store.db",
    },
    # Makes the transport of each scheme.
    "rpc/connect.py": {"gracekit.rpc.sqlite.sqlite_transport", "SqliteTransport"},
    # A played machine has the engine in memory.
    "testing/ports.py": {"gracekit.store.sqlite.sqlite_engine", "gracekit.store.sqlite.threads"},
}
# A scheme, as code writes it that decides by one.
_SCHEME: Final = re.compile(
    r"(sqlite|amqps?|rabbit|memory|postgresql):?|postgres:"
)  # `postgres` is an extra
# The table of them, and the client of brokers, which reads the rest of its URLs.
# The last one: a controller of the kernel is called `memory`.
_KNOWS_SCHEMES: Final = ("config/urls.py", "rpc/amqp/", "keeper.py")


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


def test_there_are_texts():
    """The collection finds what it is to find: an empty one would pass all the others."""
    found = texts()

    assert len(found) > 100
    assert {"tasks_sql.ACCEPT", "claims_sql.CLAIM", "leases_sql.TAKE"} <= found.keys()


def test_no_text_mixes_both_ways_to_number_its_parameters():
    """`?` or `?n`, or nobody can say which parameter is meant."""
    mixed = [name for name, text in texts().items() if len(set(map(len, marks(text)))) > 1]

    assert mixed == []


def marks(text: str) -> list[str]:
    return ["n" if number else "" for number in re.findall(r"\?(\d*)", text)]


def test_every_text_can_be_prepared_on_sqlite(database):
    """Names and places of all columns and tables are right."""
    for name, text in texts().items():
        number = len(set(re.findall(r"\$\d+", numbered(text))))
        try:
            database.execute(f"EXPLAIN {text}", (None,) * number).fetchall()
        except apsw.Error as error:
            raise AssertionError(f"{name}: {error}\n{text}") from error


@pytest.mark.server
def test_every_text_can_be_prepared_on_postgresql():
    """The same words mean something to a second engine, with a type for each parameter."""
    found = texts()
    with Postgres().running() as server:
        schema = load_migrations(POSTGRES_MIGRATIONS)
        assert server.execute(statements_of(schema)) == {}
        prepared = [f"PREPARE p{n} AS {numbered(one)}" for n, one in enumerate(found.values())]
        errors = server.execute(prepared)

    names = list(found)
    assert [f"{names[number]}: {error}" for number, error in errors.items()] == []


def test_no_statement_stands_outside_of_the_modules_of_texts():
    """One that is put together elsewhere is prepared by no test."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(_HAS_STATEMENTS) or name.endswith("_sql.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)) if _INLINE.match(text):
                    wrong.append(f"{name}:{node.lineno}: {text[:40]!r}")

    assert wrong == []


def test_sqlite_is_spoken_of_in_the_store_and_its_queue_alone():
    """Another engine is one more module there, and none of the others changes."""
    found = words_by_module(lambda word: _SQLITE.search(word) is not None)

    assert {
        name: words for name, words in found.items() if not name.startswith(_SPEAKS_SQLITE)
    } == _NAMED


def test_the_file_of_a_store_is_a_matter_of_the_store():
    """A store elsewhere has none; others ask its location for its name, its directory or a copy."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr == "path"
        and ast.unparse(node.value).endswith(("location", "StoreLocation(settings)"))
    }

    assert [name for name in users if not name.startswith(_SPEAKS_SQLITE)] == []


def test_code_does_not_decide_by_the_scheme_of_a_url():
    """It asks what a URL leads to, so that another scheme is one more line of their table."""
    found = words_by_module(lambda word: _SCHEME.fullmatch(word) is not None, texts_alone=True)

    assert [name for name in found if not name.startswith(_KNOWS_SCHEMES)] == []
    assert "config/urls.py" in found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import apsw", {"apsw"}),
        ("import apsw.ext as more", {"apsw.ext", "more"}),
        (
            "from gracekit.rpc.sqlite.sqlite_transport import QUEUES",
            {"gracekit.rpc.sqlite.sqlite_transport", "QUEUES"},
        ),
        ("def open_sqlite(path): ...", {"open_sqlite", "path"}),
        ("class SqliteThing: ...", {"SqliteThing"}),
        ("open(sqlite=True)", {"open", "sqlite"}),
        ("store.apsw_version", {"store", "apsw_version"}),
        ("url.startswith('sqlite:')", {"url", "startswith", "sqlite:"}),
        ("f'sqlite:///{path}'", {"sqlite:///", "path"}),
        ("def f():\n    'As SQLite does.'", {"f"}),
        ("x = 1  # as SQLite does", {"x"}),
    ],
)
def test_a_word_is_found_however_code_writes_it(code: str, found: set[str]):
    """Names and texts count; docstrings and comments are for readers."""
    assert {word for word, _ in words_of(ast.parse(code))} == found


def words_by_module(
    wanted: Callable[[str], bool], *, texts_alone: bool = False
) -> dict[str, set[str]]:
    """Words of the package's code that are wanted, by module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        words = {
            word
            for word, is_text in words_of(ast.parse(path.read_text()))
            if wanted(word) and (is_text or not texts_alone)
        }
        if words:
            found[str(path.relative_to(PACKAGE))] = words
    return found


def words_of(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each name and text of the code, and whether it is a text."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in docstrings:
                yield text, True
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name, False
            case ast.keyword(arg=str(name)):
                yield name, False
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, False
            case ast.ClassDef(name=name):
                yield name, False
            case ast.alias(name=name, asname=other):
                yield name, False
                if other is not None:
                    yield other, False
            case ast.ImportFrom(module=str(name)):
                yield name, False
