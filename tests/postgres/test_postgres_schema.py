"""The schema of PostgreSQL is SQLite's, and is made once, by whoever may."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psycopg
import pytest

from gracekit.errors import ConfigError, SchemaTooNewError
from gracekit.store.files import open_memory
from gracekit.store.migrate import MIGRATIONS, load_migrations, migrate
from gracekit.store.postgres.postgres_group import lock_of
from gracekit.store.postgres.postgres_link import PostgresLink
from gracekit.store.postgres.postgres_migrate import (
    POSTGRES_MIGRATIONS,
    migrate_store,
    sql_text,
    statements_of,
    version_of,
)
from tests.store.postgres import Postgres, tables_of

pytestmark = pytest.mark.server

OURS: Final = load_migrations(POSTGRES_MIGRATIONS)
COLUMNS: Final = """
SELECT table_name, column_name, data_type, is_nullable, column_default, identity_generation
FROM information_schema.columns WHERE table_schema = %s AND table_name <> 'meta'
ORDER BY table_name, ordinal_position"""
INDEXES: Final = """
SELECT tablename, indexname, regexp_replace(indexdef, ' ON [^.]*[.]', ' ON ') FROM pg_indexes
WHERE schemaname = %s AND tablename <> 'meta' ORDER BY tablename, indexname"""
OTHER: Final = """
SELECT relname, contype FROM pg_constraint
JOIN pg_namespace ON pg_namespace.oid = connamespace JOIN pg_class ON pg_class.oid = conrelid
WHERE nspname = %s AND contype NOT IN ('p', 'u') ORDER BY relname"""
COLLATED: Final = """
SELECT DISTINCT collation_name FROM information_schema.columns
WHERE table_schema = %s AND data_type = 'text'"""


def make(server: psycopg.Connection[Any], schema: str, statements: Iterable[str]) -> None:
    server.execute(f'CREATE SCHEMA "{schema}"')
    server.execute(f'SET search_path = "{schema}"')
    for statement in statements:
        server.execute(statement)


def test_the_schema_is_that_of_sqlite(postgres: Postgres, schema: str):
    """The same tables, columns, keys, indexes and defaults."""
    memory = open_memory()
    migrate(memory, load_migrations(MIGRATIONS), path="memory")
    theirs = f"{schema} of SQLite"
    with postgres.connect() as server:
        make(server, schema, statements_of(OURS))
        make(server, theirs, tables_of(memory))

        for look in (COLUMNS, INDEXES):
            found = server.execute(look, (schema,)).fetchall()
            assert found == server.execute(look, (theirs,)).fetchall()
            assert len(found) > 30


def test_text_is_compared_by_its_bytes_and_nothing_locks_other_rows(
    postgres: Postgres, schema: str
):
    """A collation is the same in all columns, and there are no foreign keys."""
    with postgres.connect() as server:
        make(server, schema, statements_of(OURS))

        assert server.execute(COLLATED, (schema,)).fetchall() == [("C",)]
        assert server.execute(OTHER, (schema,)).fetchall() == [("epoch", "c"), ("meta", "c")]


def migrated(postgres: Postgres, schema: str, texts: list[str], user: str = "test") -> int:
    """Migrate as a start does; returns the version."""
    link = PostgresLink(postgres.url(user=user), schema)
    try:
        migrate_store(link, texts, lock=lock_of(schema), schema=schema, where="the store")
        return version_of(link)
    finally:
        link.close()


def test_processes_that_start_at_once_migrate_once(postgres: Postgres, schema: str):
    """One does it, and the others find it done; each store has an id of its own."""
    with ThreadPoolExecutor(4) as threads:
        starts = [threads.submit(migrated, postgres, schema, OURS) for _ in range(4)]

    assert [start.result() for start in starts] == [1] * 4
    with postgres.connect() as server:
        assert len(server.execute(f'SELECT store_id FROM "{schema}".meta').fetchall()) == 1


def test_a_second_migration_is_added_to_the_first(postgres: Postgres, schema: str):
    """Only what is missing is done, and an older gracekit is refused then."""
    migrated(postgres, schema, OURS)
    newer = [*OURS, "ALTER TABLE task ADD colour TEXT; -- of the row"]

    assert migrated(postgres, schema, newer) == 2
    assert migrated(postgres, schema, newer) == 2
    with pytest.raises(SchemaTooNewError, match="schema version 2"):
        migrated(postgres, schema, OURS)


def test_a_migration_that_fails_leaves_nothing(postgres: Postgres, schema: str):
    """Not even the schema that it has made."""
    with pytest.raises(Exception, match="migration of the store to schema 2 failed"):
        migrated(postgres, schema, [*OURS, "ALTER TABLE nowhere ADD colour TEXT"])
    with postgres.connect() as server:
        found = server.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))

        assert found.fetchall() == []


def test_who_may_not_make_tables_is_sent_to_who_may(postgres: Postgres, schema: str):
    """The sentence names the command whose text another user runs; then the start succeeds."""
    with postgres.connect() as server:
        server.execute("CREATE ROLE guest LOGIN")
        with pytest.raises(ConfigError, match="gracekit store sql"):
            migrated(postgres, schema, OURS, "guest")
        server.execute(sql_text(postgres.url(user="guest"), schema).encode())

        assert migrated(postgres, schema, OURS, "guest") == 1

        server.execute("CREATE ROLE stranger LOGIN")
        with pytest.raises(ConfigError, match="lines that begin with GRANT"):
            migrated(postgres, schema, OURS, "stranger")
