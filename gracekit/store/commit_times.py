"""How long commits take: for metrics, and to notice a store that has become slow.

A group counts once: from the submission of its first batch to the answer, including waits for
other groups and other processes. The thread that commits notes it; any thread may ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

RECENT_S: Final = 5.0
"""The longest commit is remembered for this time at least, and for twice this time at most."""


class _Recent(NamedTuple):
    """The longest commits of the span of `RECENT_S` that ends at *until*, and of the one before."""

    until: float
    longest_s: float
    before_s: float

    def at(self, now: float) -> _Recent:
        """The longest commits that are still recent at that moment."""
        if now < self.until:
            return self
        follows = now < self.until + RECENT_S
        return _Recent(now + RECENT_S, 0.0, self.longest_s if follows else 0.0)


class CommitTimes:
    """The times of one store's commits.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now: Final = now
        self._recent = _Recent(0.0, 0.0, 0.0)
        self._under_way: float | None = None
        self._listeners: tuple[Callable[[float], None], ...] = ()

    def on_commit(self, listener: Callable[[float], None]) -> None:
        """Call *listener* with the seconds of each group, in the thread that commits."""
        self._listeners = (*self._listeners, listener)

    def begin(self, submitted_at: float) -> None:
        """Note that the commit of a group begins.

        Args:
            submitted_at: When its first batch was submitted, by `now`.
        """
        self._under_way = submitted_at

    def end(self) -> None:
        """Note that the group is committed or refused; its answers come next."""
        begun, self._under_way = self._under_way, None
        if begun is None:
            return
        now, recent = self.now(), self._recent
        took_s = now - begun
        if took_s > recent.longest_s or now >= recent.until:  # rarely
            recent = recent.at(now)
            self._recent = recent._replace(longest_s=max(recent.longest_s, took_s))
        for listener in self._listeners:
            try:
                listener(took_s)
            except Exception:  # noqa: BLE001, S110 - the commit stands; its callers wait
                pass

    def longest_s(self) -> float:
        """Seconds of the longest commit of the last moments (`RECENT_S`); from any thread.

        One that is still under way counts with the time that it has taken so far.
        """
        recent = self._recent.at(self.now())
        return max(recent.longest_s, recent.before_s, self.under_way_s())

    def under_way_s(self) -> float:
        """Seconds for which the commit under way has taken; 0 without one; from any thread."""
        begun = self._under_way
        return 0.0 if begun is None else self.now() - begun
