"""What docs/leases.md shows can be typed in that order, and prints what the page says."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import click
import pytest

from gracekit.cli.lease import lease
from gracekit.cli.lease_run import NOTICED_S
from gracekit.cli.options import who
from gracekit.config.settings import Settings
from gracekit.leasing import SETTLE_S
from tests.docs.pages import Page, environment, run, running
from tests.docs.tables import commands, section, tables

PAGE: Final = Page("leases.md")


@pytest.mark.process
def test_the_two_shells_go_as_the_page_says(tmp_path: Path):
    """The second one is refused, sees the holder, and gets the lease when the first one ends."""
    tmp_path.chmod(0o700)
    lines = commands(section(PAGE.text, "In two shells"))
    create, hold, refused, status, wait = map(shlex.split, lines)
    run(tmp_path, "-m", *create)
    with running(tmp_path, "-m", *hold) as first:
        first.wait_text("runs with token 1")
        never = subprocess.run(
            (sys.executable, "-m", *refused),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        shown = run(tmp_path, "-m", *status)
        assert first.stop(signal.SIGINT) == 128 + signal.SIGINT
    then = run(tmp_path, "-m", *wait)

    assert (never.returncode, never.stdout) == (75, "")
    assert "lease vm:vm-1 is held by " in never.stderr
    assert "EXCLUSIVE" in shown
    assert shown.rstrip().endswith("on node 7")
    assert then == "now with token 2\n"


@pytest.mark.process
def test_the_program_holds_its_lease_until_it_is_forced(tmp_path: Path):
    """It prints what the page shows, but for the name of the operator."""
    tmp_path.chmod(0o700)
    PAGE.write_to(tmp_path)
    (order,) = re.findall(r"^    (gracekit lease force .*)$", PAGE.text, re.MULTILINE)
    with running(tmp_path, "keeper.py") as keeper:
        keeper.wait_text("vm-1 runs")
        run(tmp_path, "-m", *shlex.split(order))
        assert keeper.process.wait(60) == 0
        printed = keeper.log.read_text()

    assert printed == PAGE.outputs[0].replace("uid 0 (root)@node-1", who())


def test_the_page_names_each_command_of_the_group():
    """With its options."""
    (rows,) = tables(section(PAGE.text, "Commands"))
    ctx = click.Context(lease)

    assert sorted(row[0].split()[2] for row in rows) == sorted(lease.list_commands(ctx))


def test_the_times_of_a_loss_are_those_of_the_settings():
    """The default ones."""
    (rows,) = tables(section(PAGE.text, "When a lease is lost"))
    times = Settings().timings

    assert [row[1] for row in rows] == [
        f"{one:g} s"
        for one in (
            times.fail_s,
            times.hard_s - NOTICED_S,
            times.hard_s,
            times.dead_s,
            times.dead_s + SETTLE_S,
        )
    ]
