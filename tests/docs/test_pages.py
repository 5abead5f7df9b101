"""All pages in docs/: their blocks of code are files, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Page, environment

PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
TYPED = ["../README.md", *PAGES]
UNTYPED = {  # a test, and oslo's libraries have no types
    "test_my_engine.py",
    "compute_options.py",
    "oslo_listen.py",
    "oslo_main.py",
    "test_disks.py",
}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
TO_SECTION = re.compile(r"\]\(([\w./-]*\.md|)#([^)\s]+)\)")


@pytest.mark.parametrize("name", PAGES)
def test_a_link_of_a_page_leads_somewhere(name: str):
    """Also one to a file outside of docs/, which Sphinx makes a download."""
    page = DOCS / name
    targets = {target for target in LINK.findall(page.read_text()) if not target.startswith("http")}
    assert [one for one in targets if not (page.parent / one).is_file()] == []


@pytest.mark.parametrize("name", TYPED)
def test_a_link_to_a_section_leads_to_its_heading(name: str):
    """Otherwise the reader lands at the top of a long page."""
    text, directory = Page(name).text, (DOCS / name).parent
    wrong = [
        f"{target}#{anchor}"
        for target, anchor in TO_SECTION.findall(text)
        if anchor not in Page(str(directory / target) if target else name).anchors
    ]
    assert wrong == []


def test_the_index_leads_to_every_page():
    """But for the decisions, which have an index of their own."""
    index = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"^([a-z/-]+)$", index, re.MULTILINE))
    assert listed == {name[:-3] for name in PAGES if "/" not in name and name != "index.md"} | {
        "decisions/index"
    }


@pytest.mark.process
@pytest.mark.timeout(300)
def test_programs_of_all_pages_are_typed(tmp_path: Path):
    """A reader who runs mypy --strict over those of one page sees no error."""
    wrong: dict[str, str] = {}
    for name in TYPED:
        page, directory = Page(name), tmp_path / name.replace("/", "-")
        if not (files := [one for one in page.files if one.endswith(".py") and one not in UNTYPED]):
            continue
        directory.mkdir()
        page.write_to(directory)
        options = ("--strict", "--cache-dir", str(tmp_path / "cache"))  # mypy reads gracekit once
        if said := mypy(directory, *options, *files):
            wrong[name] = said

    assert wrong == {}


def mypy(directory: Path, *arguments: str) -> str:
    """What mypy finds; empty if nothing."""
    command = (sys.executable, "-m", "mypy", *arguments)
    done = subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
