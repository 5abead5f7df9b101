"""A worker: one thread of an engine, its queue of jobs, and the group that it makes of them.

The thread takes all waiting jobs, passes them to its handler as one group, and answers them with a
single wake-up of the loop. A lone job is done at once: the thread does not wait for more to come.
Jobs that are refused because the store is locked are retried.

Only the thread refers to its handler. So a forked child, which has no such thread, never closes a
connection of its parent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from gracekit.errors import StoreError, StoreLockedError, UnknownCommitError
from gracekit.store.commit_times import CommitTimes

J = TypeVar("J")
A = TypeVar("A")
_Job_contra = TypeVar("_Job_contra", contravariant=True)
_Answer_co = TypeVar("_Answer_co", covariant=True)


class Handler(Protocol[_Job_contra, _Answer_co]):
    """Does a worker's jobs; it is made, used and closed on the worker's thread."""

    @property
    def pause_s(self) -> float | None:
        """Without a job for so many seconds, `mend` is called; None: nothing is to be mended."""

    def mend(self) -> None:
        """Try to reach the store again; must not raise."""

    def await_turn(self) -> None:
        """Wait until work may begin; called before the waiting jobs are collected."""

    def run(self, jobs: Sequence[_Job_contra], /) -> Sequence[_Answer_co | StoreError]:
        """Do *jobs*; return one outcome for each, in order."""

    def close(self) -> None:
        """Release all resources; must not raise."""


class Worker(Generic[J, A]):
    """One thread and its queue of jobs; can be started and stopped once.

    Args:
        name: Of the thread.
        open_handler: Called on the thread; `start` raises what it raises.
        times: Records how long each group of jobs took; None to record nothing.
        patience_s: Seconds from the submission of a job for which it is tried again.

    Attributes:
        begun: Whether the thread was ever started.
    """

    def __init__(
        self,
        name: str,
        open_handler: Callable[[], Handler[J, A]],
        times: CommitTimes | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._open_handler = open_handler
        self._patience_s = patience_s
        self._times = times
        self._queue: queue.SimpleQueue[_Job[J, A] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.begun = False

    async def start(self) -> None:
        """Start the thread, and wait until its handler is open.

        If this is cancelled, call `stop` nevertheless: the thread runs on.
        """
        self._thread.start()
        self.begun = True
        await self._opened

    def end(self) -> None:
        """Ask the thread to finish the queued jobs and end; does not wait for it."""
        self._queue.put(None)

    async def stop(self) -> None:
        """As `end`, and wait until all jobs are answered and the handler is closed.

        May be called twice.
        """
        self.end()
        await asyncio.wait([self._ended])

    def ask(self, job: J) -> asyncio.Future[A]:
        """Queue a job, from the loop's thread."""
        waiter: asyncio.Future[A] = self._loop.create_future()
        self._queue.put((job, waiter, self._now()))
        return waiter

    def put(self, job: J, waiter: concurrent.futures.Future[A]) -> None:
        """Queue a job from any thread; *waiter* is answered directly from the worker's thread."""
        self._queue.put((job, waiter, self._now()))

    def _now(self) -> float:
        return 0.0 if self._times is None else self._times.now()

    def _main(self) -> None:
        try:
            handler = self._open_handler()
        except BaseException as error:  # noqa: BLE001 - raised again by start()
            self._post(_settle, self._opened, error)
        else:
            self._post(_settle, self._opened, None)
            self._serve(handler)
        self._post(_settle, self._ended, None)

    def _serve(self, handler: Handler[J, A]) -> None:
        jobs: list[_Job[J, A]] = []  # the oldest first
        last = False
        while jobs or not last:
            if not jobs:
                try:
                    first = self._queue.get(timeout=handler.pause_s)
                except queue.Empty:
                    handler.mend()
                    continue
                if first is None:
                    break
                jobs = [first]
            if self._times is not None:
                self._times.begin(jobs[0][2])
            try:
                handler.await_turn()
            except OSError as error:
                lost = f"the store has no -writer file: {error}"
                jobs = self._answer(jobs, [StoreError(lost) for _ in jobs])
                continue
            last = self._take(jobs) or last
            jobs = self._answer(jobs, _run(handler, [job[0] for job in jobs]))
        handler.close()

    def _take(self, jobs: list[_Job[J, A]]) -> bool:
        """Add all waiting jobs to *jobs*; returns whether a stop was queued too."""
        for _ in range(self._queue.qsize()):
            item = self._queue.get_nowait()
            if item is None:
                return True
            jobs.append(item)
        return False

    def _answer(
        self, jobs: list[_Job[J, A]], outcomes: Sequence[A | StoreError]
    ) -> list[_Job[J, A]]:
        """Answer the jobs, except those to try again, which are returned."""
        ended, again, refused = list[tuple[_Waiter[A], A | StoreError]](), list[_Job[J, A]](), True
        for job, outcome in zip(jobs, outcomes, strict=True):
            is_locked = isinstance(outcome, StoreLockedError)
            if is_locked and self._now() - job[2] < self._patience_s:
                again.append(job)
                continue
            ended.append((job[1], outcome))
            refused &= is_locked
        if ended and self._times is not None:
            self._times.end(locked=refused)
        for waiter, outcome in ended:
            # Directly, not through the loop: the loop's own thread may be blocked on this waiter.
            if isinstance(waiter, concurrent.futures.Future):
                _settle(waiter, outcome)
        self._post(_settle_all, ended)
        return again

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        # If the loop is closed, nothing waits for the answer; the commit is done nevertheless.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


_Waiter = asyncio.Future[A] | concurrent.futures.Future[A]
_Job = tuple[J, _Waiter[A], float]
"""A job, the waiter for its answer, and the time of its submission."""


def _run(handler: Handler[J, A], jobs: Sequence[J]) -> Sequence[A | StoreError]:
    try:
        return handler.run(jobs)
    except BaseException as error:  # noqa: BLE001 - the thread must go on answering
        return [
            UnknownCommitError(f"the store's thread failed ({error!r}); read the rows again")
            for _ in jobs
        ]


def _settle_all(answers: list[tuple[_Waiter[A], A | StoreError]]) -> None:
    for waiter, outcome in answers:
        _settle(waiter, outcome)


def _settle(waiter: _Waiter[A], outcome: A | BaseException) -> None:
    if waiter.done():  # the waiting code cancelled it, or it was answered from the thread
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
