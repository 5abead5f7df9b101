"""Emits the events of one pass: its start, its progress, and its end."""

from __future__ import annotations

import asyncio

from gracekit.clock import Clock
from gracekit.recovery.resources.passes import ResourcePass
from gracekit.recovery.resources.results import ResourceOutcome
from gracekit.telemetry.telemetry import Telemetry


class PassEvents:
    """The events of one pass; making this object emits the first."""

    def __init__(self, one: ResourcePass, telemetry: Telemetry, clock: Clock) -> None:
        self._pass = one
        self._telemetry = telemetry
        self._clock = clock
        self._began = clock.loop()
        telemetry.emit(
            "reconciliation.started", by_hand=one.request.by_hand, dry_run=one.request.dry_run
        )

    async def tell_progress(self, every_s: float) -> None:
        """Emit the progress each *every_s* seconds until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            numbers = self._pass.numbers
            self._telemetry.emit(
                "reconciliation.progress",
                settled=numbers[ResourceOutcome.SETTLED],
                failed=numbers[ResourceOutcome.FAILED],
                waiting=numbers[ResourceOutcome.WAITING],
                left=numbers[ResourceOutcome.LEFT],
                waits_for=self._pass.report.waits_for,
            )

    def finished(self) -> None:
        """Emit that the pass has ended."""
        numbers, report = self._pass.numbers, self._pass.report
        self._telemetry.emit(
            "reconciliation.finished",
            settled=numbers[ResourceOutcome.SETTLED],
            failed=numbers[ResourceOutcome.FAILED],
            waiting=numbers[ResourceOutcome.WAITING],
            left=numbers[ResourceOutcome.LEFT],
            broken=sorted(report.broken),
            interrupted=report.interrupted,
            dry_run=self._pass.request.dry_run,
            took_s=round(self._clock.loop() - self._began, 3),
        )
