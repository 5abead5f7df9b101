"""The option `--api-version`: in which version `--json` shows tasks."""

from __future__ import annotations

from typing import Final

import click

from gracekit.listings.api_versions import API_VERSIONS, V1_0, V1_1

api_version_option: Final = click.option(
    "--api-version",
    type=click.Choice(API_VERSIONS),
    help="With --json: 1.0 shows a parked task as errored, 1.1 as pending.  [default: 1.0]",
)


def version_of(given: str | None, *, as_json: bool) -> str:
    """The version in which tasks are shown: text is for people, and has all states.

    Raises:
        UsageError: one was given for text.
    """
    if as_json:
        return given or V1_0
    if given is not None:
        raise click.UsageError("--api-version is for --json; the text always shows all states")
    return V1_1
