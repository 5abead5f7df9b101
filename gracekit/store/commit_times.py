"""How long commits take: for metrics, and to notice a store that has become slow.

A group of batches counts once, from the submission of its first batch to the answer. Waits for
other groups and other processes are included. The committing thread records the times; any
thread may read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

BLOCKED_S: Final = 5.0
"""If no commit succeeds for longer although one is asked for, no request can be accepted."""
RECENT_S: Final = 5.0
"""The longest commit is remembered for this time at least, and for twice this time at most."""


class _Recent(NamedTuple):
    """The longest commit of the `RECENT_S` seconds up to *until*, and of those before them."""

    until: float
    longest_s: float
    before_s: float

    def at(self, now: float) -> _Recent:
        """The record as of *now*, without commits that are older than two spans."""
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
        self._locked_since: float | None = None  # no commit has succeeded since
        self._listeners: tuple[Callable[[float], None], ...] = ()

    def on_commit(self, listener: Callable[[float], None]) -> None:
        """Call *listener* with the duration of each group in seconds, in the committing thread."""
        self._listeners = (*self._listeners, listener)

    def begin(self, submitted_at: float) -> None:
        """Record that the commit of a group begins.

        Args:
            submitted_at: When its first batch was submitted, by `now`.
        """
        self._under_way = submitted_at

    def end(self, *, locked: bool = False) -> None:
        """Record that the group was committed or refused; its batches are answered next.

        Args:
            locked: Whether it was refused because another program has locked the store.
        """
        begun, self._under_way = self._under_way, None
        if begun is None:
            return
        if not locked:
            self._locked_since = None
        elif self._locked_since is None:
            self._locked_since = begun
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
        """Seconds that the longest recent commit took (see `RECENT_S`); from any thread.

        A commit that is still running counts with its time so far.
        """
        recent = self._recent.at(self.now())
        return max(recent.longest_s, recent.before_s, self.under_way_s())

    def under_way_s(self) -> float:
        """Seconds since the running commit was submitted, 0 if none runs; from any thread.

        While commits are refused because another program has locked the store, the time counts from
        the submission of the first refused commit, even when no commit runs.
        """
        begun = self._under_way if self._locked_since is None else self._locked_since
        return 0.0 if begun is None else self.now() - begun

    def blocked(self) -> str | None:
        """Why no request can be accepted now, None if it can; from any thread."""
        blocked_s = self.under_way_s()
        return f"the store takes no writes for {blocked_s:.0f}s" if blocked_s > BLOCKED_S else None
