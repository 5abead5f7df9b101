"""A server that is killed, stopped, full or locked: what a run notices, and what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import psycopg
import pytest

from gracekit.errors import StoreLockedError, StoreUnreachableError
from gracekit.process import Point
from gracekit.store.batch import Batch
from gracekit.store.postgres import postgres_engine, postgres_link
from gracekit.store.postgres.postgres_reader import PostgresReader
from gracekit.store.state import StoreState
from tests.postgres.kit import BACKENDS, Site
from tests.store.engine_suite import Heard, keys, put
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def spare() -> Iterator[Postgres]:
    """A server to be maltreated."""
    with Postgres(max_connections="8", superuser_reserved_connections="1").running() as server:
        yield server


@pytest.fixture
def away(spare: Postgres, schema: str) -> Iterator[Site]:
    """A schema of it."""
    with Site(spare, schema) as site:
        yield site


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGQUIT, signal.SIGINT])
async def test_a_server_that_comes_back_has_what_was_committed(away: Site, how: signal.Signals):
    """Commits fail at once meanwhile, and nothing that was refused is done later."""
    async with away.opened() as engine:
        heard = Heard(engine)
        await engine.commit(put(1))
        if how is signal.SIGKILL:
            await asyncio.to_thread(away.server.kill)
        else:
            await asyncio.to_thread(away.server.stop, how)
        with pytest.raises(StoreUnreachableError):
            await engine.commit(put(2))
        with pytest.raises(StoreUnreachableError):
            await engine.query("SELECT 1")
        await asyncio.to_thread(away.server.start)
        await heard.wait(StoreState.REACHABLE)
        await engine.commit(put(3))

        assert heard.states == [StoreState.UNREACHABLE, StoreState.REACHABLE]
        assert await keys(engine) == [1, 3]


async def test_without_a_free_connection_the_store_is_unreachable_until_there_is_one(away: Site):
    """A connection that is lost then cannot be replaced."""
    async with away.opened() as engine:
        heard = Heard(engine)
        await engine.commit(put(1))
        with away.server.connect() as keeper:
            away.ask("CREATE ROLE guest LOGIN")
            taken = []
            url = away.server.url(user="guest")
            await asyncio.to_thread(away.proxy.refuse)
            await asyncio.to_thread(away.proxy.cut)
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    taken.append(psycopg.connect(url))
            engine._url = away.server.url(user="guest")
            with pytest.raises(StoreUnreachableError):
                await engine.commit(put(2))
            for connection in taken:
                connection.close()
            keeper.execute("SELECT 1")
        engine._url = away.server.url()
        await heard.wait(StoreState.REACHABLE)

        assert await keys(engine) == [1]


async def test_a_table_that_somebody_locks_holds_up_commits_and_breaks_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    """They are refused after their time as locked, and nobody's transaction is ended."""
    monkeypatch.setattr(postgres_engine, "PATIENCE_S", 1.0)
    monkeypatch.setattr(postgres_link, "LOCK_TIMEOUT_S", 1)
    async with site.opened() as engine:
        with site.server.connect() as other, other.transaction():
            other.execute(f'LOCK TABLE "{site.schema}".kv')
            with pytest.raises(StoreLockedError):
                await engine.commit(put(1))
            waits = engine.submit(put(2))
        await waits

        assert await keys(engine) == [2]
        assert engine.status.state is StoreState.REACHABLE


async def test_a_person_who_ends_our_connections_is_hardly_noticed(site: Site):
    """Both threads make new ones, and the commit that found its own ended is done again."""
    async with site.opened() as engine:
        heard = Heard(engine)
        await engine.commit(put(1))
        site.ask(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) AS ours")
        await engine.commit(put(2))
        site.ask(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) AS ours")

        assert await keys(engine) == [1, 2]
        assert heard.states == []


async def test_a_crash_of_the_server_loses_no_commit_that_this_run_knows(away: Site):
    """Not even one that need not be durable: the run lives, and goes on from what it committed."""
    async with away.opened() as engine:
        for key in range(20):
            batch = Batch(Point.TALLY, durable=False)
            batch.add("INSERT INTO kv VALUES (?, ?)", key, "seen")
            await engine.commit(batch)
        await asyncio.to_thread(away.server.kill)
        await asyncio.to_thread(away.server.start)

        assert await keys(engine) == list(range(20))


async def test_a_lost_connection_of_a_command_is_replaced(site: Site, postgres: Postgres):
    """A reader that stays open, as doctor's, goes on after a restart of the server."""
    async with site.opened():
        reader = PostgresReader(postgres.url(port=site.proxy.port), site.schema)
        reader.open()
        assert reader.read("SELECT count(*) FROM kv") == [(0,)]
        await asyncio.to_thread(site.proxy.cut)

        assert reader.read("SELECT key FROM kv") == []
        reader.close()
