"""What docs/reconciliation.md says can be typed, and its tables agree with the code."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gracekit import Service, Settings
from gracekit.recovery.resources.reading import PAGE as FOUND_AT_ONCE
from gracekit.recovery.resources.results import ResourceOutcome

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reconciliation.md").read_text()


def test_the_table_lists_every_argument_of_a_kind():
    """
    With the defaults that the page says.
    """
    (table,) = re.findall(r"^\| `name` \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    parameters = list(inspect.signature(Service.kind).parameters.values())[1:]
    (said,) = re.findall(r"svc\.kind\(name, (.*?)\)` makes", PAGE)

    assert listed == [parameter.name for parameter in parameters]
    assert said == ", ".join(
        f"{parameter.name}={parameter.default!r}".replace("'", '"') for parameter in parameters[1:]
    )


def test_the_numbers_of_the_page_are_the_defaults():
    """
    Of the settings, and of a page of `find`.
    """
    settings = Settings()
    wait_s = settings.startup_reconciliation_wait_seconds

    assert f"`startup_reconciliation_wait_seconds` ({wait_s:g} s)" in PAGE
    assert f"`reconciliation_interval` ({settings.reconciliation_interval_s / 60:g} min" in PAGE
    assert f"`reconcile_at_once` ({settings.reconcile_at_once})" in PAGE
    assert f"`accept_wait` ({settings.accept_wait_s:g} s)" in PAGE
    assert f"at most `limit` ({FOUND_AT_ONCE})" in PAGE


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The program of the page, as a reader copies it."""
    program = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "volumes.py").write_text(program)
    return tmp_path


def run(directory: Path, *words: str) -> str:
    """What Python prints in a reader's directory, with their own settings."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=env | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
def test_the_program_of_the_page_prints_what_the_page_says(directory: Path):
    """
    A reader can copy it.
    """
    (output,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

    assert run(directory, "volumes.py") == output


@pytest.mark.process
def test_the_program_of_the_page_is_typed(directory: Path):
    """
    A reader who runs mypy --strict over it sees no error.
    """
    run(directory, "-m", "mypy", "--strict", "--no-incremental", "volumes.py")


def test_the_table_of_outcomes_lists_all():
    """
    With the words that --json shows.
    """
    (table,) = re.findall(r"^\| outcome \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)

    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        outcome.value for outcome in ResourceOutcome
    ]
