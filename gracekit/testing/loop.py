"""An event loop in virtual time: it never waits, it jumps to the next timer.

With a seed it also shuffles what is ready before each iteration, so that every seed
is another legal order of events, and the same seed is always the same one.
Threads are waited for in real time while they work, and time stands still
meanwhile. There is no network: nothing here can be read from or written to.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

# The played process that a callback belongs to; None for the machine around them.
owner: Final[contextvars.ContextVar[Hashable]] = contextvars.ContextVar("owner", default=None)

_PACKAGE: Final = Path(__file__).resolve().parents[1]

THREAD_PATIENCE_S: Final = 60.0
"""Real seconds after which a thread at work counts as one that never ends."""


class NothingLeftError(RuntimeError):
    """Everybody waits for something that no timer and no thread will bring."""


class IterationsExceededError(RuntimeError):
    """The loop went round more often than it may: somebody is busy with nothing."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Virtual time, and an order by seed.

    Args:
        seed: None for the order in which things became ready, as in asyncio.

    Attributes:
        iterations: Times that the loop has gone round.
        max_iterations: After so many it gives up with IterationsExceededError; None for never.
        lag: Asked before each iteration: seconds by which it comes late.
    """

    # asyncio's own names: what waits for its time, and what is ready.
    _scheduled: list[asyncio.TimerHandle]
    _ready: deque[asyncio.Handle]

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._now = 0.0
        self._random = None if seed is None else random.Random(seed)  # noqa: S311 - a replay
        self._frozen: dict[Hashable, list[asyncio.Handle]] = {}
        self._woken = threading.Event()
        self._threads_at_work = 0
        self._error: BaseException | None = None
        self.iterations = 0
        self.max_iterations: int | None = None
        self.lag: Callable[[], float] = lambda: 0.0

    # -- time ---------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _run_once(self) -> None:
        """One iteration; what asyncio's loop does, with another idea of time and order."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.iterations += 1
        if self.max_iterations is not None and self.iterations > self.max_iterations:
            raise IterationsExceededError(
                f"still not done after {self.max_iterations} iterations of the loop"
            )
        self._now += self.lag()
        if not self._ready:
            self._jump()
        self._take_due_timers()
        ready = list(self._ready)
        self._ready.clear()
        if self._frozen:
            ready = [handle for handle in ready if not self._freezes(handle)]
        if self._random is not None:
            self._random.shuffle(ready)
        for handle in ready:
            if not handle._cancelled:  # noqa: SLF001 - as asyncio's own loop
                handle._run()  # noqa: SLF001

    def _jump(self) -> None:
        """Nothing is ready: wait for a thread if one works, else go to the next timer."""
        if self._threads_at_work:
            if not self._woken.wait(THREAD_PATIENCE_S):
                raise NothingLeftError(
                    f"a thread has not come back within {THREAD_PATIENCE_S:g} real seconds; "
                    "virtual time does not pass while a thread works"
                )
            self._woken.clear()
            return
        while self._scheduled and self._scheduled[0]._cancelled:  # noqa: SLF001
            _unscheduled(heapq.heappop(self._scheduled))
        if not self._scheduled:
            raise NothingLeftError(
                "nothing can happen any more: every task waits for something that no timer and "
                f"no thread will bring{waiting_at(self)}"
            )
        self._now = max(self._now, self._scheduled[0].when())

    def _take_due_timers(self) -> None:
        while self._scheduled and self._scheduled[0].when() <= self._now:
            self._ready.append(_unscheduled(heapq.heappop(self._scheduled)))

    def give_up(self, error: BaseException) -> None:
        """Raise *error* out of `run_forever`, before the next iteration."""
        self._error = error

    # -- played processes that are stopped for a while ------------------------------------

    def freeze(self, who: Hashable) -> None:
        """Run nothing of *who* until `thaw`: what SIGSTOP does to a process."""
        self._frozen.setdefault(who, [])

    def thaw(self, who: Hashable) -> None:
        """Let *who* go on; all its timers that ran out meanwhile are due at once."""
        self._ready.extend(self._frozen.pop(who, []))

    def _freezes(self, handle: asyncio.Handle) -> bool:
        held = self._frozen.get(handle._context.get(owner))  # type: ignore[attr-defined]  # noqa: SLF001
        if held is None:
            return False
        held.append(handle)
        return True

    # -- threads ------------------------------------------------------------------------

    def thread_begins(self) -> None:
        """Time stands still until as many threads have ended."""
        self._threads_at_work += 1

    def thread_ended(self) -> None:
        """The other half of `thread_begins`; both on the loop's thread."""
        self._threads_at_work -= 1

    def run_in_executor(  # type: ignore[override]  # the same call, less typed
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """As asyncio's; virtual time stands still until *func* has returned."""
        self.thread_begins()
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(lambda _: self.thread_ended())
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109
        """Wait for the executor's threads, in real time."""
        executor = self._default_executor  # type: ignore[attr-defined]
        if executor is not None:
            executor.shutdown(wait=True)

    def _write_to_self(self) -> None:
        self._woken.set()

    def _process_events(self, event_list: Any) -> None:
        """There are none: nothing here reads or writes."""


def waiting_at(loop: asyncio.AbstractEventLoop) -> str:
    """`; waiting: main() at test_it.py:12`, of all tasks that are not gracekit's own."""
    lines = []
    for task in asyncio.all_tasks(loop):
        for frame in task.get_stack(limit=1):
            path = Path(frame.f_code.co_filename)
            if not path.is_relative_to(_PACKAGE):
                lines.append(f"{frame.f_code.co_name}() at {path.name}:{frame.f_lineno}")
    return f"; waiting: {', '.join(sorted(lines))}" if lines else ""


def _unscheduled(timer: asyncio.TimerHandle) -> asyncio.TimerHandle:
    """As asyncio's loop: a timer must know that it is not in the heap any more."""
    timer._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001
    return timer


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """Run *main* in virtual time, as `asyncio.run` does in real time.

    Args:
        main: What to run; its result is returned.
        seed: None for asyncio's own order; a number for another legal one.

    Raises:
        TypeError: *main* is no coroutine.
    """
    given: object = main
    if not asyncio.iscoroutine(given):
        name = getattr(given, "__name__", "main")
        raise TypeError(f"run({given!r}) is no coroutine: call the function, as run({name}())")
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(main)
