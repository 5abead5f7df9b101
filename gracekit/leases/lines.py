"""Lines in the process: FIFO, one a resource, so that its tasks take turns.

The lease row keeps other processes out; the line keeps order inside this one
and costs no commit. A lane's slots, its threads and a method's slots are lines
too, only wider. A line exists only while somebody stands in it.

Recovered rows and new requests wait in one line, each kind in its own order.
While both wait, every other place goes to a recovered row.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass


class Kind(enum.Enum):
    """Who waits in a line."""

    SETTLING = "settling"  # recovery, which asks what became of a resource: it goes first
    RECOVERED = "recovered"  # a row of the record that nobody worked on
    NEW = "new"  # a delivery


Waiter = asyncio.Future[None]


class _Waiting:
    """Those who wait in one line, a queue for each kind; at least one waits.

    Attributes:
        recovered_last: Whether the last place given went to a recovered row.
    """

    __slots__ = ("new", "recovered", "recovered_last", "settling")

    def __init__(self) -> None:
        self.settling: deque[Waiter] = deque()
        self.recovered: deque[Waiter] = deque()
        self.new: deque[Waiter] = deque()
        self.recovered_last = False

    def of(self, kind: Kind) -> deque[Waiter]:
        """The queue of that kind."""
        match kind:
            case Kind.SETTLING:
                return self.settling
            case Kind.RECOVERED:
                return self.recovered
            case Kind.NEW:
                return self.new

    def next(self) -> Waiter:
        """Take out who is next."""
        if self.settling:
            return self.settling.popleft()
        # Every other place, while both wait: neither kind can keep the other from beginning.
        self.recovered_last = bool(self.recovered) and not (self.new and self.recovered_last)
        return (self.recovered if self.recovered_last else self.new).popleft()

    def __bool__(self) -> bool:
        return bool(self.settling or self.recovered or self.new)


@dataclass(slots=True)
class _Line:
    inside: int = 0
    too_many: int = 0  # of those inside, since the width shrank: their places are not refilled
    waiting: _Waiting | None = None  # made for the first who waits: mostly nobody does

    def forget_queues_if_empty(self) -> None:
        """Nobody waits any more."""
        if not self.waiting:
            self.waiting = None

    def admit_next(self) -> bool:
        """Give a place to the next in line; false if the line is empty."""
        while self.waiting is not None:
            waiter = self.waiting.next()
            self.forget_queues_if_empty()
            if not waiter.done():
                waiter.set_result(None)
                return True
        return False


class Lines:
    """Lines of one process, by key. All calls on the event loop."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def enter_nowait(self, key: Hashable, width: int = 1) -> bool:
        """Take a place inside if one of *width* is free and nobody waits for it."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        elif line.inside >= width or line.waiting is not None:
            return False
        line.inside += 1
        return True

    def is_full(self, key: Hashable, width: int = 1) -> bool:
        """Whether who enters now has to wait."""
        line = self._lines.get(key)
        return line is not None and (line.inside >= width or line.waiting is not None)

    async def enter(
        self, key: Hashable, width: int = 1, *, kind: Kind = Kind.NEW, first: bool = False
    ) -> None:
        """Wait at the end of the line until a place inside is ours.

        When cancelled, the wait is given up; a place that came at the same
        moment goes to the next.

        Args:
            key: Which line.
            width: Places inside.
            kind: With whom to queue.
            first: Queue in front of our kind: for somebody whose turn it was before.
        """
        if self.enter_nowait(key, width):
            return
        line = self._lines[key]
        if line.waiting is None:
            line.waiting = _Waiting()
        queue = line.waiting.of(kind)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        (queue.appendleft if first else queue.append)(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.leave(key)
            else:
                self._give_up(line, queue, waiter)
            raise

    def _give_up(self, line: _Line, queue: deque[Waiter], waiter: Waiter) -> None:
        with contextlib.suppress(ValueError):  # whoever left has passed us over already
            queue.remove(waiter)
        line.forget_queues_if_empty()

    def leave(self, key: Hashable) -> None:
        """Give our place inside to the next in line."""
        line = self._lines[key]
        if line.too_many:
            line.too_many -= 1
        elif line.admit_next():
            return
        line.inside -= 1
        if line.inside == 0:
            del self._lines[key]

    def resize(self, key: Hashable, width: int) -> None:
        """Let *width* be inside from now on; this admits waiters at once if there is room."""
        line = self._lines.get(key)
        if line is None:
            return
        line.too_many = max(0, line.inside - width)
        while line.inside < width and line.admit_next():
            line.inside += 1

    def is_settling(self, key: Hashable) -> bool:
        """Whether recovery waits for the place of somebody inside."""
        line = self._lines.get(key)
        return line is not None and line.waiting is not None and bool(line.waiting.settling)
