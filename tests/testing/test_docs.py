"""What docs/testing.md says can be typed, under pytest as its readers have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gracekit import Service
from gracekit.testing import InMemoryService
from tests.docs.pages import Page, run

PAGE = Page("testing.md")
KEPT_OUT = re.findall(r"-p no:looptime_\w+", PAGE.text)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """All Python blocks as the files that their first lines name."""
    PAGE.write_to(tmp_path)
    return tmp_path


@pytest.mark.process
def test_tests_of_the_page_pass(directory: Path):
    """The plain ones and those with pytest-asyncio's hook and fixture."""
    kept_out = " ".join(KEPT_OUT).split()
    said = run(directory, "-m", "pytest", "-q", "-p", "no:cacheprovider", *kept_out)

    assert re.search(r"^8 passed", said, re.MULTILINE), said


@pytest.mark.process
def test_plain_tests_of_the_page_need_no_other_plugin(directory: Path):
    """`run` is enough, also beside plugins that patch loops."""
    (directory / "conftest.py").unlink()

    said = run(directory, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_copier.py")

    assert re.search(r"^2 passed", said, re.MULTILINE), said


def test_tables_name_what_there_is():
    """Each verb of the kit that the page names is one."""
    known = set(dir(InMemoryService)) | set(vars(InMemoryService(Service("any"))))

    assert set(re.findall(r"\bone\.(\w+)", PAGE.text)) <= known
