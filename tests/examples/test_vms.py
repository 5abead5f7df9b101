"""The example of virtual machines that end in every way."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.loops import without_settings
from tests.process.helpers import ROOT

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_a_wish_is_told_from_a_crash_and_nothing_runs_twice():
    """The example judges itself, and prints what its page shows."""
    command = (sys.executable, "-m", "examples.vms.play")
    played = subprocess.run(
        command,
        cwd=ROOT,
        env=without_settings(),
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    page = (ROOT / "examples/vms/README.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)

    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout == shown
