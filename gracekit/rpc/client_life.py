"""The life of a client or listener with a connection of its own: in one event loop, to its stop.

Locks, timers and sockets of a loop do not work in another one. So another loop is refused before
it can break anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
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
        self._has_failed = False  # a start, after which nobody has stopped it

    async def start(self) -> None:
        """Begin, unless it has begun.

        Raises:
            ConfigError: it was started in another event loop, and not stopped there.
        """
        while True:
            self.check_loop("started")
            home = self._home = self._home or _Home()
            if home.ending is not None:
                with contextlib.suppress(Exception):  # whoever stopped it gets the error
                    await self.stop()
                continue
            async with home.turn:
                if home is self._home and home.ending is None:
                    if not home.is_open:
                        await self._open(home)
                    return

    async def _open(self, home: _Home) -> None:
        try:
            await self._begin()
        except BaseException:
            self._home = None  # it may be tried again in any loop
            self._has_failed = True
            raise
        self._has_failed = False
        home.is_open = True

    async def stop(self) -> None:
        """End, if it has begun. If this is cancelled, the end goes on in a task of its own.

        Raises:
            ConfigError: it was started in another event loop.
        """
        self.check_loop("stopped")
        home = self._home
        if home is None:
            if self._has_failed:
                self._has_failed = False
                await self._end()
            return
        if home.ending is None or home.ending.cancelled():
            home.ending = asyncio.create_task(self._close(home), name="gracekit-client-stop")
        await asyncio.shield(home.ending)

    async def _close(self, home: _Home) -> None:
        async with home.turn:
            if home is not self._home:
                return  # its start has failed
            try:
                await self._end()
            except Exception:
                self._home = None
                raise
            self._home = None  # not if it was cancelled half-way, as its loop ends

    def check(self, what: str) -> None:
        """Check that it has begun in this loop, before *what* is sent.

        Raises:
            DependencyError: it is not started, or is stopped.
            ConfigError: it was started in another event loop.
        """
        home = self._home
        if home is not None and home.ending is None and home.loop is asyncio.get_running_loop():
            return
        self.check_loop(f"asked to send {what}()")
        raise DependencyError(
            f"this {self._who} is not started, or is stopped, so {what}() was not sent: write "
            f"`{self._way}:` around its calls, or await its start()"
        )

    def check_loop(self, asked: str) -> None:
        """Check that no other loop has started it, before it is *asked* to do something here.

        Raises:
            ConfigError: one has.
        """
        home = self._home
        if home is None or home.loop is asyncio.get_running_loop():
            return
        over = ", which is closed" if home.loop.is_closed() else ""
        raise ConfigError(
            f"this {self._who} was started in another event loop{over}, and cannot be {asked} in "
            f"this one: open one for each loop with `{self._way}`, or use it in its own loop only, "
            "from other threads through a portal (docs/embedding.md, 'A program without an event "
            "loop')"
        )


class _Home:
    """One life, in the event loop that runs now."""

    __slots__ = ("ending", "is_open", "loop", "turn")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.turn = asyncio.Lock()
        self.is_open = False
        self.ending: asyncio.Task[Any] | None = None
