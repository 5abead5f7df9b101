"""Completion in the shell, requested as bash does it."""

from __future__ import annotations

import time
from pathlib import Path

import apsw
import pytest

from tests.cli.kit import Answer, Running, gracekit, write_service

pytestmark = pytest.mark.process


def completed(directory: Path, line: str, **more: str) -> list[str]:
    """What bash would offer for the last word of *line*."""
    answer = asked(directory, line, **more)
    assert (answer.code, answer.err) == (0, ""), answer
    return [row.removeprefix("plain,") for row in answer.out.splitlines() if row]


def asked(directory: Path, line: str, **more: str) -> Answer:
    words = line.split(" ")
    asks = {"_GRACEKIT_COMPLETE": "bash_complete", "COMP_WORDS": line}
    return gracekit(directory, **asks, COMP_CWORD=str(len(words) - 1), **more)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_commands_and_options_are_completed(directory):
    """They are requested as the shell's script does; a word that is no command completes nothing,
    without a traceback.
    """
    script = gracekit(directory, _GRACEKIT_COMPLETE="bash_source")

    assert "complete -o nosort -F" in script.out
    assert completed(directory, "gracekit sta") == ["status"]
    assert completed(directory, "gracekit tasks sh") == ["show"]
    assert "--stuck" in completed(directory, "gracekit tasks --st")
    assert completed(directory, "gracekit nothing --") is not None


def test_instances_and_tasks_are_those_of_the_store(directory, tmp_path_factory):
    """The store is that of the settings, or of --store on the line. A verb completes living
    instances, and each order the tasks that it can be for.
    """
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    store = f"sqlite:///{directory / 'gracekit-store.db'}"
    with Running(directory, "--instance", "api-2"):
        pass
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "order-1")
        run.wait_line("at work")
        gracekit(directory, "call", "compute", "boom", "--id", "order-2")
        gracekit(directory, "call", "compute", "echo", "--id", "odd id;rm")

        assert completed(directory, "gracekit drain ") == ["api-1"]
        assert completed(directory, "gracekit status --instance ") == ["api-1", "api-2"]
        assert completed(directory, "gracekit tasks cancel or") == ["order-1"]
        assert completed(directory, "gracekit tasks retry or") == ["order-2"]
        assert completed(directory, "gracekit tasks show ") == ["order-2", "order-1"]
        asked_there = completed(elsewhere, f"gracekit quiet --store {store} api")

    assert asked_there == ["api-1"]


def test_a_completion_that_fails_completes_nothing(directory):
    """Without a store, with a wrong setting or a locked store it returns quickly and silently."""
    with Running(directory):
        pass
    nowhere = completed(directory, "gracekit drain ", GRACEKIT_STORE_URL="sqlite:///nowhere/x.db")
    wrong = completed(directory, "gracekit drain ", GRACEKIT_STORE_URL="ftp://x")
    connection = apsw.Connection(str(directory / "gracekit-store.db"))
    connection.execute("PRAGMA locking_mode=EXCLUSIVE; BEGIN IMMEDIATE; PRAGMA user_version=7")
    began = time.monotonic()
    locked = completed(directory, "gracekit tasks show ")
    took_s = time.monotonic() - began
    connection.close()

    assert (nowhere, wrong, locked) == ([], [], [])
    assert took_s < 4.5  # SQLite alone waits for five seconds
