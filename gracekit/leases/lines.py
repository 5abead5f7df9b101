"""Lines in the process: FIFO, one a resource, so that its tasks take turns.

The lease row keeps other processes out; the line keeps order inside this one
and costs no commit. A lane's slots and a method's are lines too, only wider.
A line exists only while somebody stands in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Line:
    inside: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Lines:
    """Lines of one process, by key. All calls on the event loop."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def enter_nowait(self, key: Hashable, width: int = 1) -> bool:
        """Take a place inside if one of *width* is free and nobody waits for it."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        elif line.inside >= width or line.waiting:
            return False
        line.inside += 1
        return True

    async def enter(self, key: Hashable, width: int = 1) -> None:
        """Wait at the end of the line until a place inside is ours.

        When cancelled, the wait is given up; a place that came at the same
        moment goes to the next.
        """
        if self.enter_nowait(key, width):
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = self._lines[key].waiting
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(key)
            else:
                with contextlib.suppress(ValueError):  # whoever left has passed us over already
                    waiting.remove(turn)
            raise

    def leave(self, key: Hashable) -> None:
        """Give our place inside to the next in line."""
        line = self._lines[key]
        while line.waiting:
            turn = line.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        line.inside -= 1
        if line.inside == 0:
            del self._lines[key]
