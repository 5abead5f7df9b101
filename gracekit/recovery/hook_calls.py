"""Calls the application's code for recovery: probes, `errored` hooks, and the rules of resources.

A call is bounded, and its failure is a value: what a hook raises is the application's, and
recovery goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Final

from gracekit.process import Threads
from gracekit.request.calls import call_hook
from gracekit.request.context import Context
from gracekit.rpc.failures import words_of

END_S: Final = 1.0
"""A hook that was cancelled and has not ended within this time is overdue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookEnd:
    """What came of a call.

    Attributes:
        value: What it returned, in time or while its end was waited for; None if it did not.
        fault: Why it has no value in time, as a text; empty if it returned.
        raised: What it has raised in time; None if it has not.
        has_begun: Whether it was called; a plain one is not, where no thread is free in time.
    """

    value: Any = None
    fault: str = ""
    raised: BaseException | None = None
    has_begun: bool = True

    @property
    def is_unwritten(self) -> bool:
        """Whether it raised NotImplementedError."""
        return isinstance(self.raised, NotImplementedError)


class HookCalls:
    """Calls hooks of one run.

    Args:
        threads: For plain hooks: they must not take a thread that a handler was promised.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    async def call(
        self,
        hook: Callable[..., Any],
        ctx: Context,
        args: Mapping[str, Any] = MappingProxyType({}),
        *,
        limit_s: float,
        limit: str = "probe_timeout",
        before: Sequence[Any] = (),
        on_overdue: Callable[[str], None] | None = None,
        trace: AbstractContextManager[None] | None = None,
    ) -> HookEnd:
        """Call *hook*, and wait for at most *limit_s* seconds.

        Args:
            hook: Plain or async.
            ctx: Its first argument.
            args: Arguments by name.
            limit_s: After it the hook is cancelled. Nothing stops one in a thread; what that
                returns comes too late to count.
            limit: Name of what says so many seconds, for the fault.
            before: Arguments by position.
            on_overdue: Return only when the hook has, also after *limit_s*: it changes something,
                and must not go on beside the next rule or handler. If it does not end when it is
                cancelled, this is called once, with the fault. None: return at *limit_s*.
            trace: Block in which it is called.
        """
        begin = _Begin()
        calling = asyncio.ensure_future(
            call_hook(begin.noted_by(hook), ctx, args, self._threads, before=before, trace=trace)
        )
        try:
            done, _ = await asyncio.wait({calling}, timeout=limit_s)
        finally:
            calling.cancel()
        if not done:
            fault = f"no answer within {limit_s:g} s ({limit})"
            if on_overdue is not None:
                await _wait_for_end(calling, partial(on_overdue, fault))
            if not begin.has_come:
                fault = f"no thread was free within {limit_s:g} s ({limit}), so it was not called"
            return HookEnd(value=_value(calling), fault=fault, has_begun=begin.has_come)
        if calling.cancelled():
            return HookEnd(fault="cancelled")
        if (raised := calling.exception()) is None:
            return HookEnd(value=calling.result())
        return HookEnd(fault=words_of(raised), raised=raised)


@dataclass(slots=True)
class _Begin:
    """Of one call. A plain hook first waits for a thread, so it may never come."""

    has_come: bool = False

    def noted_by(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """*hook*, which notes here that it was called."""
        if asyncio.iscoroutinefunction(hook):
            self.has_come = True
            return hook

        @wraps(hook)
        def begin(*args: Any, **named: Any) -> Any:
            self.has_come = True
            return hook(*args, **named)

        return begin


async def _wait_for_end(calling: asyncio.Future[Any], on_overdue: Callable[[], None]) -> None:
    """Wait for the end of a call that was cancelled, and tell if it does not come."""
    done, _ = await asyncio.wait({calling}, timeout=END_S)
    if not done:
        on_overdue()
        await asyncio.wait({calling})


def _value(calling: asyncio.Future[Any]) -> Any:
    """What a call has returned; None if it has not, or raised."""
    if not calling.done() or calling.cancelled() or calling.exception() is not None:
        return None
    return calling.result()
