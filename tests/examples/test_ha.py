"""The example of three hosts and a virtual machine that must run once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.loops import without_settings
from tests.process.helpers import ROOT
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with Postgres().running() as server:
        yield server


def test_the_machine_starts_elsewhere_three_times_and_never_runs_twice(postgres: Postgres):
    """Its host is killed, stopped, and cut off from the store; the example judges itself."""
    command = (sys.executable, "-m", "examples.ha.play", postgres.url())
    played = subprocess.run(
        command, cwd=ROOT, env=without_settings(), capture_output=True, text=True, check=False
    )

    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout.splitlines()[-1].endswith("4 owners, tokens only rise: yes")
    assert "could not show that it lives" in played.stdout
