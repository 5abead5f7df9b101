"""Reads the arguments that an operator replaces before a parked task runs again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gracekit.cli.call import arguments
from gracekit.cli.text import safe
from gracekit.errors import UnserialisableError
from gracekit.rpc.plain import plain


def read_set(words: tuple[str, ...]) -> Mapping[str, Any]:
    """The values of `--set name=value`, each JSON or text as `gracekit call` reads it.

    Raises:
        click.UsageError: a word is no `name=value`, or no message could carry it.
    """
    try:
        given: dict[str, Any] = plain(arguments(words, None, option="--set"), "--set")
    except UnserialisableError as error:
        raise click.UsageError(safe(error)) from None
    if _has_nul(given):
        raise click.UsageError("--set has a NUL character, which no store takes")
    return given


def _has_nul(value: object) -> bool:
    match value:
        case str():
            return "\0" in value
        case Mapping():
            return any(_has_nul(part) for pair in value.items() for part in pair)
        case list():
            return any(map(_has_nul, value))
    return False
