"""What the README says can be typed, and its table agrees with the code."""

from __future__ import annotations

import importlib
import re
import signal
from pathlib import Path

import pytest

from gracekit.config.choices import OnInterrupt, choices_of
from gracekit.exits import ExitCode
from gracekit.testing import InMemoryService
from gracekit.testing import run as play
from tests.docs.pages import ROOT, Page, run, running
from tests.docs.tables import section, tables

PAGE = Page("../README.md")
MOST_LINES = 120
DEFAULT_URL = "sqlite:///gracekit.db"


@pytest.mark.process
@pytest.mark.parametrize("queue", ["sqlite", "rabbitmq"])
def test_first_service_answers_as_the_readme_says(tmp_path: Path, queue, request):
    """
    It can be copied, run, called and stopped with the commands shown; on RabbitMQ with its URL. The
    call comes at once, as somebody types it who pastes all lines.
    """
    url = DEFAULT_URL if queue == "sqlite" else request.getfixturevalue("rabbit_url")
    PAGE.write_to(tmp_path)
    run_it, call_it = (
        ("-m", *line.removesuffix(" &").split())
        for line in re.findall(r"^    (gracekit .*)$", PAGE.text, re.MULTILINE)
    )

    with running(tmp_path, *run_it, GRACEKIT_TRANSPORT_URL=url) as service:
        assert run(tmp_path, *call_it, GRACEKIT_TRANSPORT_URL=url) == PAGE.outputs[0]
        code = service.stop(signal.SIGTERM)

    assert code == ExitCode.DRAINED, service.log.read_text()


def test_render_is_called_and_stopped_as_the_readme_says(tmp_path: Path, monkeypatch):
    """
    The call of the text returns a number; a drain stops at a safe point, and the next start goes
    on.
    """
    PAGE.make_importable(tmp_path, monkeypatch)
    thumbs = importlib.import_module("thumbs")
    (call,) = re.findall(r"`await (client\.call\(render, .*?\))`", PAGE.text)

    async def main() -> None:
        async with InMemoryService(thumbs.svc) as client:
            client.interrupt_at(1)
            pending = client.start_call(thumbs.render, album="summer", pictures=["a", "b"])
            await client.wait_stopped()
            await client.start()
            assert await pending == 2
            assert await eval(call, {"client": client, "render": thumbs.render}) == 2

    play(main())


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
