"""Calls the application's hooks, rules and jobs, and runs its plain functions in threads.

A thread cannot be stopped, so a call in a thread ends when the thread has returned, even if the
coroutine that waits for it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar, cast

from gracekit.callables import is_async, name_of
from gracekit.process import Threads
from gracekit.request.context import Context
from gracekit.request.current import running_in
from gracekit.rpc.failures import words_of
from gracekit.tracing.carrier import apart

T = TypeVar("T")


async def call_hook(
    hook: Callable[..., Any],
    ctx: Context,
    args: Mapping[str, Any],
    threads: Threads,
    *,
    before: Sequence[Any] = (),
    trace: AbstractContextManager[None] | None = None,
) -> Any:
    """Call a probe, rule, errored hook or job; raises as `call`.

    Args:
        hook: A function of the application.
        ctx: Its first argument.
        args: Arguments by name.
        threads: Runs it if it is a plain function.
        before: Arguments by position, after the context.
        trace: Trace in which it is called; None to call it outside of any trace.
    """
    with running_in(ctx), trace or apart():
        return await call(partial(hook, ctx, *before, **args), threads)


async def call(function: Callable[[], Any], threads: Threads, *, abandon: bool = False) -> Any:
    """Call a function of the application, and wait until it has done its work.

    Args:
        function: A plain function is called in a thread. If it returns a coroutine or another
            awaitable, that is awaited here.
        threads: The threads.
        abandon: Whether a cancellation leaves a thread behind that is at work.

    Raises:
        Exception: what it raised; SystemExit, BaseExceptionGroup and the like become RuntimeError.
    """
    try:
        if is_async(function):
            return await end_of(await function())
        return await end_of(await in_thread(function, threads, abandon=abandon))
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        # If a task raised it, asyncio would end the whole loop, or the caller would not expect it.
        raise RuntimeError(f"{name_of(function)}() raised {words_of(error)}") from error


async def end_of(result: Any) -> Any:
    """*result* of a function; if that is a coroutine, what it returns in the end.

    Raises:
        TypeError: it has returned a generator, whose code nobody would run.
    """
    while inspect.isawaitable(result):
        result = await result
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(f"it has returned a generator, {result.__qualname__}(), which runs nothing")
    return result


async def in_thread(
    function: Callable[[], T],
    threads: Threads,
    *,
    abandon: bool = False,
    given_up: Callable[[], bool] = lambda: False,
) -> T:
    """Run *function* in a worker thread, and wait for its end.

    A cancellation ends the wait only if the function has not begun, or with *abandon*, which leaves
    the thread behind, or if *given_up* returns true.
    """
    while True:
        thread = WorkerCall(function)
        running = asyncio.ensure_future(threads.run(thread.run, abandon=abandon))
        running.add_done_callback(thread.leave)
        while not thread.returned.done():
            try:
                await asyncio.shield(thread.returned)
            except asyncio.CancelledError:
                if abandon or not thread.begun:
                    running.cancel()
                    await take_end(running)
                if abandon or not thread.begun or given_up():
                    raise
        if thread.begun or not running.cancelled():
            return thread.result()
        # The application cancelled `running` before the function began: try again.


async def take_end(running: asyncio.Future[None]) -> None:
    """Wait for the end of *running*, which was just cancelled, even if cancelled meanwhile."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({running})


class WorkerCall(Generic[T]):
    """A function in a worker thread, and whether it has returned.

    The asyncio task around the thread does not show that: if the application
    cancels all tasks of the process, that one ends too while the thread goes on.

    Attributes:
        begun: Whether the function runs, or has run.
        returned: Done when the function has returned, or will never begin.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._over = self._left = False
        self.begun = False
        self.returned: asyncio.Future[None] = self._loop.create_future()

    def run(self) -> None:
        """Call the function; runs in the thread."""
        self.begun = True
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - carried over to the loop as a value
            self._error = error
        self._over = True
        # Set `_over`, then read `_left`; `leave` does the reverse. So one of the two sees both.
        if self._left:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._tell)

    def leave(self, running: asyncio.Future[None]) -> None:
        """Note, on the loop, that the task around the thread has ended; usually the thread has."""
        self._left = True
        if not self.begun:
            self._over = True
            self._error = asyncio.CancelledError() if running.cancelled() else running.exception()
        if self._over:
            self._tell()

    def _tell(self) -> None:
        if not self.returned.done():
            self.returned.set_result(None)

    def result(self) -> T:
        """Return what the function returned, or raise what it raised; may be called once."""
        # Its traceback refers to frames that refer to this object: such a cycle would keep all
        # that the function had in its variables until the garbage collector runs.
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return cast("T", self._value)
        finally:
            error = None
