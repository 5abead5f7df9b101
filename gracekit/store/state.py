"""Whether a store can be used: four states, their legal steps, and notification of changes.

`_NEXT` is the only place that says which state may follow which.
"""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from gracekit.errors import (
    StoreBrokenError,
    StoreError,
    StoreFencedError,
    StoreUnreachableError,
)
from gracekit.store.batch import Value

if TYPE_CHECKING:
    from gracekit.store.engine import Aside


class StoreState(enum.Enum):
    """Whether a process can use its store."""

    REACHABLE = "reachable"
    UNREACHABLE = "unreachable"  # for now: the engine keeps trying to reconnect
    FENCED = "fenced"  # for good: other runs declared this one dead, and act in its place
    BROKEN = "broken"  # for good: I/O error, full or read-only disk, corruption


_NEXT: Final[Mapping[StoreState, frozenset[StoreState]]] = {
    StoreState.REACHABLE: frozenset({StoreState.UNREACHABLE, StoreState.FENCED, StoreState.BROKEN}),
    StoreState.UNREACHABLE: frozenset({StoreState.REACHABLE, StoreState.FENCED, StoreState.BROKEN}),
    StoreState.FENCED: frozenset(),
    StoreState.BROKEN: frozenset(),
}


class StoreStatus(msgspec.Struct, frozen=True):
    """The present state of a store.

    Attributes:
        state: Whether it can be used.
        since: Loop time in seconds of the last change; None if there was none yet.
        error: The error with which commits fail now; None if the store can be used.
    """

    state: StoreState = StoreState.REACHABLE
    since: float | None = None
    error: StoreError | None = None

    @property
    def is_final(self) -> bool:
        """Whether no other state can follow, so that this process can never commit again."""
        return not _NEXT[self.state]

    def refusal(self) -> StoreError | None:
        """A new error for one commit, a copy of `error`; None if commits are possible."""
        return None if self.error is None else type(self.error)(str(self.error))


OnStatus = Callable[[StoreStatus], None]


class StatusSource:
    """The base of engines: holds the status of the store and notifies of each change.

    Attributes:
        guarded: The statement and values of `guard`; None before.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the engine's start
        self._status = StoreStatus()
        self._stepping = threading.Lock()  # the engine's threads change the status too
        self._callbacks: list[OnStatus] = []
        self._reached = StoreStatus()  # what the server says, without `distrust`
        self._distrusted: StoreUnreachableError | None = None
        self.guarded: tuple[str, tuple[Value, ...]] | None = None
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

    def wall(self) -> float:
        """See `Engine.wall`; a store on this machine has the clock of this machine."""
        return time.time()

    def guard(self, sql: str, *params: Value) -> None:
        """See `Engine.guard`."""
        self.guarded = (sql, params)

    def _become(self, state: StoreState, error: StoreError | None = None) -> None:
        """Change the state, from any thread; ignore a change that `_NEXT` does not allow.

        Such changes are normal: two threads may meet the same fault, and a connection may come
        back after the run was fenced.
        """
        with self._stepping:
            if state not in _NEXT[self._reached.state]:
                return
            self._reached = StoreStatus(state, None, error)
            self._show()

    def distrust(self, why: str | None) -> None:
        """See `Engine.distrust`."""
        with self._stepping:
            self._distrusted = None if why is None else StoreUnreachableError(why)
            self._show()

    def _show(self) -> None:
        """Put both together, and tell if that is something new."""
        state, error = self._reached.state, self._reached.error
        if state is StoreState.REACHABLE and self._distrusted is not None:
            state, error = StoreState.UNREACHABLE, self._distrusted
        if state is self._status.state:
            return
        since = None if self._loop is None else self._loop.time()
        self._status = StoreStatus(state, since, error)
        for callback in self._callbacks:
            self._notify_soon(callback)

    def break_(self, error: StoreBrokenError) -> None:
        """The disk has failed: no later commit can succeed."""
        self._become(StoreState.BROKEN, error)

    def fence(self) -> StoreFencedError:
        """The guard found nothing: no later commit can succeed. Returns the error of this one."""
        error = StoreFencedError(
            "this run was declared dead, by an operator or by another run that has taken over its "
            "rows; what it was to write now is not written"
        )
        self._become(StoreState.FENCED, error)
        return error

    def keep_aside(self, work: Callable[[Aside], float], *, within_s: float) -> Callable[[], None]:
        """See `Engine.keep_aside`; a store on this machine needs none."""
        raise NotImplementedError(f"{work} within {within_s} s")

    def _notify_soon(self, callback: OnStatus) -> None:
        # The queue keeps the order: simulation runs callbacks of the loop in random order, and a
        # subscriber must not see the return of a store before its loss.
        self._notices.append((callback, self._status))
        try:
            (self._loop or asyncio.get_running_loop()).call_soon_threadsafe(self._notify_next)
        except RuntimeError:  # the loop is closed, and its subscribers with it
            self._notices.clear()

    def _notify_next(self) -> None:
        # One notice for each call, so that a callback that raises does not prevent the next.
        callback, status = self._notices.popleft()
        callback(status)
