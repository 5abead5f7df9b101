"""Checks of a store in PostgreSQL: the server, the rights of its user, and what is inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import psycopg

from gracekit.config.settings import Settings
from gracekit.doctor import store_runs
from gracekit.doctor.finding import Finding, fail, ok, told, warn
from gracekit.errors import ConfigError, GracekitError
from gracekit.exits import ExitCode
from gracekit.store.location import StoreLocation
from gracekit.store.postgres.postgres_link import PostgresLink
from gracekit.store.postgres.postgres_migrate import version_of
from gracekit.store.postgres.postgres_server import FACTS, ServerFacts
from gracekit.store.postgres.sqlstates import start_error

CONNECTIONS: Final = 4
"""Of one run, with a command beside it."""
_MAY_CREATE: Final = "SELECT has_database_privilege(current_database(), 'CREATE')"


def check_server(location: StoreLocation) -> Iterator[Finding]:
    """Check that the server can be reached, and may keep a store."""
    place = location.postgres
    assert place is not None
    try:
        link = PostgresLink(place.libpq, place.schema, read_only=True)
    except psycopg.Error as error:
        refused = start_error(error, place.name)
        code = ExitCode.CONFIG if isinstance(refused, ConfigError) else ExitCode.DEPENDENCY
        yield from told("server", refused, code)
        return
    try:
        yield from _judge(ServerFacts.of(link.ask(FACTS)[0]))
        ((may_create,),) = link.ask(_MAY_CREATE)
        yield _schema(version_of(link), location, may_create=bool(may_create))
    except psycopg.Error as error:
        yield fail("server", f"it refuses: {error}", "see its log", ExitCode.DEPENDENCY)
    finally:
        link.close()


def _judge(facts: ServerFacts) -> Iterator[Finding]:
    if facts.refusal is not None:
        yield from told("server", facts.refusal)
    else:
        yield ok("server", f"PostgreSQL {facts.version}")
    if facts.standbys:
        yield ok("standbys", f"each commit waits for {facts.standbys}")
    else:
        yield ok("standbys", "no commit waits for one: a failover loses what was not copied yet")
    if facts.free < CONNECTIONS:
        yield warn(
            "connections",
            f"{facts.free} are free, and each run needs {CONNECTIONS}",
            "raise max_connections of the server, or end connections that nobody needs",
        )
    else:
        yield ok("connections", f"{facts.free} are free")


def _schema(version: int, location: StoreLocation, *, may_create: bool) -> Finding:
    known = location.schema
    if version > known:
        return fail(
            "schema",
            f"version {version}, and this gracekit knows up to {known}",
            "upgrade gracekit here, or use another schema",
        )
    if version == known:
        return ok("schema", f"version {version}")
    if not version and not may_create:
        return warn(
            "schema",
            "there is no store that this user may use, and it may not make one",
            "give what `gracekit store sql` prints to a user who may: if there is one, the lines "
            "that begin with GRANT",
        )
    return ok("schema", "no store yet" if not version else f"{version}: the next start migrates it")


def check_inside(
    settings: Settings, location: StoreLocation, found: store_runs.Runs
) -> Iterator[Finding]:
    """Check what the store knows of its tasks, once there is one of this version."""
    directory, reader = location.run_directory, location.reader()
    assert directory is not None
    assert reader is not None
    try:
        reader.open()
    except GracekitError:
        return  # `check_server` has said so
    try:
        yield from store_runs.check_epoch(reader, directory)
        yield store_runs.check_unfinished(reader, found, settings)
        yield store_runs.check_suspects(reader, found)
        yield store_runs.check_accounts(reader)
    finally:
        reader.close()
