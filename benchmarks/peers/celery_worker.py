"""Celery: its worker program with prefork, two processes.

- Late acks, and 128 prefetched for each process: by default it acks before it runs a task.
- A call is a task whose result goes over `rpc://` to the caller's queue; a cast is sent with
  `ignore_result`.
- Processor time is that of the program and of its two processes.
- It runs as a program, not in `benchmarks.child`, whose lines it speaks in a thread of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from celery import Celery, signals
from celery.platforms import SecurityWarning

from benchmarks.child import Measure, Prepare
from benchmarks.plain import ARGS, SAMPLE, SAMPLE_ID, Tally, url_of

KIND: Final = "celery"
PROCESSES: Final = 2


class _Shared:
    """A tally of several processes, which are forked when it exists."""

    def __init__(self) -> None:
        self._seen = multiprocessing.Value("q", 0)
        self._wanted = multiprocessing.Value("q", 0)
        self._last = multiprocessing.Value("d", 0.0)
        self._enough, self._said = os.pipe()

    def one(self) -> None:
        """In one of them: one more was seen."""
        with self._seen.get_lock():
            self._seen.value += 1
            if self._seen.value == self._wanted.value:
                self._last.value = time.perf_counter()
                os.write(self._said, b".")

    def more(self, number: int) -> float:
        """Wait until *number* more have come; when the last of them did."""
        with self._seen.get_lock():
            self._wanted.value += number
            waits = self._seen.value < self._wanted.value
        if waits:
            os.read(self._enough, 1)
        return self._last.value if waits else time.perf_counter()


def _application(directory: Path, prefetch: int, one: Any) -> tuple[Any, Any]:
    app = Celery(KIND, broker=url_of(directory), backend="rpc://")
    app.conf.update(
        task_default_queue=KIND,
        task_acks_late=True,
        worker_prefetch_multiplier=max(1, prefetch // PROCESSES),
        broker_connection_retry_on_startup=True,  # its default, which it wants said
    )

    def work(vm: str, note: str) -> None:  # noqa: ARG001 - as sent
        one()

    return app, app.task(name="work")(work)


@contextlib.asynccontextmanager
async def _sample(_size: int, directory: Path) -> AsyncIterator[Measure]:
    tally = Tally()
    _, work = _application(directory, 1, tally.one)
    work.apply_async(kwargs=dict(ARGS), task_id=SAMPLE_ID, ignore_result=True)
    work.apply_async(kwargs=dict(ARGS), task_id=SAMPLE_ID, reply_to=SAMPLE_ID)
    yield tally.more


PREPARE: Final[dict[str, Prepare]] = {SAMPLE: _sample}


def main(_module: str, _kind: str, prefetch: str, directory: str) -> None:
    """The worker, until there are no more lines."""
    out = os.dup(1)
    os.dup2(2, 1)  # what else is printed is no answer
    warnings.simplefilter("ignore", SecurityWarning)  # it does not like to run as root
    shared = _Shared()
    app, _ = _application(Path(directory), int(prefetch), shared.one)

    def speak() -> None:
        os.write(out, b"[]\n")
        for line in sys.stdin:
            os.write(out, f"[{shared.more(int(line))!r}]\n".encode())
        os.kill(os.getpid(), signal.SIGTERM)

    def ready(**_: Any) -> None:
        threading.Thread(target=speak, daemon=True).start()

    signals.worker_ready.connect(ready, weak=False)
    app.worker_main(["--quiet", "worker", f"--concurrency={PROCESSES}", "--loglevel=WARNING"])


if __name__ == "__main__":
    main(*sys.argv[1:])
