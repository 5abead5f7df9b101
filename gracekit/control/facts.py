"""What probes, metrics and `status` show of a run's store and of its queues."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from typing import Any, Final

from gracekit.clock import age_s
from gracekit.control.accounts import METRIC, AccountsCount
from gracekit.errors import GracekitError, StoreError
from gracekit.listings import listings_sql as sql
from gracekit.listings.store_view import StoreView
from gracekit.rpc.server import RpcServer
from gracekit.telemetry.readings import StoreNumbers
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane

FRESH_S: Final = 5.0
LOCAL_EVERY_S: Final = 0.5
BROKER_EVERY_S: Final = 15.0
"""A file, or a broker, is asked about the queues at most each so many seconds."""
LOOK_TIMEOUT_S: Final = 1.0
"""If the store has not answered within this time, probes report that it does not answer."""


class StoreFacts:
    """Queries the store on demand, at most each `FRESH_S`; concurrent callers share one query.

    Args:
        view: Reads the run's store.
        telemetry: Knows whether there is a meter provider, whose callbacks cannot await a query.
        servers: Read the run's queues.
        service: The service whose requests are counted.

    Attributes:
        last: The last result, however old; unknown numbers if the store did not answer.
        accounts: Counts the accounts, which takes longer than this query.
        queues: The last count of the queues: for each lane that could be asked its `topic`, how
            many requests are `waiting`, and the age of the oldest, `oldest_s` (None: not known).
    """

    def __init__(
        self,
        view: StoreView,
        accounts: AccountsCount,
        telemetry: Telemetry,
        servers: Mapping[Lane, RpcServer],
        *,
        service: str,
    ) -> None:
        self._view = view
        self._telemetry = telemetry
        self._servers = servers
        self._service = service
        is_local = all(server.is_local for server in servers.values())
        self._count_every_s = LOCAL_EVERY_S if is_local else BROKER_EVERY_S
        self._looking, self._counting = asyncio.Lock(), asyncio.Lock()
        self._looked_at = self._counted_at = -math.inf  # loop times
        self.accounts: Final = accounts
        self.last = StoreNumbers()
        self.queues: Mapping[str, Mapping[str, Any]] = {}

    async def fresh(self) -> StoreNumbers:
        """Numbers at most `FRESH_S` old; never raises, and waits `LOOK_TIMEOUT_S` at most."""
        async with self._looking:
            # Half a second earlier, as `keep` asks each `FRESH_S`: numbers are younger than a tick.
            if self._view.clock.loop() - self._looked_at >= FRESH_S - 0.5:
                self.last = await self._look()
                self._looked_at = self._view.clock.loop()
            return self.last

    async def count_queues(self) -> Mapping[str, Mapping[str, Any]]:
        """`queues`, counted anew if they are old; never raises, and waits `LOOK_TIMEOUT_S`."""
        async with self._counting:
            if self._view.clock.loop() - self._counted_at >= self._count_every_s:
                self.queues = await self._count()
                self._counted_at = self._view.clock.loop()
            return self.queues

    async def measure(self) -> None:
        """Refresh all that metrics need; waits 2 seconds at most."""
        await asyncio.gather(self.fresh(), self.count_queues())
        await self.accounts.fresh(METRIC)

    async def keep(self) -> None:
        """Query again and again while the process has a meter provider, until cancelled."""
        while True:
            await self._view.clock.wait_tick(FRESH_S)
            if self._telemetry.is_measured:
                await self.measure()

    async def _look(self) -> StoreNumbers:
        clock = self._view.clock
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                query = self._view.engine.query
                rows = await query(sql.UNFINISHED_OF_SERVICE, self._service)
                ((due,),) = await query(sql.NOTIFICATIONS_DUE, self._service)
                ((holds,),) = await query(sql.OPEN_HOLDS_OF_SERVICE, self._service, clock.wall())
        except (StoreError, TimeoutError):
            return StoreNumbers()
        oldest = min((float(at) for _, _, at in rows if at is not None), default=None)
        return StoreNumbers(
            unfinished={str(state): int(number) for state, number, _ in rows if number},
            oldest_unfinished_s=0.0 if oldest is None else age_s(clock.wall(), oldest),
            notifications_due=int(due or 0),
            open_holds=int(holds or 0),
        )

    async def _count(self) -> Mapping[str, Mapping[str, Any]]:
        found = {}
        with contextlib.suppress(GracekitError, TimeoutError):
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                for lane, server in self._servers.items():
                    number, oldest_s = await server.waiting()
                    topic = server.queues[0].topic
                    found[lane.value] = {"topic": topic, "waiting": number, "oldest_s": oldest_s}
        return found
