"""What the metrics of one run show: the words of its labels, and the readings of its gauges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from gracekit.config.choices import RejectReason, choices_of
from gracekit.phase import Phase, ServiceState
from gracekit.recovery.decisions import Step
from gracekit.rpc.server import RpcServer
from gracekit.runs.members import Members
from gracekit.service import Service
from gracekit.telemetry.metrics import LabelWords
from gracekit.telemetry.readings import Readings, StoreNumbers
from gracekit.tracker.task import TERMINAL, TRANSIENT, Lane, TaskState
from gracekit.tracker.tracker import Tracker

_ENDS: Final = frozenset(state.value for state in TERMINAL - {TaskState.REJECTED})


def label_words(service: Service) -> LabelWords:
    """Every value that a label of the service's metrics may have."""
    names = (*(method.name for method in service.methods), *(job.name for job in service.jobs))
    return LabelWords(
        methods=frozenset(names),
        lanes=frozenset(lane.value for lane in Lane),
        outcomes=_ENDS,
        decisions=_ENDS | {Step.RUN_AGAIN.value},
        reasons=frozenset(choices_of(RejectReason)),
        states=frozenset(state.value for state in TRANSIENT),
        phases=frozenset(state.value for state in ServiceState),
    )


class Gauges:
    """Reads the gauges of one run, from any thread; nothing is asked of store or broker.

    Args:
        members: Knows when the run began.
        servers: Whose intakes are shown.
        loop: Of the run: its time is what deadlines are in.
    """

    def __init__(
        self,
        phase: Phase,
        tracker: Tracker,
        members: Members,
        servers: Mapping[Lane, RpcServer],
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._phase = phase
        self._tracker = tracker
        self._members = members
        self._servers = servers
        self._loop = loop

    def read(self, store: StoreNumbers, *, broker_connected: bool | None) -> Readings:
        """What the gauges show now.

        Args:
            store: What was last seen of the store: nothing is asked of it here.
            broker_connected: None where there is no broker, or it is not known.
        """
        phase, now = self._phase, self._loop.time()
        draining, deadline = phase.state is ServiceState.DRAINING, phase.deadline
        running = [task for task in self._tracker if task.running and task.holds_drain]
        known = [end for task in running if (end := task.expected_end(now)) is not None]
        is_known = draining and len(known) == len(running)
        return Readings(
            started_at=self._members.joined_at,
            state=phase.state,
            is_ready=phase.not_ready is None,
            in_flight=self._tracker.counts(),
            open_intakes={lane.value: server.is_open for lane, server in self._servers.items()},
            drain_left_s=None if deadline is None else max(0.0, deadline - now),
            drain_expected_s=max(0.0, max(known, default=now) - now) if is_known else None,
            drain_at_risk=0 if deadline is None else sum(end > deadline for end in known),
            broker_connected=broker_connected,
            store=store,
        )
