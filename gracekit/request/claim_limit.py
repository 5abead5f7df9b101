"""The claim limit: how many recovered rows of a lane may be claimed here before it is their turn.

Few, so that siblings can claim the others. A row that waits for something of
its own, a busy resource say, no longer counts as ahead: it must not keep those
behind it from beginning.
"""

from __future__ import annotations

import asyncio


class ClaimLimit:
    """The recovered rows of one lane in this process.

    Args:
        ahead: How many may wait for the lane itself.
        total: How many may be in flight.
    """

    def __init__(self, *, ahead: int, total: int) -> None:
        self._ahead = ahead
        self._room = total
        self._changed = asyncio.Event()

    def take(self) -> bool:
        """Count one more row, if the limit allows."""
        if self._ahead <= 0 or self._room == 0:
            return False
        self._ahead -= 1
        self._room -= 1
        return True

    def take_some(self, most: int) -> int:
        """Take up to so many; returns how many."""
        number = 0
        while number < most and self.take():
            number += 1
        return number

    def widen(self, by: int) -> None:
        """Let so many more rows wait for the lane itself; fewer, if *by* is negative."""
        self._ahead += by
        self._changed.set()

    def begin(self) -> None:
        """A row has begun, or waits for something of its own: the next may be claimed."""
        self._ahead += 1
        self._changed.set()

    def leave(self) -> None:
        """A row that has begun, or waits for something of its own, is over in this process."""
        self._room += 1
        self._changed.set()

    async def wait_change(self) -> None:
        """Wait until another row may be claimed, or `wake`."""
        self._changed.clear()
        await self._changed.wait()

    def wake(self) -> None:
        """Let who waits look again."""
        self._changed.set()
