"""The page about the command line names every command, and its exit statuses as its help does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import click

from gracekit.cli.main import cli
from tests.cli.kit import ROOT

PAGE: Final = ROOT / "docs" / "command-line.md"
OF_EVERY: Final = {0, 1, 2, 78}


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its words."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
            if not command.invoke_without_command:
                continue
        yield f"{before}{name}", command


def in_help(command: click.Command) -> set[int] | None:
    """The numbers in its help's sentence about exit statuses; None without such a sentence."""
    text = " ".join((command.help or "").split())
    _, found, sentence = text.partition("Exit status:")
    if not found:
        _, found, sentence = text.partition("Exit codes:")
    return set(map(int, re.findall(r"\b\d+\b", sentence))) if found else None


def on_page() -> dict[str, set[int]]:
    """Command to the statuses of its rows."""
    found: dict[str, set[int]] = {}
    name = ""
    _, _, table = PAGE.read_text().partition("The statuses that only some commands have:")
    for line in table.partition("\n## ")[0].splitlines():
        if not line.startswith("|") or line.startswith(("| command", "|---")):
            continue
        first, statuses, _ = (cell.strip() for cell in line.strip("|").split("|"))
        name = first.strip("`") or name
        found.setdefault(name, set()).update(map(int, re.findall(r"\d+", statuses)))
    return found


def test_every_command_has_its_exit_statuses_on_one_page():
    """
    No command is missing or too many; the numbers are those of its help.
    """
    page, known = on_page(), dict(commands(cli))

    assert page.keys() == known.keys()
    said = {name: numbers for name, one in known.items() if (numbers := in_help(one)) is not None}
    assert len(said) > 7
    assert {name: page[name] - OF_EVERY for name in said} == {
        name: numbers - OF_EVERY for name, numbers in said.items()
    }
