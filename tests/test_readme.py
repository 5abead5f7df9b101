"""What the README says can be typed, and its tables agree with the code."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import apsw
import pytest

from gracekit.config.choices import OnInterrupt, choices_of
from gracekit.config.settings import Settings, variable_name
from gracekit.config.values import format_duration
from gracekit.exits import ExitCode

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
OUTPUTS = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
WITHOUT = {  # what the README says where the code has no value
    "GRACEKIT_INSTANCE": "first free {host}-{n}",
    "GRACEKIT_KILL_AFTER": "unknown",
}
T = TypeVar("T")

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
    assert "summer/d" in log.read_text()


@pytest.mark.process
def test_embedded_service_drains_inside_uvicorn_as_the_readme_says(directory):
    """
    Readiness is 200 while it serves and 503 during the drain; a task that outlives the drain is
    handed over: exit code 75.
    """
    text = (directory / "embedded.py").read_text()
    assert "    return 2 * n\n" in text
    slow = "    import time\n\n    while not ctx.cancelled:\n        time.sleep(0.02)\n"
    (directory / "embedded.py").write_text(
        text.replace("    return 2 * n\n", f"{slow}    raise OSError\n")
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = directory / "log"
    program = start(directory, "embedded.py", str(port), output=log, drain_timeout="3s")
    try:
        assert wait_ready(port, "200", log) == "serving"
        call = ("cast", "inside", "double", "n=1")
        run(directory, "-m", "gracekit", *call)
        wait_for(lambda: read_states(directory) == ["running"], log)
        program.terminate()
        assert wait_ready(port, "503", log) == "draining"
        code = program.wait(WAIT_S)
    finally:
        program.kill()
        program.wait()

    assert code == ExitCode.HANDED_OVER, log.read_text()
    assert read_states(directory) == ["handed_over"]


def wait_ready(port: int, status: str, log: Path) -> str:
    """The body of an answer with that status, as curl sees it."""

    def ask() -> str:
        command = ("curl", "-s", "-w", "\n%{http_code}", f"http://127.0.0.1:{port}/")
        body, _, code = subprocess.run(
            command, capture_output=True, text=True, check=False
        ).stdout.rpartition("\n")
        return body if code == status else ""

    return wait_for(ask, log)


def wait_for(condition: Callable[[], T], log: Path) -> T:
    limit = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.05)
    return found


def read_states(directory: Path) -> list[str]:
    connection = apsw.Connection(
        str(directory / "gracekit-store.db"), flags=apsw.SQLITE_OPEN_READONLY
    )
    try:
        connection.set_busy_timeout(10_000)
        return [str(row[0]) for row in connection.execute("SELECT state FROM task")]
    finally:
        connection.close()


@pytest.mark.process
def test_blocks_are_typed(directory):
    """
    A newcomer who runs mypy --strict over the blocks sees no error.
    """
    answer = run(directory, "-m", "mypy", "--strict", "--no-incremental", *BLOCKS)

    assert answer.startswith("Success")


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


def test_exit_codes_are_all_named():
    """
    The table of exit codes has each code that a run leaves with.
    """
    rows = [row[0] for row in table_below("Signals and exit codes")]

    assert {int(row) for row in rows if row.isdigit()} == {int(code) for code in ExitCode}


def test_settings_have_the_defaults_that_the_readme_says():
    """
    Names and defaults in the table of settings are the code's.
    """
    fields = {variable_name(name): name for name in Settings.__dataclass_fields__}
    settings = Settings()
    for variable, said, _ in table_below("Settings"):
        if variable.startswith("GRACEKIT_"):
            value = getattr(settings, fields[variable])
            shown = format_duration(value) if isinstance(value, float) else str(value)
            shown = shown.lower() if isinstance(value, bool) else shown
            expected = {None: WITHOUT.get(variable), settings.host: "the host's name"}
            assert said == expected.get(value, shown), variable


def test_links_lead_somewhere():
    """
    Every file that the README links to exists.
    """
    links = re.findall(r"\]\(([^)#]+)\)", README)

    assert [link for link in links if not (ROOT / link).exists()] == []
