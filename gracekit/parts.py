"""What starts and stops with a service: one contract, and one ordered list of all such parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

Action = Callable[[], Awaitable[object]]
Around = Callable[[str, Awaitable[Any], float], Awaitable[Any]]
"""Runs one stop (its name, the stop, loop time at which it is cut), and reports what it raises."""


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
    """A part made of a step that is taken at the start, and of one for the stop.

    Args:
        begin: Taken once; again if it raised. None for nothing.
        end: Taken at each stop, so it may be taken twice. None for nothing.
    """

    def __init__(self, begin: Action | None = None, *, end: Action | None = None) -> None:
        self._begin = begin
        self._end = end
        self._beginning = asyncio.Lock()

    async def start(self) -> None:
        """Take the first step, unless it was taken."""
        async with self._beginning:
            if self._begin is not None:
                await self._begin()
                self._begin = None

    async def stop(self) -> None:
        """Take the last step."""
        if self._end is not None:
            await self._end()


@dataclass(frozen=True, slots=True)
class ListedPart:
    """One line of the list.

    Attributes:
        name: Names the part in the log.
        part: Started after those above it, stopped before them.
        reserve_s: Seconds that its stop gets at least: those below it end so much earlier.
    """

    name: str
    part: Part
    reserve_s: float = 0.0


class PartList:
    """The parts of one service in their order: starting goes down the list, stopping up.

    Each start and each stop is begun once, so both may be called again to go on.
    """

    def __init__(self, listed: Sequence[ListedPart]) -> None:
        self._listed = listed
        self._started = 0  # so many from the top have been started, or were begun to be
        self._standing = len(listed)  # so many from the top have not been stopped

    @property
    def starting(self) -> str:
        """Name of the part that starts, or would start next; of the last one if all have."""
        return self._listed[min(self._started, len(self._listed) - 1)].name

    async def start(
        self, *, through: str | None = None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Start what has not been started, down to the part of that name or to the last.

        Args:
            through: Name of the last one to start; None for all.
            unless: Asked before each part; once it says true nothing more is started.
        """
        end = len(self._listed) if through is None else self._place(through) + 1
        while self._started < end and not unless():
            listed = self._listed[self._started]
            await listed.part.start()
            self._started += 1

    async def stop(self, around: Around, *, by: float, above: str | None = None) -> None:
        """Stop what has not been stopped, from the last one up.

        All are stopped, whether they were started or not: a start may have been cut in the middle.

        Args:
            around: Runs each stop.
            by: Loop time at which the uppermost of them is cut.
            above: Name of the part at which to end, which is not stopped; None for all.
        """
        end = 0 if above is None else self._place(above) + 1
        while self._standing > end:
            listed = self._listed[self._standing - 1]
            reserved_s = sum(one.reserve_s for one in self._listed[end : self._standing - 1])
            await around(f"stop of {listed.name}", listed.part.stop(), by - reserved_s)
            self._standing -= 1

    async def undo(self) -> None:
        """After a start that failed: stop what was started, or begun to be; all of it."""
        async with AsyncExitStack() as stack:  # one that raises does not keep the others
            for listed in self._listed[: self._started + 1]:
                stack.push_async_callback(listed.part.stop)

    def _place(self, name: str) -> int:
        return [listed.name for listed in self._listed].index(name)
