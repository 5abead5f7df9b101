"""Completion in the shell, requested as bash does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.kit import gracekit, write_service

pytestmark = pytest.mark.process


def completed(directory: Path, line: str) -> list[str]:
    """What bash would offer for the last word of *line*."""
    words = line.split(" ")
    asks = {"_GRACEKIT_COMPLETE": "bash_complete", "COMP_WORDS": line}
    answer = gracekit(directory, **asks, COMP_CWORD=str(len(words) - 1))
    assert (answer.code, answer.err) == (0, ""), answer
    return [row.removeprefix("plain,") for row in answer.out.splitlines() if row]


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
    assert completed(directory, "gracekit pending ret") == ["retry"]
    assert "--stuck" in completed(directory, "gracekit tasks --st")
    assert completed(directory, "gracekit nothing --") is not None
