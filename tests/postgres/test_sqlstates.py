"""What each class of SQLSTATE means for a commit, raised by a real server in a batch."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from gracekit.errors import (
    ConfigError,
    DependencyError,
    StoreBrokenError,
    StoreError,
    StoreLockedError,
    StoreUnreachableError,
)
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.postgres import postgres_engine
from gracekit.store.postgres.postgres_engine import PostgresEngine
from gracekit.store.state import StoreState
from tests.postgres.kit import KV, Site, until
from tests.store.engine_suite import put
from tests.store.postgres import Postgres

pytestmark = pytest.mark.server

AGAIN: Final = ("40001", "40P01", "57014", "55P03", "25P03", "53200")
BATCH: Final = ("22003", "22021", "23505", "54000", "0A000", "P0001")
SETUP: Final = ("42P01", "42703", "42501", "28000", "3D000", "3F000")
UNREACHABLE: Final = ("08006", "57P01", "57P02", "57P03", "53300", "25006")
BROKEN: Final = ("53100", "58030", "XX001")


def raising(state: str) -> Batch:
    """A batch that the server refuses with *state*, after it has inserted a row."""
    batch = put(9)
    batch.add(f"DO $do$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $do$")
    return batch


async def outcomes(engine: PostgresEngine, state: str) -> list[object]:
    """What becomes of a group with such a batch in the middle."""
    futures = [engine.submit(batch) for batch in (put(1), raising(state), put(2))]
    return list(await asyncio.gather(*futures, return_exceptions=True))


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres_engine, "PATIENCE_S", 0.0)


@pytest.mark.parametrize("state", [*BATCH, *SETUP])
async def test_what_a_batch_alone_does_wrong_fails_it_alone(site: Site, state: str):
    """The others of its group are committed, and the store can be used as before."""
    async with site.opened() as engine:
        one, wrong, two = await outcomes(engine, state)

        assert one == two == [[]]
        assert type(wrong) is StoreError
        assert state in str(wrong)
        assert site.keys() == {1, 2}
        assert engine.status.state is StoreState.REACHABLE


@pytest.mark.parametrize("state", AGAIN)
async def test_what_may_succeed_again_fails_nothing_for_good(site: Site, state: str):
    """Nothing was done, and the next try may succeed."""
    async with site.opened() as engine:
        await engine.commit(put(0))
        batch = raising(state)
        with pytest.raises(StoreLockedError, match=state):
            await engine.commit(batch)
        await engine.commit(put(3))

        assert site.keys() == {0, 3}
        assert engine.status.state is StoreState.REACHABLE


@pytest.mark.parametrize("state", UNREACHABLE)
async def test_a_server_that_cannot_be_used_for_now_is_looked_for(site: Site, state: str):
    """Nothing was done; the store is unreachable, and soon reachable again."""
    async with site.opened() as engine:
        with pytest.raises(StoreUnreachableError, match=state):
            await engine.commit(raising(state))
        assert site.keys() == set()
        await until(lambda: engine.status.state is StoreState.REACHABLE, "reachable")
        await engine.commit(put(3))

        assert site.keys() == {3}


@pytest.mark.parametrize("state", BROKEN)
async def test_a_server_that_cannot_write_is_the_end(site: Site, state: str):
    """As of a disk: whatever is tried later could be reported wrongly."""
    async with site.opened() as engine:
        with pytest.raises(StoreBrokenError, match=state):
            await engine.commit(raising(state))
        with pytest.raises(StoreBrokenError):
            await engine.commit(put(3))

        assert engine.status.state is StoreState.BROKEN
        assert site.keys() == set()


@pytest.mark.parametrize("value", ["a\0b", "half \ud800"])
async def test_a_text_that_the_server_cannot_keep_fails_its_batch_alone(site: Site, value: str):
    """A zero byte is refused by the server, half a character before it is sent."""
    async with site.opened() as engine:
        futures = [engine.submit(batch) for batch in (put(1), put(2, value), put(3))]
        one, wrong, three = await asyncio.gather(*futures, return_exceptions=True)

        assert one == three == [[]]
        assert type(wrong) is StoreError
        assert site.keys() == {1, 3}


@pytest.mark.parametrize(
    "value", [0, -1, 2**40, 2**63 - 1, 0.5, 1e300, float("inf"), "", "ä€", None]
)
async def test_values_come_back_as_they_went(site: Site, value: object):
    """With their types: tokens are above what a small integer holds."""
    async with site.opened() as engine:
        kind = {int: "BIGINT", float: "DOUBLE PRECISION"}.get(type(value), "TEXT")
        site.ask(f"CREATE TABLE kept (value {kind})")
        batch = Batch(Point.ACCEPT)
        batch.add("INSERT INTO kept VALUES (?)", value)  # type: ignore[arg-type]  # any of them
        for _ in range(3):  # the second time it is prepared
            await engine.commit(batch)

        found = await engine.query(
            "SELECT value FROM kept WHERE value IS NOT DISTINCT FROM ?", value
        )
        assert found == [(value,)] * 3
        assert type(found[0][0]) is type(value)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"user": "nobody_knows"}, ConfigError),
        ({"database": "nowhere"}, ConfigError),
        ({"port": 1}, DependencyError),
    ],
)
async def test_a_start_says_whether_a_person_must_act(
    postgres: Postgres, schema: str, change: dict[str, object], kind: type[Exception]
):
    """A wrong login or name is a wrong setting; a server that is away may come."""
    url = postgres.url(**change)  # type: ignore[arg-type]  # its keywords
    engine = PostgresEngine(url, schema, process=Process(), migrations=KV)
    with pytest.raises(kind, match=rf"postgresql://127.0.0.1:\d+/\w+\?schema={schema}"):
        await engine.start()
    await engine.stop()
