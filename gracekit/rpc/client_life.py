"""The life of a client or listener with a connection of its own: in one event loop, to its stop.

Locks, timers and sockets of a loop do not work in another one, and a fork shares the sockets of
its parent. So both are refused before they can break anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from gracekit.errors import ConfigError, DependencyError

ClientStep = Callable[[], Awaitable[None]]


class ClientLife:
    """Starts and stops a client; starts and stops that overlap take turns.

    Args:
        begin: Connects. If it fails, the next start calls it again.
        end: Disconnects, and ends what waits.
        who: Its kind, in error texts.
        way: How it is opened, in error texts.
    """

    def __init__(self, begin: ClientStep, end: ClientStep, *, who: str, way: str) -> None:
        self._begin = begin
        self._end = end
        self._who = who
        self._way = way
        self._home: _Home | None = None  # where it was started; None before, and after a stop
        self._stops = 0  # how often a stop was asked for

    async def start(self) -> None:
        """Begin, unless it has begun. If that fails or is cancelled, end what has begun.

        Raises:
            ConfigError: it was started in another event loop or process, and not stopped there.
            DependencyError: it was stopped while this start waited for another one, or for a stop.
        """
        stops = self._stops
        while True:
            self.check_loop("started")
            if self._stops != stops:
                raise DependencyError(f"this {self._who} was stopped before it had started")
            home = self._home = self._home or _Home()
            if home.ending is not None:
                with contextlib.suppress(Exception):  # whoever stopped it gets the error
                    await self._wait_end(home)
                continue
            try:
                async with home.turn:
                    if home.ending is None:
                        await self._open(home)
                        return
            except Exception:
                with contextlib.suppress(Exception):  # the first error says more
                    await self._wait_end(home)
                raise

    async def _open(self, home: _Home) -> None:
        if home.is_open:
            return
        if type(home.loop).add_reader is asyncio.AbstractEventLoop.add_reader:  # it has no sockets
            raise ConfigError(
                f"this {self._who} opens a real queue, for which virtual time does not wait: let "
                "the test give another one (docs/testing.md, 'A service that calls another one')"
            )
        try:
            await self._begin()
        except BaseException:
            self._ending(home)
            raise
        home.is_open = True

    async def stop(self) -> None:
        """End, if it has begun. If this is cancelled, the end goes on in a task of its own.

        Raises:
            ConfigError: it was started in another event loop or process.
        """
        self.check_loop("stopped")
        self._stops += 1
        home = self._home
        if home is not None:
            await self._wait_end(home)

    async def _wait_end(self, home: _Home) -> None:
        ending = self._ending(home)
        try:
            await asyncio.shield(ending)
        finally:
            if ending.done():
                self._forget(home, ending)  # its callback may be still to come

    def _ending(self, home: _Home) -> asyncio.Task[Any]:
        """The task that ends *home*, which is started if there is none."""
        if home.ending is None or home.ending.cancelled():
            home.ending = asyncio.create_task(self._close(home), name="gracekit-client-stop")
            home.ending.add_done_callback(partial(self._forget, home))
        return home.ending

    async def _close(self, home: _Home) -> None:
        async with home.turn:
            await self._end()

    def _forget(self, home: _Home, ending: asyncio.Task[Any]) -> None:
        if ending.cancelled():
            return  # its loop has ended before all was closed
        ending.exception()  # after a start that failed or was cancelled nobody may look
        if self._home is home:
            self._home = None

    def check(self, what: str) -> None:
        """Check that it has begun in this loop, before *what* is sent.

        Raises:
            DependencyError: it is not started, or is stopped.
            ConfigError: it was started in another event loop or process.
        """
        home = self._home
        if home is not None and home.ending is None and home.is_here():
            return
        self.check_loop(f"asked to send {what}()")
        raise DependencyError(
            f"this {self._who} is not started, or is stopped, so {what}() was not sent: write "
            f"`{self._way}:` around its calls, or await its start()"
        )

    def check_loop(self, asked: str) -> None:
        """Check that no other loop or process has started it, before it is *asked* to do something.

        Raises:
            ConfigError: one has.
        """
        home = self._home
        if home is None or home.is_here():
            return
        if home.pid != os.getpid():
            raise ConfigError(
                f"this {self._who} was started in process {home.pid}, of which this one is a fork, "
                f"and cannot be {asked} here, as both would use one connection: open one in each "
                f"process, after the fork, with `{self._way}`"
            )
        over = ", which is closed" if home.loop.is_closed() else ""
        raise ConfigError(
            f"this {self._who} was started in another event loop{over}, and cannot be {asked} in "
            f"this one: open one for each loop with `{self._way}`, or, where no loop runs, "
            "call by `svc.sync_client(...)` (docs/callers.md, 'From code that is not async')"
        )


class _Home:
    """One life, in the event loop and process that run now.

    Attributes:
        is_open: Whether it has begun; stays so after its end.
        ending: Ends it; also begun if its start has failed.
    """

    __slots__ = ("ending", "is_open", "loop", "pid", "turn")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.turn = asyncio.Lock()
        self.is_open = False
        self.ending: asyncio.Task[Any] | None = None

    def is_here(self) -> bool:
        """Whether the caller runs in its loop and process."""
        return self.loop is asyncio.get_running_loop() and self.pid == os.getpid()
