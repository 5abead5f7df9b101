"""Processes as the tests see them: started, signalled by pid, waited for, looked into from outside.

Whatever a test waits for, it asks for again and again with a generous bound: the machine may be
busy. Stores are read through read-only connections of the same SQLite that the services use.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import apsw
import pytest

from gracekit.process import FAILPOINTS_ON
from tests.loops import without_settings

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WAIT_S = 30.0
"""Bound of every wait for something that must come."""
SLACK_S = 6.0
"""What a busy machine may add to a bound that the product promises."""

TRANSIENT = ("accepted", "running", "pending", "handed_over")


async def until(
    condition: Callable[[], T | None],
    what: str | Callable[[], str],
    within_s: float = WAIT_S,
    *,
    every_s: float = 0.01,
) -> T:
    """Wait until *condition* is true; returns its answer. *what* tells what was waited for."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {within_s:g} s: {told}")
        await asyncio.sleep(every_s)
    return found


@dataclass(frozen=True, slots=True)
class Effect:
    """One line of the effects file; *at* in monotonic seconds, comparable between processes."""

    at: float
    pid: int
    word: str
    key: str
    more: tuple[str, ...]


class ServiceProcess:
    """One process of the service under test."""

    def __init__(self, site: Site, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._site = site
        self._popen = popen
        self._log = log
        self.target = popen.pid  # who gets its signals

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    async def wait_log(self, text: str, *, times: int = 1, within_s: float = WAIT_S) -> None:
        """Wait until the log has *text* so often."""

        def seen() -> bool:
            if (log := self.log).count(text) >= times:
                return True
            assert not self.ended, f"ended {self._popen.returncode} before {text!r}:\n{log}"
            return False

        told = lambda: f"{text!r} in the log of {self.pid}:\n{self.log[-3000:]}"  # noqa: E731
        await until(seen, told, within_s)

    async def serving(self) -> ServiceProcess:
        """Wait until it takes requests."""
        await self.wait_log("service.serving", within_s=3 * WAIT_S)
        return self

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.target, number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """As a crash: no farewell. Returns when it is dead."""
        self._popen.kill()
        self._popen.wait()

    async def wait_asleep(self) -> None:
        """Wait until its main thread has slept each time that we looked ten times in a row."""
        looks = 0

        def asleep() -> bool:
            nonlocal looks
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            looks = looks + 1 if state == "S" else 0
            return looks >= 10

        await until(asleep, f"{self.pid} asleep")

    async def exit_code(self, within_s: float = WAIT_S) -> int:
        """Wait for its end; negative for a signal that killed it."""

        def code() -> tuple[int] | None:
            found = self._popen.poll()
            return None if found is None else (found,)

        told = lambda: f"end of {self.pid}:\n{self.log[-3000:]}"  # noqa: E731 - asked at the end
        return (await until(code, told, within_s))[0]

    async def stop(self) -> int:
        """Ask it to stop and wait for its exit code."""
        self.terminate()
        return await self.exit_code()

    @property
    def run(self) -> dict[str, Any]:
        """Its row of the store."""
        (row,) = self._site.rows(
            "SELECT * FROM run WHERE pid = ? ORDER BY started_at DESC LIMIT 1", self.pid
        )
        return row


class Site:
    """A directory with one store, one transport, one effects file, and processes on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store.db"
        self.transport = root / "transport.db"
        self.url = f"sqlite:///{self.transport}"
        self.settings: dict[str, object] = {}  # of all its processes, unless one has others
        self._effects = root / "effects"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._unread: list[int] = []
        self._terminal: int | None = None

    # -- processes -----------------------------------------------------------------

    def start(self, **settings: object) -> ServiceProcess:
        """Start a process; *settings* by name, `test_…` ones for `served` itself."""
        return self._start([sys.executable, str(HERE / "served.py")], settings)

    def start_cli(self, **settings: object) -> ServiceProcess:
        """The same through `gracekit run`."""
        return self._start([sys.executable, "-m", "gracekit", "run", "served:svc"], settings)

    def start_unread(self, *, cli: bool = True, **settings: object) -> ServiceProcess:
        """Its standard output and error are a pipe that is full, and that nobody reads."""
        reading, writing = os.pipe()
        fill(writing)
        self._unread.append(reading)
        command = [sys.executable, "-m", "gracekit", "run", "served:svc"]
        served = [sys.executable, str(HERE / "served.py")]
        try:
            return self._start(command if cli else served, settings, output=writing)
        finally:
            os.close(writing)

    def start_printing_to(self, output: int, **settings: object) -> ServiceProcess:
        """Its standard output is *output*, which Python buffers, as outside of the tests."""
        command = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-m", "gracekit"]
        return self._start([*command, "run", "served:svc"], settings, output=output)

    def start_at_terminal(self, *, nohup: bool = False, **settings: object) -> ServiceProcess:
        """Its standard input is its controlling terminal; `close_terminal` hangs up."""
        self._terminal, slave = pty.openpty()
        command = [*(["nohup"] if nohup else []), sys.executable, str(HERE / "served.py")]
        try:
            return self._start(["setsid", "--ctty", *command], settings, stdin=slave)
        finally:
            os.close(slave)

    def close_terminal(self) -> None:
        """The kernel sends SIGHUP to the process whose terminal it is."""
        assert self._terminal is not None
        os.close(self._terminal)
        self._terminal = None

    async def start_as_pid_1(self, **settings: object) -> ServiceProcess:
        """In a pid namespace of its own, as in a container; skips where that is not allowed."""
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        may = await asyncio.to_thread(
            subprocess.run, [*command, "true"], capture_output=True, check=False
        )
        if may.returncode != 0:
            pytest.skip(f"no pid namespace: {may.stderr.decode().strip()}")
        outer = self._start([*command, sys.executable, str(HERE / "served.py")], settings)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        outer.target = int(await until(children.read_text, "the process in its namespace"))
        return outer

    def start_deaf_to_alarm(self, **settings: object) -> ServiceProcess:
        """From a parent that ignores and blocks SIGALRM, which an exec does not undo."""
        deafen = (
            "import os, signal, sys; signal.signal(signal.SIGALRM, signal.SIG_IGN); "
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); "
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        served = [sys.executable, str(HERE / "served.py")]
        return self._start([sys.executable, "-c", deafen, *served], settings)

    def start_program(self, name: str, *words: str, **settings: object) -> ServiceProcess:
        """A program beside `served`, with a service of its own or embedding that one."""
        return self._start([sys.executable, "-m", f"tests.process.{name}", *words], settings)

    def start_inside(self, *prefix: str, **settings: object) -> ServiceProcess:
        """The service as a child of another command, for example in namespaces of its own."""
        return self._start([*prefix, sys.executable, str(HERE / "served.py")], settings)

    def _start(
        self,
        command: list[str],
        settings: dict[str, object],
        *,
        stdin: int = subprocess.DEVNULL,
        output: int | None = None,
    ) -> ServiceProcess:
        given = (
            {
                "transport_url": self.url,
                "store_url": f"sqlite:///{self.store}",
                "startup_reconciliation_wait_seconds": "0.2s",
                "reconcile_every": "0.5s",
                "host": "node-a",
                "test_effects": self._effects,
            }
            | self.settings
            | settings
        )
        log = self.root / f"log-{len(self._processes)}"
        with log.open("wb") as out:
            popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=out if output is None else output,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env=_environment(given),
            )
        self._processes.append(popen)
        return ServiceProcess(self, popen, log)

    def caster(
        self, prefix: str, count: int, *, per_second: float, enough: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """A client process that casts at a steady rate; its output is `cast-{prefix}`.

        With *enough* it casts more than *count*, until there is such a file.
        """
        command = [sys.executable, str(HERE / "caster.py"), self.url, prefix]
        output, log = self.root / f"cast-{prefix}", self.root / f"cast-{prefix}.log"
        with output.open("wb") as out, log.open("wb") as errors:
            popen = subprocess.Popen(
                [*command, str(count), str(per_second), *([str(enough)] if enough else [])],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=_environment({}),
            )
        self._processes.append(popen)
        return popen

    def go(self) -> None:
        """Let handlers end that wait for it."""
        (self.root / "go").touch()

    def confirmed(self, prefix: str) -> list[str]:
        """Ids that the caster saw confirmed."""
        path = self.root / f"cast-{prefix}"
        return path.read_text().split()

    def close(self) -> None:
        """Leave no process behind."""
        for popen in self._processes:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
        for reading in self._unread:
            os.close(reading)
        if self._terminal is not None:
            os.close(self._terminal)

    # -- the world -----------------------------------------------------------------

    @property
    def effects(self) -> list[Effect]:
        if not self._effects.exists():
            return []
        return [_effect(line) for line in self._effects.read_text().splitlines()]

    def seen(self, word: str, key: str | None = None) -> list[Effect]:
        """Effects with that word, and key if given."""
        return [e for e in self.effects if e.word == word and key in {None, e.key}]

    async def effect(self, word: str, key: str | None = None, *, times: int = 1) -> list[Effect]:
        """Wait for effects."""
        return await until(
            lambda: found if len(found := self.seen(word, key)) >= times else [],
            f"{times} x {word} {key or ''}",
            within_s=WAIT_S + 0.03 * times,  # thousands of them take a busy machine a minute
        )

    # -- the record ----------------------------------------------------------------

    def rows(self, sql: str, *params: object) -> list[dict[str, Any]]:
        """Rows of the store, as committed by now."""
        return read_rows(self.store, sql, params)

    def task(self, request_id: str) -> dict[str, Any]:
        (row,) = self.rows("SELECT * FROM task WHERE request_id = ?", request_id)
        return row

    def state(self, request_id: str) -> str | None:
        found = self.rows("SELECT state FROM task WHERE request_id = ?", request_id)
        return found[0]["state"] if found else None

    async def in_state(self, request_id: str, state: str) -> None:
        await until(lambda: self.state(request_id) == state, f"{request_id} {state}")

    async def found(self, sql: str) -> dict[str, Any]:
        """Wait until the store, which may not be there yet, has such a row; returns the first."""

        def look() -> list[dict[str, Any]]:
            with contextlib.suppress(apsw.Error):
                return self.rows(sql)
            return []

        return (await until(look, f"a row: {sql}"))[0]

    def transient(self) -> list[dict[str, Any]]:
        """Rows that are not terminal."""
        marks = ", ".join("?" * len(TRANSIENT))
        return self.rows(f"SELECT * FROM task WHERE state IN ({marks})", *TRANSIENT)

    def queued(self) -> int:
        """Messages that the transport still holds for the service."""
        sql = "SELECT count(*) AS n FROM message WHERE queue NOT LIKE 'reply%'"
        return int(self.transport_rows(sql)[0]["n"])

    def transport_rows(self, sql: str) -> list[dict[str, Any]]:
        """Rows of the transport's file."""
        return read_rows(self.transport, sql, ())


def fill(pipe: int) -> None:
    """Write into a pipe until it takes no more."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 512)
    os.set_blocking(pipe, True)


def read_rows(path: Path, sql: str, params: Iterable[object]) -> list[dict[str, Any]]:
    """Rows of a database that others write, by a connection that can only read."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        connection.set_busy_timeout(10_000)
        connection.wal_autocheckpoint(0)
        cursor = connection.execute(sql, tuple(params))
        return [dict(zip(_names(cursor), row, strict=True)) for row in cursor]
    finally:
        connection.close()


def _names(cursor: apsw.Cursor) -> list[str]:
    return [name for name, *_ in cursor.get_description()]


def _effect(line: str) -> Effect:
    at, pid, word, key, *more = line.split()
    return Effect(int(at) / 1e9, int(pid), word, key, tuple(more))


def _environment(settings: dict[str, object]) -> dict[str, str]:
    ours = {f"GRACEKIT_{name.upper()}": str(value) for name, value in settings.items()}
    path = os.pathsep.join((str(ROOT), str(HERE)))
    return without_settings() | ours | FAILPOINTS_ON | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
