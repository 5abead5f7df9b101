"""Waits until every request that stood in this host's queues at one moment has been taken.

An application writes `creating`, then sends the request. A service that was down finds the record
before it finds the request. If it judged the record first, the request would come to a resource
that has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from gracekit.clock import Clock
from gracekit.errors import GracekitError
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import Queue

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
        is_local: Whether a queue counts what consumers hold, as a file and memory do.
    """

    def __init__(
        self,
        servers: Collection[RpcServer],
        clock: Clock,
        report: Report,
        siblings_s: Callable[[], Awaitable[float]],
        *,
        is_local: bool,
    ) -> None:
        self._servers = tuple(servers)
        self._clock = clock
        self._report = report
        self._siblings_s = siblings_s
        self._is_local = is_local

    async def wait_read(self) -> None:
        """Wait for the requests that stand in the queues now.

        A queue is read to that point when it is empty, or when as many new deliveries have come
        from it as stood in it. What has come and has no place is not taken yet.
        """
        began = self._clock.loop()
        marks = {server: await self._marks(server) for server in self._servers}
        looks = 0
        while looks < LOOKS:
            left = [await self._left(server, of_queues) for server, of_queues in marks.items()]
            looks = 0 if any(left) else looks + 1
            self._report(sum(left), self._clock.loop() - began)
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(await self._siblings_s())

    async def _depth(self, server: RpcServer, queue: Queue) -> int:
        """How many requests a queue holds that are not taken; raises GracekitError."""
        depth = await server.depth(queue)
        return max(0, depth - server.kept[queue.name]) if self._is_local else depth

    async def _marks(self, server: RpcServer) -> Mapping[Queue, int]:
        """Of each queue, the count of its fresh deliveries at which all that stands in it came."""
        return {queue: await self._mark(server, queue) for queue in server.queues}

    async def _mark(self, server: RpcServer, queue: Queue) -> int:
        while True:
            fresh = server.fresh[queue.name]
            try:
                return fresh + await self._depth(server, queue)
            except GracekitError:  # the broker is away, and nothing is read either
                await asyncio.sleep(LOOK_S)

    async def _left(self, server: RpcServer, marks: Mapping[Queue, int]) -> int:
        """How many requests are to be taken still; 0 if all queues are read to their marks."""
        left = sum([await self._left_in(server, queue, mark) for queue, mark in marks.items()])
        return max(1, left) if server.has_waiting or server.failure is not None else left

    async def _left_in(self, server: RpcServer, queue: Queue, mark: int) -> int:
        missing = mark - server.fresh[queue.name]
        if missing <= 0:
            return 0
        try:
            return min(missing, await self._depth(server, queue))
        except GracekitError:
            return missing
