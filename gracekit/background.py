"""Background work that must run as long as its owner lives: after a failure it is started again.

An asyncio task that is not awaited ends silently when it raises. So every background
loop of gracekit is started here: a failure is logged with its traceback, and after a
pause the work is called again. A step that ends by itself runs by `run_beside`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.errors import ConfigError
from gracekit.telemetry.telemetry import Telemetry

LONGEST_END_S: Final = 1.0
"""Seconds to wait for the end of cancelled work, which may swallow its cancellation."""

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, None]]


def need_loop() -> None:
    """Raise ConfigError where no event loop of asyncio runs, as under trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "no event loop of asyncio runs here, and gracekit needs it: run the program by "
            'asyncio.run(main()), or by anyio.run(main, backend="asyncio"); trio has another loop'
        ) from None


def start(work: Work, name: str, *, telemetry: Telemetry, clock: Clock) -> asyncio.Task[None]:
    """Run `keep_on` in a task of its own, which the caller may cancel."""
    return asyncio.create_task(keep_on(work, name, telemetry=telemetry, clock=clock), name=name)


def run_beside(
    tasks: set[asyncio.Task[Any]], step: Coroutine[Any, Any, T], name: str | None = None
) -> asyncio.Task[T]:
    """Run *step* in a task of its own, which stays in *tasks* until it ends: asyncio keeps none."""
    task = asyncio.create_task(step, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class Background:
    """A part that does *work* from its start to its stop; see `keep_on`."""

    def __init__(self, work: Work, name: str, *, telemetry: Telemetry, clock: Clock) -> None:
        self._work = work
        self._name = name
        self._telemetry = telemetry
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to work."""
        if self._task is None:
            self._task = start(self._work, self._name, telemetry=self._telemetry, clock=self._clock)

    async def stop(self) -> None:
        """Cancel the work, and wait for its end, `LONGEST_END_S` at most."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=LONGEST_END_S)
            if self._task is task:
                self._task = None


async def keep_on(work: Work, name: str, *, telemetry: Telemetry, clock: Clock) -> None:
    """Do *work* until it returns, or until this task is cancelled.

    Some libraries raise CancelledError for a lost connection. If this task was not cancelled,
    that is a failure like any other.

    Args:
        work: Called again after each failure; it must keep its progress in its object.
        name: Names it in the log.
        telemetry: Emits each failure as `background.failed`.
        clock: Jitters the pauses, which are those of `backoff.WORK`.
    """
    pauses = backoff.WORK.pauses(clock)
    while True:
        began_at = clock.loop()
        try:
            await work()
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled():
                raise asyncio.CancelledError from error
            if clock.loop() - began_at > backoff.WORK.most_s:
                pauses = backoff.WORK.pauses(clock)
            again_s = next(pauses)
            telemetry.emit(
                "background.failed",
                cause=error,
                work=name,
                error=repr(error),
                again_s=round(again_s, 1),
            )
        else:
            return
        await asyncio.sleep(again_s)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
