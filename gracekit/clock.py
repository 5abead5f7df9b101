"""All clocks, ids and random numbers of the product.

There are four kinds of time, which are never mixed: loop time for deadlines inside
a run, wall time for stored moments, boot time for how long this process may act
unseen by others, and the machine's time for measurements on which no decision
depends. Random ids come from here too, so that a simulation can replace all of it
with a seeded source.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gracekit.end_timer import boottime

_EARLY_S: Final = 0.001
"""A timer may end a little before its time; then its tick must not be found again."""
_KEPT_LINES: Final = 8
"""So many lengths of waits keep their timer while nothing waits, for the next wait."""


class Clock:
    """The production clock; a simulation passes its own subclass."""

    _ticks_from: float | None = None  # loop time of the first tick; None before it is needed
    _wall_of_store: Callable[[], float] | None = None

    def loop(self) -> float:
        """Loop time in seconds; deadlines of drains and calls use it."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Seconds since the epoch: for stored moments, never for liveness or ownership."""
        return time.time() if self._wall_of_store is None else self._wall_of_store()

    def follow(self, wall: Callable[[], float]) -> None:
        """Take wall time from *wall* from now on: hosts that share a store have its clock."""
        self._wall_of_store = wall

    def boot(self) -> float:
        """Seconds since the machine was started, suspended or not: for `Process.end_at`."""
        return boottime()

    def machine(self) -> float:
        """Monotonic seconds of the machine; virtual loop time does not change them."""
        return time.monotonic()

    def new_id(self) -> str:
        """128 random bits as 32 hex digits, the form of oslo's `_unique_id`."""
        return os.urandom(16).hex()

    def new_request_id(self) -> str:
        """An id that sorts by time: 32 hex digits of a UUIDv7 (RFC 9562).

        A store keeps ids in order. So ids that are made one after the other lie in the same pages,
        and a new one costs the same beside a million old ones as beside none.
        """
        digits = self.new_id()
        variant = "89ab"[int(digits[16], 16) & 3]
        return f"{int(self.wall() * 1000):012x}7{digits[13:16]}{variant}{digits[17:]}"

    def tick(self, within_s: float) -> float:
        """The loop time of the last tick in the next *within_s* seconds.

        Ticks are a second apart. Work that is done every few seconds waits for them, so an idle
        process wakes up once a second, and not once for each piece of work. The first call places
        the ticks, so siblings do not act in step. If *within_s* is less than a second, the result
        is simply so many seconds away.
        """
        now = self.loop()
        if within_s < 1:
            return now + within_s
        if self._ticks_from is None:
            self._ticks_from = now
        return self._ticks_from + math.floor(now - self._ticks_from + within_s + _EARLY_S)

    async def wait_tick(
        self, within_s: float, *, unless: asyncio.Future[Any] | None = None
    ) -> float:
        """Wait until `tick`, or until *unless* is done.

        Returns:
            How many seconds it is until that tick, without any delay.
        """
        loop, began_at, at = asyncio.get_running_loop(), self.loop(), self.tick(within_s)
        # Not by `sleep`, which adds the time to a later reading of the clock: only timers that are
        # due at the very same time share a wake-up.
        due = loop.create_future()
        timer = loop.call_at(at, _end, due)
        wake = partial(_end, due)
        if unless is not None:
            unless.add_done_callback(wake)
        try:
            await due
        finally:
            timer.cancel()
            if unless is not None:
                unless.remove_done_callback(wake)
        return at - began_at

    def jitter(self, seconds: float) -> float:
        """*seconds* plus or minus a fifth, so that siblings do not act in step."""
        return seconds * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load, guards nothing


class SharedTimeouts:
    """Time-outs of many short waits, which share timers: one for each wait would cost 4 us.

    Waits of the same length end in the order in which they began, so one timer, for the oldest,
    is enough for all of them.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timers
        self._lines: dict[float, _Line] = {}  # by length in seconds
        self._kept = _KEPT_LINES

    def begin(self, scope: asyncio.Timeout, seconds: float) -> float:
        """Let *scope*, an entered `asyncio.timeout(None)`, expire in *seconds*; see `end`.

        Returns:
            The loop time at which it does.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a program may run a second one, and the first has ended
            self._loop, self._lines = loop, {}
        until = loop.time() + seconds
        line = self._lines.get(seconds)
        if line is None:
            line = self._lines[seconds] = _Line()
            self._kept = _KEPT_LINES
        line.waits[scope] = until
        if line.timer is None:
            line.timer = loop.call_at(until, line.look)
        return until

    def end(self, scope: asyncio.Timeout, seconds: float) -> None:
        """The wait is over; call it as *scope* is left, before the loop goes on."""
        line = self._lines.get(seconds)
        if line is None:
            return
        line.waits.pop(scope, None)
        if not line.waits and len(self._lines) > self._kept:
            del self._lines[seconds]
            line.stop()

    def hasten(self, seconds: float) -> None:
        """Let the waits of now expire in *seconds* at the latest, and `stop`."""
        soon = asyncio.get_running_loop().time() + seconds
        for line in self._lines.values():
            for scope, until in line.waits.items():
                scope.reschedule(min(soon, until))
            line.waits.clear()
        self.stop()

    def stop(self) -> None:
        """Keep no timer for which nothing waits, now and when the last waits end."""
        self._kept = 0
        for seconds, line in list(self._lines.items()):
            if not line.waits:
                del self._lines[seconds]
                line.stop()


class _Line:
    """Waits of one length, the oldest first, each with the loop time of its end."""

    __slots__ = ("timer", "waits")

    def __init__(self) -> None:
        self.waits: dict[asyncio.Timeout, float] = {}
        self.timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def look(self) -> None:
        """Let those expire whose time it is, and look again at the end of the next."""
        self.timer, loop = None, asyncio.get_running_loop()
        while self.waits:
            scope, until = next(iter(self.waits.items()))
            if until > loop.time():
                self.timer = loop.call_at(until, self.look)
                return
            del self.waits[scope]
            scope.reschedule(until)


def _end(due: asyncio.Future[None], _: asyncio.Future[Any] | None = None) -> None:
    if not due.done():
        due.set_result(None)


def age_s(now: float, then: float) -> float:
    """Seconds from *then* to *now*; a wall clock that stepped back counts as age 0."""
    return max(0.0, now - then)
