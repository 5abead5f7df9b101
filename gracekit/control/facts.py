"""What probes and metrics show of a run's store: facts at most 5 seconds old, and its accounts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from gracekit.clock import age_s
from gracekit.control import facts_sql as sql
from gracekit.control.accounts import METRIC, AccountsCount
from gracekit.errors import StoreError
from gracekit.listings.store_view import StoreView
from gracekit.telemetry.telemetry import Telemetry

FRESH_S: Final = 5.0
LOOK_TIMEOUT_S: Final = 1.0
"""If the store has not answered within this time, probes report that it does not answer."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one query of the store.

    Attributes:
        at: Loop time of the query.
        answers: Whether the store answered at all.
        unfinished: Requests of the service that have not ended, by state.
        oldest_s: Age of the oldest of them, in seconds, since it was accepted or last parked; None
            if there is none. Those that are parked now do not count.
        notifications_due: Number of notifications that runs of the service are still to send.
        open_holds: Number of open holds of the service.
    """

    at: float
    answers: bool
    unfinished: Mapping[str, int] = msgspec.field(default_factory=dict)
    oldest_s: float | None = None
    notifications_due: int | None = None
    open_holds: int | None = None


class StoreFacts:
    """Queries the store on demand, at most each `FRESH_S`; concurrent callers share one query.

    Args:
        view: Reads the run's store.
        telemetry: Knows whether there is a meter provider, whose callbacks cannot await a query.
        service: The service whose requests are counted.

    Attributes:
        last: The last result, however old; None before the first.
        accounts: Counts the accounts, which takes longer than this query.
    """

    def __init__(
        self, view: StoreView, accounts: AccountsCount, telemetry: Telemetry, *, service: str
    ) -> None:
        self._view = view
        self._telemetry = telemetry
        self._service = service
        self._looking = asyncio.Lock()
        self.accounts: Final = accounts
        self.last: Facts | None = None

    async def fresh(self) -> Facts:
        """Facts at most `FRESH_S` old; never raises, and waits `LOOK_TIMEOUT_S` at most."""
        async with self._looking:
            if self.last is None or self._is_old(self.last):
                self.last = await self._look()
            return self.last

    def _is_old(self, facts: Facts) -> bool:
        # Half a second earlier, as `keep` asks each `FRESH_S`: facts are younger than their tick.
        return self._view.clock.loop() - facts.at >= FRESH_S - 0.5

    async def measure(self) -> None:
        """Refresh `last` and the accounts as metrics need it; waits 2 seconds at most."""
        await self.fresh()
        await self.accounts.fresh(METRIC)

    async def keep(self) -> None:
        """Query again and again while the process has a meter provider, until cancelled."""
        while True:
            await self._view.clock.wait_tick(FRESH_S)
            if self._telemetry.is_measured:
                await self.measure()

    async def _look(self) -> Facts:
        clock = self._view.clock
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                query = self._view.engine.query
                rows = await query(sql.UNFINISHED, self._service)
                ((due,),) = await query(sql.NOTIFICATIONS_DUE, self._service)
                ((holds,),) = await query(sql.OPEN_HOLDS, self._service, clock.wall())
        except (StoreError, TimeoutError):
            return Facts(at=clock.loop(), answers=False)
        oldest = min((float(at) for _, _, at in rows if at is not None), default=None)
        return Facts(
            at=clock.loop(),
            answers=True,
            unfinished={str(state): int(number) for state, number, _ in rows if number},
            oldest_s=None if oldest is None else age_s(clock.wall(), oldest),
            notifications_due=int(due or 0),
            open_holds=int(holds or 0),
        )
