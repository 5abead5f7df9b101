"""All pages in docs/: their blocks of code are files, their links lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS

PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", PAGES)
def test_a_link_of_a_page_leads_somewhere(name: str):
    """
    Also one to a file outside of docs/, which Sphinx makes a download.
    """
    page = DOCS / name
    targets = {target for target in LINK.findall(page.read_text()) if not target.startswith("http")}
    assert [one for one in targets if not (page.parent / one).is_file()] == []


def test_the_index_leads_to_every_page():
    """
    But for the decisions, which have an index of their own.
    """
    index = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"^([a-z/-]+)$", index, re.MULTILINE))
    assert listed == {name[:-3] for name in PAGES if "/" not in name and name != "index.md"} | {
        "decisions/index"
    }
