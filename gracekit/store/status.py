"""Whether a store can be used: four states, their legal steps, and who is notified of a change.

`_NEXT` is the only place that says which state may follow which.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gracekit.errors import StoreBrokenError, StoreError


class StoreState(enum.Enum):
    """Whether a process can use its store."""

    REACHABLE = "reachable"
    UNREACHABLE = "unreachable"  # for now: the engine goes on trying by itself
    FENCED = "fenced"  # for good: others have declared this run dead, and act in its place
    BROKEN = "broken"  # for good: I/O error, full or read-only disk, corruption


_NEXT: Final[Mapping[StoreState, frozenset[StoreState]]] = {
    StoreState.REACHABLE: frozenset({StoreState.UNREACHABLE, StoreState.FENCED, StoreState.BROKEN}),
    StoreState.UNREACHABLE: frozenset({StoreState.REACHABLE, StoreState.FENCED, StoreState.BROKEN}),
    StoreState.FENCED: frozenset(),
    StoreState.BROKEN: frozenset(),
}


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The state of a store since its last change.

    Attributes:
        state: Whether it can be used.
        since: Loop time in seconds of the change; None if there was none yet.
        error: What a commit fails with now; None if it can be used.
    """

    state: StoreState = StoreState.REACHABLE
    since: float | None = None
    error: StoreError | None = None

    @property
    def is_final(self) -> bool:
        """Whether no other state follows: this process commits nothing any more."""
        return not _NEXT[self.state]

    def refusal(self) -> StoreError | None:
        """The error for one more commit, with the same words as all others; None if it may."""
        return None if self.error is None else type(self.error)(str(self.error))


OnStatus = Callable[[StoreStatus], None]


class StatusSource:
    """The part of an engine that knows the state of its store, and notifies of each change."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the engine's start
        self._status = StoreStatus()
        self._stepping = threading.Lock()  # the engine's threads take steps, too
        self._callbacks: list[OnStatus] = []
        self._notices: deque[tuple[OnStatus, StoreStatus]] = deque()

    @property
    def status(self) -> StoreStatus:
        """See `Engine.status`."""
        return self._status

    def on_status(self, callback: OnStatus) -> None:
        """See `Engine.on_status`."""
        with self._stepping:
            self._callbacks.append(callback)
            if self._status.state is not StoreState.REACHABLE:
                self._notify_soon(callback)

    def _become(self, state: StoreState, error: StoreError | None = None) -> None:
        """Take a step, from any thread; one that does not follow the present state is ignored.

        Two threads may meet the same fault, and a connection may come back to a fenced run.
        """
        with self._stepping:
            if state not in _NEXT[self._status.state]:
                return
            since = None if self._loop is None else self._loop.time()
            self._status = StoreStatus(state, since, error)
            for callback in self._callbacks:
                self._notify_soon(callback)

    def _break(self, error: StoreBrokenError) -> None:
        self._become(StoreState.BROKEN, error)

    def _notify_soon(self, callback: OnStatus) -> None:
        # By a queue of our own: a loop that plays other orders of events must not show a
        # subscriber the return of a store before its loss.
        self._notices.append((callback, self._status))
        try:
            (self._loop or asyncio.get_running_loop()).call_soon_threadsafe(self._notify_next)
        except RuntimeError:  # the loop is closed, and its subscribers with it
            self._notices.clear()

    def _notify_next(self) -> None:
        # One at a time, so that a callback that raises does not silence the next.
        callback, status = self._notices.popleft()
        callback(status)
