"""The real command line: processes in a directory of their own, lines waited for, a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, Self

from gracekit import RpcClient
from tests.loops import without_settings

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_S: Final = 300.0
_LOG_LINE: Final = re.compile(r"\d\d:\d\d:\d\d |\{")
GRACEKIT: Final = (sys.executable, "-m", "gracekit")
# A terminal of one's own, so that a typed Ctrl-C becomes a SIGINT.
_ON_TERMINAL: Final = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "gracekit", *sys.argv[1:]])
"""

SERVICE: Final = """
from __future__ import annotations

import asyncio

from gracekit import Context, Service

svc = Service("compute")
go = asyncio.Event()


@svc.rpc
async def echo(ctx: Context, value: object = None) -> object:
    return value


@svc.rpc(resource="vm", on_interrupt="retry")
async def work(ctx: Context, vm: str) -> str:
    print("at work", repr(vm), flush=True)
    await go.wait()
    return vm


@svc.rpc
async def boom(ctx: Context) -> None:
    raise LookupError("no \\x1b[31msuch thing\\nError: forged")


@svc.rpc
async def slip(ctx: Context) -> None:
    await echo(ctx, valu=1)


@svc.rpc
async def leak(ctx: Context) -> None:
    raise LookupError("no answer of amqp://u:canary@host/v")


@svc.rpc(on_interrupt="requeue")
async def peek(ctx: Context) -> None:
    print("peeking", flush=True)
    await go.wait()


@svc.rpc
async def hold(ctx: Context, vm: str) -> None:
    await ctx.hold("migration", vm, at_most="1h")


@svc.ops
async def release(ctx: Context) -> None:
    go.set()
"""


def environment(**more: str) -> dict[str, str]:
    """This process's own, without settings of ours."""
    mine = {k: v for k, v in without_settings().items() if not k.startswith("PYTEST_")}
    mine.pop("NO_COLOR", None)
    return {**mine, "PYTHONPATH": str(ROOT), "TERM": "xterm", **more}


def write_service(directory: Path, name: str = "compute", text: str = SERVICE) -> None:
    """The module that `gracekit run` is given."""
    (directory / f"{name}.py").write_text(text)


def door_of(directory: Path) -> Path:
    """The door of the one run of the default store in *directory*."""
    (door,) = (directory / "gracekit-store.db-runs").glob("*.sock")
    return door


def cast_many(directory: Path, number: int) -> None:
    """Send so many casts of `work`, each for its own resource, faster than by commands."""

    async def cast() -> None:
        async with RpcClient(f"sqlite:///{directory / 'gracekit.db'}", "compute") as client:
            casts = (client.cast("work", vm=f"vm-{n}") for n in range(number))
            await asyncio.gather(*casts)

    asyncio.run(cast())


class Answer:
    """One finished command."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"


def gracekit(directory: Path, *words: str, **more: str) -> Answer:
    """Run one command in *directory* to its end."""
    done = subprocess.run(
        [*GRACEKIT, *words],
        cwd=directory,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )
    return Answer(done)


class Started:
    """A command at work, whose output is waited for line by line."""

    def __init__(self, directory: Path, *words: str, terminal: bool = False, **more: str) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.seen: list[str] = []
        self._master = -1
        if terminal:
            self._master, slave = pty.openpty()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _ON_TERMINAL, *words],
                cwd=directory,
                env=environment(**more),
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
            )
            os.close(slave)
            self._reader = threading.Thread(target=self._read, args=(self._master,), daemon=True)
        else:
            self._pipe, write = os.pipe()
            self.process = subprocess.Popen(
                [*GRACEKIT, *words],
                cwd=directory,
                env=environment(**more),
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
            )
            os.close(write)
            self._reader = threading.Thread(target=self._read, args=(self._pipe,), daemon=True)
        self._reader.start()

    def _read(self, fd: int) -> None:
        rest = b""
        try:
            while data := os.read(fd, 65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._lines.put(line.decode(errors="replace").rstrip("\r"))
        except OSError:
            pass  # EIO: the other side of a terminal is gone
        self._lines.put(rest.decode(errors="replace") or None)
        self._lines.put(None)
        os.close(fd)

    def wait_line(self, part: str) -> str:
        """The next line that holds *part*."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                break
            self.seen.append(line)
            if part in line:
                return line
        raise AssertionError(f"no line with {part!r} in:\n" + "\n".join(self.seen))

    def rest(self) -> str:
        """Everything said, after the end."""
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            self.seen.append(line)
        return "\n".join(self.seen)

    def type(self, text: str) -> None:
        """Press keys on its terminal."""
        os.write(self._master, text.encode())

    def wait(self) -> int:
        """Its exit code; minus the signal's number if one ended it."""
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """End it as the kernel's out-of-memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self._reader.join(PATIENCE_S)


class Running(Started):
    """`gracekit run compute`, serving."""

    def __init__(self, directory: Path, *words: str, **options: Any) -> None:
        self._printed: list[str] = []
        super().__init__(directory, "run", "compute", *words, **options)
        self.wait_line("service.serving")
        # A thread writes the log, so what a job or a recovered task prints may come before it.
        self._printed = [line for line in self.seen if not _LOG_LINE.match(line)]

    def wait_line(self, part: str) -> str:
        """The next line that holds *part*, or one that was printed before the service served."""
        for line in self._printed:
            if part in line:
                self._printed.remove(line)
                return line
        return super().wait_line(part)
