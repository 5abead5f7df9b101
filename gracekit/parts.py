"""What starts and stops with a service: one contract, and one ordered list of all such parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

import msgspec

Action = Callable[[], Awaitable[object]]
Around = Callable[[str, Awaitable[Any], float], Awaitable[Any]]
"""Awaits one stop and reports what it raises; takes its name, the stop, and the loop time at which
to cancel it."""


class Part(Protocol):
    """Something that starts and stops with the service.

    `start` returns when it works, `stop` when it has stopped. Both may be called twice, in the
    wrong order, by several at once, and be cancelled at any moment. Once a last `stop` has
    returned, no task and no thread of the part is left. Each stop is bounded by its caller, who
    cancels it. A part that was stopped need not work again when it is started.
    """

    async def start(self) -> None:
        """Begin to work."""

    async def stop(self) -> None:
        """End, and wait for the end."""


class StepPart:
    """A part made of two functions, one for its start and one for its stop.

    Args:
        begin: Called at the start; not again unless it raised. None for nothing to do.
        end: Called at each stop, so perhaps twice. None for nothing to do.
    """

    def __init__(self, begin: Action | None = None, *, end: Action | None = None) -> None:
        self._begin = begin
        self._end = end
        self._beginning = asyncio.Lock()

    async def start(self) -> None:
        """Call `begin`, unless it has succeeded before."""
        async with self._beginning:
            if self._begin is not None:
                await self._begin()
                self._begin = None

    async def stop(self) -> None:
        """Call `end`."""
        if self._end is not None:
            await self._end()


class ListedPart(msgspec.Struct, frozen=True):
    """One line of the list.

    Attributes:
        name: Names the part in the log.
        part: Started after those above it, stopped before them.
        reserve_s: Seconds that its stop gets at least: parts below it must end that much earlier.
    """

    name: str
    part: Part
    reserve_s: float = 0.0


class PartList:
    """The parts of one service in their order: starting goes down the list, stopping up.

    If a start or stop was interrupted, calling it again continues at the part where it stood.
    """

    def __init__(self, listed: Sequence[ListedPart]) -> None:
        self._listed = listed
        self._started = 0  # number of parts, from the top, that have started
        self._standing = len(listed)  # number of parts, from the top, that have not stopped

    @property
    def starting(self) -> str:
        """Name of the part that is starting or starts next; of the last one once all have."""
        return self._listed[min(self._started, len(self._listed) - 1)].name

    async def start(
        self, *, through: str | None = None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Start, in order, the parts that have not been started.

        Args:
            through: Name of the last one to start; None for all.
            unless: Called before each part; once it returns true, no more parts are started.
        """
        end = len(self._listed) if through is None else self._place(through) + 1
        while self._started < end and not unless():
            listed = self._listed[self._started]
            await listed.part.start()
            self._started += 1

    async def stop(self, around: Around, *, by: float, above: str | None = None) -> None:
        """Stop the parts that have not been stopped, from the last one up.

        Parts that never started are stopped too, because a start may have been cut short.

        Args:
            around: Runs each stop.
            by: Loop time at which the last of these stops is cancelled.
            above: Stop only the parts below the one of this name; None for all.
        """
        end = 0 if above is None else self._place(above) + 1
        while self._standing > end:
            listed = self._listed[self._standing - 1]
            reserved_s = sum(one.reserve_s for one in self._listed[end : self._standing - 1])
            await around(f"stop of {listed.name}", listed.part.stop(), by - reserved_s)
            self._standing -= 1

    async def undo(self) -> None:
        """After a failed start, stop the part that failed and all that were started before it."""
        async with AsyncExitStack() as stack:  # if one raises, the others are stopped too
            for listed in self._listed[: self._started + 1]:
                stack.push_async_callback(listed.part.stop)

    def _place(self, name: str) -> int:
        return [listed.name for listed in self._listed].index(name)
