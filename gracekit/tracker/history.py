"""How long a method's attempts take: what the expected finish of a task rests on.

Of each method the last attempts that succeeded are kept, in memory, and seeded
from the journal at start. With too few of them, or once a task has run longer
than all of them, nothing is expected: an estimate is never invented.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from gracekit.store.engine import Engine

KEPT: Final = 64
"""Attempts that are kept of each method."""
FEWEST: Final = 5
"""Fewer are no history."""
QUANTILE: Final = 0.95
SEED_ROWS: Final = 2000
"""Ended rows that a start looks at, so that its cost does not grow with the store."""

# A resumed attempt did a part of the work only, so first ones count alone.
_SEED: Final = """
SELECT namespace, method, finished_at - started_at FROM (
    SELECT * FROM task WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT ?)
WHERE state = 'succeeded' AND attempts = 1 AND service = ? AND started_at IS NOT NULL
    AND finished_at >= started_at ORDER BY finished_at"""

Key = tuple[str | None, str]


class Durations:
    """Seconds that the last attempts of one method took. May be asked from any thread."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """One more attempt has succeeded."""
        self._last.append(seconds)

    def expected(self, elapsed_s: float) -> float | None:
        """Seconds from start to end of an attempt that has run for *elapsed_s*.

        A high quantile of those kept attempts that took longer than that; None
        if there are too few at all, or none took longer.
        """
        known = sorted(self._last.copy())
        if len(known) < FEWEST:
            return None
        longer = known[bisect.bisect_right(known, elapsed_s) :]
        if not longer:
            return None
        return longer[math.ceil(QUANTILE * len(longer)) - 1]


class History:
    """The durations of every method of one service."""

    def __init__(self) -> None:
        self._methods: dict[Key, Durations] = {}

    def of(self, namespace: str | None, method: str) -> Durations:
        """The durations of one registered method."""
        key = (namespace, method)
        known = self._methods.get(key)
        if known is None:
            known = self._methods[key] = Durations()
        return known

    async def seed(self, engine: Engine, *, service: str, methods: Iterable[Key]) -> None:
        """Take the last attempts of *methods* from the journal.

        Raises:
            StoreError: it cannot be read; nothing is expected then.
        """
        wanted = set(methods)
        for namespace, method, seconds in await engine.query(_SEED, SEED_ROWS, service):
            key = (None if namespace is None else str(namespace), str(method))
            if key in wanted:
                self.of(*key).add(float(seconds or 0.0))
