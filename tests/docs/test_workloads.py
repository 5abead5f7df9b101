"""docs/workloads.md: its program prints what the page says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import Page, run

PAGE: Final = Page("workloads.md")


@pytest.mark.process
def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path):
    """In virtual time, without a broker or a file."""
    PAGE.write_to(tmp_path)

    assert f"```text\n{run(tmp_path, 'machines.py')}```" in PAGE.text


def test_the_recipe_for_libvirt_can_be_read():
    """There is no libvirt here to run it with."""
    ast.parse(PAGE.files["seen.py"])
