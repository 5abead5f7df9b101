"""The hooks of a service: `on_start` before it takes requests, `on_stop` when nothing runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from gracekit.callables import name_of
from gracekit.clock import Clock
from gracekit.errors import GracekitError
from gracekit.process import Threads
from gracekit.request.calls import call
from gracekit.telemetry.telemetry import Telemetry

SHORTEST_S: Final = 0.1
"""Seconds that each `on_stop` gets at least, even after `end_by` has passed."""
START_GRACE_S: Final = 1.0
STOP_GRACE_S: Final = 0.1
"""Seconds that a cancelled hook gets to clean up; after that gracekit no longer waits for it. An
`on_stop` hook gets less, because a drain has one second for everything after its last task."""

ServiceHook = Callable[[], Any]


class ServiceHooks:
    """The `on_start` and `on_stop` hooks of one service, each called in the order of declaration.

    Args:
        threads: Run plain hooks. One that hangs keeps its thread, so each hook needs its own.
        start_timeout_s: Timeout of each `on_start`.
        stop_timeout_s: Timeout of each `on_stop`.

    Attributes:
        end_by: Loop time by which all `on_stop` should have ended; None until a drain sets it.
    """

    def __init__(
        self,
        start_hooks: Sequence[ServiceHook],
        stop_hooks: Sequence[ServiceHook],
        telemetry: Telemetry,
        clock: Clock,
        threads: Threads,
        *,
        start_timeout_s: float,
        stop_timeout_s: float,
    ) -> None:
        self._to_start = list(start_hooks)
        self._to_stop = list(stop_hooks)
        self._telemetry = telemetry
        self._clock = clock
        self._threads = threads
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._starting = asyncio.Lock()
        self._stopping = asyncio.Lock()  # not the same: an `on_start` may hang
        self._ignoring: list[asyncio.Task[None]] = []
        self.end_by: float | None = None

    @property
    def still_running(self) -> int:
        """How many hooks still run although they were cancelled."""
        return sum(not calling.done() for calling in self._ignoring)

    async def start(self) -> None:
        """Call each `on_start` that has not been called.

        Raises:
            GracekitError: one took too long.
            Exception: what one of them raised.
        """
        async with self._starting:
            while self._to_start:
                await self._call_start(self._to_start[0])
                del self._to_start[0]

    async def _call_start(self, hook: ServiceHook) -> None:
        calling = await self._call_for(hook, self._start_timeout_s, START_GRACE_S)
        if calling is None:
            raise GracekitError(
                f"on_start hook {name_of(hook)}() took over {self._start_timeout_s:g} s: make it "
                "faster or raise GRACEKIT_START_TIMEOUT"
            )
        calling.result()

    async def stop(self) -> None:
        """Call each `on_stop` that has not been called; what one raises is logged."""
        async with self._stopping:
            while self._to_stop:
                hook, left_s = self._to_stop[0], self._left_s()
                calling = await self._call_for(hook, left_s, STOP_GRACE_S)
                if error := _failure(calling, left_s):
                    self._telemetry.emit("hook.failed", hook=name_of(hook), error=error)
                del self._to_stop[0]

    def _left_s(self) -> float:
        if self.end_by is None:
            return self._stop_timeout_s
        return max(SHORTEST_S, min(self._stop_timeout_s, self.end_by - self._clock.loop()))

    async def _call_for(
        self, hook: ServiceHook, timeout_s: float, grace_s: float
    ) -> asyncio.Task[None] | None:
        """Call *hook* in a task of its own; returns the ended task, None if it took too long.

        A hook may swallow its cancellation, or raise CancelledError itself. If it were awaited
        directly, it could block the step that awaits it for ever, or cancel that step.
        """
        calling = asyncio.create_task(
            call(hook, self._threads, abandon=True), name=f"gracekit-hook-{name_of(hook)}"
        )
        try:
            await asyncio.wait({calling}, timeout=timeout_s)
            return calling if calling.done() else None
        finally:
            if not calling.done():
                self._ignoring.append(calling)
                calling.cancel()
                await asyncio.wait({calling}, timeout=grace_s)


def _failure(calling: asyncio.Task[None] | None, timeout_s: float) -> str:
    """The error to log for a hook that was called; empty if it succeeded."""
    if calling is None:
        return f"took over {timeout_s:g} s, and was cancelled"
    if calling.cancelled():
        return "it raised CancelledError"
    return "" if (error := calling.exception()) is None else repr(error)
