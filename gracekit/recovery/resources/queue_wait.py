"""Waits until all requests that are in this host's queues at one moment have been read.

An application writes `creating`, then sends the request. A service that was down sees the record
before it reads the request. If it settled the record first, the request would then meet a resource
that was marked as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Final

from gracekit.errors import GracekitError
from gracekit.recovery.resources.results import PassReport
from gracekit.recovery.shared import Shared
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import Queue

LOOK_S: Final = 1.0
LOOKS: Final = 2
"""A queue must be found empty so many times in a row: a delivery on its way is neither in the queue
nor here, and RabbitMQ reports 0 messages for a quorum queue without a leader."""
LONGEST_S: Final = 3600.0
"""After so many seconds an event reports that the wait is too long; the wait goes on."""


class QueueWait:
    """Waits for the queues that the servers of one run read."""

    def __init__(self, shared: Shared, servers: Collection[RpcServer]) -> None:
        self._servers = tuple(servers)
        self._clock = shared.clock
        self._telemetry = shared.telemetry
        self._members = shared.members
        self._is_local = shared.is_local  # then a queue's depth includes unaccepted deliveries
        self._accept_wait_s = shared.settings.accept_wait_s
        self._report = PassReport(keeps=False)
        self._began = 0.0
        self._is_reported = False
        self._waiting: asyncio.Task[None] | None = None

    async def wait_for(self, report: PassReport) -> bool:
        """Wait, and show the number of requests in *report*; false if `pause` ended the wait."""
        self._report, self._is_reported, self._began = report, False, self._clock.loop()
        task = self._waiting = asyncio.create_task(self.wait_read())
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            self._waiting = None
            report.waits_for = 0
        if task.cancelled():
            return False
        task.result()
        return True

    def pause(self) -> None:
        """End the wait."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def wait_read(self) -> None:
        """Wait for the requests that are in the queues now.

        A queue is done when it is empty, or when as many fresh deliveries have come from it as
        were in it. A delivery for which the lane has no place yet does not count as read.
        """
        marks = {server: await self._marks(server) for server in self._servers}
        looks = 0
        while looks < LOOKS:
            left = [await self._left(server, of_queues) for server, of_queues in marks.items()]
            looks = 0 if any(left) else looks + 1
            self._note(sum(left))
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(await self._siblings_s())

    async def _siblings_s(self) -> float:
        """Seconds for which a sibling may keep a delivery for which it has no place.

        A local queue counts it until it is accepted; a broker counts only what it has not sent.
        """
        if self._is_local or not await self._members.siblings():
            return 0.0
        return self._accept_wait_s

    def _note(self, requests: int) -> None:
        self._report.waits_for = requests
        waited_s = self._clock.loop() - self._began
        if waited_s >= LONGEST_S and not self._is_reported:
            self._is_reported = True
            self._telemetry.emit(
                "reconciliation.waits", requests=requests, waited_s=round(waited_s, 1)
            )

    async def _depth(self, server: RpcServer, queue: Queue) -> int:
        """How many requests in a queue are not read yet; raises GracekitError."""
        depth = await server.depth(queue)
        return max(0, depth - server.kept[queue.name]) if self._is_local else depth

    async def _marks(self, server: RpcServer) -> Mapping[Queue, int]:
        """For each queue, how many fresh deliveries must have come when it is done."""
        return {queue: await self._mark(server, queue) for queue in server.queues}

    async def _mark(self, server: RpcServer, queue: Queue) -> int:
        while True:
            fresh = server.fresh[queue.name]
            try:
                return fresh + await self._depth(server, queue)
            except GracekitError:  # the broker is away, and nothing is read either
                self._note(1)
                await asyncio.sleep(LOOK_S)

    async def _left(self, server: RpcServer, marks: Mapping[Queue, int]) -> int:
        """How many requests are still to be read; 0 if all queues are done."""
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
