"""`Engine`, the interface of all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Protocol

from gracekit.errors import StoreFencedError
from gracekit.store.batch import Batch, Row, Value
from gracekit.store.commit_times import CommitTimes
from gracekit.store.state import OnStatus, StoreStatus

Rows = list[list[Row]]


class Queries(Protocol):
    """Anything that answers queries: an `Engine` or a `StoreReader`."""

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`."""
        ...


class Aside(Protocol):
    """A connection beside the one that commits: it takes no lock of the store and asks no guard."""

    def origin(self) -> str:
        """Which server answers; another one, or one that was restored, has another origin.

        Raises:
            StoreUnreachableError: none answers.
        """
        ...

    def ask(self, sql: str, *params: Value) -> list[Row]:
        """Commit one statement, durably; returns its rows.

        Raises:
            StoreUnreachableError: it is not known whether it was committed.
        """
        ...


class Engine(Protocol):
    """A database that commits batches and answers queries."""

    @property
    def status(self) -> StoreStatus:
        """Whether the store can be used; a file is never UNREACHABLE.

        While it cannot be used, every commit fails at once with the same message.
        """
        ...

    def on_status(self, callback: OnStatus) -> None:
        """Call *callback* on the loop, once for each change of the status, in order.

        If the store is not reachable now, *callback* is soon called with the present status.
        """

    @property
    def commits(self) -> CommitTimes:
        """How long commits take; the same object for as long as the engine lives."""
        ...

    def guard(self, sql: str, *params: Value) -> None:
        """Commit nothing more unless *sql* returns a row: the run that commits may still act.

        It is asked in the transaction of each commit, before all other statements, so that a run
        whose rows were taken over leaves none that recovery would miss. If it returns no row, the
        store is FENCED. `start` forgets it.
        """

    def fence(self) -> StoreFencedError:
        """Become FENCED: this run may not act any more. From any thread; returns the error."""
        ...

    def distrust(self, why: str | None) -> None:
        """Be UNREACHABLE, whatever the server answers, until it is called with None.

        For a run whose beats fail: others may declare it dead soon, and it must begin nothing.
        """

    def keep_aside(self, work: Callable[[Aside], float], *, within_s: float) -> Callable[[], None]:
        """Call *work* on a thread of its own, again after as many seconds as it returns.

        Only for a store that hosts share, once started.

        Args:
            work: Gets a connection of its own; it may raise nothing.
            within_s: Seconds within which a statement must be answered.

        Returns:
            Ends it; a call of *work* that is under way goes on to its end.
        """
        ...

    async def start(self) -> None:
        """Open the database and migrate it to the newest schema.

        Raises:
            ConfigError: the path, the file or its schema cannot be used.
            DependencyError: opening failed, for example by an I/O error.
        """

    def wall(self) -> float:
        """Seconds since the epoch, by the clock that all who use the store share."""
        ...

    async def identity(self) -> str | None:
        """A string that no other store has; a copy has another one. Asked after `start`.

        None for a store that no other process can open.
        """
        ...

    async def stop(self) -> None:
        """Answer all submitted jobs, then close; may be called twice or before `start`."""

    async def commit(self, batch: Batch) -> Rows:
        """Commit *batch*, and return what each statement returned, in their order.

        Raises:
            ConflictError: a statement touched another number of rows than its `expect`; nothing
                was done.
            UnknownCommitError: it is not known whether the batch was committed.
            StoreUnreachableError: nothing was done; a later try may succeed.
            StoreFinalError: broken or fenced; nothing was done, and no later try can succeed.
            StoreError: refused, or the database stayed locked; nothing was done.
        """

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        """As `commit`, but the batch is queued, in the order of calls, when this returns.

        Cancelling the future does not stop the commit; only its answer is lost.
        """

    def commit_from_thread(self, batch: Batch, *, timeout_s: float) -> Rows:
        """As `commit`, for a thread that must not wait for the loop.

        Raises:
            UnknownCommitError: also if there is no answer within *timeout_s* seconds.
        """

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """Run a SELECT on the committed rows.

        Raises:
            StoreError: the SQL is wrong, or writes.
        """

    def look_at_files(self) -> Hashable | None:
        """Become BROKEN if the files that `start` opened were removed or replaced.

        Returns:
            A mark of what is committed. If two calls return equal ones, no process has committed
            anything from the first call to the second, so what was read between them is still
            true. None if the engine does not know.
        """
        ...
