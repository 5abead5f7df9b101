"""Calls the functions of kinds, with their Context, and keeps track of rules that do not end.

A rule that did not end when it was cancelled at its time limit cannot be stopped, and two must
never act on one resource. So it keeps its lease until it has ended. Its pass no longer waits for
it, and no pass calls it again meanwhile.

A plain function that hangs also keeps its thread. As it is not known before which one will hang,
all rules with plain functions together get half of the threads. The other half is left to `find`,
to probes and to the hooks of methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gracekit.clock import Clock
from gracekit.config.values import duration
from gracekit.leases.leases import Resource
from gracekit.recovery.hook_calls import HookCalls, HookEnd
from gracekit.recovery.resources.kinds import KindHook, ResourceKind
from gracekit.recovery.resources.results import Result
from gracekit.recovery.shared import Shared
from gracekit.request.work_context import WorkContext
from gracekit.rpc.failures import kind_of, words_of
from gracekit.telemetry.telemetry import Telemetry

LOGGED_FOR_S: Final = 3600.0
"""Seconds after which an error that goes on is logged again, even within one pass."""


class KindCalls:
    """Calls the functions of one run's kinds.

    If a backend is away, a rule raises for each resource, and again at each retry. So an error is
    logged once in a pass for each function and kind of error, with its traceback.
    """

    def __init__(self, calls: HookCalls, telemetry: Telemetry, clock: Clock) -> None:
        self._calls = calls
        self._telemetry = telemetry
        self._clock = clock
        # By kind, function and trouble: the loop time at which it was logged.
        self._told_at: dict[tuple[str, str, str], float] = {}

    def begin_pass(self) -> None:
        """Note that a pass begins, so that each error is logged again."""
        self._told_at.clear()

    async def call(
        self,
        kind: ResourceKind,
        hook: KindHook,
        ctx: WorkContext,
        args: Mapping[str, Any] = MappingProxyType({}),
        *,
        limit_s: float,
        limit: str = "probe_timeout",
        before: Sequence[Any] = (),
        on_overdue: Callable[[str], None] | None = None,
    ) -> HookEnd:
        """Call *hook* of *kind*; the other arguments are those of `HookCalls.call`."""
        assert hook.target is not None
        end = await self._calls.call(
            hook.target,
            ctx,
            args,
            limit_s=limit_s,
            limit=limit,
            before=before,
            on_overdue=on_overdue,
            tracked=ctx._task,  # noqa: SLF001 - only applications must not read it
        )
        if end.fault and not end.is_unwritten:
            trouble = "slow" if end.has_begun else "no thread"
            self.tell(kind, hook, end.fault, raised=end.raised, trouble=trouble)
        return end

    def tell(
        self,
        kind: ResourceKind,
        hook: KindHook,
        error: str,
        *,
        raised: BaseException | None = None,
        trouble: str,
    ) -> None:
        """Log an error of *hook*, unless its like was logged in this pass within `LOGGED_FOR_S`.

        Args:
            kind: The kind that the function belongs to.
            hook: The function.
            error: What was wrong, as a text.
            raised: The exception that it raised; None if it returned, or did not answer.
            trouble: Name for all errors of this sort; not used for exceptions.
        """
        what = (kind.name, hook.name, trouble if raised is None else kind_of(raised))
        now = self._clock.loop()
        if now - self._told_at.get(what, float("-inf")) < LOGGED_FOR_S:
            return
        self._told_at[what] = now
        self._telemetry.emit(
            "hook.failed",
            level=logging.WARNING,
            cause=raised,
            hook=f"{kind.name}.{hook.name}",
            error=error,
        )


InterimResult = asyncio.Future[Result]
"""Gets the result that is reported for a resource whose rule has not ended at its limit."""


class _Unended(NamedTuple):
    """A rule that has not ended: its asyncio task, and the loop time at which it began."""

    task: asyncio.Task[Result]
    since: float


class UnendedRules:
    """The rules of one run that have not ended.

    Args:
        on_end: Called when one ends: the rule for its resource may then be followed again.
    """

    def __init__(self, shared: Shared, on_end: Callable[[], None]) -> None:
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._on_end = on_end
        self._most = max(1, shared.threads.number // 2)
        self._plain = 0  # number of rules with plain functions that have not ended
        self._news = asyncio.Event()  # set for a moment when one has ended or becomes overdue
        self._unended: dict[Resource, _Unended] = {}

    @property
    def tasks(self) -> list[asyncio.Task[Result]]:
        """Their asyncio tasks, which end when the rules do; a stop of recovery cancels them."""
        return [one.task for one in self._unended.values()]

    def why_not(self, resource: Resource) -> str | None:
        """Why no rule may begin for *resource*; None if one may."""
        if (one := self._unended.get(resource)) is not None:
            return f"its rule has not ended for {duration(self._clock.loop() - one.since)}"
        if len(self._unended) >= self._most:
            return f"{len(self._unended)} rules have not ended, so no other one begins"
        return None

    async def wait_for_place(self, resource: Resource, *, plain: bool) -> str | None:
        """Wait until a rule may begin for *resource*; returns what `why_not` does.

        Args:
            resource: The caller must call `wait_for` for it at once, without another await.
            plain: Whether its rule is a plain function, which may keep a thread.
        """
        while (why := self.why_not(resource)) is None and plain and self._plain >= self._most:
            await self._news.wait()
        return why

    async def wait_for(
        self,
        resource: Resource,
        settle: Callable[[InterimResult], Coroutine[Any, Any, Result]],
        *,
        plain: bool,
        patience: tuple[float, Result] | None = None,
    ) -> Result:
        """Settle *resource* in a task of its own, and wait until that ends or is overdue.

        *patience* is after how many seconds not to wait any longer, and what is returned then.
        """
        began = self._clock.loop()
        overdue: InterimResult = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(settle(overdue))
        if plain:
            self._plain += 1
            task.add_done_callback(self._leave_place)
        try:
            most_s = None if patience is None else patience[0]
            await asyncio.wait({task, overdue}, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.done():
            return task.result()
        self._unended[resource] = _Unended(task, began)
        task.add_done_callback(partial(self._note_end, resource))
        self._tell_waiting()
        if overdue.done() or patience is None:
            return overdue.result()
        return patience[1]

    def _leave_place(self, _: asyncio.Task[Result]) -> None:
        self._plain -= 1
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        self._news.set()  # wakes all that wait now
        self._news.clear()

    def _note_end(self, resource: Resource, task: asyncio.Task[Result]) -> None:
        del self._unended[resource]
        if task.cancelled():
            return  # a stop cancelled it: its lease is free once this process is dead
        if (error := task.exception()) is not None:
            self._telemetry.emit("store.error", what="resources", error=words_of(error))
        else:
            outcome = task.result().outcome.value
            self._telemetry.emit("resource.reconciled", kind=resource[0], outcome=outcome)
        self._on_end()
