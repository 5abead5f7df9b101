"""`gracekit dump` on processes that serve, and on one whose event loop is blocked."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.kit import SERVICE, Running, environment, gracekit, write_service

pytestmark = pytest.mark.process

BLOCKING = f"""{SERVICE}

@svc.rpc
async def block(ctx: Context) -> None:
    import time

    print("blocking", flush=True)
    time.sleep(20)
"""
EMBEDDED = """
import asyncio

from compute import svc
from gracekit import Runtime


async def main() -> None:
    async with Runtime(svc) as runtime:
        print("service.serving", flush=True)
        await runtime.serve()


asyncio.run(main())
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path, text=BLOCKING)
    return tmp_path


def test_tasks_and_threads_are_printed(directory):
    """The text is that of SIGUSR1; control characters in a request id are escaped."""
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "a\x1b[2Jb")
        run.wait_line("at work")
        shown = gracekit(directory, "dump")
        named = gracekit(directory, "dump", "api-1", "--json")
        unknown = gracekit(directory, "dump", "api-2")

    lines = shown.out.splitlines()
    assert (shown.code, named.code, unknown.code) == (0, 0, 4), (shown, unknown)
    assert lines[0].startswith("--- gracekit compute@api-1 pid ")
    assert lines[-1] == "--- end ---"
    assert r"task a\x1b[2Jb method=work" in shown.out
    assert "    await go.wait()" in lines
    assert any(line.endswith("(event loop)") for line in lines)
    assert named.json["instance"] == "api-1"
    assert named.json["text"].endswith("--- end ---\n")


def test_of_a_blocked_loop_it_says_within_5_s_what_shows_its_stacks(directory):
    """The command names SIGUSR1, which still works; afterwards the run goes on."""
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", "block")
        run.wait_line("blocking")
        began = time.monotonic()
        answer = gracekit(directory, "dump")
        took_s = time.monotonic() - began

    assert (answer.code, answer.out) == (4, ""), answer
    assert "did not answer to 'dump' within 4 s: its event loop is blocked" in answer.err
    assert f"`kill -USR1 {run.process.pid}` writes its stacks to its standard error" in answer.err
    assert took_s < 4 + 6  # the start of a process on a busy machine


def test_who_has_no_handler_for_the_signal_is_not_sent_it(directory):
    """The signal would end a program that embeds a service and handles signals itself."""
    command = (sys.executable, "-c", EMBEDDED)
    with subprocess.Popen(
        command, cwd=directory, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert "serving" in process.stdout.readline()
            gracekit(directory, "cast", "compute", "block")
            assert "blocking" in process.stdout.readline()
            answer = gracekit(directory, "dump")
        finally:
            process.kill()

    assert answer.code == 4
    assert f"but `py-spy dump --pid {process.pid}` shows its stacks" in answer.err


def test_of_several_runs_one_has_to_be_named(directory):
    """The refusal names them, and no option that the command does not have."""
    with Running(directory, "--instance", "api-1"), Running(directory, "--instance", "api-2"):
        answer = gracekit(directory, "dump")

    assert answer.code == 2
    assert answer.err.endswith(
        "2 runs live (compute@api-1, compute@api-2): name one as INSTANCE or SERVICE@INSTANCE\n"
    )
