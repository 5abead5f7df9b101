"""What probes and metrics show of a run's store, at most 5 seconds old."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gracekit.clock import age_s
from gracekit.control import facts_sql as sql
from gracekit.errors import StoreError
from gracekit.listings.store_view import StoreView
from gracekit.telemetry.telemetry import Telemetry

FRESH_S: Final = 5.0
LOOK_TIMEOUT_S: Final = 1.0
"""If the store has not answered within this time, probes report that it does not answer."""
COUNT_EVERY_S: Final = 60.0
"""Seconds between two counts of the accounts, which read every row of the store."""
COUNT_SHARE: Final = 100
"""A count that took 1 s is repeated after 100 s: it keeps other reads waiting."""
UNCOUNTED_S: Final = 600.0
"""Seconds until the next count if the last one timed out or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one look has shown.

    Attributes:
        at: Loop time in seconds.
        answers: Whether the store answered at all.
        unfinished: Requests of the service that have not ended, by state.
        oldest_s: Age of the oldest of them, in seconds; None if there is none.
    """

    at: float
    answers: bool
    unfinished: Mapping[str, int] = field(default_factory=dict)
    oldest_s: float | None = None


class StoreFacts:
    """Queries the store on demand, at most each `FRESH_S`; concurrent callers share one query.

    Args:
        view: Reads the run's store.
        telemetry: Knows whether there is a meter provider, whose callbacks cannot await a query.
        service: The service whose requests are counted.

    Attributes:
        last: What the last look has shown, however old; None before the first.
        accounts_off_by: Requests of the store that are not accounted for, as last counted; None
            before that.
    """

    def __init__(self, view: StoreView, telemetry: Telemetry, *, service: str) -> None:
        self._view = view
        self._telemetry = telemetry
        self._service = service
        self._looking = asyncio.Lock()
        self._counting = asyncio.Lock()
        self._count_at = 0.0  # loop time of the next count
        self.last: Facts | None = None
        self.accounts_off_by: int | None = None

    async def fresh(self) -> Facts:
        """Facts at most `FRESH_S` old; never raises, and waits `LOOK_TIMEOUT_S` at most."""
        async with self._looking:
            if self.last is None or self._view.clock.loop() - self.last.at >= FRESH_S:
                self.last = await self._look()
            return self.last

    async def count_accounts(self) -> None:
        """Count the accounts, if they are due; waits `LOOK_TIMEOUT_S` at most."""
        clock = self._view.clock
        async with self._counting:
            began_at = clock.loop()
            if began_at < self._count_at:
                return
            self._count_at = began_at + UNCOUNTED_S
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    self.accounts_off_by = (await self._view.accounts()).off_by
            except (StoreError, TimeoutError):
                return
            took_s = clock.loop() - began_at
            self._count_at = clock.loop() + max(COUNT_EVERY_S, COUNT_SHARE * took_s)

    async def keep(self) -> None:
        """Query again and again while the process has a meter provider, until cancelled."""
        while True:
            await asyncio.sleep(FRESH_S)
            if self._telemetry.is_measured:
                await self.fresh()
                await self.count_accounts()

    async def _look(self) -> Facts:
        clock = self._view.clock
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                rows = await self._view.engine.query(sql.UNFINISHED, self._service)
        except (StoreError, TimeoutError):
            return Facts(at=clock.loop(), answers=False)
        oldest = min((float(at or 0.0) for _, _, at in rows), default=None)
        return Facts(
            at=clock.loop(),
            answers=True,
            unfinished={str(state): int(number or 0) for state, number, _ in rows},
            oldest_s=None if oldest is None else age_s(clock.wall(), oldest),
        )
