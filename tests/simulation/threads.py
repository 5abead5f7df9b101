"""Worker threads without threads: a plain handler is a greenlet, and its sleeps are virtual."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import greenlet
import msgspec

from gracekit.life import Alive, Liveness, Lock, RecordedLife
from gracekit.process import Threads
from gracekit.testing.faults import Fault, Faults
from tests.played import PlayedProcess

T = TypeVar("T")


def sleep(seconds: float) -> None:
    """What a plain handler calls: its thread sleeps, the loop goes on."""
    parent = greenlet.getcurrent().parent
    assert parent is not None, "only a plain handler sleeps here"
    parent.switch(seconds)


_spawned: set[asyncio.Task[None]] = set()


def spawn(call: Callable[..., object], *args: object) -> None:
    """What starts a thread of the application: it goes on by itself, until its process dies."""

    async def run() -> None:
        thread = greenlet.greenlet(call)
        thread.gr_context = contextvars.copy_context()
        await asyncio.sleep(0)
        with contextlib.suppress(Exception, asyncio.CancelledError):  # nobody looks at its future
            given: Any = thread.switch(*args)
            while not thread.dead:
                await asyncio.sleep(given)
                given = thread.switch()

    task = asyncio.ensure_future(run())
    _spawned.add(task)
    task.add_done_callback(_spawned.discard)


class GreenThreads(Threads):
    """Runs each function to its next sleep, on the loop's thread.

    Attributes:
        was_full: Whether a function had to wait for one.
    """

    def __init__(self, number: int, faults: Faults) -> None:
        super().__init__(number)
        self._faults = faults
        self._room = anyio.CapacityLimiter(number)
        self.was_full = False

    async def run(self, function: Callable[[], T], *, abandon: bool = False) -> T:
        self.was_full |= not self._room.available_tokens
        async with self._room:
            if self._faults.draw("process", "thread", (Fault.DELAY,)):
                await asyncio.sleep(self._faults.seconds("process", "thread"))
            thread = greenlet.greenlet(function)
            thread.gr_context = contextvars.copy_context()
            given: Any = thread.switch()
            try:
                while not thread.dead:
                    await asyncio.sleep(given)
                    given = thread.switch()
            finally:
                if not thread.dead:  # the process was killed, and its threads with it
                    thread.throw()
            result: T = given
            return result


class GreenProcess(PlayedProcess):
    """A played process on some host, whose threads are greenlets."""

    def move_to(self, boot_id: str) -> None:
        """Be a process of that boot of some host; processes of others cannot see it."""
        self._living.discard(self.identity)
        self.identity = msgspec.structs.replace(self.identity, boot_id=boot_id)
        self._living.add(self.identity)

    def shares_boot(self, other: GreenProcess) -> bool:
        """Whether each can see of the other whether it lives."""
        return self.identity.boot_id == other.identity.boot_id

    def judge(
        self, life: RecordedLife, directory: Path | None, *, is_shared: bool = False
    ) -> Liveness:
        if life.identity.boot_id != self.identity.boot_id:
            return Liveness(Alive.NOT_PROVEN, Lock.ELSEWHERE.value)
        return super().judge(life, directory, is_shared=is_shared)

    def threads(self, number: int) -> Threads:
        return GreenThreads(number, self._faults)
