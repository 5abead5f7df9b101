"""Lines: first-in, first-out queues inside one process, one for each resource.

The lease row keeps other processes out; the line keeps the order inside this
process and costs no commit. A lane's slots, its threads and a method's slots are
lines with more places. A line exists only while a task is in it.

Recovered rows and new requests wait in the same line, each kind in its own order.
While both wait, every second place goes to a recovered row.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import deque
from collections.abc import Hashable

import msgspec


class Kind(enum.Enum):
    """What waits in a line."""

    SETTLING = "settling"  # recovery, which settles an unfinished task: it goes first
    RECOVERED = "recovered"  # an accepted row that this run has claimed
    NEW = "new"  # a delivery


Waiter = asyncio.Future[None]


class _Waiting:
    """The waiters of one line, in a queue for each kind; there is at least one.

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
        """Remove and return the next waiter."""
        if self.settling:
            return self.settling.popleft()
        # While both wait, they alternate, so that neither kind can keep the other from starting.
        self.recovered_last = bool(self.recovered) and not (self.new and self.recovered_last)
        return (self.recovered if self.recovered_last else self.new).popleft()

    def __bool__(self) -> bool:
        return bool(self.settling or self.recovered or self.new)


class _Line(msgspec.Struct):
    inside: int = 0
    too_many: int = 0  # places above the width since it shrank; these are not refilled
    waiting: _Waiting | None = None  # made for the first waiter, as mostly there is none

    def forget_queues_if_empty(self) -> None:
        """Remove the queues if there is no waiter any more."""
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
    """The lines of one process, by key. To be called on the event loop only."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}

    def enter_nowait(self, key: Hashable, width: int = 1) -> bool:
        """Take one of *width* places if one is free and there is no waiter."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        elif line.inside >= width or line.waiting is not None:
            return False
        line.inside += 1
        return True

    def is_full(self, key: Hashable, width: int = 1) -> bool:
        """Whether a task that enters now would have to wait."""
        line = self._lines.get(key)
        return line is not None and (line.inside >= width or line.waiting is not None)

    async def enter(
        self, key: Hashable, width: int = 1, *, kind: Kind = Kind.NEW, first: bool = False
    ) -> None:
        """Wait at the end of the line until the caller has a place.

        If cancelled, the caller leaves the line; a place that it got at the same
        moment goes to the next waiter.

        Args:
            key: Key of the line.
            width: Number of places.
            kind: What waits.
            first: Wait in front of its kind; for a task that has had its turn before.
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
        with contextlib.suppress(ValueError):  # `admit_next` has removed it already
            queue.remove(waiter)
        line.forget_queues_if_empty()

    def leave(self, key: Hashable) -> None:
        """Leave the caller's place to the next waiter."""
        line = self._lines[key]
        if line.too_many:
            line.too_many -= 1
        elif line.admit_next():
            return
        line.inside -= 1
        if line.inside == 0:
            del self._lines[key]

    def resize(self, key: Hashable, width: int) -> None:
        """Change the number of places; waiters get new ones at once."""
        line = self._lines.get(key)
        if line is None:
            return
        line.too_many = max(0, line.inside - width)
        while line.inside < width and line.admit_next():
            line.inside += 1

    def is_settling(self, key: Hashable) -> bool:
        """Whether recovery waits for a place in the line."""
        line = self._lines.get(key)
        return line is not None and line.waiting is not None and bool(line.waiting.settling)
