"""Settles open holds that have lapsed, or whose run has died."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from gracekit.journal.holds import Hold
from gracekit.recovery.decisions import Done, Wait
from gracekit.recovery.method_hooks import MethodHooks
from gracekit.recovery.shared import Shared
from gracekit.request.suspects import is_guilty, suspicion
from gracekit.rpc.methods import Method


class LeftHolds:
    """Settles such holds by the probe of the method that opened them."""

    def __init__(self, shared: Shared, *, hooks: MethodHooks) -> None:
        self._holds = shared.holds
        self._suspects = shared.suspects
        self._hooks = hooks
        self._trigger = shared.trigger
        self._telemetry = shared.telemetry
        self._clock = shared.clock

    async def settle_all(self) -> None:
        """Settle all holds that are due; during a drain, only end those that have lapsed."""
        for hold in await self._holds.due():
            if not hold.errored_due and self._has_lapsed(hold):
                await self._end(hold, "lapsed")
            elif self._trigger.is_paused:
                continue
            elif hold.errored_due:
                await self._tell_errored(hold)
            else:
                await self._settle(hold)

    def _has_lapsed(self, hold: Hold) -> bool:
        """Whether a hold that this run owns is due because it lapsed, not because of its probe."""
        if hold.owner is None:
            return False
        return hold.next_check is None or self._clock.wall() >= hold.lapses_at

    async def _tell_errored(self, hold: Hold) -> None:
        method = self._hooks.method_of(hold)
        if method is None or method.errored_hook is None:
            await self._holds.errored_done(hold)
        elif is_guilty(hold.crashes, self._hooks.cap_of(method), alone=hold.alone):
            why = self._hooks.give_up(f"{hold.method}.errored", hold.crashes)
            await self._holds.errored_done(hold, given_up=why)
        else:
            async with self._calling(hold, method) as is_ours:
                if is_ours:
                    subject = self._hooks.of_hold(hold)
                    fault = await self._hooks.call_errored(subject, method, "hold")
                    await self._holds.errored_done(hold, failed=fault)

    @contextlib.asynccontextmanager
    async def _calling(self, hold: Hold, method: Method[Any, Any]) -> AsyncIterator[bool]:
        """Surround a call of a hold's probe or errored hook; yields whether to call it here."""
        about = suspicion(hold.crashes, self._hooks.cap_of(method))
        async with self._suspects.beginning(("hold", hold.id), about) as alone:
            yield not self._trigger.is_paused and await self._holds.begin(hold, alone=alone)

    async def _settle(self, hold: Hold) -> None:
        """Probe a hold. Done ends it, Fail and Retry end it with the errored hook, Wait keeps it.

        A hold that is kept also keeps this run in its drain, until the hold lapses.
        """
        method = self._hooks.method_of(hold)
        if self._clock.wall() >= hold.lapses_at:
            await self._end(hold, "lapsed")
        elif method is None or method.probe_hook is None:
            await self._end(hold, "no_probe", errored=method is not None)
        elif is_guilty(hold.crashes, self._hooks.cap_of(method), alone=hold.alone):
            why = self._hooks.give_up(f"{hold.method}.probe", hold.crashes)
            await self._end(hold, "given_up", errored=True, given_up=why)
        else:
            async with self._calling(hold, method) as is_ours:
                if is_ours:
                    await self._probe(hold, method)

    async def _probe(self, hold: Hold, method: Method[Any, Any]) -> None:
        match await self._hooks.ask(self._hooks.of_hold(hold), method):
            case Done():
                await self._end(hold, "done")
            case Wait(seconds):
                check = min(self._clock.wall() + seconds, hold.lapses_at)
                await self._holds.wait(hold, next_check=check)
            case _:
                await self._end(hold, "failed", errored=True)

    async def _end(
        self, hold: Hold, reason: str, *, errored: bool = False, given_up: str = ""
    ) -> None:
        if not await self._holds.settle(hold, reason, errored=errored, given_up=given_up):
            return
        self._telemetry.emit("hold.ended", **hold.event_fields, reason=reason)
        if errored:
            self._trigger.go_on()  # its errored hook is due now
