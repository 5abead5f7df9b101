"""Calls the application's code for recovery: probes, `errored` hooks, and the rules of resources.

A call has a timeout, and its failure is returned as a value, so that recovery goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gracekit.callables import is_async
from gracekit.process import Threads
from gracekit.request.calls import call_hook
from gracekit.request.context import Context
from gracekit.rpc.failures import words_of
from gracekit.tracker.task import TrackedTask

END_S: Final = 1.0
"""A hook that has not ended so many seconds after its cancellation is overdue."""


class HookEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call.

    Attributes:
        value: What the hook returned; None if it had returned nothing when `call` ended its wait.
        fault: Why it returned nothing in time; empty if it did return.
        raised: What it raised in time; None if it did not raise.
        has_begun: Whether it was called. A plain hook is not if no thread gets free in time.
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
        threads: Run plain hooks. They have threads of their own, as a handler that has its turn
            must find one free.
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
        tracked: TrackedTask | None = None,
    ) -> HookEnd:
        """Call *hook*, and wait for at most *limit_s* seconds.

        Args:
            hook: Plain or async.
            ctx: Its first argument.
            args: Arguments by name.
            limit_s: After this the hook is cancelled. A hook in a thread cannot be stopped; its
                result then comes too late to count.
            limit: Name of the setting or option that sets *limit_s*, for the fault.
            before: Arguments by position.
            on_overdue: If given, return only after the hook has ended, even after *limit_s*: for a
                hook that changes something and must not run beside the next rule or handler. It is
                called once, with the fault, if the hook does not end when cancelled.
            trace: Trace in which it is called.
            tracked: Work of recovery in which it is called; a dump shows the stack of the hook.
        """
        begin = _Begin()
        calling = asyncio.ensure_future(
            call_hook(begin.noted_by(hook), ctx, args, self._threads, before=before, trace=trace)
        )
        if tracked is not None:
            tracked.calling = calling
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
        return HookEnd(fault=words_of(raised), raised=raised, has_begun=begin.has_come)


class _Begin(msgspec.Struct):
    """Notes whether a hook was called: a plain one waits for a thread, perhaps in vain."""

    has_come: bool = False

    def noted_by(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap *hook*, so that its call is noted here."""
        if is_async(hook):
            self.has_come = True
            return hook

        @wraps(hook)
        def begin(*args: Any, **named: Any) -> Any:
            self.has_come = True
            return hook(*args, **named)

        return begin


async def _wait_for_end(calling: asyncio.Future[Any], on_overdue: Callable[[], None]) -> None:
    """Wait for the end of a cancelled call; call *on_overdue* if that takes over `END_S`."""
    done, _ = await asyncio.wait({calling}, timeout=END_S)
    if not done:
        on_overdue()
        await asyncio.wait({calling})


def _value(calling: asyncio.Future[Any]) -> Any:
    """What a call has returned; None if it has not, or raised."""
    if not calling.done() or calling.cancelled() or calling.exception() is not None:
        return None
    return calling.result()
