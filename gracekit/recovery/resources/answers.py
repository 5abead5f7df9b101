"""Follows the rule of one resource: reads it again, calls its function, acts on the answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from gracekit.recovery.decisions import Wait
from gracekit.recovery.hook_calls import HookEnd
from gracekit.recovery.resources.found import Absent, Broken, Settled
from gracekit.recovery.resources.kind_calls import KindCalls
from gracekit.recovery.resources.reading import FindError
from gracekit.recovery.resources.results import ResourceOutcome, Result
from gracekit.recovery.resources.rule_ends import Begun, Ending, RuleEnds
from gracekit.recovery.resources.rules import How, KindHook
from gracekit.recovery.shared import Shared
from gracekit.rpc.failures import words_of

PROBE_RETURNS: Final = "it returns Settled, Absent, Broken or Wait"
DELETE_RETURNS: Final = "a delete returns nothing, when the resource is gone"


class RuleAnswers:
    """Follows the rules of one run; the leases of their resources are held meanwhile."""

    def __init__(self, shared: Shared, calls: KindCalls, ends: RuleEnds) -> None:
        self._settings = shared.settings
        self._calls = calls
        self._ends = ends

    async def follow(self, begun: Begun, *, crashes: int) -> Result:
        """Do what the rule says, and end it.

        Args:
            begun: The case; its lease is held.
            crashes: How many processes ended while the rule ran; 0 if too few to give up.
        """
        case, rule = begun.case, begun.case.rule
        if case.dependency is not None:
            return await self._ends.fail(begun, f"dependency {':'.join(case.dependency)}")
        if crashes:
            return await self._ends.fail(begun, f"attempts: {crashes} processes ended while it ran")
        if rule.how is How.MARK:
            return await self._ends.write(begun, rule.failed)
        if (moved := await self._look_again(begun)) is not None:
            return moved
        return await (self._delete if rule.how is How.DELETE else self._probe)(begun)

    async def _look_again(self, begun: Begun) -> Result | None:
        """Read the resource again, now that its lease is held; None if it is as it was found."""
        found = begun.case.found
        try:
            present = await begun.case.page.look_again(found.id)
        except FindError as error:
            return await self._ends.put_off(begun, str(error))  # its rule was not called
        if present is None or present.status != found.status:
            return await self._ends.end(begun, Ending(ResourceOutcome.MOVED_ON))
        if present.busy:
            busy = Ending(ResourceOutcome.LEFT, reason="it is busy")
            return await self._ends.end(begun, busy)
        return None

    async def _call(
        self,
        begun: Begun,
        limit_s: float,
        limit: str,
        on_overdue: Callable[[str], None] | None = None,
    ) -> HookEnd:
        return await self._calls.call(
            begun.case.kind,
            _hook_of(begun),
            begun.ctx,
            before=(begun.case.found,),
            limit_s=limit_s,
            limit=limit,
            on_overdue=on_overdue,
        )

    async def _delete(self, begun: Begun) -> Result:
        on_overdue = partial(self._ends.tell_overdue, begun, begun.case.rule.name)
        end = await self._call(begun, begun.case.kind.max_wait_s, "max_wait", on_overdue)
        if not end.has_begun:
            return await self._ends.put_off(begun, f"{begun.case.rule.name}: {end.fault}")
        if end.fault:
            return await self._ends.fail(begun, end.fault)
        if end.value is not None:  # perhaps it means that the delete goes on
            return await self._wrong(begun, f"returned {_short(end.value)}: {DELETE_RETURNS}")
        return await self._ends.write(begun, begun.case.rule.done)

    async def _probe(self, begun: Begun) -> Result:
        end = await self._call(begun, self._settings.probe_timeout_s, "probe_timeout")
        if not end.has_begun:
            return await self._ends.put_off(begun, f"{begun.case.rule.name}: {end.fault}")
        if end.is_unwritten:
            return await self._ends.fail(begun, f"{begun.case.rule.name} is not implemented")
        if end.fault:
            return await self._ends.wait(begun, None, end.fault)
        return await self._take_answer(begun, end.value)

    async def _take_answer(self, begun: Begun, answer: object) -> Result:
        match answer:
            case Settled(status=status) if status in begun.case.kind.rules:
                why = (
                    f"answered {status!r}, which is a status that has a rule: it returns Wait "
                    "while the backend still works, and Settled with a status that stays"
                )
                return await self._wrong(begun, why)
            case Settled(status=status, facts=facts):
                return await self._ends.write(begun, status, facts=facts)
            case Absent(reason) | Broken(reason):
                return await self._ends.fail(begun, reason)
            case Wait(seconds=seconds):
                return await self._ends.wait(begun, seconds, f"{begun.case.rule.name} said Wait")
            case _:
                return await self._wrong(begun, f"answered {_short(answer)}: {PROBE_RETURNS}")

    async def _wrong(self, begun: Begun, said: str) -> Result:
        """Treat a wrong return value; *said* names it, and what the function may return."""
        hook = _hook_of(begun)
        self._calls.tell(begun.case.kind, hook, said, trouble="wrong answer")
        return await self._ends.wait(begun, None, f"{hook.name} {said}")


def _hook_of(begun: Begun) -> KindHook:
    hook = begun.case.rule.hook
    assert hook is not None  # only a mark calls no function
    return hook


def _short(answer: object) -> str:
    return words_of(answer)[:80]
