"""The page about the command line names every command, and its exit statuses as its help does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import click
import pytest

from gracekit.cli.main import cli
from gracekit.cli.reconcile import reconcile, status_of
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
    """No command is missing or too many; the numbers are those of its help."""
    page, known = on_page(), dict(commands(cli))

    assert page.keys() == known.keys()
    said = {name: numbers for name, one in known.items() if (numbers := in_help(one)) is not None}
    assert len(said) > 7
    assert {name: page[name] - OF_EVERY for name in said} == {
        name: numbers - OF_EVERY for name, numbers in said.items()
    }


REFUSED: Final = {"outcome": "moved_on", "reason": "the record took no write"}
ONE: Final = {"of_one": True}
DRY: Final = {"dry_run": True}


@pytest.mark.parametrize(
    ("report", "asked", "status"),
    [
        ({}, {}, 0),
        ({"counts": {"left": 2, "settled": 1}}, {}, 0),
        ({"counts": {"waiting": 1}}, {}, 3),
        ({"counts": {"stale": 1}}, {}, 3),
        ({"counts": {"left": 1}}, ONE, 3),
        ({"results": [REFUSED]}, ONE, 3),
        ({"results": [REFUSED]}, {}, 0),
        ({"interrupted": True}, {}, 3),
        ({"interrupted": True}, DRY, 3),
        ({"counts": {"waiting": 1}}, DRY, 0),
        ({"counts": {"failed": 1, "waiting": 1}}, {}, 1),
        ({"broken": {"share": "no answer"}, "interrupted": True}, {}, 1),
    ],
)
def test_a_pass_ends_with_the_status_that_its_help_names(
    report: dict[str, Any], asked: dict[str, bool], status: int
):
    """3 means that not everything is settled; which cases are that is said one by one."""
    whole = {"broken": {}, "interrupted": False, "results": [], **report}
    whole["counts"] = Counter(report.get("counts", {}))

    assert status_of(whole, **{"dry_run": False, "of_one": False, **asked}) == status
    words = " ".join((reconcile.help or "").split())
    for case in (
        "could not settle its resource yet, or lost its lease",
        "With --resource: that resource was left, or its record took no write",
        "A drain, a quiet or the end of the run has cut the pass short",
        "With --dry-run only the last one counts",
    ):
        assert case in words
