"""`ThreadedEngine`: what engines share that have one thread to write and one to read.

A commit is answered after its COMMIT. In a forked child the threads do not exist: it is refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any, Final

from gracekit.errors import StoreClosedError, StoreError, UnknownCommitError
from gracekit.store.batch import Batch, BatchOutcome, Row, Value
from gracekit.store.commit_times import CommitTimes
from gracekit.store.engine import Rows
from gracekit.store.state import StatusSource
from gracekit.store.worker import Handler, Worker

Query = tuple[str, Sequence[Value]]


class _Current:
    """The id of this process, cached: two calls of `getpid` cost 1.5 % of a request."""

    pid = os.getpid()

    @classmethod
    def look(cls) -> None:
        """Refresh it; called in a forked child before its own code runs."""
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Current.look)


class ThreadedEngine(StatusSource):
    """An engine with two threads; a subclass opens what each of them uses.

    Args:
        where: Names the store in messages.
        name: Of the threads.
        patience_s: Seconds from its submission that a batch waits for another program's lock.
    """

    def __init__(self, where: str, name: str, *, patience_s: float) -> None:
        super().__init__()
        self.commits: Final = CommitTimes()
        self._where = where
        self._name = name
        self._patience_s = patience_s
        self._pid = _Current.pid
        self._started = False  # the threads exist
        self._open = False  # jobs are accepted
        self._changing = asyncio.Lock()
        self._ending: list[Worker[Any, Any]] = []
        self._writer: Worker[Batch, Rows]  # both are replaced by each start
        self._reader: Worker[Query, list[Row]]

    def _open_writer(self) -> Handler[Batch, Rows]:
        """Open and migrate the store, on the thread that writes."""
        raise NotImplementedError

    def _open_reader(self) -> Handler[Query, list[Row]]:
        """Open the store for queries, on the thread that reads."""
        raise NotImplementedError

    def _look_once(self) -> None:
        """What `start` does when both threads have opened the store."""

    async def start(self) -> None:
        """See `Engine.start`; a second call does nothing."""
        async with self._changing:
            if self._started:
                return
            self._loop = asyncio.get_running_loop()
            self._pid = _Current.pid
            self.guarded = None
            self._writer = Worker(
                f"{self._name}-writer", self._open_writer, self.commits, self._patience_s
            )
            self._reader = Worker(f"{self._name}-reader", self._open_reader)
            try:
                await self._writer.start()
                await self._reader.start()
            except BaseException:
                self._ending += [worker for worker in (self._reader, self._writer) if worker.begun]
                for worker in self._ending:
                    worker.end()
                raise
            self._look_once()
            self._started = self._open = True

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if _Current.pid != self._pid:
            return  # in a forked child: the threads exist only in the parent
        async with self._changing:
            self._open = False
            if self._started:
                # Stop the writer last: SQLite's empties the WAL, which an open reader prevents.
                self._ending += [self._reader, self._writer]
                self._started = False
            while self._ending:  # includes the threads of a start that failed
                await self._ending[0].stop()
                del self._ending[0]

    async def commit(self, batch: Batch) -> Rows:
        """See `Engine.commit`."""
        return await self.submit(batch)

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        """See `Engine.submit`."""
        if (refusal := self._refusal()) is not None:
            return answered(refusal, self._loop)
        return self._writer.ask(batch)

    def commit_from_thread(self, batch: Batch, *, timeout_s: float) -> Rows:
        """See `Engine.commit_from_thread`."""
        if (refusal := self._refusal()) is not None:
            raise refusal
        future: concurrent.futures.Future[Rows] = concurrent.futures.Future()
        self._writer.put(batch, future)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise UnknownCommitError(
                f"the batch {batch.point.value} was not committed within {timeout_s} s and may "
                f"still be; read the rows again before acting"
            ) from error

    async def query(self, sql: str, *params: Value) -> list[Row]:
        """See `Engine.query`; runs on a separate read-only connection."""
        if (refusal := self._closed()) is not None:
            raise refusal
        return await self._reader.ask((sql, params))

    def _refusal(self) -> StoreError | None:
        """The error for a commit at this moment; None if commits are possible."""
        if self._status.error is not None:
            return self._status.refusal()
        return self._closed()

    def _closed(self) -> StoreError | None:
        if not self._open:
            return StoreClosedError(f"{self._where} is not open; start the store before using it")
        if _Current.pid != self._pid:
            return StoreError(
                f"{self._where} was opened by process {self._pid}, of which process {_Current.pid} "
                f"is a fork; open a store after forking"
            )
        return None


def answered(outcome: BatchOutcome, loop: asyncio.AbstractEventLoop | None) -> asyncio.Future[Rows]:
    """A future that is done, with *outcome*."""
    # Prefer the engine's own loop: in a forked child no loop is running.
    future: asyncio.Future[Rows] = (loop or asyncio.get_running_loop()).create_future()
    if isinstance(outcome, StoreError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    return future
