"""Counts the accounts of a run's store without delaying other reads.

A count walks an index over all rows, which takes a second where a large store is not in the page
cache. The engine has one thread for all its reads, including those of probes and recovery. So the
rows of a file are counted on a connection and a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Final, NamedTuple

from gracekit.errors import GracekitError, StoreError
from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import Accounts, StoreView
from gracekit.process import Threads
from gracekit.store.location import ReadOnlyStore


class Freshness(NamedTuple):
    """How new one kind of reader gets the accounts, and what that may cost.

    Attributes:
        age_s: A count that is younger than so many seconds is not made again.
        pause: The shortest pause after a count, as a multiple of the time that the count took.
    """

    age_s: float
    pause: float


OPERATOR: Final = Freshness(age_s=5.0, pause=100)
"""For an operator who waits for the answer; counts cost 1 % of one processor at most."""
METRIC: Final = Freshness(age_s=60.0, pause=1000)
"""For metrics, which are read all the time; counts cost 0.1 % of one processor at most."""
COUNT_WAIT_S: Final = 1.0
"""A caller waits so many seconds for a count; after that it gets the previous one."""
END_TIMEOUT_S: Final = 1.0
"""A stop waits so many seconds at most for a disk that does not answer."""


class AccountsCount:
    """Counts the accounts on demand, one count at a time, which concurrent callers share.

    Args:
        view: Reads the run's store.
        file: Opens the store once more; None for a store in memory, which the engine of *view*
            counts.
        threads: One thread, for the count.

    Attributes:
        last: The last count, however old; None before the first.
    """

    def __init__(self, view: StoreView, file: ReadOnlyStore | None, threads: Threads) -> None:
        self._view = view
        self._file = file
        self._threads = threads
        self._pending: asyncio.Task[None] | None = None
        self._ended_at: float | None = None  # loop time of the last count's end, even if it failed
        self._took_s = 0.0
        self._failure: Exception | None = None
        self._is_stopped = False
        self.last: Accounts | None = None

    async def fresh(self, freshness: Freshness) -> Accounts | None:
        """The last count, after a new one if *freshness* asks for it; None if there is none.

        Waits `COUNT_WAIT_S` at most, and never raises. A count that takes longer goes on.
        """
        if (pending := self._begin(freshness)) is not None:
            await asyncio.wait({pending}, timeout=COUNT_WAIT_S)
        return self.last

    async def first(self) -> Accounts:
        """As `fresh`, but waits for the first count without a limit.

        Raises:
            StoreError: there is none, because the store cannot be read.
        """
        counted = await self.fresh(OPERATOR)
        if counted is None and self._pending is not None:
            await asyncio.wait({self._pending})
            counted = self.last
        if counted is None:
            failure = self._failure or "the service is about to close its store"
            why = str(failure) or repr(failure)
            raise StoreError(f"the accounts could not be counted: {why}") from self._failure
        return counted

    async def stop(self) -> None:
        """Cancel a count that is under way, and wait until its connection is closed."""
        self._is_stopped = True
        if (pending := self._pending) is not None:
            if self._file is None:
                pending.cancel()
            await asyncio.wait({pending}, timeout=END_TIMEOUT_S)

    def _begin(self, freshness: Freshness) -> asyncio.Task[None] | None:
        """The count under way, or a new one if that is due; None if there is neither."""
        if self._pending is None and not self._is_stopped:
            pause_s = max(freshness.age_s, freshness.pause * self._took_s)
            if self._ended_at is None or self._view.clock.loop() - self._ended_at >= pause_s:
                self._pending = asyncio.create_task(self._count(), name="accounts")
        return self._pending

    async def _count(self) -> None:
        clock = self._view.clock
        began_at = clock.loop()
        try:
            if self._file is None:
                self.last = await self._view.accounts()
            else:
                self.last = await self._threads.run(partial(self._read, self._file))
            self._failure = None
        except Exception as error:
            self._failure = error
            if not isinstance(error, GracekitError):
                raise  # an error in gracekit: the loop logs it
        finally:
            self._ended_at = clock.loop()
            self._took_s = self._ended_at - began_at
            self._pending = None

    def _read(self, file: ReadOnlyStore) -> Accounts:
        """Count; runs in the thread, and only there the connection is used."""
        with contextlib.closing(file):
            file.open(given_up=lambda: self._is_stopped)
            return Accounts.of_rows(file.read(sql.ACCOUNTS))
