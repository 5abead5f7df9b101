"""The schema of a store on PostgreSQL: how far it is, and how it gets to the newest one.

The numbered texts are applied in one transaction, under the lock of the store, so that one process
migrates and the others find it done. The table `meta` has the number of the last one.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from gracekit.errors import ConfigError, StoreError
from gracekit.store.migrate import load_migrations, refuse_newer
from gracekit.store.postgres.postgres_group import begin
from gracekit.store.postgres.postgres_link import PostgresLink
from gracekit.store.postgres.sqlstates import text_of

POSTGRES_MIGRATIONS: Final = "gracekit.store.postgres.migrations"
"""The package with the schema."""

_NO_RIGHT: Final = {"42501", "3F000"}  # without a right to use it, a schema counts as missing
_COMMENT: Final = re.compile(r"\s*--[^\n]*")
_HAS_TABLE: Final = "SELECT to_regclass('meta') IS NOT NULL"
_HAS_SCHEMA: Final = "SELECT count(*) FROM pg_namespace WHERE nspname = ?"
_VERSION: Final = "SELECT schema FROM meta"
_SET_VERSION: Final = "UPDATE meta SET schema"


def version_of(link: PostgresLink) -> int:
    """The number of the last migration; 0 if there is no store in the schema."""
    ((exists,),) = link.ask(_HAS_TABLE)
    if not exists:
        return 0
    ((version,),) = link.ask(_VERSION) or [(0,)]
    assert isinstance(version, int)
    return version


def statements_of(migrations: Sequence[str], version: int = 0) -> Iterator[str]:
    """What brings a store from *version* to the newest schema, one statement at a time."""
    for text in migrations[version:]:
        yield from (one.strip() for one in _COMMENT.sub("", text).split(";") if one.strip())
    yield f"{_SET_VERSION} = {len(migrations)}"


def sql_text(url: str, schema: str) -> str:
    """The script that makes an empty store which the user of *url* may use."""
    user = conninfo_to_dict(url).get("user") or getpass.getuser()
    lines = (
        "BEGIN",
        f'CREATE SCHEMA IF NOT EXISTS "{schema}"',
        f'SET LOCAL search_path = "{schema}"',
        *statements_of(load_migrations(POSTGRES_MIGRATIONS)),
        f'GRANT USAGE ON SCHEMA "{schema}" TO "{user}"',
        f'GRANT ALL ON ALL TABLES IN SCHEMA "{schema}" TO "{user}"',
        f'GRANT ALL ON ALL SEQUENCES IN SCHEMA "{schema}" TO "{user}"',
        "COMMIT",
    )
    return "".join(f"{line};\n" for line in lines)


def migrate_store(
    link: PostgresLink, migrations: Sequence[str], *, lock: int, schema: str, where: str
) -> None:
    """Bring the store to the newest schema, or leave it as it was.

    Raises:
        ConfigError: the role may not do it.
        SchemaTooNewError: a newer gracekit has migrated it.
        StoreError: a migration failed.
        psycopg.Error: the lock was not granted, or the connection was lost.
    """
    begin(link, lock)
    link.read()
    version = version_of(link)
    try:
        refuse_newer(version, len(migrations), where)
        if version < len(migrations):
            ((has_schema,),) = link.ask(_HAS_SCHEMA, schema)
            link.clear()
            if not has_schema:
                link.send(f'CREATE SCHEMA "{schema}"')
            for statement in statements_of(migrations, version):
                link.send(statement)
            link.send("COMMIT")
            link.read()
    except psycopg.Error as error:
        if link.is_lost:
            raise
        raise _failed(error, len(migrations), where) from error
    finally:
        if not link.is_lost:
            link.roll_back()  # behind COMMIT a warning and nothing else


def _failed(error: psycopg.Error, version: int, where: str) -> ConfigError | StoreError:
    if error.sqlstate in _NO_RIGHT:
        return ConfigError(
            f"this user may not make or use the tables of {where}: {text_of(error)}; give what "
            "`gracekit store sql` prints to a user who may: if there are tables, its lines that "
            "begin with GRANT"
        )
    return StoreError(f"the migration of {where} to schema {version} failed: {text_of(error)}")
