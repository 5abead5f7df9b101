"""What docs/callers.md says can be typed, and its table agrees with the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gracekit.rpc.options import CallOptions, PrepareOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "callers.md").read_text()


def test_the_table_lists_every_option():
    """
    Nothing that `prepare` takes is left unsaid, and nothing is promised that it does not take.
    """
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)

    assert listed == list(PrepareOptions.__annotations__)
    assert set(listed) == set(CallOptions.__slots__)


@pytest.mark.process
def test_the_program_of_the_page_prints_what_the_page_says(tmp_path: Path):
    """
    A reader can copy it.
    """
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (output,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "ask.py").write_text(program)
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}

    done = subprocess.run(
        [sys.executable, "ask.py"],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert done.stdout == output
