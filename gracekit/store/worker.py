"""A daemon thread between the loop and a connection.

It takes everything that waits, hands it to its handler at once, and answers
all of it with a single wake-up of the loop. A job that comes alone waits for
no timer and no companion.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from gracekit.errors import StoreError, UnknownCommitError
from gracekit.store.commit_times import CommitTimes

J = TypeVar("J")
A = TypeVar("A")
_Job_contra = TypeVar("_Job_contra", contravariant=True)
_Answer_co = TypeVar("_Answer_co", covariant=True)


class Handler(Protocol[_Job_contra, _Answer_co]):
    """What a worker drives; made, used and closed on its thread."""

    def await_turn(self) -> None:
        """Wait until work may begin; called before the waiting jobs are taken."""

    def run(self, jobs: Sequence[_Job_contra], /) -> Sequence[_Answer_co | StoreError]:
        """Do *jobs*; one outcome each, in their order."""

    def close(self) -> None:
        """Let go of everything; must not raise."""


class Worker(Generic[J, A]):
    """One thread and the queue before it, used for one start and one stop.

    Args:
        name: Of the thread.
        open_handler: Called on the thread; what it raises, `start` raises.
        times: Notes how long each group of jobs took; None to note nothing.

    Attributes:
        begun: Whether there is a thread, or was one.
    """

    def __init__(
        self,
        name: str,
        open_handler: Callable[[], Handler[J, A]],
        times: CommitTimes | None = None,
    ) -> None:
        self._open_handler = open_handler
        self._times = times
        self._queue: queue.SimpleQueue[_Job[J, A] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.begun = False

    async def start(self) -> None:
        """Return when the handler is open; cancelled, `stop` is due all the same."""
        self._thread.start()
        self.begun = True
        await self._opened

    def end(self) -> None:
        """Ask the thread to do what is queued and end; does not wait."""
        self._queue.put(None)

    async def stop(self) -> None:
        """As `end`, and wait until all is answered and closed; may be called twice."""
        self.end()
        await asyncio.wait([self._ended])

    def ask(self, job: J) -> asyncio.Future[A]:
        """Queue a job, from the loop's thread."""
        waiter: asyncio.Future[A] = self._loop.create_future()
        self._queue.put((job, waiter, self._now()))
        return waiter

    def put(self, job: J, waiter: concurrent.futures.Future[A]) -> None:
        """Queue a job from any thread; its waiter is answered at once, not by way of the loop."""
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
        while (first := self._queue.get()) is not None:
            if self._times is not None:
                self._times.begin(first[2])
            try:
                handler.await_turn()
            except OSError as error:
                self._answer([(first[1], StoreError(f"the store has no -turn file: {error}"))])
                continue
            jobs, waiters, last = self._take(first)
            self._answer(list(zip(waiters, _run(handler, jobs), strict=True)))
            if last:
                break
        handler.close()

    def _take(self, first: _Job[J, A]) -> tuple[list[J], list[_Waiter[A]], bool]:
        """All that waits now, *first* in front, and whether the stop was among it."""
        jobs, waiters = [first[0]], [first[1]]
        for _ in range(self._queue.qsize()):
            item = self._queue.get_nowait()
            if item is None:
                return jobs, waiters, True
            jobs.append(item[0])
            waiters.append(item[1])
        return jobs, waiters, False

    def _answer(self, answers: list[tuple[_Waiter[A], A | StoreError]]) -> None:
        if self._times is not None:
            self._times.end()
        for waiter, outcome in answers:
            # Not by way of the loop, which may be what its thread is waiting for.
            if isinstance(waiter, concurrent.futures.Future):
                _settle(waiter, outcome)
        self._post(_settle_all, answers)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        # A closed loop has nobody left who waits; the commit holds all the same.
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
    if waiter.done():  # cancelled by who awaited it, or answered from the thread
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
