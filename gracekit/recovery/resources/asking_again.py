"""Follows rules again that have not settled their resource: the probe said Wait, raised or hung."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gracekit import backoff
from gracekit.journal.findings import FindingRow, FindingRows
from gracekit.recovery.decisions import probe_pause_s
from gracekit.recovery.resources.acting import Acting
from gracekit.recovery.resources.found import Found
from gracekit.recovery.resources.kind_table import KindTable
from gracekit.recovery.resources.reading import PAGE, FindError, Page, Reader
from gracekit.recovery.resources.results import ResourceOutcome
from gracekit.recovery.resources.rule_ends import Case
from gracekit.recovery.resources.rules import How
from gracekit.recovery.shared import Shared
from gracekit.rpc.failures import words_of


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
