"""What needs oslo.messaging itself runs where `requirements/oslo.lock` is installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.oslo.kit import ROOT, oslo_python
from tests.scale import scale

TIMEOUT_S = scale(120, 3600)
"""Of each test inside, which does not see the options of the run that it is part of."""

pytestmark = pytest.mark.process


def run(*arguments: str | Path) -> str:
    """What the Python of that environment says, which must end well."""
    answer = subprocess.run(
        [oslo_python(), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=2 * TIMEOUT_S,
    )
    assert answer.returncode == 0, answer.stdout
    return answer.stdout


def test_the_library_runs_without_eventlet():
    """It is not installed there: the peer's threads are real ones."""
    said = run("-c", "import importlib.util as u; print(u.find_spec('eventlet'))")

    assert said == "None\n"


def test_gracekit_loads_nothing_of_oslo():
    """Not even where it is installed: who does not serve endpoints does not pay for it."""
    said = run(
        "-c", "import sys; from gracekit import *; print([n for n in sys.modules if 'oslo_' in n])"
    )

    assert said == "['gracekit.rpc.oslo_wire']\n"


def test_the_adapter_answers_as_the_library_does():
    """`test_adapter.py`, all of it, in the environment of the library."""
    inside = Path(__file__).parent / "test_adapter.py"

    quiet = ("-q", "-p", "no:cacheprovider")
    said = run("-m", "pytest", *quiet, f"--timeout={TIMEOUT_S}", inside)

    assert re.search(r"^\d{2,} passed in", said, re.MULTILINE), said
