"""Ends a rule: writes a status, or lets it be followed again; records that with the lease's end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from gracekit import backoff
from gracekit.journal.findings import FindingRow, FindingRows
from gracekit.leases.leases import Guard, Resource
from gracekit.process import Point
from gracekit.recovery.decisions import probe_pause_s
from gracekit.recovery.resources.found import Found
from gracekit.recovery.resources.kinds import How, KindHook, ResourceKind, StatusRule
from gracekit.recovery.resources.reading import FindError, Page
from gracekit.recovery.resources.results import (
    LONGEST_REASON,
    ResourceOutcome,
    Result,
    short_facts,
)
from gracekit.recovery.resources.rule_calls import InterimResult, KindCalls
from gracekit.recovery.shared import Shared
from gracekit.request.work_context import WorkContext
from gracekit.rpc.failures import words_of
from gracekit.store.batch import Batch

NO_FACTS: Final[Mapping[str, object]] = MappingProxyType({})
LOST: Final = "its lease was lost"
WRITE_RETURNS: Final = "it returns True if it has changed the record, else False"

UNCHANGED: Final = (
    "answered False though the status is unchanged: the record may hold a newer token; was the "
    "store lost?"
)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One resource that is to be settled.

    Attributes:
        page: Page on which it was found.
        finding: Its row; None if it has none.
        dependency: A resource that it needs and that has a failed status; None if there is none.
        at_once: Whether to follow a waiting rule before it is due.
        for_use: Whether a handler waits for it, so that it may begin in a drain, too.
    """

    kind: ResourceKind
    found: Found
    page: Page
    finding: FindingRow | None
    dependency: Resource | None = None
    at_once: bool = False
    for_use: bool = False

    @property
    def rule(self) -> StatusRule:
        """The rule for its status."""
        return self.kind.rules[self.found.status]

    @property
    def by(self) -> str:
        """What its new status is due to, for records and logs: its rule, or a dependency."""
        return self.rule.name if self.dependency is None else "dependency"

    @property
    def resource(self) -> Resource:
        """(kind, id)."""
        return self.kind.name, self.found.id

    @property
    def may_keep_thread(self) -> bool:
        """Whether its delete, act or `write` is a plain function, which keeps a thread if it
        hangs.
        """
        done = self.rule.hook if self.rule.how in {How.DELETE, How.ACT} else None
        return self.kind.hook("write").is_plain or (done is not None and done.is_plain)


class Begun(NamedTuple):
    """A case whose rule has begun; `overdue` gets a result if the rule does not end in time."""

    case: Case
    guard: Guard
    row_id: int
    waiting_since: float | None
    ctx: WorkContext
    overdue: InterimResult

    @property
    def event_fields(self) -> dict[str, Any]:
        """The fields that each event of the rule has."""
        return {
            "resource": self.case.resource,
            "status": self.case.found.status,
            "rule": self.case.by,
            "token": self.guard.token,
        }


class Ending(NamedTuple):
    """How a rule ends: what was written, why, and the facts that go with it."""

    outcome: ResourceOutcome
    written: str | None = None
    reason: str = ""
    facts: Mapping[str, object] = NO_FACTS


class RuleEnds:
    """Ends the rules of one run."""

    def __init__(self, shared: Shared, calls: KindCalls, findings: FindingRows) -> None:
        self._journal = shared.journal
        self._leases = shared.leases
        self._settings = shared.settings
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._calls = calls
        self._findings = findings

    async def wait(self, begun: Begun, seconds: float | None, why: str) -> Result:
        """Follow the rule again after *seconds*, or a growing pause; fail it after `max_wait`."""
        now, since = self._clock.wall(), begun.waiting_since
        left_s = begun.case.kind.max_wait_s - (0.0 if since is None else max(0.0, now - since))
        if left_s <= 0:
            return await self.fail(begun, f"gave up: {why}")
        pause_s = probe_pause_s(since, now) if seconds is None else max(0.05, seconds)
        return await self._put_off(begun, min(pause_s, left_s), why)

    async def _put_off(self, begun: Begun, seconds: float, why: str) -> Result:
        why = why[:LONGEST_REASON]
        batch = Batch(Point.FINDING)
        next_check = self._clock.wall() + seconds
        self._findings.add_wait(batch, begun.row_id, next_check=next_check, why=why)
        self._leases.add_release(batch, begun.guard, reason="clean")
        await self._journal.commit(batch)
        return self.tell(begun, Ending(ResourceOutcome.WAITING, reason=why))

    async def put_off(self, begun: Begun, why: str) -> Result:
        """Follow the rule again later without counting the time to `max_wait`.

        For a rule whose function was not called, or whose `write` gave no answer.
        """
        batch = Batch(Point.FINDING)
        now, finding = self._clock.wall(), begun.case.finding
        pause_s = probe_pause_s(None if finding is None else finding.first_seen, now)
        next_check = now + max(backoff.RESOURCES_S, pause_s)
        self._findings.add_let_go(batch, begun.case.resource, next_check=next_check)
        self._leases.add_release(batch, begun.guard, reason="clean")
        await self._journal.commit(batch)
        return self.tell(begun, Ending(ResourceOutcome.WAITING, reason=why[:LONGEST_REASON]))

    async def fail(self, begun: Begun, reason: str) -> Result:
        """Write the failed status of the rule."""
        failed, reason = begun.case.rule.failed, reason[:LONGEST_REASON]
        return await self.write(begun, failed, outcome=ResourceOutcome.FAILED, reason=reason)

    async def write(
        self,
        begun: Begun,
        status: str,
        *,
        outcome: ResourceOutcome = ResourceOutcome.SETTLED,
        reason: str = "",
        facts: Mapping[str, object] = NO_FACTS,
    ) -> Result:
        """Replace the status that was found by *status*, unless the lease was lost."""
        if not await self._leases.is_ours(begun.guard):
            return self.tell(begun, Ending(ResourceOutcome.STALE, reason=LOST))
        kind = begun.case.kind
        hook = kind.hook("write")
        answer = await self._calls.call(
            kind,
            hook,
            begun.ctx,
            before=(begun.case.found, status, facts),
            limit_s=self._settings.probe_timeout_s,
            on_overdue=partial(self.tell_overdue, begun, hook.name),
        )
        if answer.value is True:  # even if it came late: the record was changed
            return await self.end(begun, Ending(outcome, status, reason, facts))
        if answer.value is False:
            return await self._refused(begun, hook)
        said = answer.fault
        if not said:
            said = f"answered {words_of(answer.value)[:80]}: {WRITE_RETURNS}"
            self._calls.tell(kind, hook, said, trouble="wrong answer")
        return await self.put_off(begun, f"{hook.name}: {said}")

    async def _refused(self, begun: Begun, hook: KindHook) -> Result:
        """Treat a `write` that changed nothing: the record has changed, or refuses the token."""
        if not await self._leases.is_ours(begun.guard):
            return await self.end(begun, Ending(ResourceOutcome.STALE))
        found = begun.case.found
        try:
            present = await begun.case.page.look_again(found.id)
        except FindError:
            present = None  # whether the record has changed is not known
        if present is None or present.status != found.status:
            return await self.end(begun, Ending(ResourceOutcome.MOVED_ON))
        self._calls.tell(begun.case.kind, hook, UNCHANGED, trouble="unchanged")
        why = f"{hook.name} {UNCHANGED}"
        return await self.end(begun, Ending(ResourceOutcome.MOVED_ON, reason=why))

    async def end(self, begun: Begun, ending: Ending) -> Result:
        """Commit the end and the release of the lease; a written status is noted as an incident."""
        case = begun.case
        batch = Batch(Point.RESOURCE_SETTLED)
        self._findings.add_end(batch, begun.row_id)
        if ending.written is not None:
            detail = f"{case.found.status} -> {ending.written} by {case.by}, "
            detail += f"token {begun.guard.token}{': ' * bool(ending.reason)}{ending.reason}"
            what = f"resource_{ending.outcome.value}"
            self._findings.add_note(batch, what, case.resource, detail)
        self._leases.add_release(batch, begun.guard, reason="clean")
        await self._journal.commit(batch)
        return self.tell(begun, ending)

    def tell_overdue(self, begun: Begun, hook: str, fault: str) -> None:
        """Let the pass go on without a delete or write that has not ended when cancelled."""
        if begun.overdue.done():
            return
        reason = f"{hook} has not ended: {fault}"
        self._telemetry.emit("resource.stuck", **begun.event_fields, reason=reason)
        begun.overdue.set_result(_result(begun, Ending(ResourceOutcome.WAITING, reason=reason)))

    def tell(self, begun: Begun, ending: Ending) -> Result:
        """Emit the event of an end, and return the result."""
        outcome, written, reason, _ = ending
        if outcome is ResourceOutcome.SETTLED:
            self._telemetry.emit("resource.settled", **begun.event_fields, written=written or "")
        elif outcome is ResourceOutcome.FAILED:
            self._telemetry.emit(
                "resource.failed", **begun.event_fields, written=written or "", reason=reason
            )
        else:
            self._telemetry.emit(
                "resource.left", **begun.event_fields, outcome=outcome.value, reason=reason
            )
        return _result(begun, ending)


def _result(begun: Begun, ending: Ending) -> Result:
    return Result(
        since=begun.case.found.since,
        **{**begun.event_fields, **ending._asdict(), "facts": short_facts(ending.facts)},
    )
