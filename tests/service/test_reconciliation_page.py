"""What docs/reconciliation.md says can be typed, and its tables agree with the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from gracekit import Service, Settings
from gracekit.recovery.resources.reading import PAGE as FOUND_AT_ONCE
from gracekit.recovery.resources.results import ResourceOutcome
from tests.docs.pages import Page, run

PAGE = Page("reconciliation.md").text


def test_the_table_lists_every_argument_of_a_kind():
    """With the defaults that the page says."""
    (table,) = re.findall(r"^\| `name` \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    parameters = list(inspect.signature(Service.kind).parameters.values())[1:]
    (said,) = re.findall(r"svc\.kind\(name, (.*?)\)` makes", PAGE)

    assert listed == [parameter.name for parameter in parameters]
    assert said == ", ".join(
        f"{parameter.name}={parameter.default!r}".replace("'", '"') for parameter in parameters[1:]
    )


def test_the_numbers_of_the_page_are_the_defaults():
    """Of the settings, and of a page of `find`."""
    settings = Settings()
    wait_s = settings.startup_reconciliation_wait_seconds

    assert f"`startup_reconciliation_wait_seconds` ({wait_s:g} s)" in PAGE
    assert f"`reconciliation_interval` ({settings.reconciliation_interval_s / 60:g} min" in PAGE
    assert f"`reconcile_at_once` ({settings.reconcile_at_once})" in PAGE
    assert f"`accept_wait` ({settings.accept_wait_s:g} s)" in PAGE
    assert f"at most `limit` ({FOUND_AT_ONCE})" in PAGE


@pytest.mark.process
def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path):
    """A reader can copy it."""
    page = Page("reconciliation.md")
    page.write_to(tmp_path)

    assert run(tmp_path, "volumes.py") == page.outputs[0]


def test_the_table_of_outcomes_lists_all():
    """With the words that --json shows."""
    (table,) = re.findall(r"^\| outcome \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)

    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        outcome.value for outcome in ResourceOutcome
    ]
