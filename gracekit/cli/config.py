"""`gracekit config show`: the settings that a run would use, and where each comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from gracekit.cli.main import HintingGroup
from gracekit.cli.options import (
    app_dir_option,
    config_option,
    factory_option,
    json_option,
    setting_flags,
)
from gracekit.cli.text import json_text, table
from gracekit.config.loading import load, setting_named
from gracekit.config.settings import variable_name

_HEADERS: Final = ("SETTING", "VALUE", "ORIGIN", "VARIABLE")


@click.group(cls=HintingGroup)
def config() -> None:
    """Show settings, and where each comes from."""


@config.command()
@click.argument("names", metavar="[SETTING]...", nargs=-1)
@click.option(
    "--app",
    metavar="MODULE[:ATTR]",
    envvar="GRACEKIT_APP",
    help="The service, for its own defaults.  [env: GRACEKIT_APP]",
)
@factory_option
@app_dir_option
@config_option
@json_option
@setting_flags
def show(
    names: tuple[str, ...],
    *,
    app: str | None,
    factory: bool,
    app_dir: Path,
    config: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Show settings with their values and origins.

    Without SETTING it shows all. ORIGIN is where the value comes from: an option,
    a variable, a file with its line, the service (its own defaults, with --app),
    or the default. Give it the options and the environment of `gracekit run` to
    see what that run would use. Secrets are not shown.
    """
    wanted = {setting_named(name) for name in names}
    defaults: Mapping[str, object] = {}
    if app:
        from gracekit.cli.app import load_service  # noqa: PLC0415 - it takes 0.2 s to load

        defaults = load_service(app, factory=factory, app_dir=app_dir).defaults
    settings = load(flags, os.environ, config, defaults=defaults)
    rows = [row for row in settings.describe() if not wanted or row[0] in wanted]
    if as_json:
        entries = [
            {"setting": n, "value": v, "origin": o, "variable": variable_name(n)}
            for n, v, o in rows
        ]
        click.echo(json_text({"settings": entries}))
    else:
        click.echo(table(_HEADERS, [(n, v, o, variable_name(n)) for n, v, o in rows]))
