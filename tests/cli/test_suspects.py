"""An errored hook and a hold's probe that kill their process, and an operator who ends them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.kit import Running, Started, gracekit, write_service

pytestmark = pytest.mark.process

KILLER = """
from __future__ import annotations

import asyncio
import os

from gracekit import Context, Done, Service

svc = Service("compute")


@svc.rpc(settle=0)
async def work(ctx: Context, vm: str) -> None:
    print("at work", repr(vm), flush=True)
    await asyncio.sleep(1000)


@work.errored
async def _(ctx: Context, vm: str, reason: str) -> None:
    os._exit(9)


@svc.rpc(settle=0)
async def move(ctx: Context, vm: str) -> None:
    await ctx.hold("move", vm, at_most="1h")
    print("holds", repr(vm), flush=True)


@move.probe
async def _(ctx: Context, vm: str) -> Done:
    os._exit(9)
"""


def die_of(directory: Path, method: str, line: str) -> None:
    """A request whose hook, or whose hold's probe, kills the next two processes."""
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", method, "vm=v", "--id", "order-1")
        run.wait_line(line)
        run.process.send_signal(signal.SIGKILL)
        run.wait()
    for _ in range(2):
        # Not `Running`: a run that ends itself so soon may not have written yet that it serves.
        with Started(directory, "run", "compute") as run:
            assert run.wait() == 9


def lives(directory: Path) -> bool:
    """Whether a process serves and leaves in order."""
    with Running(directory) as run:
        assert gracekit(directory, "quiet").code == 0
        run.process.send_signal(signal.SIGTERM)
        return run.wait() == 0


def test_an_operator_ends_an_errored_hook_that_kills_its_process(tmp_path):
    """doctor names it; cancelled, it is called no more, and the service lives."""
    write_service(tmp_path, text=KILLER)
    die_of(tmp_path, "work", "at work")

    found = gracekit(tmp_path, "doctor", "compute:svc").out
    assert "the errored hook of task order-1 (work): 2" in " ".join(found.split())
    failed = gracekit(tmp_path, "tasks", "fail", "order-1", "--reason", "it kills")
    cancelled = gracekit(tmp_path, "tasks", "cancel", "order-1", "--reason", "it kills")
    again = gracekit(tmp_path, "tasks", "cancel", "order-1", "--reason", "it kills")
    shown = gracekit(tmp_path, "tasks", "show", "order-1")

    assert [failed.code, cancelled.code, again.code] == [1, 0, 1], (failed, cancelled, again)
    assert "its errored hook is not called any more" in cancelled.out
    assert "kept      args" in shown.out  # for a retry
    assert lives(tmp_path)
    found = gracekit(tmp_path, "doctor", "compute:svc").out
    assert "no task, hook or probe was running in two or more processes when they died" in found


def test_an_operator_ends_a_hold_whose_probe_kills_its_process(tmp_path):
    """It is listed with the processes that ended of it, named by doctor, and ended for good."""
    write_service(tmp_path, text=KILLER)
    die_of(tmp_path, "move", "holds")

    found = gracekit(tmp_path, "doctor", "compute:svc").out
    assert "hold move v (move): 2" in " ".join(found.split())
    (listed,) = gracekit(tmp_path, "holds", "--json").json["holds"]
    assert (listed["name"], listed["key"], listed["crashes"]) == ("move", "v", 1)
    assert "left over" in gracekit(tmp_path, "holds").out
    ended = gracekit(tmp_path, "holds", "end", "move", "v", "--reason", "it kills")
    again = gracekit(tmp_path, "holds", "end", "move", "v", "--reason", "it kills")

    assert [ended.code, again.code] == [0, 1], (ended, again)
    assert "no holds" in gracekit(tmp_path, "holds").out
    assert lives(tmp_path)


def test_tasks_says_who_runs_apart_and_who_waits_for_that(tmp_path):
    """And the log names the one that was running when processes died."""
    write_service(tmp_path)
    work = ("cast", "compute", "work")
    options = {
        "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "0",
        "GRACEKIT_MAX_ATTEMPTS": "10",
    }
    for number in range(7):  # after seven, old-a is alone for 20 s
        with Running(tmp_path, **options) as run:
            if number == 0:
                gracekit(tmp_path, *work, "vm=a", "--id", "old-a")
                gracekit(tmp_path, *work, "vm=b", "--id", "old-b")
            for _ in range(2 if number < 2 else 1):
                run.wait_line("at work")
            run.process.send_signal(signal.SIGKILL)
            run.wait()
    with Running(tmp_path, **options) as run:
        line = run.wait_line("task.apart")
        gracekit(tmp_path, *work, "vm=c", "--id", "new-c")
        listed = gracekit(tmp_path, "tasks").out
        run.process.send_signal(signal.SIGKILL)
        run.wait()

    assert "old-a" in line
    rows = {row.split()[0]: " ".join(row.split()) for row in listed.splitlines()[1:] if row.strip()}
    assert rows["old-a"].endswith("runs apart: processes died around it, 7 times")
    assert rows["old-b"].endswith("waits to run apart: processes died around it, 2 times")
    assert rows["new-c"].endswith("waits: old-a runs apart")
