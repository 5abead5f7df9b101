"""Real processes of the service, started, signalled by pid and timed to their end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.child import ROOT

PATIENCE_S: Final = 60.0


class Process:
    """A process that says `service.serving` when it takes requests.

    Args:
        directory: Where its files and its log are.
        command: After `python -m`.
        settings: As environment variables, without the prefix.
        python: Of the environment in which it runs; None for this one.
    """

    def __init__(
        self,
        directory: Path,
        *command: str,
        settings: Mapping[str, object],
        python: Path | None = None,
    ) -> None:
        self._log = directory / f"log-{time.monotonic_ns()}"
        self._unread = ""
        self.seen_at = 0.0  # moment of the last line that was waited for, by `perf_counter`
        ours = {f"GRACEKIT_{name.upper()}": str(value) for name, value in settings.items()}
        with self._log.open("wb") as out:
            self._popen = subprocess.Popen(  # noqa: S603 - ourselves
                [str(python or sys.executable), "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, **ours, "PYTHONPATH": str(ROOT)},
            )
        self._lines = self._log.open()

    def serving(self, *, every_s: float = 0.005) -> Self:
        """Wait until it takes requests, and look every *every_s* seconds."""
        return self.logged("service.serving", every_s=every_s)

    def logged(self, event: str, patience_s: float = PATIENCE_S, *, every_s: float = 0.005) -> Self:
        """Wait until *event* stands in its log, behind the one that was waited for before."""
        deadline = time.monotonic() + patience_s
        while event not in (log := self._unread + self._lines.read()):
            if self._popen.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text()
                raise RuntimeError(f"{self._popen.args!r} does not log {event}:\n{log[-5000:]}")
            self._unread = log[-len(event) :]  # it may be half written
            time.sleep(every_s)
        self.seen_at = time.perf_counter()
        self._unread = log.partition(event)[2]
        return self

    def noted(self, note: Path) -> int:
        """Wait until it has written a moment into the file *note*; that moment."""
        deadline = time.monotonic() + PATIENCE_S
        while not (note.exists() and (text := note.read_text())):
            if self._popen.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text()
                raise RuntimeError(f"{self._popen.args!r} notes nothing:\n{log[-5000:]}")
            time.sleep(0.005)
        return int(text)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._popen.pid

    def memory_mib(self, field: str) -> float:
        """What it has in memory, as a field of /proc/PID/status says it."""
        status = Path(f"/proc/{self._popen.pid}/status").read_text()
        return int(status.partition(f"{field}:")[2].split()[0]) / 1024

    def terminate(self) -> tuple[int, int]:
        """Ask it to stop and wait until it is gone; monotonic nanoseconds of both moments."""
        # `Popen.wait` with a time-out looks each 50 ms, which is more than an exit takes.
        exits = os.pidfd_open(self._popen.pid)
        try:
            asked = time.monotonic_ns()
            os.kill(self._popen.pid, signal.SIGTERM)
            select.select([exits], [], [], PATIENCE_S)
            gone = time.monotonic_ns()
        finally:
            os.close(exits)
        if (code := self._popen.poll()) != 0:
            raise RuntimeError(f"it ended with {code}:\n{self._log.read_text()}")
        return asked, gone

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        self._lines.close()


def service(directory: Path, app: str = "benchmarks.served:svc", /, **settings: object) -> Process:
    """`gracekit run` of *app*, with files in *directory*."""
    given = {
        "transport_url": f"sqlite:///{directory / 'transport.db'}",
        "store_url": f"sqlite:///{directory / 'store.db'}",
        "host": "bench",
    }
    command = ("gracekit", "run", app)
    return Process(directory, *command, settings=given | settings)
