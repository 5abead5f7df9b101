"""What docs/testing.md says can be typed, under pytest as its readers have it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gracekit import Service
from gracekit.testing import InMemoryService

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
BLOCKS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
KEPT_OUT = re.findall(r"-p no:looptime_\w+", PAGE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """All Python blocks as the files that their first lines name."""
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(directory: Path, *arguments: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}
    done = subprocess.run(
        (sys.executable, "-m", *arguments),
        cwd=directory,
        env=env | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
def test_tests_of_the_page_pass(directory: Path):
    """
    The plain ones and those with pytest-asyncio's hook and fixture.
    """
    kept_out = " ".join(KEPT_OUT).split()
    said = run(directory, "pytest", "-q", "-p", "no:cacheprovider", *kept_out)

    assert re.search(r"^7 passed", said, re.MULTILINE), said


@pytest.mark.process
def test_plain_tests_of_the_page_need_no_other_plugin(directory: Path):
    """
    `run` is enough, also beside plugins that patch loops.
    """
    (directory / "conftest.py").unlink()

    said = run(directory, "pytest", "-q", "-p", "no:cacheprovider", "test_copier.py")

    assert re.search(r"^2 passed", said, re.MULTILINE), said


@pytest.mark.process
def test_blocks_are_typed(directory: Path):
    """
    A reader who runs mypy --strict over them sees no error.
    """
    assert run(directory, "mypy", "--strict", "--no-incremental", *BLOCKS).startswith("Success")


def test_tables_name_what_there_is():
    """
    Each verb of the kit that the page names is one.
    """
    known = set(dir(InMemoryService)) | set(vars(InMemoryService(Service("any"))))

    assert set(re.findall(r"\bone\.(\w+)", PAGE)) <= known
