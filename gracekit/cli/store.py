"""`gracekit store`: copy the file of a store, or print the text that makes one in PostgreSQL."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec

from gracekit.cli.options import HintingGroup, config_option, json_option, store_option
from gracekit.cli.records import StoreRecords
from gracekit.cli.text import json_text
from gracekit.config.loading import load
from gracekit.config.urls import absolute
from gracekit.store.location import StoreLocation


@click.group(cls=HintingGroup)
def store() -> None:
    """Copy a store, or print what makes its tables."""


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
