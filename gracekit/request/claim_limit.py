"""The claim limit: how many recovered rows of a lane may be claimed here before it is their turn.

The limit is low, so that siblings can claim the other rows. A row that waits
for something other than the lane, such as a busy resource, no longer counts as
ahead: otherwise it would keep the rows behind it from starting.
"""

from __future__ import annotations

import asyncio


class ClaimLimit:
    """The recovered rows of one lane in this process.

    Args:
        ahead: How many claimed rows may wait for a slot of the lane.
        total: How many claimed rows may be in flight.
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
        """Count up to *most* more rows; returns how many the limit allowed."""
        number = 0
        while number < most and self.take():
            number += 1
        return number

    def widen(self, by: int) -> None:
        """Let *by* more rows wait for a slot of the lane; fewer if it is negative."""
        self._ahead += by
        self._changed.set()

    def begin(self) -> None:
        """A row has started, or waits for something else than a slot: allow the next claim."""
        self._ahead += 1
        self._changed.set()

    def leave(self) -> None:
        """A row for which `begin` was called is no longer in flight in this process."""
        self._room += 1
        self._changed.set()

    async def wait_change(self) -> None:
        """Wait until the limit has changed, or `wake` is called."""
        self._changed.clear()
        await self._changed.wait()

    def wake(self) -> None:
        """End each `wait_change`."""
        self._changed.set()
