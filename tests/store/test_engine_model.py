"""Both engines against a dictionary: random batches in random groups."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gracekit.errors import ConflictError, StoreError
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.engine import Engine
from gracekit.store.sqlite.sqlite_engine import MemoryEngine, SqliteEngine

SCHEMA = """
CREATE TABLE kv (key INTEGER PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE total (what TEXT PRIMARY KEY, n INTEGER NOT NULL)"""
TOTAL = "INSERT INTO total VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"

KEYS = st.integers(0, 3)
VALUES = st.integers(0, 2)
STATEMENTS = st.one_of(
    st.tuples(st.just("insert"), KEYS, VALUES),
    st.tuples(st.just("insert-new"), KEYS, VALUES),
    st.tuples(st.just("bump"), KEYS, VALUES),
    st.tuples(st.just("swap"), KEYS, VALUES),
    st.tuples(st.just("delete"), KEYS, VALUES),
    st.tuples(st.just("ask"), KEYS, VALUES),
    st.tuples(st.just("ask-absent"), KEYS, VALUES),
)
GROUPS = st.lists(
    st.lists(st.lists(STATEMENTS, min_size=1, max_size=3), min_size=1, max_size=5), max_size=5
)


def to_batch(statements) -> Batch:
    batch = Batch(Point.CLAIM, durable=len(statements) > 1)
    for kind, key, value in statements:
        match kind:
            case "insert":
                batch.add("INSERT INTO kv VALUES (?, ?)", key, value, expect=1)
            case "insert-new":
                batch.insert("INSERT INTO kv VALUES (?, ?) ON CONFLICT DO NOTHING", key, value)
            case "bump":
                batch.add("UPDATE kv SET value = value + 1 WHERE key = ?", key)
            case "swap":
                batch.add(
                    "UPDATE kv SET value = 0 WHERE key = ? AND value = ?", key, value, expect=1
                )
            case "delete":
                batch.ask("DELETE FROM kv WHERE key = ? RETURNING value", key, expect=1)
            case "ask":
                batch.ask("SELECT value FROM kv WHERE key = ?", key, expect=1)
            case "ask-absent":
                batch.ask("SELECT value FROM kv WHERE key = ?", key, expect=0)
    batch.add_up(TOTAL, "passed", 1)
    return batch


def apply_to_model(model: dict[int, int], statements):  # noqa: C901 - a case for each kind
    """The outcome that the engines must have; *model* changes only if all went well."""
    state, rows = dict(model), []
    for index, (kind, key, value) in enumerate(statements):
        present = key in state
        match kind:
            case "insert" if present:
                return "refused"
            case "insert":
                state[key] = value
                rows.append([])
            case "insert-new" if not present:
                state[key] = value
                rows.append([(key,)])
            case "bump":
                if present:
                    state[key] += 1
                rows.append([])
            case "swap" if state.get(key) == value:
                state[key] = 0
                rows.append([])
            case "delete" if present:
                rows.append([(state.pop(key),)])
            case "ask" if present:
                rows.append([(state[key],)])
            case "ask-absent" if not present:
                rows.append([])
            case _:
                return ("conflict", index)
    model.clear()
    model.update(state)
    return rows


def seen(outcome):
    match outcome:
        case ConflictError():
            return ("conflict", outcome.statement)
        case StoreError():
            return "refused"
        case BaseException():
            raise outcome
        case _:
            return outcome


async def check(engine: Engine, groups) -> None:
    model: dict[int, int] = {}
    await engine.start()
    passed = 0
    for group in groups:
        expected = [apply_to_model(model, statements) for statements in group]
        outcomes = await asyncio.gather(
            *(engine.submit(to_batch(statements)) for statements in group),
            return_exceptions=True,
        )
        assert [seen(outcome) for outcome in outcomes] == expected
        assert dict(await engine.query("SELECT key, value FROM kv")) == model
        passed += sum(isinstance(outcome, list) for outcome in outcomes)
        assert await engine.query("SELECT coalesce(sum(n), 0) FROM total") == [(passed,)]
    await engine.stop()


@settings(max_examples=150, deadline=None)
@given(GROUPS)
def test_memory_engine_equals_the_model(groups):
    """Every outcome and every state in memory is the model's."""
    asyncio.run(check(MemoryEngine([SCHEMA], process=Process()), groups))


@settings(max_examples=40, deadline=None)
@given(GROUPS)
def test_sqlite_engine_equals_the_model(groups):
    """Every outcome and every state of the file is the model's, whatever shares a commit."""
    with tempfile.TemporaryDirectory() as place:
        engine = SqliteEngine(Path(place) / "store.db", [SCHEMA], process=Process())
        asyncio.run(check(engine, groups))
