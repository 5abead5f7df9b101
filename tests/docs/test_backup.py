"""The steps of docs/backup.md copy a store in use, and put the copy back."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path
from typing import Final

import pytest

from gracekit.cli.incidents import KINDS
from gracekit.store.older import EPOCH_BITS
from tests.cli.kit import Running, gracekit, write_service
from tests.docs.pages import Page
from tests.docs.tables import commands

PAGE: Final = Page("backup.md")
COPY: Final = "/backups/gracekit-2026-11-22.db"


def shell_blocks(copy: Path) -> list[str]:
    """The steps that a shell takes, with a backup in another place."""
    blocks = re.findall(r"^   ```sh\n(.*?)^   ```", PAGE.text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block).replace(COPY, str(copy)) for block in blocks]


@pytest.mark.process
def test_the_steps_of_the_page_restore_a_store(tmp_path: Path):
    """What was recorded before the backup is back, and what came later is not; the start says
    so.
    """
    directory, copy = tmp_path / "site", tmp_path / "copy.db"
    directory.mkdir()
    write_service(directory)
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "call", "compute", "echo", "--id", "before")
        (backup,) = commands(PAGE.text)
        words = backup.replace(COPY, str(copy)).split()[1:]
        assert gracekit(directory, *words).code == 0
        again = gracekit(directory, *words)
        gracekit(directory, "call", "compute", "echo", "--id", "after")
        assert gracekit(directory, "drain").code == 0
        run.wait()
    assert again.code == 78  # an existing file is not overwritten
    assert copy.stat().st_mode & 0o777 == 0o600

    for block in shell_blocks(copy):
        subprocess.run(["/bin/sh", "-ec", block], cwd=directory, check=True)
    (kept,) = directory.glob("old-*")  # a second restore moves its store to a directory of its own
    assert (kept / "gracekit-store.db").exists()
    doctor = gracekit(directory, "doctor")
    with Running(directory, "--instance", "api-1") as run:
        listed = gracekit(directory, "tasks", "--state", "all", "--json").json["tasks"]

    assert "backup" in doctor.out
    assert any("store.older" in line for line in run.seen)
    assert [task["request_id"] for task in listed] == ["before"]


def test_numbers_and_names_are_those_of_the_code():
    """Where new tokens begin, and what kind of incident a restored task is."""
    assert f"`epoch * 2^{EPOCH_BITS}`" in PAGE.text
    assert "gracekit incidents --what restored" in PAGE.text
    assert "restored" in KINDS
