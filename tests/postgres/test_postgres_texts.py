"""Statements of gracekit as PostgreSQL takes them, and how many round trips they need."""

from __future__ import annotations

import pytest

from gracekit.errors import ConflictError
from gracekit.journal.tasks_sql import REPLIES, REPLIES_DUE
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.store.postgres.postgres_link import PostgresLink
from gracekit.store.postgres.postgres_texts import encoded, numbered, only_if, rows_of, with_id_of
from tests.postgres.kit import Site
from tests.store.engine_suite import keys, put, swap


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT ?, ? WHERE a = ?", "SELECT $1, $2 WHERE a = $3"),
        ("SELECT ?2, ?1 WHERE ?1 = ?11", "SELECT $2, $1 WHERE $1 = $11"),
    ],
)
def test_each_value_has_its_number(sql: str, expected: str):
    """`?` in order, `?n` by its own."""
    assert numbered(sql) == expected


def test_the_id_of_an_inserted_row_takes_the_place_of_the_first_value():
    """The others move up by one."""
    text = with_id_of("INSERT INTO content VALUES (?, ?, ?)", "INSERT INTO task (id) VALUES (?)")

    assert text == "INSERT INTO content VALUES (currval('task_id_seq'), $1, $2)"


def test_what_was_asked_becomes_a_condition():
    """So a task without a reply costs no round trip; its values follow those of the change."""
    text = only_if("UPDATE a SET b = ? WHERE c = ? OR d = 1", "SELECT 1 FROM e WHERE f = ?")

    assert text == (
        "UPDATE a SET b = $1 WHERE EXISTS (SELECT 1 FROM e WHERE f = $3) AND (c = $2 OR d = 1)"
    )
    assert only_if(REPLIES_DUE, REPLIES) is not None


@pytest.mark.parametrize(
    ("sql", "asked"),
    [
        ("INSERT INTO a VALUES (?)", "SELECT 1"),
        ("UPDATE a SET b = 1 WHERE c = 2 RETURNING id", "SELECT 1"),
        ("UPDATE a SET b = 1 WHERE c IN (SELECT d FROM e WHERE f = 1)", "SELECT 1"),
        ("UPDATE a SET b = 1 WHERE c = 2", "UPDATE a SET b = 1 RETURNING id"),
    ],
)
def test_what_cannot_be_joined_is_asked_in_a_round_trip_of_its_own(sql: str, asked: str):
    """A second WHERE may belong to anything, and a change must not be made twice."""
    assert only_if(sql, asked) is None


def test_values_of_no_known_type_are_refused():
    """Before anything is sent."""
    with pytest.raises(TypeError, match="complex"):
        encoded(1j)  # type: ignore[arg-type]  # the mistake


def test_results_have_the_types_that_sqlite_gives():
    """Truth is an integer, and a sum of integers one, too."""
    columns = (16, 16, 17, 20, 701, 1700, 1700, 25, 25)
    row = (b"t", b"f", b"\\x00ff", b"7", b"0.5", b"-12", b"1.5", b"x", None)

    assert rows_of(columns, [row]) == [(1, 0, b"\x00\xff", 7, 0.5, -12, 1.5, "x", None)]


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each round trip."""
    made: list[int] = []
    read = PostgresLink.read

    def counted(self: PostgresLink, **options: float) -> None:
        made.append(1)
        read(self, **options)

    monkeypatch.setattr(PostgresLink, "read", counted)
    return made


@pytest.mark.server
async def test_a_group_is_two_round_trips(site: Site, trips: list[int]):
    """Lock, guard and statements, then COMMIT; also with a condition that was asked before."""
    async with site.opened() as engine:
        engine.guard("SELECT 1")
        await engine.commit(put(1, "a"))
        batch = put(2, "b")
        asked = batch.ask("SELECT 1 FROM kv WHERE key = ?", 1)
        done = batch.add("UPDATE kv SET value = ? WHERE key = ?", "c", 1, expect=1, after=asked)
        asked = batch.ask("SELECT 1 FROM kv WHERE key = ?", 99)
        left = batch.add("UPDATE kv SET value = ? WHERE key = ?", "d", 2, expect=1, after=asked)
        trips.clear()
        rows = await engine.commit(batch)

        assert len(trips) == 2
        assert (rows[done], rows[left]) == ([], [])
        assert site.ask("SELECT value FROM kv ORDER BY key") == [("c",), ("b",)]


@pytest.mark.server
async def test_a_batch_that_misses_costs_a_round_trip_for_each_batch(site: Site, trips: list[int]):
    """The group, its end, one for each batch, the sums, and COMMIT."""
    async with site.opened() as engine:
        await engine.commit(put(0))
        writer = engine._open_writer()
        trips.clear()
        outcomes = writer.run([put(1), swap(0, "no", "x"), put(2)])
        writer.close()

        assert [type(one) for one in outcomes] == [list, ConflictError, list]
        assert len(trips) == 2 + 3 + 2
        assert await keys(engine) == [0, 1, 2]


@pytest.mark.server
async def test_a_duplicate_uses_up_an_id_and_gives_it_to_nobody(site: Site):
    """What belongs to the row would get that id: counts are looked at first."""
    async with site.opened() as engine:
        for value in ("first", "again"):
            batch = Batch(Point.ACCEPT)
            sql = "INSERT INTO kv (key, value) VALUES (?, ?) ON CONFLICT DO NOTHING"
            row = batch.insert(sql, 7, value)
            batch.add("INSERT INTO kv (key, value) VALUES (1000 + ?, 'of')", of=row)
            if value == "first":
                await engine.commit(batch)
        with pytest.raises(ConflictError) as caught:
            await engine.commit(batch)

        assert caught.value.statement == 0
        assert len(await keys(engine)) == 2


@pytest.mark.server
async def test_what_the_last_holder_of_the_lock_has_committed_is_seen(site: Site):
    """Whatever a role's default is: under repeatable read the snapshot would be older."""
    with site.server.connect() as owner:
        owner.execute("CREATE ROLE strict LOGIN SUPERUSER")
        owner.execute("ALTER ROLE strict SET default_transaction_isolation = 'repeatable read'")
        engine = site.make()
        engine._url = site.server.url(user="strict")
        await engine.start()
        await engine.commit(put(1, "a"))
        batch = Batch(Point.ACCEPT)
        batch.ask("SELECT value FROM kv")
        with owner.transaction():
            owner.execute(f"SELECT pg_advisory_xact_lock({site.lock})")
            waits = engine.submit(batch)
            await site.until("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            owner.execute(f"UPDATE {site.schema}.kv SET value = 'b'")

        assert await waits == [[("b",)]]
        await engine.stop()
