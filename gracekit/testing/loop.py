"""An event loop in virtual time: instead of waiting it jumps to the next timer.

With a seed it also shuffles the ready callbacks before each iteration. So each seed
gives another legal order of events, and the same seed always gives the same order.

It waits for working threads in real time; virtual time stands still meanwhile. There
is no network: the loop cannot watch sockets or files.
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

# The simulated process that a callback belongs to; None for the machine around them.
owner: Final[contextvars.ContextVar[Hashable]] = contextvars.ContextVar("owner", default=None)

_PACKAGE: Final = Path(__file__).resolve().parents[1]

THREAD_PATIENCE_S: Final = 60.0
"""Real seconds after which a working thread is considered stuck."""


class NothingLeftError(RuntimeError):
    """Every task waits, but no timer and no thread is left that could wake one."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, with an order that a seed determines.

    Args:
        seed: None for asyncio's order, in which callbacks became ready.
    """

    # asyncio's names of its timers and of its ready callbacks.
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

    # -- time ---------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _run_once(self) -> None:
        """One iteration, as asyncio's loop makes it, but with virtual time and seeded order."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
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
        """With nothing ready, wait for a working thread, or else jump to the next timer."""
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

    # -- freezing simulated processes -----------------------------------------------------

    def freeze(self, who: Hashable) -> None:
        """Run no callback of *who* until `thaw`, as SIGSTOP does to a process."""
        self._frozen.setdefault(who, [])

    def thaw(self, who: Hashable) -> None:
        """Let *who* go on; its timers that expired meanwhile are due at once."""
        self._ready.extend(self._frozen.pop(who, []))

    def _freezes(self, handle: asyncio.Handle) -> bool:
        held = self._frozen.get(handle._context.get(owner))  # type: ignore[attr-defined]  # noqa: SLF001
        if held is None:
            return False
        held.append(handle)
        return True

    # -- threads ------------------------------------------------------------------------

    def thread_begins(self) -> None:
        """Count a working thread; virtual time stands still until all have ended."""
        self._threads_at_work += 1

    def thread_ended(self) -> None:
        """Count the end of a working thread; call both on the loop's thread."""
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
        """Does nothing, as there are no events of sockets or files."""


def waiting_at(loop: asyncio.AbstractEventLoop) -> str:
    """`; waiting: main() at test_it.py:12`, for all waiting tasks that are not gracekit's own."""
    lines = []
    for task in asyncio.all_tasks(loop):
        for frame in task.get_stack(limit=1):
            path = Path(frame.f_code.co_filename)
            if not path.is_relative_to(_PACKAGE):
                lines.append(f"{frame.f_code.co_name}() at {path.name}:{frame.f_lineno}")
    return f"; waiting: {', '.join(sorted(lines))}" if lines else ""


def _unscheduled(timer: asyncio.TimerHandle) -> asyncio.TimerHandle:
    """Mark a timer as removed from the heap, as asyncio's loop does."""
    timer._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001
    return timer


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """Run *main* in virtual time, as `asyncio.run` does in real time.

    Args:
        main: The coroutine; its result is returned.
        seed: None for asyncio's order of callbacks; a number for another legal order.

    Raises:
        TypeError: *main* is no coroutine.
    """
    given: object = main
    if not asyncio.iscoroutine(given):
        name = getattr(given, "__name__", "main")
        raise TypeError(f"run({given!r}) is no coroutine: call the function, as run({name}())")
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(main)


def owned_by(who: object) -> contextvars.Context:
    """A context in which tasks and callbacks belong to *who*."""
    context = contextvars.copy_context()
    context.run(owner.set, who)
    return context
