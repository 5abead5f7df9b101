"""The examples, typed as their docstrings say: real processes in a fresh directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WAIT_S = 40.0

pytestmark = pytest.mark.process


class Terminal:
    """A directory in which commands are typed; no process outlives it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[bytes]] = []

    def serve(self, module: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start the service of an example; returns when it takes requests."""
        log = self.directory / f"log-{len(self._started)}"
        command = ("-m", "gracekit", "run", "--app-dir", str(EXAMPLES), f"{module}:svc")
        process = self.type(*command, output=log)
        wait_for(lambda: "service.serving" in log.read_text(), log)
        return process, log

    def call(self, module: str, *arguments: str) -> str:
        """Run an example as a client; what it prints."""
        output = self.directory / f"client-{len(self._started)}"
        process = self.type(str(EXAMPLES / f"{module}.py"), *arguments, output=output)
        assert process.wait(WAIT_S) == 0, output.read_text()
        return output.read_text()

    def type(self, *arguments: str, output: Path) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("GRACEKIT_")}
        env |= {
            "PYTHONPATH": str(EXAMPLES.parent),
            "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "200ms",
        }
        with output.open("wb") as out:
            process = subprocess.Popen(
                (sys.executable, *arguments),
                cwd=self.directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(WAIT_S)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def wait_for(condition: Callable[[], bool], log: Path) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.02)


def test_hello_answers_and_drains(terminal):
    """
    The first example answers a call, and SIGTERM ends it with 0.
    """
    service, log = terminal.serve("ex01_hello")

    answer = terminal.call("ex01_hello", "World")
    service.send_signal(signal.SIGTERM)

    assert answer.startswith("Hello, World! (request ")
    assert service.wait(WAIT_S) == 0, log.read_text()


def test_copy_goes_on_after_a_drain_with_the_next_block(terminal):
    """
    A drained copy leaves with 75; the next start copies the rest, and no block twice.
    """
    first, log = terminal.serve("ex02_drain_and_resume")
    terminal.call("ex02_drain_and_resume", "disk-1", "12")
    wait_for(lambda: "block 2 copied" in log.read_text(), log)

    first.send_signal(signal.SIGTERM)
    code = first.wait(WAIT_S)
    _, next_log = terminal.serve("ex02_drain_and_resume")
    wait_for(lambda: "block 11 copied" in next_log.read_text(), next_log)

    copied = [line.split()[2] for path in (log, next_log) for line in _said(path, "disk-1: block")]
    assert (code, copied) == (75, [str(block) for block in range(12)])


def test_probe_answers_for_a_task_that_was_killed(terminal, tmp_path):
    """
    After kill -9 the probe finds the volume: its caller gets the result, and nothing is done twice.
    """
    first, log = terminal.serve("ex03_probe_the_truth")
    answer = tmp_path / "answer"
    caller = terminal.type(str(EXAMPLES / "ex03_probe_the_truth.py"), "vol-1", output=answer)
    wait_for(lambda: "waiting for the cloud" in log.read_text(), log)

    first.kill()
    first.wait(WAIT_S)
    _, next_log = terminal.serve("ex03_probe_the_truth")

    assert caller.wait(WAIT_S) == 0, next_log.read_text()
    assert answer.read_text() == "vol-1 is ready\n"
    assert _said(next_log, "vol-1:") == ["vol-1: probe says done"]


def _said(log: Path, beginning: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith(beginning)]
