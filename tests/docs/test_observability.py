"""What docs/observability.md shows of logs can be run, and its tables agree with the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gracekit.config.choices import LogFailures, LogFormat, LogLevel, choices_of
from gracekit.telemetry.catalogue import CATALOGUE
from tests.docs.pages import Page, run

PAGE = Page("observability.md")
SERVICE = """
import logging
import sys

sys.stderr = sys.stdout

import own_logging  # as the program of the page, which embeds the service

from gracekit import Context, Service
from gracekit.testing import InMemoryService, run

svc = Service("logging")


@svc.rpc
async def work(ctx: Context) -> None:
    logging.getLogger("app").warning("at work")


async def main() -> None:
    async with InMemoryService(svc) as one:
        await one.prepare(request_id="order-1042").call(work)


run(main())
"""


@pytest.mark.process
def test_a_line_of_an_embedding_program_has_the_request_id(tmp_path: Path):
    """By the filter and the format of the page."""
    PAGE.write_to(tmp_path)
    (tmp_path / "program.py").write_text(SERVICE)

    assert re.search(r"^\S+ \S+ order-1042 at work$", run(tmp_path, "program.py"), re.MULTILINE)


@pytest.mark.process
def test_the_line_of_the_page_is_one_that_its_commands_find(tmp_path: Path):
    """With the keys that the page names and the fields of its event; text that is no JSON is
    skipped.
    """
    (line,) = re.findall(r"^```json\n(.*)\n```", PAGE.text, re.MULTILINE)
    shown = json.loads(line)
    keys = re.findall(r"`([a-z.]+)`", PAGE.text.partition("in addition to ")[2].partition(":\n")[0])
    assert len(keys) == 7
    fields = set(shown) - set(keys)
    assert fields <= set(CATALOGUE[shown["event"]].fields)
    (tmp_path / "thumbs.log").write_text(f"printed\n{line}\n")

    commands = re.findall(r"^jq .*$", PAGE.text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands if shutil.which("jq") else ():
        found = subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert json.loads(found.stdout) == shown


def test_the_tables_name_events_that_there_are():
    """Each row that begins with the name of an event."""
    rows = re.findall(
        r"^\| (`[a-z]+\.[a-z_]+`(?:, `[a-z]+\.[a-z_]+`)*) \|", PAGE.text, re.MULTILINE
    )
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}

    assert len(named) > 15
    assert named <= set(CATALOGUE)


def test_the_values_of_the_settings_are_those_that_there_are():
    """Of format, level and failures."""
    table = dict(
        re.findall(r"^\| `(GRACEKIT_LOG_\w+)` \| `\w+` \| (.*) \|$", PAGE.text, re.MULTILINE)
    )
    for name, choice in (("FORMAT", LogFormat), ("LEVEL", LogLevel), ("FAILURES", LogFailures)):
        words = set(re.findall(r"`(\w+)`", table[f"GRACEKIT_LOG_{name}"]))
        assert set(choices_of(choice)) <= words
