"""What the README says can be typed, and its table agrees with the code."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from gracekit.config.choices import OnInterrupt, choices_of
from tests.docs.pages import ROOT, Page, shell
from tests.docs.tables import section, tables

PAGE = Page("../README.md")
MOST_LINES = 120
DEFAULT_URL = "sqlite:///gracekit.db"


@pytest.mark.process
@pytest.mark.parametrize("queue", ["sqlite", "rabbitmq"])
def test_a_copy_survives_kill_as_the_readme_says(tmp_path: Path, queue, request):
    """The lines are pasted into a shell, also with RabbitMQ's URL; here the kill waits for the
    first part. The copy is whole, and another process answers the call than the one that took it.
    """
    url = DEFAULT_URL if queue == "sqlite" else request.getfixturevalue("rabbit_url")
    PAGE.write_to(tmp_path)
    lines = re.findall(r"^    ((?:\(sleep|gracekit ).*)$", PAGE.text, re.MULTILINE)
    text = "\n".join([*lines, "wait"]).replace("sleep 5", "until [ -s *.copy ]; do sleep 0.1; done")
    out = shell(tmp_path, text, GRACEKIT_TRANSPORT_URL=url)
    said = [line for line in out.splitlines() if line.startswith(("attempt", '"'))]

    assert len(lines) == 3
    shown = [line for line in PAGE.outputs[0].splitlines() if line != "..."]
    assert said[0] == shown[0]
    assert said[-1] == shown[-1]
    assert {line.split(" copies")[0] for line in said[:-1]} == {"attempt 1", "attempt 2"}
    assert "verdict=killed" in out
    source = Path(shutil.which("python3") or sys.executable)
    assert (tmp_path / "python.copy").read_bytes() == source.read_bytes()


def test_policies_are_all_named():
    """The table of on_interrupt has one row for each policy."""
    (rows,) = tables(section(PAGE.text, "What becomes of an interrupted task"))

    assert {row[0].split('"')[1] for row in rows} == set(choices_of(OnInterrupt))


def test_readme_is_short():
    """The README is read in one go; everything else is on a page of docs/."""
    assert len(PAGE.text.splitlines()) <= MOST_LINES


def test_links_lead_somewhere():
    """Every file that the README links to exists."""
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.text)

    assert [link for link in links if not (ROOT / link).exists()] == []
