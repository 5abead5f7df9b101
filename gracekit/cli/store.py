"""`gracekit store`: copy, retire and put back a store, print what makes one in PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from gracekit.cli.main import HintingGroup
from gracekit.cli.options import config_option, json_option, store_option
from gracekit.cli.records import StoreRecords
from gracekit.cli.task_orders import open_writing
from gracekit.cli.text import json_text
from gracekit.config.loading import load
from gracekit.config.settings import Settings
from gracekit.config.urls import absolute
from gracekit.errors import ConflictError, GracekitError
from gracekit.leases.epoch import add_restored_copy, add_retirement
from gracekit.process import Point
from gracekit.runs.run import end_all_beats
from gracekit.store.batch import Batch
from gracekit.store.location import StoreLocation


@click.group(cls=HintingGroup)
def store() -> None:
    """Copy, retire or put back a store, or print what makes its tables."""


@store.command()
@click.argument("file", type=click.Path(path_type=Path))
@store_option
@config_option
@json_option
def backup(file: Path, *, store_url: str | None, config: Path | None, as_json: bool) -> None:
    """Copy a store to FILE, while its services go on.

    It uses SQLite's own backup: the copy is one file, checked, with the store as
    it was at one moment. docs/backup.md says how to restore it.
    """
    settings = load({"store_url": store_url}, os.environ, config)
    with StoreRecords(settings) as records:
        source = records.location
    made = source.back_up(absolute(file), now=time.time())
    if as_json:
        facts = msgspec.structs.asdict(made)
        click.echo(json_text(facts | {"path": str(made.path), "store": source.name}))
    else:
        click.echo(
            f"{made.path}: {made.size} bytes, {made.tasks} requests, schema {made.schema}, "
            "whole; to restore it see docs/backup.md"
        )


@store.command()
@store_option
@config_option
@json_option
def restored(*, store_url: str | None, config: Path | None, as_json: bool) -> None:
    """Say that a backup of the database was put back.

    Fencing tokens then begin above all earlier ones, and the next start doubts
    what the copy says of accepted requests. Runs that still use the store end
    with exit code 70. A file needs no such word: docs/backup.md says why.
    """
    settings = load({"store_url": store_url}, os.environ, config)
    asyncio.run(_commit(settings, _put_back))
    told = "tokens begin above all earlier ones; start the services that have ended"
    click.echo(json_text({"done": told}) if as_json else told)


def _put_back(batch: Batch, now: float) -> None:
    add_restored_copy(batch, now)
    end_all_beats(batch)


@store.command()
@store_option
@config_option
@json_option
def retire(*, store_url: str | None, config: Path | None, as_json: bool) -> None:
    """Say that a store is put away, or moved to another place.

    Refused while a run may act or a lease is held. The next start on it, wherever
    it is then, raises the fencing tokens, as after a backup was put back.
    """
    settings = load({"store_url": store_url}, os.environ, config)
    try:
        asyncio.run(_commit(settings, add_retirement))
    except ConflictError as error:
        raise GracekitError(
            "a run may act on the store, or has died and nobody has taken its work over (see "
            "`gracekit hosts`), or a lease is held (see `gracekit lease list`): drain the "
            "services, after a start if a run has died"
        ) from error
    told = "no run may act and no lease is held; the next start raises all tokens"
    click.echo(json_text({"done": told}) if as_json else told)


async def _commit(settings: Settings, add: Callable[[Batch, float], None]) -> None:
    batch = Batch(Point.RETIRE)
    with StoreRecords(settings):  # there is a store
        async with open_writing(settings) as engine:
            add(batch, engine.wall())
            await engine.commit(batch)


@store.command("sql")
@store_option
@config_option
def show_sql(*, store_url: str | None, config: Path | None) -> None:
    """Print the SQL that makes a store in PostgreSQL.

    Give it to psql as a user who may create a schema, if the user of the service
    may not: it may use the tables then, and its start makes none.
    """
    settings = load({"store_url": store_url}, os.environ, config)
    click.echo(StoreLocation(settings).sql_text(), nl=False)
