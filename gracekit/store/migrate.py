"""Migrations: numbered SQL files, and the number that a database has reached.

`PRAGMA user_version` counts the migrations applied. The missing ones are applied
in one transaction, so that several processes may start at once. Runs of an older
gracekit go on beside a migration.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import apsw

from gracekit.errors import ConfigError, SchemaTooNewError, StoreError

MIGRATIONS: Final = "gracekit.store.sqlite.migrations"
"""The package with the store's schema; the sqlite transport has a separate schema."""

_PURPOSES: Final = (
    ("task", "a store", "of the service's store (GRACEKIT_STORE_URL)"),
    ("queue", "a file of queues", "of the service's transport (GRACEKIT_TRANSPORT_URL)"),
)
"""What the files of gracekit are for: a table that each has, its name, and which URL names it."""

_NAME: Final = re.compile(r"(\d+)\D.*\.sql")


def load_migrations(package: str) -> list[str]:
    """The SQL texts of a package, sorted by the number that each file's name begins with.

    Args:
        package: Dotted name, for example `"gracekit.store.sqlite.migrations"`.

    Raises:
        ConfigError: the numbers are not 1, 2, 3, … without a gap.
    """
    # Not by `importlib.resources`, which loads zipfile, tempfile and two compressions for this.
    texts = {
        int(match[1]): file.read_text(encoding="utf-8")
        for directory in importlib.import_module(package).__path__
        for file in Path(directory).iterdir()
        if (match := _NAME.fullmatch(file.name))
    }
    if not texts or sorted(texts) != list(range(1, len(texts) + 1)):
        raise ConfigError(
            f"{package} holds the migrations {sorted(texts)}; they must be numbered 1, 2, 3, … "
            f"without a gap: install gracekit again"
        )
    return [texts[number] for number in sorted(texts)]


def migrate(
    connection: apsw.Connection,
    migrations: Sequence[str],
    *,
    path: Path | str,
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Bring a database to the newest schema, or leave it exactly as it was.

    Args:
        connection: With which it is done, in one transaction.
        migrations: SQL texts in order.
        path: Of its file, for messages.
        before_commit: What this raises undoes the migration.

    Raises:
        ConfigError: it is a database of gracekit for another purpose.
        SchemaTooNewError: a newer gracekit has migrated it.
        StoreError: a migration failed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        _apply(connection, migrations, path)
        before_commit()
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(apsw.Error):
            connection.execute("ROLLBACK")
        raise


def _apply(connection: apsw.Connection, migrations: Sequence[str], path: Path | str) -> None:
    version = connection.execute("PRAGMA user_version").get
    _check_purpose(connection, migrations[0], path)
    refuse_newer(version, len(migrations), path)
    for number, text in enumerate(migrations[version:], start=version + 1):
        try:
            connection.execute(text).fetchall()  # a row would stop it there
        except apsw.SQLError as error:
            raise StoreError(f"migration {number} of {path} failed: {error}") from error
    connection.execute(f"PRAGMA user_version={len(migrations)}")


def refuse_newer(version: int, known: int, where: Path | str) -> None:
    """Refuse a store that a newer gracekit has migrated.

    Raises:
        SchemaTooNewError: it has.
    """
    if version > known:
        raise SchemaTooNewError(
            f"{where} has schema version {version} and this gracekit knows up to {known}; upgrade "
            "this process or use another store (to stay with this version: docs/releases.md, Go "
            "back)"
        )


def need_version(version: int, known: int, where: Path | str) -> None:
    """Refuse to read a store of another schema version than *known*.

    Raises:
        ConfigError: it has another one.
    """
    refuse_newer(version, known, where)
    if version < known:
        raise ConfigError(
            f"{where} has schema version {version} and this gracekit reads {known}: use the "
            "gracekit that wrote it, also for a backup to go back to (a service that still runs "
            "stops by SIGTERM); the first start of the service with this gracekit migrates the "
            "store"
        )


def _check_purpose(connection: apsw.Connection, first: str, path: Path | str) -> None:
    """Refuse a store where queues are wanted, and the reverse: their versions say nothing then."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    for wanted, wanted_name, url in _PURPOSES:
        for present, present_name, _ in _PURPOSES:
            is_wanted = f"CREATE TABLE {wanted} " in first
            if is_wanted and present in tables and wanted not in tables:
                raise ConfigError(
                    f"{path} is {present_name} of gracekit, and {wanted_name} is needed here: "
                    f"give the URL {url}"
                )
