"""docs/command-line.md names every command; tests/cli/ compares its exit statuses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner

from gracekit.cli.main import COMMANDS, cli
from tests.cli.kit import GRACEKIT, environment
from tests.docs.pages import Page
from tests.docs.tables import commands, section, tables

PAGE: Final = Page("command-line.md")


def test_the_overview_names_every_command():
    """By what it is for; some have two uses."""
    (rows,) = tables(section(PAGE.text, "The commands"))
    named = ", ".join(row[1] for row in rows).split(", ")

    assert set(named) == set(COMMANDS)


def test_the_shared_options_are_options():
    """Of two commands or more."""
    (rows,) = tables(section(PAGE.text, "Options that many commands share"))
    ctx = click.Context(cli)
    for option in (row[0].split()[0] for row in rows):
        having = [
            name
            for name in COMMANDS
            if (command := cli.get_command(ctx, name)) is not None
            and any(option in parameter.opts for parameter in command.params)
        ]
        assert len(having) > 1, option


def test_the_commands_of_the_page_are_read():
    """Help and version are printed; every other one is a command line that can be parsed."""
    for line in commands(PAGE.text):
        words = line.replace('"', "").split()[1:]
        if line.startswith("gracekit pending"):
            words = [*words[:2], "--help"]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code in {0, 78}, result.output


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_for_a_shell_prints_its_script(tmp_path: Path, shell: str):
    """As the start-up file of the shell would ask for it."""
    (line,) = re.findall(
        rf"^.*_GRACEKIT_COMPLETE=({shell}_source) gracekit\b", PAGE.text, re.MULTILINE
    )

    done = subprocess.run(
        GRACEKIT,
        env=environment(_GRACEKIT_COMPLETE=line),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert "_gracekit_completion" in done.stdout
