"""What workers share where gracekit's packages are missing: on the standard library alone.

A worker reads one queue of the broker whose URL stands in the file `url`, and its handler only
counts. The parked ones do not return: what each keeps in memory while it waits is measured.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

ARGS: Final[Mapping[str, Any]] = MappingProxyType({"vm": "vm-1", "note": "x" * 170})
"""About 200 bytes of JSON."""

SAMPLE: Final = "sample"
"""Prepare this, and a cast and a call lie in the queue, as the library's own client sends them."""
SAMPLE_ID: Final = "5a3b1e" + 26 * "0"
"""Their id, and the queue for the call's reply: who sends them again puts in its own."""

SENDER: Final = "sender"
"""Prepare this, and it puts as many tasks into its library's queue as it is asked for."""

URL_FILE: Final = "url"


def url_of(directory: Path) -> str:
    """Where the broker is, or the database."""
    return (directory / URL_FILE).read_text()


def parked(kind: str) -> str:
    """What the worker *kind* is called when its handlers do not return."""
    return f"{kind}, parked"


def called_by(kind: str) -> str:
    """What the client is called that calls the worker *kind* by its own library."""
    return f"{kind}, its own client"


def be_quiet() -> None:
    """No line for each event: a bench measures the product, not its log."""
    logging.getLogger("gracekit").setLevel(logging.WARNING)


def note_moment(file: Path) -> None:
    """Write the present moment into *file*, in monotonic nanoseconds."""
    file.write_text(str(time.monotonic_ns()))


class Count:
    """How many messages the handler has seen, on one event loop."""

    def __init__(self) -> None:
        self._seen = 0
        self._wanted = 0
        self._last = 0.0
        self._enough = asyncio.Event()
        self._never = asyncio.Event()

    def one(self) -> None:
        """One more was seen."""
        self._seen += 1
        self._last = time.perf_counter()
        if self._seen == self._wanted:
            self._enough.set()

    async def work(self, vm: str, note: str) -> None:  # noqa: ARG002 - as sent
        """A handler that does nothing."""
        self.one()

    async def park(self, vm: str, note: str) -> None:  # noqa: ARG002 - as sent
        """A handler that stays in flight."""
        self.one()
        await self.stay()

    async def stay(self) -> None:
        """Never return."""
        await self._never.wait()

    async def more(self, number: int) -> list[float]:
        """Wait until *number* more have come; when the last of them did, by the system's clock."""
        self._wanted += number
        if self._seen < self._wanted:
            self._enough.clear()
            await self._enough.wait()
        return [self._last]


class Tally:
    """The same where handlers run in threads."""

    def __init__(self) -> None:
        self._seen = 0
        self._wanted = 0
        self._last = 0.0
        self._lock = threading.Lock()
        self._enough = threading.Event()

    def one(self) -> None:
        """One more was seen."""
        with self._lock:
            self._seen += 1
            self._last = time.perf_counter()
            if self._seen == self._wanted:
                self._enough.set()

    async def more(self, number: int) -> list[float]:
        """Wait until *number* more have come; when the last of them did, by the system's clock."""
        with self._lock:
            self._wanted += number
            self._enough.clear()
            if self._seen >= self._wanted:
                self._enough.set()
        await asyncio.to_thread(self._enough.wait)
        return [self._last]
