"""What the README says can be typed, and its table agrees with the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit.config.choices import OnInterrupt, choices_of
from gracekit.config.settings import variable_name
from gracekit.exits import ExitCode

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
OUTPUTS = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
MOST_LINES = 120

WAIT_S = 60.0
DEFAULT_URL = "sqlite:///gracekit.db"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """All Python blocks as the files that their first lines name."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def start(
    directory: Path, *arguments: str, output: Path, **settings: str
) -> subprocess.Popen[bytes]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}
    env |= {variable_name(name): value for name, value in settings.items()}
    with output.open("wb") as out:
        return subprocess.Popen(
            (sys.executable, *arguments),
            cwd=directory,
            env=env | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def run(directory: Path, *arguments: str) -> str:
    output = directory / "output"
    process = start(directory, *arguments, output=output)
    try:
        assert process.wait(WAIT_S) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    return output.read_text()


@pytest.mark.process
@pytest.mark.parametrize("queue", ["sqlite", "rabbitmq"])
def test_first_service_answers_as_the_readme_says(directory, queue, request):
    """
    The service and the client can be copied, run, and drained; on RabbitMQ with another URL.
    """
    url = DEFAULT_URL if queue == "sqlite" else request.getfixturevalue("rabbit_url")
    ask = directory / "ask.py"
    assert DEFAULT_URL in ask.read_text()
    ask.write_text(ask.read_text().replace(DEFAULT_URL, url))
    log = directory / "log"
    service = start(directory, "-m", "gracekit", "run", "thumbs:svc", output=log, transport_url=url)
    try:
        limit = time.monotonic() + WAIT_S
        while "service.serving" not in log.read_text():
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.02)
        answer = run(directory, "ask.py")
        service.terminate()
        code = service.wait(WAIT_S)
    finally:
        service.kill()
        service.wait()

    assert answer == OUTPUTS[0]
    assert code in {ExitCode.DRAINED, ExitCode.HANDED_OVER}, log.read_text()
    assert "summer/c" in log.read_text()


def table_below(heading: str) -> Iterator[list[str]]:
    """Rows of the tables of one section, cells without backquotes; heads and rules too."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("|"):
            yield [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def test_policies_are_all_named():
    """
    The table of on_interrupt has one row for each policy.
    """
    rows = [row[0] for row in table_below("What becomes of an interrupted task")]

    assert {row.split('"')[1] for row in rows if '"' in row} == set(choices_of(OnInterrupt))


def test_readme_is_short():
    """
    The README is read in one go; everything else is on a page of docs/.
    """
    assert len(README.splitlines()) <= MOST_LINES


def test_links_lead_somewhere():
    """
    Every file that the README links to exists.
    """
    links = re.findall(r"\]\(([^)#]+)\)", README)

    assert [link for link in links if not (ROOT / link).exists()] == []
