"""Reads the gauges of one run's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from gracekit.control.facts import StoreFacts
from gracekit.control.health import LOST_S
from gracekit.periodic import PeriodicJobs
from gracekit.phase import Phase, ServiceState
from gracekit.request.lanes import LaneGate
from gracekit.rpc.server import RpcServer
from gracekit.rpc.transport import Transport
from gracekit.runs.members import Members
from gracekit.telemetry.readings import Readings, StoreNumbers
from gracekit.tracker.task import Lane
from gracekit.tracker.tracker import Tracker


class Gauges:
    """Reads the gauges of one run, from any thread; asks neither the store nor the broker.

    Args:
        members: Has the time at which the run began.
        gates: Have the numbers of handlers that may run in each lane.
        servers: Say whether the queues of each lane are read.
        transport: Says whether the broker is connected.
        jobs: Have the time of the last success of each periodic job.
        facts: Have the result of the last query of the store.
        loop: The run's event loop, whose time deadlines use.
    """

    def __init__(
        self,
        phase: Phase,
        tracker: Tracker,
        members: Members,
        gates: Mapping[Lane, LaneGate],
        servers: Mapping[Lane, RpcServer],
        transport: Transport,
        jobs: PeriodicJobs,
        facts: StoreFacts,
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._phase = phase
        self._tracker = tracker
        self._members = members
        self._gates = gates
        self._servers = servers
        self._transport = transport
        self._jobs = jobs
        self._facts = facts
        self._loop = loop

    def read(self) -> Readings:
        """What the gauges show now."""
        phase, now, queues = self._phase, self._loop.time(), self._facts.queues
        draining, deadline = phase.state is ServiceState.DRAINING, phase.deadline
        running = [task for task in self._tracker if task.running]
        known = [end for task in running if (end := task.expected_end(now)) is not None]
        is_known = draining and len(known) == len(running)
        return Readings(
            started_at=self._members.joined_at,
            state=phase.state,
            is_ready=phase.not_ready is None,
            in_flight=self._tracker.counts(),
            running=self._running(),
            running_limits={lane.value: gate.max_running for lane, gate in self._gates.items()},
            open_intakes={
                lane.value: _is_read(server, now) for lane, server in self._servers.items()
            },
            job_successes=dict(self._jobs.succeeded_at),
            drain_left_s=None if deadline is None else max(0.0, deadline - now),
            drain_expected_s=max(0.0, max(known, default=now) - now) if is_known else None,
            drain_at_risk=0 if deadline is None else sum(end > deadline for end in known),
            drain_unknown=0 if deadline is None else len(running) - len(known),
            broker_connected=self._transport.is_connected,
            waiting={lane: one["waiting"] for lane, one in queues.items()},
            oldest_waiting_s={
                lane: age for lane, one in queues.items() if (age := one["oldest_s"]) is not None
            },
            store=self._store(),
        )

    def _running(self) -> Mapping[str, int]:
        running = self._tracker.running_by_lane()
        return {lane.value: running.get(lane, 0) for lane in self._gates}

    def _store(self) -> StoreNumbers:
        numbers, accounts = self._facts.last, self._facts.accounts.last
        if numbers.unfinished is None or accounts is None:
            return numbers
        return msgspec.structs.replace(numbers, accounts_off_by=accounts.off_by)


def _is_read(server: RpcServer, now: float) -> bool:
    """Whether intake is open and its queues can be read, as the health checks see it.

    A pause because the lane has no free place, or because too many bytes were read, counts as
    read: the service is busy, but the broker is there. A short gap counts as read too, because
    each claim of a queue file takes a moment.
    """
    lost = server.lost
    return server.is_open and (lost is None or now - lost.since < LOST_S)
