"""What docs/engines.md shows can be run, and its table of states is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gracekit.store.status import StoreState
from tests.docs.pages import Page, run

PAGE = Page("engines.md")


@pytest.mark.process
def test_the_suite_of_the_page_tests_an_engine(tmp_path: Path):
    """
    With pytest-asyncio in its automatic mode, as the page says.
    """
    PAGE.write_to(tmp_path)

    said = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto")

    assert re.search(r"^1\d passed", said, re.MULTILINE), said


def test_the_states_of_a_store_are_listed_in_their_order():
    """
    With the words of the code.
    """
    text = PAGE.text.partition("## Status\n")[2].partition("\n## ")[0]

    assert re.findall(r"^\| (\w+) \|", text, re.MULTILINE)[1:] == [
        state.value for state in StoreState
    ]
