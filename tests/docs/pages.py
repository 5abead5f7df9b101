"""What the tests of the pages in docs/ begin with: blocks of code, as files that can be run."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest

from tests.loops import without_settings

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
WAIT_S: Final = 60.0
T = TypeVar("T")
_NAMED: Final = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OUTPUT: Final = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
_BLOCK: Final = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#{1,4} (.*)$", re.MULTILINE)


class Page:
    """One page.

    Attributes:
        text: As it stands.
        files: Its named blocks: a block of Python or TOML begins with a line `# thumbs.py`.
        outputs: Its blocks of text, in their order: what the programs print.
    """

    def __init__(self, name: str) -> None:
        self.text = (DOCS / name).read_text()
        self.files = dict(_NAMED.findall(self.text))
        self.outputs = _OUTPUT.findall(self.text)

    @property
    def anchors(self) -> set[str]:
        """Those of its headings, as GitHub and MyST name them; a title that is repeated has one."""
        titles = _HEADING.findall(_BLOCK.sub("", self.text))
        return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in titles}

    def write_to(self, directory: Path) -> None:
        """Write the named blocks as files."""
        for name, text in self.files.items():
            (directory / name).write_text(text)

    def make_importable(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        """Write the named blocks as files that can be imported until the end of the test."""
        self.write_to(directory)
        patch.syspath_prepend(str(directory))


def environment(**more: str) -> dict[str, str]:
    """For a process that a reader would start: no setting but *more*."""
    return without_settings() | {"PYTHONPATH": str(ROOT)} | more


def run(directory: Path, *arguments: str, **env: str) -> str:
    """Run Python with *arguments* in *directory* to its end; what it printed."""
    done = subprocess.run(
        (sys.executable, *arguments),
        cwd=directory,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shell(directory: Path, lines: str, **env: str) -> str:
    """What bash prints for *lines*, in which `gracekit` is this one."""
    command = directory / "bin" / "gracekit"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m gracekit "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        ("bash", "-c", lines),
        cwd=directory,
        env=environment(**env, PATH=f"{command.parent}:{os.environ['PATH']}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout


class Program:
    """A process that a reader would start, and the file of what it writes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def wait_for(self, condition: Callable[[], T]) -> T:
        """Wait until *condition* is true while the process lives; its value."""
        limit = time.monotonic() + WAIT_S
        while not (found := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < limit, self.log.read_text()
            time.sleep(0.02)
        return found

    def wait_text(self, part: str) -> None:
        """Wait until the process has written *part*."""
        self.wait_for(lambda: part in self.log.read_text())

    def stop(self, number: int) -> int:
        """Send a signal, and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


@contextlib.contextmanager
def running(directory: Path, *arguments: str, **env: str) -> Iterator[Program]:
    """Python with *arguments* in *directory*; killed at the end of the block."""
    log = directory / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            (sys.executable, *arguments),
            cwd=directory,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Program(process, log)
    finally:
        process.kill()
        process.wait()
