"""Real processes of the service, started, signalled by pid and timed to their end."""

from __future__ import annotations

import os
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
    """

    def __init__(self, directory: Path, *command: str, settings: Mapping[str, object]) -> None:
        self._log = directory / f"log-{time.monotonic_ns()}"
        ours = {f"GRACEKIT_{name.upper()}": str(value) for name, value in settings.items()}
        with self._log.open("wb") as out:
            self._popen = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, **ours, "PYTHONPATH": str(ROOT)},
            )

    def serving(self) -> Self:
        """Wait until it takes requests."""
        deadline = time.monotonic() + PATIENCE_S
        while "service.serving" not in (log := self._log.read_text()):
            if self._popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._popen.args!r} does not serve:\n{log}")
            time.sleep(0.005)
        return self

    def terminate(self) -> tuple[int, int]:
        """Ask it to stop and wait until it is gone; monotonic nanoseconds of both moments."""
        asked = time.monotonic_ns()
        os.kill(self._popen.pid, signal.SIGTERM)
        code = self._popen.wait(PATIENCE_S)
        gone = time.monotonic_ns()
        if code != 0:
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


def service(directory: Path, **settings: object) -> Process:
    """`gracekit run` of the service of the benches, with files in *directory*."""
    given = {
        "transport_url": f"sqlite:///{directory / 'transport.db'}",
        "store_url": f"sqlite:///{directory / 'store.db'}",
        "host": "bench",
    }
    command = ("gracekit", "run", "benchmarks.served:svc")
    return Process(directory, *command, settings=given | settings)
