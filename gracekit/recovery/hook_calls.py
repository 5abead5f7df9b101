"""Calls the application's code for recovery: probes, `errored` hooks, and the rules of resources.

A call has a timeout, and its failure is logged and returned as a value, so that recovery goes on. A
call for a task or a hold is recorded before it begins: one during which processes died is made
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Final

import msgspec

from gracekit.callables import is_async
from gracekit.errors import DependencyError, InvalidArgumentsError, RpcError
from gracekit.journal.holds import Hold
from gracekit.journal.rows import TaskRow
from gracekit.leases.leases import Guard
from gracekit.process import Threads
from gracekit.recovery.decisions import Done, Fail, ProbeAnswer, Retry, Wait, probe_pause_s
from gracekit.recovery.shared import Shared
from gracekit.request.calls import call_hook, take_end
from gracekit.request.context import Context
from gracekit.rpc.failures import traceback_lines, words_of
from gracekit.rpc.methods import Method
from gracekit.telemetry.safe_text import masked
from gracekit.tracker.task import CancelCause, Lane, TaskState, TrackedTask

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
        except asyncio.CancelledError:
            calling.cancel()
            if tracked is not None and tracked.cancel_cause is CancelCause.FENCED:
                await take_end(calling)  # others may act once nothing here seems to
            raise
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


class HookSubject(msgspec.Struct, frozen=True, kw_only=True):
    """What a hook is called about: an unfinished task, or a hold.

    Attributes:
        task: The task that the hook's context shows.
        args: Arguments of the request, as sent. A hook gets them as its method does, and also the
            defaults; if they do not fit the types of this version, it gets them as sent.
        caller: Context of the request.
        waiting_since: Wall time at which its probe first answered Wait; None before that.
    """

    task: TrackedTask
    args: Mapping[str, Any]
    caller: Mapping[str, Any]
    waiting_since: float | None

    def masked(self, text: str) -> str:
        """*text*, which came from the application, with the values of the request masked."""
        task = self.task
        return masked(text, self.caller, self.args, resource=task.shown_resource, who=str(task))


class MethodHooks:
    """Calls the hooks of one run's methods."""

    def __init__(self, shared: Shared, calls: HookCalls) -> None:
        self._services = shared.services
        self._arrivals = shared.arrivals
        self._calls = calls
        self._methods = shared.methods
        self._settings = shared.settings
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._asking: set[asyncio.Task[Any]] = set()

    @property
    def asking(self) -> set[asyncio.Task[Any]]:
        """The asyncio tasks that wait for a probe now; a drain does not cancel them."""
        return self._asking

    def method_of(self, of: TaskRow | Hold) -> Method[Any, Any] | None:
        """The method of a row or hold; None if this version does not serve it."""
        try:
            return self._methods.resolve(of.namespace, of.method, of.version)
        except RpcError:
            return None

    def cap_of(self, method: Method[Any, Any]) -> int:
        """After how many crashes a task of *method*, or one of its hooks, may be given up."""
        return method.options.max_attempts or self._settings.max_attempts

    def of_row(self, row: TaskRow, method: Method[Any, Any]) -> HookSubject:
        """The subject of the hooks of a task."""
        return HookSubject(
            task=self._arrivals.task_of(row, method),
            args=row.args or {},
            caller=row.context or {},
            waiting_since=row.waiting_since,
        )

    def of_hold(self, hold: Hold) -> HookSubject:
        """The subject of the hooks of a hold: the request that opened it."""
        task = TrackedTask(
            request_id=f"hold {hold.name} {hold.key}",
            method=hold.method,
            lane=Lane.REQUESTS,
            on_interrupt="probe",
            tracked_at=self._clock.loop(),
            attempt=1,
            state=TaskState.HANDED_OVER,
        )
        return HookSubject(task=task, args=hold.args, caller={}, waiting_since=None)

    # -- a probe ------------------------------------------------------------------------

    async def ask(
        self, subject: HookSubject, method: Method[Any, Any], guard: Guard | None = None
    ) -> ProbeAnswer | None:
        """The probe's answer; None if the probe raises NotImplementedError.

        A probe that raises anything else, or is too slow, counts as Wait with back-off.
        """
        assert method.probe_hook is not None
        subject.task.token = guard.token if guard else None
        limit_s = method.options.probe_timeout_s or self._settings.probe_timeout_s
        with self._asking_now(), self._at_work("probe", subject) as work:
            end = await self._call("probe", method.probe_hook, subject, method, limit_s, work)
        if end.is_unwritten:
            return None
        error = end.fault
        if not error:
            if isinstance(answer := end.value, Done | Retry | Fail | Wait):
                return answer
            said = words_of(answer)
            error = f"answered {said}: a probe returns Done, Retry, Fail or Wait"
        self._tell(f"{subject.task.method}.probe", subject, error, end.raised)
        return Wait(probe_pause_s(subject.waiting_since, self._clock.wall()))

    @contextlib.contextmanager
    def _asking_now(self) -> Iterator[None]:
        """While a probe runs, a drain waits for it instead of releasing the row."""
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            yield
        finally:
            self._asking.discard(task)

    # -- an errored hook ----------------------------------------------------------------

    async def call_errored(
        self, subject: HookSubject, method: Method[Any, Any], reason: str
    ) -> str:
        """Call the hook with the reason; if it raises or takes too long, that is logged.

        Returns:
            Why it has failed, for the record; empty if it has not.

        Raises:
            DependencyError: there was no thread for it, so it was not called.
        """
        assert method.errored_hook is not None
        limit_s = self._settings.probe_timeout_s
        hook = f"{subject.task.method}.errored"
        with self._at_work("errored hook", subject) as work:
            try:
                end = await self._call(
                    "errored", method.errored_hook, subject, method, limit_s, work, reason=reason
                )
            except asyncio.CancelledError:
                if (cause := work.cancel_cause) is not None:
                    error = f"cancelled ({cause.value}); the next run calls it again"
                    self._tell(hook, subject, error, None)
                raise
        if not end.has_begun:
            raise DependencyError(end.fault)
        if end.fault:  # it is not called again: whether it did its work is for the application
            self._tell(hook, subject, end.fault, end.raised)
        return subject.masked(end.fault)

    def give_up(self, hook: str, crashes: int) -> str:
        """Log that *hook* is not called any more; returns the sentence for the record."""
        why = f"not called any more: {crashes} processes ended while it ran"
        self._telemetry.emit("hook.failed", hook=hook, error=why)
        return why

    # -- either -------------------------------------------------------------------------

    def _at_work(
        self, what: str, subject: HookSubject
    ) -> contextlib.AbstractContextManager[TrackedTask]:
        name, about = f"{what} of {subject.task.method}", subject.task.request_id
        return self._services.tracker.background(name, self._clock, about=about)

    async def _call(
        self,
        what: str,
        hook: Callable[..., Any],
        subject: HookSubject,
        method: Method[Any, Any],
        limit_s: float,
        work: TrackedTask,
        **extra: Any,
    ) -> HookEnd:
        ctx = Context(
            subject.task,
            self._services,
            args=subject.args,
            caller=subject.caller,
            method=(method.namespace, method.name, method.version),
            expires_at=None,
        )
        traced = self._telemetry.tracing.hook(
            what, subject.caller, method=method.name, message_id=subject.task.request_id
        )
        values = subject.args
        with contextlib.suppress(InvalidArgumentsError):
            values = method.converted(values)
        args = {**method.hook_arguments(hook, values), **extra}
        return await self._calls.call(hook, ctx, args, limit_s=limit_s, trace=traced, tracked=work)

    def _tell(
        self, hook: str, subject: HookSubject, error: str, raised: BaseException | None
    ) -> None:
        # The traceback's last line is the error again, so it is masked as a whole.
        trace = "" if raised is None else subject.masked("".join(traceback_lines(raised)))
        self._telemetry.emit(
            "hook.failed",
            trace=trace,
            hook=hook,
            task_id=subject.task.request_id,
            method=subject.task.method,
            context=subject.task.shown_context,
            error=subject.masked(error),
        )
