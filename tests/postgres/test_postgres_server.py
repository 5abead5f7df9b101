"""Servers on which no store may be kept, and servers that take another one's place."""

from __future__ import annotations

import asyncio

import pytest

from gracekit.errors import ConfigError, StoreUnreachableError
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.older import EPOCH_BITS
from gracekit.store.postgres.postgres_engine import PostgresEngine
from gracekit.store.postgres.postgres_server import ServerFacts
from gracekit.store.state import StoreState
from tests.postgres.kit import until
from tests.store.engine_suite import Heard
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]

EPOCH = "SELECT epoch, floor, copied_at IS NOT NULL FROM epoch"
COPIED = "SELECT 1 WHERE to_regclass(%s) IS NOT NULL"
SOUND = ServerFacts(15, "15.4", "UTF8", "", 90)


def store_on(url: str, schema: str) -> PostgresEngine:
    return PostgresEngine(url, schema, process=Process())


async def test_each_commit_waits_for_the_disk_whatever_the_server_is_set_to(
    postgres: Postgres, schema: str
):
    """Also if it is set so while the run lives; other settings are left as they are."""
    ask = Batch(Point.TALLY)
    ask.ask("SELECT current_setting('synchronous_commit')")
    with postgres.connect() as server:
        server.execute(f"CREATE ROLE {schema} LOGIN SUPERUSER")
        seen = []
        for setting in ("off", "remote_apply"):
            server.execute(f"ALTER ROLE {schema} SET synchronous_commit = {setting}")
            engine = store_on(postgres.url(user=schema), schema)
            await engine.start()
            seen.append((await engine.commit(ask))[0])
            server.execute("ALTER SYSTEM SET synchronous_commit = off")
            server.execute("SELECT pg_reload_conf()")
            seen.append((await engine.commit(ask))[0])
            server.execute("ALTER SYSTEM RESET synchronous_commit")
            server.execute("SELECT pg_reload_conf()")
            await engine.stop()

    assert seen == [[("on",)], [("on",)], [("remote_apply",)], [("remote_apply",)]]


async def test_settings_of_a_role_change_neither_values_nor_what_counts_as_a_failure(
    postgres: Postgres, schema: str
):
    """A time comes back as it was written, bytes too, and debug output is no warning."""
    with postgres.connect() as server:
        server.execute(f"CREATE ROLE {schema} LOGIN SUPERUSER")
        for setting in ("extra_float_digits = -15", "bytea_output = escape"):
            server.execute(f"ALTER ROLE {schema} SET {setting}")
        server.execute(f"ALTER ROLE {schema} SET client_min_messages = debug5")
    engine = store_on(postgres.url(user=schema), schema)
    await engine.start()
    batch = Batch(Point.TALLY)
    batch.add("UPDATE epoch SET copied_at = ?", 1764370000.123456)
    await engine.commit(batch)

    assert await engine.query("SELECT copied_at FROM epoch") == [(1764370000.123456,)]
    assert await engine.query("SELECT CAST(? AS BYTEA)", b"\x00a\xff") == [(b"\x00a\xff",)]
    await engine.stop()


async def test_a_database_of_another_encoding_is_refused(postgres: Postgres, schema: str):
    """Texts would come back as other texts, or not at all."""
    with postgres.connect() as server:
        server.execute(f"CREATE DATABASE {schema} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")

    with pytest.raises(ConfigError, match="the encoding of the database is LATIN1"):
        await store_on(postgres.url(database=schema), schema).start()


def test_a_server_that_nobody_has_tested_is_refused():
    """Its version is named, and the oldest that is tested."""
    old = ServerFacts(14, "14.9", "UTF8", "", 90)

    assert SOUND.refusal is None
    assert "PostgreSQL 14.9 is older than 15" in str(old.refusal)


async def test_the_same_server_after_a_restart_is_no_other_one(postgres: Postgres, schema: str):
    """No epoch begins."""
    for _ in range(2):
        engine = store_on(postgres.url(), schema)
        await engine.start()
        assert await engine.query(EPOCH) == [(0, 0, 0)]
        await engine.stop()


async def test_a_standby_that_takes_over_begins_an_epoch_while_runs_live(schema: str):
    """Tokens that the lost primary granted in its last moment are not granted again."""
    with Postgres().running() as primary, Postgres().copy_of(primary) as standby:
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        engine = store_on(f"postgresql://test@{hosts}/postgres?sslmode=disable", schema)
        await engine.start()
        heard = Heard(engine)
        with standby.connect() as copy:
            await until(lambda: copy.execute(COPIED, (f"{schema}.meta",)).fetchone(), "a copy")
            await asyncio.to_thread(primary.kill)
            with pytest.raises(StoreUnreachableError):
                await engine.commit(Batch(Point.TALLY))
            copy.execute("SELECT pg_promote()")
        await heard.wait(StoreState.REACHABLE)
        seen = await engine.query(EPOCH)
        await engine.stop()

    assert seen == [(1, 1 << EPOCH_BITS, 1)]
