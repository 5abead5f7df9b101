"""The test kit brings nothing with it that gracekit does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_LOADED = ("pytest", "_pytest", "looptime", "hypothesis", "greenlet", "gracekit.cli", "tests")


@pytest.mark.process
def test_it_loads_no_test_library():
    """`import gracekit.testing` works where only gracekit's own dependencies are installed."""
    code = f"import sys, gracekit.testing; print([n for n in {NOT_LOADED!r} if n in sys.modules])"

    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (answer.stdout.strip(), answer.stderr) == ("[]", "")
