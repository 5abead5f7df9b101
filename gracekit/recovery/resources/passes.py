"""One pass: finds all resources in a transient status, kind by kind, and settles them.

Between passes, rules whose probe said Wait, raised or hung are followed again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator

import msgspec

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.journal.findings import FindingRow, FindingRows, PassRecord, Sighting
from gracekit.recovery.decisions import probe_pause_s
from gracekit.recovery.resources.acting import Acting
from gracekit.recovery.resources.found import Found
from gracekit.recovery.resources.judging import Judging, PassRequest
from gracekit.recovery.resources.kind_table import KindTable
from gracekit.recovery.resources.kinds import How, ResourceKind
from gracekit.recovery.resources.reading import PAGE, FindError, Page, Reader
from gracekit.recovery.resources.results import (
    LONGEST_REASON,
    PassReport,
    ResourceOutcome,
    Result,
    left,
)
from gracekit.recovery.resources.rule_ends import Case
from gracekit.recovery.shared import Shared
from gracekit.rpc.failures import words_of
from gracekit.telemetry.telemetry import Telemetry


class PausedError(Exception):
    """The service takes no requests now: the pass begins nothing more."""


class ResourcePass:
    """One pass of one run; made anew for each pass."""

    def __init__(
        self,
        kinds: KindTable,
        reader: Reader,
        acting: Acting,
        findings: FindingRows,
        request: PassRequest,
        report: PassReport,
        telemetry: Telemetry,
        clock: Clock,
        *,
        at_once: int,
        may_begin: Callable[[], bool],
        began_at: float | None = None,
    ) -> None:
        self._kinds = kinds
        self._reader = reader
        self._acting = acting
        self._findings = findings
        self.request = request
        self._telemetry = telemetry
        self._clock = clock
        self._at_once = at_once
        self._may_begin = may_begin
        self._readers: list[asyncio.Task[None]] = []
        self._others: ResourcePass | None = None
        self.report = report
        self.began_at = clock.wall() if began_at is None else began_at
        self._ahead_s = clock.wall() - clock.loop()
        self._judging = Judging(
            kinds, request, self.report, acting, reader, clock, began_at=self.began_at
        )

    async def run(self) -> PassReport:
        """Make the pass; returns its report when nothing is left to do."""
        rules = [rule for kind in self._kinds for rule in kind.rules.values()]
        if self.request.before_use is None and any(rule.before_use for rule in rules):
            return await self._run_in_turn()
        return await self._run()

    async def _run_in_turn(self) -> PassReport:
        """First what frees things that others need, then the others."""
        for first in (True, False):
            self._others = one = ResourcePass(
                self._kinds,
                self._reader,
                self._acting,
                self._findings,
                msgspec.structs.replace(self.request, before_use=first),
                self.report,
                self._telemetry,
                self._clock,
                at_once=self._at_once,
                may_begin=self._may_begin,
                began_at=self.began_at,
            )
            await one.run()
            if self.report.interrupted:
                break
        return self.report

    async def _run(self) -> PassReport:
        if self.request.by_hand and self.request.is_of_all:
            await self._drop_undeclared()
        self._readers = [asyncio.create_task(self._settle_kind(kind)) for kind in self._chosen()]
        if not self._readers:
            return self.report
        try:
            await asyncio.wait(self._readers)
        except asyncio.CancelledError:
            self.interrupt()
            await asyncio.gather(*self._readers, return_exceptions=True)
            raise
        for reader in self._readers:
            if not reader.cancelled() and (error := reader.exception()) is not None:
                raise error
        for (kind, status), number in self.report.unruled.items():
            self._telemetry.emit("resource.unruled", kind=kind, status=status, number=number)
        return self.report

    async def _drop_undeclared(self) -> None:
        """Forget the resources of kinds that the code has no longer; no other pass reads them."""
        verb = "would be" if self.request.dry_run else "is"
        for finding in await self._findings.of_other_kinds(self._kinds):
            why = f"no kind {finding.kind} is declared: what is on record of it {verb} dropped"
            if not self.request.dry_run:
                await self._findings.forget(finding, is_gone=True, dropped=why)
            found = Found(finding.name, finding.status, since=finding.first_seen)
            self.report.add(left(finding.kind, found, why))

    def interrupt(self) -> None:
        """Read nothing more; rules that act are waited for."""
        self.report.interrupted = True
        for reader in self._readers:
            reader.cancel()
        if self._others is not None:
            self._others.interrupt()

    def _chosen(self) -> list[ResourceKind]:
        """The kinds to settle, and those that come before them, which are only read."""
        chosen: set[str] = set()
        for kind in reversed(self._kinds.in_order()):
            if kind.name in chosen or self.request.covers(kind.name):
                chosen |= {kind.name, *kind.after}
        return [kind for kind in self._kinds.in_order() if kind.name in chosen]

    def _is_clock_set(self) -> bool:
        """Whether the wall clock was set since the pass began, so that times cannot be compared."""
        return abs(self._clock.wall() - self._clock.loop() - self._ahead_s) > 1.0

    @property
    def numbers(self) -> Counter[ResourceOutcome]:
        """Number of resources by outcome so far; what a dry run would settle counts as waiting."""
        numbers = Counter(self.report.numbers)
        if self.request.dry_run:
            numbers[ResourceOutcome.WAITING] += numbers.pop(ResourceOutcome.SETTLED, 0)
        return numbers

    def record(self, run_id: str, *, settles: bool) -> PassRecord:
        """The record of the pass, to be kept at its end.

        Args:
            run_id: Id of this run.
            settles: Whether recovery settles resources without an operator's request.
        """
        numbers = self.numbers
        return PassRecord(
            run_id=run_id,
            began_at=self.began_at,
            finished_at=self._clock.wall(),
            settled=numbers[ResourceOutcome.SETTLED],
            failed=numbers[ResourceOutcome.FAILED],
            waiting=numbers[ResourceOutcome.WAITING],
            left_alone=numbers[ResourceOutcome.LEFT],
            found_only=not settles,
            by_hand=self.request.by_hand,
            broken=self.report.broken,
        )

    # -- one kind -----------------------------------------------------------------------

    async def _settle_kind(self, kind: ResourceKind) -> None:
        state = self._judging.states[kind.name]
        acting: set[asyncio.Task[None]] = set()
        try:
            await self._wait_for_earlier(kind)
            await self._read(kind, acting)
            if self.request.is_whole and not self._is_clock_set():
                await self._wait_for(acting)
                await self._findings.sweep(kind.name, before=self.began_at)
        except FindError as error:
            state.broken = str(error)
        except PausedError:
            self.report.interrupted = True
        except Exception as error:
            state.broken = words_of(error)
            raise
        finally:
            await self._wait_for(acting)
            if state.broken is not None:
                self.report.broken[kind.name] = state.broken
                self._telemetry.emit("reconciliation.broken", kind=kind.name, reason=state.broken)
            state.over.set()

    async def _wait_for_earlier(self, kind: ResourceKind) -> None:
        for before in kind.after:
            state = self._judging.states[before]
            await state.over.wait()
            if state.broken is not None:
                raise FindError(f"waits for {before}: {state.broken}")
        if self.report.interrupted:
            raise PausedError

    async def _wait_for(self, acting: Collection[asyncio.Task[None]]) -> None:
        """Wait for the rules that act, even if this is cancelled meanwhile."""
        while open_ones := [task for task in acting if not task.done()]:
            try:
                await asyncio.wait(open_ones)
            except asyncio.CancelledError:
                self.report.interrupted = True

    async def _read(self, kind: ResourceKind, acting: set[asyncio.Task[None]]) -> None:
        slots = asyncio.Semaphore(self._at_once)
        async for page, founds in self._reader.pages(kind):
            known = await self._findings.by_name(kind.name, [found.id for found in founds])
            if not self.request.dry_run:
                await self._findings.note_seen(self._sightings(kind, page, founds, known))
            for found in founds:
                case = self._judging.case(kind, page, found, known.get(found.id))
                if isinstance(case, Result):
                    self._add(case)
                if not isinstance(case, Case):
                    continue
                if self.request.dry_run:
                    result = await self._judging.foresee(case)
                    self.report.add(result)
                    self._judging.note_end(case, result)
                    continue
                await slots.acquire()
                if not self._may_begin():
                    raise PausedError
                background.run_beside(acting, self._act(case, slots))

    def _sightings(
        self,
        kind: ResourceKind,
        page: Page,
        founds: list[Found],
        known: dict[str, FindingRow],
    ) -> Iterator[Sighting]:
        """The resources whose rows to update, or to add if `find` does not say since when."""
        for found in founds:
            rule = kind.rules.get(found.status)
            if rule is None or rule.how is How.LEAVE:
                continue  # it needs no row; the sweep removes one from an earlier status
            dateless = found.since is None and kind.name in self.request.had_first
            if found.id in known or dateless:
                yield Sighting(kind=kind.name, name=found.id, status=found.status, page=page.after)

    # -- one resource -------------------------------------------------------------------

    async def _act(self, case: Case, slots: asyncio.Semaphore) -> None:
        try:
            result = await self._acting.settle(case)
        except Exception as error:  # noqa: BLE001 - it must not stop the other resources
            self._telemetry.emit("store.error", what="resources", error=words_of(error))
            result = left(case.kind.name, case.found, words_of(error)[:LONGEST_REASON])
        finally:
            slots.release()
        self._add(result)
        self._judging.note_end(case, result)

    def _add(self, result: Result) -> None:
        self.report.add(result)
        if not self.request.dry_run:
            self._telemetry.emit(
                "resource.reconciled", kind=result.resource[0], outcome=result.outcome.value
            )


class AskingAgain:
    """Follows such rules again between two passes, each when it is due.

    Attributes:
        due_at: Loop time at which the next rule is due.
    """

    def __init__(
        self,
        shared: Shared,
        kinds: KindTable,
        findings: FindingRows,
        reader: Reader,
        acting: Acting,
        may_begin: Callable[[], bool],
    ) -> None:
        self._kinds = kinds
        self._findings = findings
        self._reader = reader
        self._acting = acting
        self._may_begin = may_begin
        self._settings = shared.settings
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._had_trouble = False
        self.due_at = 0.0

    async def ask_due(self) -> None:
        """Follow the rules that are due, at most as many as may act at a time."""
        self.due_at = self._clock.loop() + backoff.RESOURCES_S  # also if this fails
        self._had_trouble = False
        await self._acting.let_go_owed()
        due = await self._findings.due(self._settings.reconcile_at_once)
        if due and self._may_begin():
            await asyncio.gather(*map(self._ask_safely, due))
        await self.note_next()

    async def note_next(self) -> None:
        """Read when the next rule is due."""
        moment = await self._findings.next_check()
        left_s = float("inf") if moment is None else max(0.05, moment - self._clock.wall())
        if self._acting.is_owing or self._had_trouble:
            left_s = backoff.RESOURCES_S
        self.due_at = self._clock.loop() + left_s

    async def _ask_safely(self, finding: FindingRow) -> None:
        """Follow one rule again; an error is logged and does not stop the others."""
        try:
            await self._ask(finding)
        except Exception as error:  # noqa: BLE001 - whatever failed, it is tried again later
            self._telemetry.emit("store.error", what="resources", error=words_of(error))
            self._had_trouble = True

    async def _ask(self, finding: FindingRow) -> None:
        if finding.kind not in self._kinds:  # perhaps a newer version beside this one has it
            await self._put_off(finding)
            return
        kind = self._kinds[finding.kind]
        page = Page(self._reader, kind, finding.page)
        try:
            founds = await page.read()
        except FindError as error:
            self._telemetry.emit("reconciliation.broken", kind=kind.name, reason=str(error))
            await self._put_off(finding)
            return
        found = founds.get(finding.name)
        now = self._clock.wall()
        rule = None if found is None else kind.rules.get(found.status)
        if found is None or rule is None or not _is_same(found, finding, now):
            await self._findings.forget(finding, is_gone=len(founds) < PAGE)
            return
        if found.busy or rule.how is How.LEAVE:
            await self._put_off(finding)
            return
        case = Case(kind=kind, found=found, page=page, finding=finding)
        result = await self._acting.settle(case)
        self._telemetry.emit("resource.reconciled", kind=kind.name, outcome=result.outcome.value)
        if result.outcome is ResourceOutcome.LEFT:
            await self._put_off(finding)

    async def _put_off(self, finding: FindingRow) -> None:
        now = self._clock.wall()
        pause_s = max(backoff.RESOURCES_S, probe_pause_s(finding.waiting_since, now))
        await self._findings.put_off(finding, next_check=now + pause_s)


def _is_same(found: Found, finding: FindingRow, now: float) -> bool:
    """Whether the resource has had the same status since it was found.

    If it was deleted and created again, its request may still be in a queue, so it must wait for a
    pass. A `since` later than *now* was written before the clock was set back, and says nothing.
    """
    is_anew = found.since is not None and finding.first_seen < found.since <= now
    return found.status == finding.status and not is_anew
