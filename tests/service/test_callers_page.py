"""What docs/callers.md says can be typed, and its table agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gracekit.rpc.options import CallOptions, PrepareOptions
from tests.docs.pages import Page, run

PAGE = Page("callers.md")


def test_the_table_lists_every_option():
    """
    Nothing that `prepare` takes is left unsaid, and nothing is promised that it does not take.
    """
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.text, re.MULTILINE)

    assert listed == list(PrepareOptions.__annotations__)
    assert set(listed) == set(CallOptions.__slots__)


@pytest.mark.process
def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path):
    """
    A reader can copy it.
    """
    (program,) = PAGE.files
    PAGE.write_to(tmp_path)

    assert run(tmp_path, program) == PAGE.outputs[0]
