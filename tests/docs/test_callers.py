"""The programs of docs/callers.md print what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import Page, run

PAGE: Final = Page("callers.md")


@pytest.mark.process
@pytest.mark.parametrize(("name", "printed"), list(zip(PAGE.files, PAGE.outputs, strict=True)))
def test_a_program_prints_what_the_page_says(name: str, printed: str, tmp_path: Path):
    """Each named program has a block of what it prints."""
    PAGE.write_to(tmp_path)

    assert run(tmp_path, name) == printed
