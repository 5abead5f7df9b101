"""Waits until every request that stood in this host's queues at one moment has been taken.

An application writes `creating`, then sends the request. A service that was down finds the record
before it finds the request. If it judged the record first, the request would come to a resource
that has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from gracekit.clock import Clock
from gracekit.errors import GracekitError
from gracekit.rpc.server import RpcServer
from gracekit.tracker.task import Lane

LOOK_S: Final = 1.0
LOOKS: Final = 2
"""So many looks in a row must find a queue empty: what a broker has just sent is neither in its
queue nor here, and RabbitMQ says 0 of a quorum queue without a leader."""
LONGEST_S: Final = 3600.0
"""After it the wait is reported as one that should not be; it goes on."""
Report = Callable[[int, float], None]


class QueueWait:
    """The queues of one host, as its servers read them.

    Args:
        servers: Of each lane.
        report: Called with the number of requests that are still to be taken, and the seconds that
            the wait has lasted.
        siblings_s: Asked for the seconds that other runs of the host may keep a delivery which is
            no longer in its queue, and is not accepted.
        held: How many requests of a lane run here that their queue holds until they have ended.
    """

    def __init__(
        self,
        servers: Mapping[Lane, RpcServer],
        clock: Clock,
        report: Report,
        siblings_s: Callable[[], Awaitable[float]],
        held: Callable[[Lane], int],
    ) -> None:
        self._servers = servers
        self._held = held
        self._clock = clock
        self._report = report
        self._siblings_s = siblings_s

    async def wait_read(self) -> None:
        """Wait for the requests that stand in the queues now.

        A queue is read to that point when it is empty, or when as many new deliveries have come as
        stood in it. What has come and has no place is not taken yet.
        """
        began = self._clock.loop()
        marks = {lane: await self._mark(lane) for lane in self._servers}
        looks = 0
        while looks < LOOKS:
            left = [await self._left(lane, mark) for lane, mark in marks.items()]
            looks = 0 if any(left) else looks + 1
            self._report(sum(left), self._clock.loop() - began)
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(await self._siblings_s())

    async def _depth(self, lane: Lane) -> int:
        """How many requests its queues hold that are not taken; raises GracekitError."""
        return max(0, await self._servers[lane].depth() - self._held(lane))

    async def _mark(self, lane: Lane) -> int:
        """The count of fresh deliveries at which all that stands in its queues has come."""
        while True:
            fresh = self._servers[lane].fresh
            try:
                return fresh + await self._depth(lane)
            except GracekitError:  # the broker is away, and nothing is read either
                await asyncio.sleep(LOOK_S)

    async def _left(self, lane: Lane, mark: int) -> int:
        """How many requests are to be taken still; 0 if the queue is read to the mark."""
        server = self._servers[lane]
        if server.has_waiting or server.failure is not None:
            return max(1, mark - server.fresh)
        if server.fresh >= mark:
            return 0
        try:
            return min(mark - server.fresh, await self._depth(lane))
        except GracekitError:
            return mark - server.fresh
