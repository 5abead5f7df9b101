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

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reconciliation.md").read_text()


def test_the_table_lists_every_argument_of_a_kind():
    """
    With the defaults that the page says.
    """
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
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


@pytest.mark.process
def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path):
    """
    A reader can copy it.
    """
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (output,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "volumes.py").write_text(program)
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}

    done = subprocess.run(
        [sys.executable, "volumes.py"],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout == output
