"""Durations of a method's last attempts, from which the end of a task is estimated.

For each method the durations of the last successful attempts are kept in memory;
at start they are read from the journal. With too few of them, or once a task has
run longer than all of them, there is no estimate.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from typing import Final

KEPT: Final = 64
"""Attempts that are kept for each method."""
FEWEST: Final = 5
"""With fewer attempts there is no estimate."""
QUANTILE: Final = 0.95
MethodKey = tuple[str | None, str]


class Durations:
    """Seconds that the last attempts of one method took. May be read from any thread."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """Add the duration of an attempt that has succeeded."""
        self._last.append(seconds)

    @property
    def usual(self) -> float | None:
        """Seconds within which 95 % of the kept attempts ended; None if there are too few."""
        return _high(sorted(self._last.copy())) if len(self._last) >= FEWEST else None

    def expected(self, elapsed_s: float) -> float | None:
        """Seconds from start to end of an attempt that has run for *elapsed_s*.

        The 95 % quantile of the kept attempts that took longer than that; None
        if too few are kept, or none took longer.
        """
        known = sorted(self._last.copy())
        if len(known) < FEWEST:
            return None
        longer = known[bisect.bisect_right(known, elapsed_s) :]
        return _high(longer) if longer else None


def _high(ordered: list[float]) -> float:
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1]


class History:
    """The durations of every method of one service."""

    def __init__(self) -> None:
        self._methods: dict[MethodKey, Durations] = {}

    def of(self, namespace: str | None, method: str) -> Durations:
        """The durations of one method; made empty if there are none."""
        key = (namespace, method)
        known = self._methods.get(key)
        if known is None:
            known = self._methods[key] = Durations()
        return known

    def seed(
        self, attempts: Iterable[tuple[str | None, str, float]], known: Iterable[MethodKey]
    ) -> None:
        """Add attempts from the journal, oldest first, of methods in *known*.

        Args:
            attempts: (namespace, method, seconds) of each.
            known: The methods that this version of the service has.
        """
        wanted = set(known)
        for namespace, method, seconds in attempts:
            if (namespace, method) in wanted:
                self.of(namespace, method).add(seconds)
