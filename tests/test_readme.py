"""What the README says can be typed, and its table agrees with the code."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from gracekit.config.choices import OnInterrupt, choices_of
from gracekit.exits import ExitCode
from tests.docs.pages import ROOT, Page, run, running
from tests.docs.tables import section, tables

PAGE = Page("../README.md")
MOST_LINES = 120
DEFAULT_URL = "sqlite:///gracekit.db"


@pytest.mark.process
@pytest.mark.parametrize("queue", ["sqlite", "rabbitmq"])
def test_first_service_answers_as_the_readme_says(tmp_path: Path, queue, request):
    """
    The service and the client can be copied, run, and drained; on RabbitMQ with another URL.
    """
    url = DEFAULT_URL if queue == "sqlite" else request.getfixturevalue("rabbit_url")
    PAGE.write_to(tmp_path)
    ask = tmp_path / "ask.py"
    assert DEFAULT_URL in ask.read_text()
    ask.write_text(ask.read_text().replace(DEFAULT_URL, url))
    command = ("-m", "gracekit", "run", "thumbs:svc")

    with running(tmp_path, *command, GRACEKIT_TRANSPORT_URL=url) as service:
        service.wait_text("service.serving")
        assert run(tmp_path, "ask.py") == PAGE.outputs[0]
        code = service.stop(signal.SIGTERM)

    log = service.log.read_text()
    assert code in {ExitCode.DRAINED, ExitCode.HANDED_OVER}, log
    assert "summer/c" in log


def test_policies_are_all_named():
    """
    The table of on_interrupt has one row for each policy.
    """
    (rows,) = tables(section(PAGE.text, "What becomes of an interrupted task"))

    assert {row[0].split('"')[1] for row in rows} == set(choices_of(OnInterrupt))


def test_readme_is_short():
    """
    The README is read in one go; everything else is on a page of docs/.
    """
    assert len(PAGE.text.splitlines()) <= MOST_LINES


def test_links_lead_somewhere():
    """
    Every file that the README links to exists.
    """
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.text)

    assert [link for link in links if not (ROOT / link).exists()] == []
