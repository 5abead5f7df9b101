"""Passes that operators ask for. They settle tasks too if recovery does not by itself."""

from __future__ import annotations

import asyncio

from gracekit.recovery.adoption import Adoption
from gracekit.recovery.resources.judging import PassRequest
from gracekit.recovery.resources.results import PassReport
from gracekit.recovery.resources.schedule import Resources
from gracekit.recovery.settling import Settling
from gracekit.recovery.shared import Shared


class PassesByHand:
    """Makes such passes, each in the asyncio task of its caller.

    Attributes:
        tasks: The tasks of the callers; a stop of recovery cancels them.
    """

    def __init__(
        self, shared: Shared, *, adoption: Adoption, settling: Settling, resources: Resources
    ) -> None:
        self._settings = shared.settings
        self._adoption = adoption
        self._settling = settling
        self._resources = resources
        self.tasks: list[asyncio.Task[object]] = []  # a list: a simulation needs a fixed order

    async def make(self, request: PassRequest, report: PassReport) -> None:
        """Settle what an operator asks for.

        Args:
            request: What to settle.
            report: Filled in while the pass is made.

        Raises:
            GracekitError: it cannot be done now; the message says why.
        """
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            await self._make(request, report)
        except asyncio.CancelledError:
            report.interrupted = True
            raise
        finally:
            self.tasks.remove(task)

    async def _make(self, request: PassRequest, report: PassReport) -> None:
        settles = self._settings.startup_reconciliation_enabled
        if request.is_of_all and not settles and self._resources.may_begin():
            if request.dry_run:
                report.tasks = await self._settling.count_due()
            else:
                await self._adoption.adopt_dead_runs()
                report.tasks = await self._settling.settle_all()
            if not self._resources.may_begin():
                report.interrupted = True  # not an error, as the pass has begun
                return
        await self._resources.make_by_hand(request, report)
