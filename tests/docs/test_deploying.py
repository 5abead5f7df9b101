"""What docs/deploying.md shows is what `gracekit init` prints, and what a service has on disk."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from gracekit.cli.main import cli
from gracekit.config.loading import load
from gracekit.deploy.plan import Plan
from gracekit.deploy.systemd import UnitOptions, unit
from tests.cli.kit import Started, gracekit
from tests.docs.pages import WAIT_S, Page, environment
from tests.docs.tables import commands, section, tables

PAGE: Final = Page("deploying.md")
FILES: Final = {"systemd": "thumbs.service", "k8s": "thumbs.yaml", "docker": "Dockerfile"}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service of the page, in the working directory."""
    PAGE.write_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(line: str) -> Result:
    """One command of the page, in this process."""
    return CliRunner().invoke(cli, line.split()[1:])


def block(language: str) -> list[str]:
    """The lines of the page's block in that language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.text, re.MULTILINE | re.DOTALL)
    return text.splitlines()


def assert_within(shown: list[str], printed: str) -> None:
    """Every line that is shown is printed, in this order; `# ...` stands for what is left out."""
    lines = iter(printed.splitlines())
    missing = [line for line in shown if line.strip() != "# ..." and line not in lines]
    assert missing == []


# -- what init prints -------------------------------------------------------------------


@pytest.mark.process
def test_commands_of_the_page_print_what_doctor_then_examines(directory: Path):
    """Each one works as it stands; doctor finds no fault in the manifest."""
    lines = commands(PAGE.text)
    prints = {line.split()[2]: invoke(line) for line in lines if " init " in line}
    assert prints.keys() == FILES.keys()
    for name, result in prints.items():
        assert result.exit_code == 0, result.output
        (directory / FILES[name]).write_text(result.output)

    examines = [line for line in lines if " doctor " in line]
    answers = {line.split()[3]: invoke(f"{line} --quiet") for line in examines}

    assert answers.keys() == {"--unit", "--manifest"}
    assert len(examines) + len(prints) == len(set(lines))
    assert " 0 FAIL," in answers["--manifest"].output, answers["--manifest"].output
    assert " FAIL," in answers["--unit"].output  # it judges this machine


def test_the_manifest_is_what_is_printed(directory: Path):
    """Probes, volume and times, line by line."""
    printed = invoke("gracekit init k8s thumbs:svc --image registry.example/thumbs:1").output

    assert_within(block("yaml"), printed)


def test_the_dockerfile_is_what_is_printed(directory: Path):
    """But for the version of Python, which is that of whoever prints it."""
    printed = invoke("gracekit init docker thumbs:svc").output

    assert_within(block("dockerfile"), re.sub(r"(?<=FROM python:)3\.\d+", "3.11", printed))


def test_the_unit_is_what_is_printed_for_the_place_of_the_page():
    """Each line that is shown, and each directive that the table explains."""
    place = Path("/opt/thumbs")
    plan = Plan(
        name="thumbs",
        topic="thumbs",
        target="thumbs:svc",
        factory=False,
        app_dir=place,
        settings=load({}, {}),
        start_hooks=0,
    )
    options = UnitOptions(
        instances=None,
        version=253,
        user="thumbs",
        program=(str(place / "bin/gracekit"),),
        interpreter=Path("/usr/bin/python3"),
    )

    printed = unit(plan, options)

    assert_within(block("ini"), printed)
    (rows,) = tables(section(PAGE.text, "The unit"))
    named = re.findall(r"\b[A-Z]\w+(?==|\b)", " ".join(row[0] for row in rows))
    assert [name for name in named if name not in printed] == []


# -- restarts ---------------------------------------------------------------------------


@pytest.mark.process
def test_processes_are_restarted_one_after_the_other(directory: Path):
    """By the script of the page: each is drained and ready again before the next one ends."""
    (script,) = re.findall(r"```sh\n# roll.sh\n(.*?)^```", PAGE.text, re.DOTALL | re.MULTILINE)
    program = directory / "bin" / "gracekit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gracekit "$@"\n')
    program.chmod(0o700)
    path = f"{program.parent}:{os.environ['PATH']}"
    with contextlib.ExitStack() as stack:
        for name in ("api-1", "api-2"):
            run = stack.enter_context(Started(directory, "run", "thumbs:svc", "--instance", name))
            run.wait_line("service.serving")
        with subprocess.Popen(
            ("sh", "-c", script), cwd=directory, env=environment(PATH=path), start_new_session=True
        ) as roll:
            try:
                code = roll.wait(WAIT_S)
                found = gracekit(directory, "status", "--json").json
                drained = gracekit(directory, "drain", "--all")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(roll.pid, signal.SIGKILL)

    lives = {run["instance"]: run["generation"] for run in found["runs"] if run["alive"]}
    ended = {run["instance"]: run["verdict"] for run in found["last_exits"]}
    assert code == drained.code == 0
    assert lives == {"api-1": 2, "api-2": 2}
    assert ended == {"api-1": "drained", "api-2": "drained"}


# -- files ------------------------------------------------------------------------------


@pytest.mark.process
def test_a_service_has_the_files_of_the_table(directory: Path):
    """While it runs: all that the table lists, and nothing else."""
    (rows,) = tables(section(PAGE.text, "Files"))
    named = {row[0].rstrip("/") for row in rows}
    suffixes = {end.strip("…") for name in named if name[0] == "…" for end in name.split(", ")}
    files = {name for name in named if name[0] != "…"}

    with Started(directory, "run", "thumbs:svc") as service:
        service.wait_line("service.serving")
        found = {path.name for path in directory.iterdir()} - {"thumbs.py", "__pycache__"}
        modes = {path.stat().st_mode & 0o077 for path in directory.glob("gracekit*")}
        assert gracekit(directory, "drain").code == 0

    assert files <= found
    assert suffixes == {"-wal", "-shm", "-writer"}
    assert {
        name
        for name in found - files
        if name not in {file + suffix for file in files for suffix in suffixes}
    } == set()
    assert modes == {0}


@pytest.mark.process
@pytest.mark.parametrize("unsafe", ["writable for everybody", "a symbolic link"])
def test_a_start_refuses_files_that_others_could_change(directory: Path, unsafe: str):
    """With 78 and the remedy, as the page says."""
    if unsafe == "a symbolic link":
        (directory / "elsewhere.db").touch(mode=0o600)
        (directory / "gracekit-store.db").symlink_to("elsewhere.db")
    else:
        directory.chmod(0o777)

    answer = gracekit(directory, "run", "thumbs:svc")

    assert answer.code == 78, answer
    assert re.search(r"^Error: .*; see docs/errors.md#configerror$", answer.err, re.MULTILINE)
