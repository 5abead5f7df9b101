"""Decides which of the resources that a pass has found are to be settled now."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from gracekit.clock import Clock
from gracekit.config.values import duration, format_duration
from gracekit.journal.findings import FindingRow
from gracekit.leases.leases import Resource
from gracekit.recovery.resources.acting import Acting
from gracekit.recovery.resources.found import Found
from gracekit.recovery.resources.kind_table import KindTable
from gracekit.recovery.resources.kinds import How, ResourceKind
from gracekit.recovery.resources.reading import Page, Reader
from gracekit.recovery.resources.results import PassReport, ResourceOutcome, Result, left
from gracekit.recovery.resources.rule_ends import Case

_SKEW_S: Final = 60.0
"""The clocks of two hosts may differ by so much."""


class PassRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass is to do.

    Attributes:
        by_hand: Whether an operator has asked for it. It then keeps the result of each resource,
            and follows waiting rules again at once.
        dry_run: Whether only to report what would be done.
        kind: Settle this kind only.
        resource: Settle this resource only.
        at_least_s: Seconds for which a resource must have had its status.
        had_first: Kinds that have had their first pass; for them `stuck_after` counts instead.
        before_use: Follow only rules that have `before_use`, or only the others; None for all,
            in this order.
        but: A resource that is not settled: the caller's own.
        within_s: Wait so long for the queues, at most; None to wait until they were read.
    """

    by_hand: bool = False
    dry_run: bool = False
    kind: str | None = None
    resource: Resource | None = None
    at_least_s: float = 0.0
    had_first: frozenset[str] = frozenset()
    before_use: bool | None = None
    but: Resource | None = None
    within_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it settles everything, or the last of it."""
        return not self.dry_run and self.is_of_all and not self.before_use

    @property
    def is_of_all(self) -> bool:
        """Whether neither a kind nor a resource is chosen."""
        return self.kind is None and self.resource is None

    def covers(self, kind: str) -> bool:
        """Whether resources of *kind* are settled."""
        chosen = self.kind if self.resource is None else self.resource[0]
        return chosen in {None, kind}


class KindState(msgspec.Struct):
    """One kind in one pass.

    Attributes:
        over: Set when its resources are settled, or its pass is broken.
        broken: Why its pass is broken; None if it is not.
        failed: Ids of its resources in a failed status; only if other kinds come after it.
        unsettled: Ids of its resources with a rule that are not settled; also only then.
    """

    over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    broken: str | None = None
    failed: set[str] = msgspec.field(default_factory=set)
    unsettled: set[str] = msgspec.field(default_factory=set)


class Judging:
    """Decides about the resources of one pass.

    Attributes:
        states: State of each kind, by name.
    """

    def __init__(
        self,
        kinds: KindTable,
        request: PassRequest,
        report: PassReport,
        acting: Acting,
        reader: Reader,
        clock: Clock,
        *,
        began_at: float,
    ) -> None:
        self._kinds = kinds
        self._request = request
        self._report = report
        self._acting = acting
        self._reader = reader
        self._clock = clock
        self._began_at = began_at
        self._needed = kinds.needed()
        self.states = {kind.name: KindState() for kind in kinds}

    def case(
        self, kind: ResourceKind, page: Page, found: Found, known: FindingRow | None
    ) -> Case | Result | None:
        """A case to settle, or a result that says why not; None if the pass does not cover it."""
        state = self.states[kind.name]
        if kind.name in self._needed and found.status in kind.failed_statuses:
            state.failed.add(found.id)
        if found.status not in kind.rules and found.status in kind.end_statuses:
            return None  # `find` returns it only for the resources that need it
        rule = kind.rules.get(found.status)
        if rule is not None and self._request.before_use not in {None, rule.before_use}:
            self._note_unsettled(kind, found)
            return None
        only = self._request.resource
        is_asked = self._request.covers(kind.name) and only in {None, (kind.name, found.id)}
        is_asked = is_asked and (kind.name, found.id) != self._request.but
        needs = [(need, self.states[need[0]]) for need in found.needs if need[0] in self.states]
        dependency = next((need for need, state in needs if need[1] in state.failed), None)
        if rule is not None and rule.needs_failed == "call":
            dependency = None
        at_once = self._request.by_hand or dependency is not None
        reason = self._wrong_need(kind, found)
        reason = reason or self._why_left(kind, found, known, at_once=at_once)
        waits = next((need for need, state in needs if need[1] in state.unsettled), None)
        if reason is None and waits is not None:
            reason = f"waits for {':'.join(waits)}"
        if reason is not None or not is_asked:
            self._note_unsettled(kind, found)
        if not is_asked:
            return None
        if found.status not in kind.rules:
            self._report.unruled[kind.name, found.status] += 1
        if reason is not None:
            return left(kind.name, found, reason)
        return Case(
            kind=kind,
            found=found,
            page=page,
            finding=known,
            dependency=dependency,
            at_once=at_once,
            for_use=self._request.but is not None,
        )

    def _note_unsettled(self, kind: ResourceKind, found: Found) -> None:
        rule = kind.rules.get(found.status)
        if kind.name in self._needed and rule is not None and rule.how is not How.LEAVE:
            self.states[kind.name].unsettled.add(found.id)

    def _why_left(
        self, kind: ResourceKind, found: Found, known: FindingRow | None, *, at_once: bool
    ) -> str | None:
        rule = kind.rules.get(found.status)
        if rule is None:
            return f"status {found.status!r} has no rule"
        if found.busy:
            return "it is busy"
        if rule.how is How.LEAVE:
            return rule.why
        if known is not None and known.status != found.status:
            known = None
        if known is not None and known.next_check is not None and not at_once:
            wait_s = known.next_check - self._clock.wall()
            if wait_s > 0:
                return f"asked again in {wait_s:.0f}s: {known.detail or ''}"
        return self._why_young(kind, found, known)

    def _why_young(self, kind: ResourceKind, found: Found, known: FindingRow | None) -> str | None:
        at_least_s, since = self._request.at_least_s, found.since
        if kind.name in self._request.had_first:
            at_least_s = kind.stuck_after_s
            if since is None:
                since = self._began_at if known is None else known.first_seen
        if self._report.is_unread and (since is None or since >= self._began_at):
            return "it is younger than the wait for the queues, which were not read to the end"
        if since is None:
            return None
        if max(0.0, self._began_at - since) >= at_least_s:
            return None
        if (ahead_s := since - self._clock.wall()) > _SKEW_S:
            return (
                f"its since= lies {duration(ahead_s)} in the future: it is compared "
                "with this host's clock, in seconds since 1970"
            )
        # Names the limit and not the age, which has grown by the time that this is read.
        return f"has been {found.status} for less than {format_duration(at_least_s)}"

    def _wrong_need(self, kind: ResourceKind, found: Found) -> str | None:
        """Why it is not known when the needs of *found* are settled; logged once in a pass."""
        if not (later := {need for need, _ in found.needs} - self._kinds.before(kind.name)):
            return None
        why = (
            f"it needs a {min(later)}, and kind {kind.name} does not come after {min(later)}: "
            f"svc.kind({kind.name!r}, after=[...])"
        )
        self._reader.tell(kind, f"{found.id!r} is left: {why}", trouble="needs")
        return why

    def note_end(self, case: Case, result: Result) -> None:
        """Note the result of a case, for resources that need this one."""
        if case.kind.name not in self._needed:
            return
        state = self.states[case.kind.name]
        if result.written is None and result.outcome is not ResourceOutcome.MOVED_ON:
            state.unsettled.add(case.found.id)
        if result.written in case.kind.failed_statuses:
            state.failed.add(case.found.id)

    async def foresee(self, case: Case) -> Result:
        """What a dry run expects of a case, without touching the resource."""
        if (why := await self._acting.why_not(case)) is not None:
            return left(case.kind.name, case.found, why)
        rule = case.rule
        if case.dependency is not None:
            needs = ":".join(case.dependency)
            would, written = f"write {rule.failed}: dependency {needs}", rule.failed
        elif rule.how is How.MARK:
            would, written = f"mark {rule.failed}", rule.failed
        elif rule.how is How.DELETE:
            would = f"delete again ({rule.name}), else {rule.failed}"
            written = rule.done
        elif rule.how is How.ACT:
            would, written = f"call {rule.name}, else {rule.failed}", rule.done
        else:
            would, written = f"ask {rule.name}, else {rule.failed}", ""
        return Result(
            resource=case.resource,
            status=case.found.status,
            since=case.found.since,
            outcome=ResourceOutcome.SETTLED,
            written=written or None,
            rule=rule.name,
            reason=would,
        )
