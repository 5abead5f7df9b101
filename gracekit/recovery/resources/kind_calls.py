"""Calls the functions of kinds, and logs their errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.recovery.hook_calls import HookCalls, HookEnd
from gracekit.recovery.resources.kinds import ResourceKind
from gracekit.recovery.resources.rule_context import RuleContext
from gracekit.recovery.resources.rules import KindHook
from gracekit.rpc.failures import kind_of
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
        ctx: RuleContext,
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
