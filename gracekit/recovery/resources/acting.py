"""Settles one resource: takes its lease, calls its rule, acts on the answer, releases the lease."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Final

from gracekit.errors import ConflictError, StoreError
from gracekit.journal.findings import FindingRows, Sighting
from gracekit.leases.leases import Guard, Resource
from gracekit.process import Point
from gracekit.recovery.decisions import Wait
from gracekit.recovery.hook_calls import HookEnd
from gracekit.recovery.resources.found import Absent, Broken, Settled
from gracekit.recovery.resources.kinds import How, KindHook
from gracekit.recovery.resources.reading import FindError
from gracekit.recovery.resources.results import ResourceOutcome, Result, left
from gracekit.recovery.resources.rule_calls import (
    InterimResult,
    KindCalls,
    UnendedRules,
)
from gracekit.recovery.resources.rule_ends import LOST, Begun, Case, Ending, RuleEnds
from gracekit.recovery.shared import Shared
from gracekit.request.suspects import SuspectRow, Suspicion, is_guilty, suspicion
from gracekit.request.work_context import WorkContext
from gracekit.rpc.failures import words_of
from gracekit.store.batch import Batch

AT_WORK_HERE: Final = "a request for it is at work here"
NO_REQUESTS: Final = "the service takes no requests now"


class Acting:
    """Settles resources of one run.

    Args:
        may_begin: Whether the service takes requests; during a drain or quiet no rule begins.
        unended: Keeps rules that do not end, so that their passes go on.
        patience_s: After so many seconds a pass that nobody has asked for goes on without a rule
            that acts; None to wait for its limit.
    """

    def __init__(
        self,
        shared: Shared,
        calls: KindCalls,
        findings: FindingRows,
        may_begin: Callable[[], bool],
        unended: UnendedRules,
        patience_s: float | None,
    ) -> None:
        self._journal = shared.journal
        self._leases = shared.leases
        self._lines = shared.lines
        self._tracker = shared.tracker
        self._services = shared.services
        self._suspects = shared.suspects
        self._settings = shared.settings
        self._clock = shared.clock
        self._ends = RuleEnds(shared, calls, findings)
        self._answers = RuleAnswers(shared, calls, self._ends)
        self._findings = findings
        self._may_begin = may_begin
        self._unended = unended
        self._patience_s = patience_s
        self._owed: set[Resource] = set()  # this run may own their rows, though no rule acts
        self._under_way: dict[
            Resource, asyncio.Future[Result | None]
        ] = {}  # done when the rule has ended
        # Waits of suspects that have not begun; in a fixed order, for simulations.
        self._waits: dict[asyncio.Timeout, None] = {}

    def let_go_of_waiting(self) -> None:
        """End the waits of suspects that want to be alone, as in a drain they might never begin."""
        for wait in self._waits:
            if wait.when() is None:  # otherwise it was ended already
                wait.reschedule(asyncio.get_running_loop().time())

    @property
    def is_owing(self) -> bool:
        """Whether `let_go_owed` has something to do."""
        return bool(self._owed)

    async def let_go_owed(self) -> None:
        """Release rows that this run may own after a failed commit; only while no rule acts."""
        if not self._owed:
            return
        batch, owed = Batch(Point.FINDING), set(self._owed)
        for resource in owed:
            self._findings.add_let_go(batch, resource, next_check=self._clock.wall())
        await self._journal.commit(batch)
        self._owed -= owed

    async def settle(self, case: Case) -> Result:
        """Settle one resource, unless a task or rule works on it; returns what became of it."""
        if case.for_use and (joined := self._under_way.get(case.resource)) is not None:
            await asyncio.wait({joined})
            return joined.result() or self._left(case, "the pass that settled it was cut off")
        result: Result | None = None
        joined = self._under_way[case.resource] = asyncio.get_running_loop().create_future()
        try:
            result = await self._settle_in_turn(case)
            return result
        finally:
            joined.set_result(result)
            if self._under_way.get(case.resource) is joined:
                del self._under_way[case.resource]

    async def _settle_in_turn(self, case: Case) -> Result:
        plain = case.may_keep_thread
        if (why := await self._unended.wait_for_place(case.resource, plain=plain)) is not None:
            return self._left(case, why)
        settle = partial(self._settle, case)
        patience = None
        if self._patience_s is not None and not (case.at_once or case.for_use):
            why = f"{case.rule.name} has not ended yet, and the pass goes on"
            patience = (
                self._patience_s,
                dataclasses.replace(
                    self._left(case, why), outcome=ResourceOutcome.WAITING, rule=case.rule.name
                ),
            )
        return await self._unended.wait_for(case.resource, settle, plain=plain, patience=patience)

    async def _settle(self, case: Case, overdue: InterimResult) -> Result:
        if not self._lines.enter_nowait(case.resource):
            return self._left(case, AT_WORK_HERE)
        try:
            # The tracker also knows requests that have neither a row nor a lease yet.
            if any(task.resource == case.resource for task in self._tracker):
                return self._left(case, AT_WORK_HERE)
            return await self._settle_alone(case, overdue)
        finally:
            self._lines.leave(case.resource)

    async def _settle_alone(self, case: Case, overdue: InterimResult) -> Result:
        known = case.finding
        if known is not None and known.status != case.found.status:
            known = None  # the row is about an earlier status
        cap = self._settings.max_attempts
        about = None if known is None else suspicion(known.crashes, cap)
        row = ("finding", 0 if known is None else known.id)
        who = object()
        try:
            alone = await self._enter(who, row, about, for_use=case.for_use)
        except TimeoutError:
            return self._left(case, NO_REQUESTS)
        try:
            if not (case.for_use or self._may_begin()):
                return self._left(case, NO_REQUESTS)
            guilty = known is not None and is_guilty(known.crashes, cap, alone=known.alone)
            crashes = known.crashes if known and guilty else 0
            return await self._settle_now(case, overdue, alone=alone, crashes=crashes)
        finally:
            self._suspects.leave(who)

    async def _enter(
        self, who: object, row: SuspectRow, about: Suspicion | None, *, for_use: bool
    ) -> bool:
        """Wait until the rule may begin; returns whether it is alone.

        Raises:
            TimeoutError: `let_go_of_waiting` has ended the wait.
        """
        if not (for_use or self._may_begin()):
            raise TimeoutError
        async with asyncio.timeout(None) as wait:
            self._waits[wait] = None
            try:
                return await self._suspects.enter(who, row, about)
            finally:
                del self._waits[wait]

    async def _settle_now(
        self, case: Case, overdue: InterimResult, *, alone: bool, crashes: int
    ) -> Result:
        with self._tracker.background(_named(case), self._clock) as task:
            try:
                guard, row_id, since = await self._begin(case, alone=alone)
            except ConflictError:
                why = await self.why_not(case)
                return self._left(case, why or "a task was at work on it just now")
            task.resource, task.token = case.resource, guard.token
            ctx = WorkContext(task, self._services, what=_named(case))
            begun = Begun(case, guard, row_id, since, ctx, overdue)
            return await self._act_and_end(begun, crashes=crashes)

    async def _act_and_end(self, begun: Begun, *, crashes: int) -> Result:
        """Follow the rule; in any case lease and row are released, or noted as kept."""
        try:
            result = await self._answers.follow(begun, crashes=crashes)
        except asyncio.CancelledError:
            if begun.ctx.lost:  # this process goes on
                self._owe(begun, settle_s=self._settings.startup_reconciliation_wait_seconds)
            else:
                self._leases.kept += 1  # only the death of this process frees it
            raise
        except ConflictError:  # another run has taken over its lease or row
            result = self._ends.tell(begun, Ending(ResourceOutcome.STALE, reason=LOST))
        except Exception:
            self._owe(begun)
            raise
        if result.outcome is ResourceOutcome.STALE:
            self._owe(begun)
        return result

    def _owe(self, begun: Begun, *, settle_s: float | None = None) -> None:
        self._leases.owe(begun.guard, begun.case.rule.name, settle_s=settle_s)
        self._owed.add(begun.case.resource)

    async def _begin(self, case: Case, *, alone: bool) -> tuple[Guard, int, float | None]:
        """Take the lease and record that the rule begins; ConflictError if a task is at work."""
        batch = Batch(Point.RULE)
        # A lease that an earlier try may have taken must not be released while this one commits.
        doubted = self._leases.forget_doubt(case.resource, case.rule.name)
        lease = self._leases.add_take(batch, case.resource, case.rule.name, None)
        row = self._findings.add_begin(
            batch,
            Sighting(
                kind=case.kind.name,
                name=case.found.id,
                status=case.found.status,
                page=case.page.after,
            ),
            rule=case.rule.name,
            settle_s=self._settings.startup_reconciliation_wait_seconds,
            alone=alone,
            at_once=case.at_once,
        )
        try:
            rows = await self._journal.commit(batch)
        except (StoreError, asyncio.CancelledError) as error:
            is_clear = isinstance(error, ConflictError)
            if doubted or not is_clear:
                self._leases.doubt(case.resource, case.rule.name)
            if not is_clear:
                self._owed.add(case.resource)
            raise
        row_id, since = rows[row][0]
        self._owed.discard(case.resource)  # a rule acts on it now, so its row is not released
        guard = Guard(resource=case.resource, token=int(rows[lease][0][0] or 0))
        return guard, int(row_id or 0), None if since is None else float(since)

    async def why_not(self, case: Case) -> str | None:
        """Why a rule cannot begin, such as a task at work on the resource; None if it can."""
        if (why := self._unended.why_not(case.resource)) is not None:
            return why
        task = await self._findings.at_work(*case.resource)
        if task is not None:
            where = "" if task.instance is None else f" on {task.instance}"
            verb = {"running": "runs", "accepted": "waits"}.get(task.state, "is unfinished")
            return f"request {task.request_id} ({task.method}) {verb}{where}"
        lease = await self._leases.look(case.resource)
        if lease is not None and lease.owner is not None:
            return f"its lease is held by {lease.request_id} of run {lease.owner}"
        if lease is not None and lease.not_before > self._clock.wall():
            return "a process that worked on it has died, and its last request may be under way"
        return None

    def _left(self, case: Case, reason: str) -> Result:
        return left(case.kind.name, case.found, reason)


def _named(case: Case) -> str:
    return f"rule {case.rule.name} of kind {case.kind.name}"


PROBE_RETURNS: Final = "it returns Settled, Absent, Broken or Wait"
DELETE_RETURNS: Final = "a delete returns nothing, when the resource is gone"
ACT_RETURNS: Final = "an act returns nothing when it is done, else Settled, Absent, Broken or Wait"


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
        return await (self._probe if rule.how is How.PROBE else self._do)(begun)

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

    async def _do(self, begun: Begun) -> Result:
        """Call a delete or an act."""
        on_overdue = partial(self._ends.tell_overdue, begun, begun.case.rule.name)
        end = await self._call(begun, begun.case.kind.max_wait_s, "max_wait", on_overdue)
        if not end.has_begun:
            return await self._ends.put_off(begun, f"{begun.case.rule.name}: {end.fault}")
        if end.fault:
            return await self._ends.fail(begun, end.fault)
        if end.value is None:
            return await self._ends.write(begun, begun.case.rule.done)
        if begun.case.rule.how is How.ACT:
            return await self._take_answer(begun, end.value)
        # Perhaps it means that the delete goes on.
        return await self._wrong(begun, f"returned {_short(end.value)}: {DELETE_RETURNS}")

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
                may = ACT_RETURNS if begun.case.rule.how is How.ACT else PROBE_RETURNS
                return await self._wrong(begun, f"answered {_short(answer)}: {may}")

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
