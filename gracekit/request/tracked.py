"""Work that a handler tracks: blocks of `ctx.track`, and calls by `ctx.track_call`.

It may run in a thread of the application. The tracker belongs to the loop, so a thread has the
loop change it. It waits until its block is tracked, and does not wait at the end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gracekit.callables import name_of
from gracekit.request.current import running_in, swap
from gracekit.telemetry.logs import running
from gracekit.tracker.task import TrackedTask

if TYPE_CHECKING:
    from gracekit.request.context import Context

T = TypeVar("T")
ANSWER_S: Final = 10.0
"""Seconds that a thread waits for the loop to track a block."""


class TrackedBlock(AbstractContextManager["Context"], AbstractAsyncContextManager["Context"]):
    """A block of work in the tracker, from its entry to its exit; in any thread.

    The arguments are those of `Context.track`.
    """

    def __init__(
        self, ctx: Context, name: str, *, resource: tuple[str, str] | None, keep_open: bool
    ) -> None:
        self._ctx = ctx
        self._name = f"{ctx.method}:{name}"
        self._resource = resource and (str(resource[0]), str(resource[1]))
        self._keep_open = keep_open
        self._services = ctx._services  # noqa: SLF001 - a block is a part of its Context
        self._work: TrackedTask | None = None
        self._here: tuple[asyncio.Task[Any] | None, int] = (None, 0)
        self._inside: Context | None = None
        self._before: Context | None = None

    def __enter__(self) -> Context:
        self._here = _here(self._services.loop)
        self._inside = self.begin(*self._here)
        self._before = swap(self._inside)
        return self._inside

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if running.get() is self._inside:  # else it is left in another thread or task
            swap(self._before)
        # What is raised into the handler itself is no error of work beside it.
        is_seen = self._is_own(*self._here) and _here(self._services.loop) == self._here
        self.end(None if is_seen else error)

    async def __aenter__(self) -> Context:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def begin(self, here: asyncio.Task[Any] | None, thread_id: int | None) -> Context:
        """Track the block, which runs in the asyncio task *here* or in that thread.

        Returns:
            The context that the block works with.

        Raises:
            RuntimeError: the loop of the service is closed, or blocked for `ANSWER_S`.
        """
        self._work = self._on_loop(partial(self._tracked, here, thread_id))
        if self._work.parent is not None:
            return self._ctx
        alone = copy.copy(self._ctx)
        alone._task, alone._expires_at = self._work, None  # noqa: SLF001
        return alone

    @property
    def is_cancelled(self) -> bool:
        """Whether the block should end; it may have begun to run only now."""
        return self._work is not None and self._work.cancel_cause is not None

    def end(self, error: BaseException | None) -> None:
        """Track the block no more; *error* is what it has raised. May be called twice.

        A thread does not wait for the loop here, as a handler may block the loop until the thread
        has ended.
        """
        assert self._work is not None
        end, loop = self._services.tracker.end_work, self._services.loop
        if _running_loop() is loop:
            end(self._work, error)
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed: no drain waits any more
            loop.call_soon_threadsafe(end, self._work, error)

    def runs_in(self, thread_id: int | None) -> None:
        """Note in which thread the block runs; None for in none any more."""
        assert self._work is not None
        self._work.thread_id = thread_id

    def _is_own(self, here: asyncio.Task[Any] | None, thread_id: int | None) -> bool:
        """Whether code that runs there is the handler's own."""
        task = self._ctx._task  # noqa: SLF001
        return here is task.handler if here else thread_id == (task.thread_id or -1)

    def _tracked(self, here: asyncio.Task[Any] | None, thread_id: int | None) -> TrackedTask:
        task = self._ctx._task  # noqa: SLF001
        is_own = self._is_own(here, thread_id)  # then who cancels the handler cancels the block
        work = self._services.tracker.begin_work(
            self._name,
            self._services.clock,
            about=task.request_id,
            handler=None if is_own else here,
            parent=task if self._keep_open else None,
        )
        work.ops_resource, work.shown_context = self._resource, task.shown_context
        work.handler = here
        if here is None:
            work.thread_id = thread_id
        return work

    def _on_loop(self, track: Callable[[], TrackedTask]) -> TrackedTask:
        """Call *track* in the thread of the loop, and return what it returned."""
        loop = self._services.loop
        if _running_loop() is loop:
            return track()
        tracked: concurrent.futures.Future[TrackedTask] = concurrent.futures.Future()

        def make() -> None:
            if tracked.set_running_or_notify_cancel():
                try:
                    tracked.set_result(track())
                except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                    tracked.set_exception(error)

        loop.call_soon_threadsafe(make)
        with contextlib.suppress(TimeoutError):
            return tracked.result(ANSWER_S)
        if not tracked.cancel():
            return tracked.result()
        raise RuntimeError(
            f"{self._name} cannot be tracked: for {ANSWER_S:.0f} s the event loop has not answered "
            "this thread; look for a handler that blocks it, such as one that waits for this thread"
        )


class TrackedCall:
    """A function that the application will call in a thread, tracked from now on.

    Args:
        block: Tracks it.
        function: Called in the contextvars of the code that makes this object, because a new thread
            has none.
    """

    def __init__(self, block: TrackedBlock, function: Callable[..., Any]) -> None:
        self._block = block
        self._function = function
        self._name = name_of(function)
        self._ctx = block.begin(None, None)
        self._context = contextvars.copy_context()
        self._unbegun = [True]  # who takes it out decides; a `pop` is atomic

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; the block ends with it.

        Raises:
            CancelledError: the call was given up.
        """
        try:
            self._unbegun.pop()
        except IndexError:
            raise self._unbegun_error() from None
        if self._block.is_cancelled:
            self._block.end(error := self._unbegun_error())
            raise error
        return self._context.run(self.run, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function here."""
        self._block.runs_in(threading.get_ident())
        error: BaseException | None = None
        try:
            with running_in(self._ctx):
                return self._checked(self._function(*args, **kwargs))
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._block.runs_in(None)
            self._block.end(error)
            error = None  # its traceback refers to this frame

    def _checked(self, result: Any) -> Any:
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()
            raise TypeError(
                f"{self._name}() has returned a {type(result).__name__}, which no thread runs: "
                f"start it as an asyncio task with `async with ctx.track({self._name!r})`"
            )
        return result

    def submit(self, submit: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Have *submit* call it in a thread, and return what that returns."""
        try:
            submitted = submit(self, *args, **kwargs)
        except BaseException:
            self._give_up(None)
            raise
        if inspect.iscoroutine(submitted) or inspect.isgenerator(submitted):
            submitted.close()
            self._give_up(None)
            raise TypeError(
                "track_call() needs a function that submits one call at once, such as "
                "executor.submit: call it for each part in place of executor.map, and await a "
                f"coroutine in `async with ctx.track({self._name!r})`"
            )
        if callable(when_done := getattr(submitted, "add_done_callback", None)):
            when_done(self._done)
        return submitted

    def _done(self, future: Any) -> None:
        """The executor is done with it: if it has not begun, nothing was done."""
        error = None if future.cancelled() else future.exception()
        self._give_up(error or self._unbegun_error())

    def _give_up(self, error: BaseException | None) -> None:
        with contextlib.suppress(IndexError):
            self._unbegun.pop()
            self._block.end(error)

    def _unbegun_error(self) -> BaseException:
        return concurrent.futures.CancelledError(f"{self._name}() was cancelled before it began")


def _here(loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Task[Any] | None, int]:
    """The asyncio task of *loop* that runs here, if any, and this thread."""
    return (asyncio.current_task() if _running_loop() is loop else None), threading.get_ident()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
