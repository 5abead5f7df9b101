"""Answers health probes: whether a run is alive, whether it is ready, whether it has started.

Probes come by the run's door (`gracekit health`) and by its HTTP endpoint. A check asks neither
the broker nor the application: it reads the state of the run, and facts of the store that are
less than 5 seconds old (`StoreFacts`). Its answer names no request, resource or operator, because
a probe needs no token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from gracekit.clock import Clock
from gracekit.control.facts import StoreFacts
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.phase import Phase, ServiceState
from gracekit.rpc.server import RpcServer
from gracekit.store.engine import Engine
from gracekit.store.state import StoreState
from gracekit.tracker.task import Lane

LONG_UNFINISHED_S: Final = 3600.0
"""If a request is unfinished for longer, an operator should look."""

SLOW_COMMIT_S: Final = 1.0
"""If a commit takes longer, an operator should look."""
LOST_S: Final = 1.0
"""A shorter gap in reading requests is no warning: a queue may be busy for a moment."""

ENDED_S: Final = 10.0
"""If the run ended more seconds ago and its process goes on, the process should be restarted."""

HealthStatus = Literal["pass", "warn", "fail"]


class Probe(enum.Enum):
    """The three probes, and what a platform does if one fails."""

    LIVE = "live"  # it restarts the process
    READY = "ready"  # it sends no requests
    STARTED = "started"  # it does not ask the other probes yet


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one probe.

    Attributes:
        status: `pass`, `fail`, or `warn`: it serves and passes, but an operator should look.
        phase: The state of the service.
        why: What is wrong, a few words each; empty if nothing is.
    """

    status: HealthStatus
    phase: ServiceState
    why: tuple[str, ...] = ()

    @classmethod
    def judged(cls, phase: ServiceState, failures: list[str], warnings: list[str]) -> Health:
        """`fail` with any failure, `warn` with only warnings, else `pass`."""
        status: HealthStatus = "fail" if failures else "warn" if warnings else "pass"
        return cls(status=status, phase=phase, why=tuple(failures + warnings))

    @property
    def passes(self) -> bool:
        """Whether the probe succeeds."""
        return self.status != "fail"

    def as_json(self) -> dict[str, Any]:
        """`{"status": "fail", "phase": "draining", "why": ["drain by SIGTERM, 18s left"]}`."""
        return {"status": self.status, "phase": self.phase.value, "why": list(self.why)}


class HealthCheck:
    """Answers the probes of one run; `facts` is what is known of its store and queues."""

    def __init__(
        self,
        phase: Phase,
        coordinator: ShutdownCoordinator,
        servers: Mapping[Lane, RpcServer],
        engine: Engine,
        facts: StoreFacts,
        clock: Clock,
    ) -> None:
        self._phase = phase
        self._coordinator = coordinator
        self._servers = servers
        self._engine = engine
        self.facts = facts
        self._clock = clock
        self._seen_ended_at: float | None = None  # loop time at which a probe saw it

    async def ask(self, probe: Probe) -> Health:
        """Whether *probe* passes now; within 1 second, also when the store hangs."""
        match probe:
            case Probe.LIVE:
                return self._live()
            case Probe.STARTED:
                return self._started()
            case Probe.READY:
                return await self._ready()

    def _live(self) -> Health:
        """The answer itself proves that the loop runs; with a broken store a restart may help."""
        failures = []
        if self._engine.status.state is StoreState.BROKEN:
            failures.append("the store is broken")
        if self._phase.state is ServiceState.STOPPED:
            now = self._clock.loop()
            if self._seen_ended_at is None:
                self._seen_ended_at = now
            if now - self._seen_ended_at >= ENDED_S:
                failures.append("the run has ended, and its process goes on")
        return Health.judged(self._phase.state, failures, [])

    def _started(self) -> Health:
        starting = [] if self._phase.has_served else ["it is starting"]
        return Health.judged(self._phase.state, starting, [])

    async def _ready(self) -> Health:
        failures = list(self._not_serving()) or list(self._cut_off())
        facts = await self.facts.fresh()
        if facts.unfinished is None:
            failures.append("the store does not answer")
        elif (blocked := self._phase.blocked) is not None:
            failures.append(blocked)
        warnings = [] if failures else list(self._worth_a_look())
        oldest_s = facts.oldest_unfinished_s or 0.0
        if oldest_s > LONG_UNFINISHED_S:
            warnings.append(f"the oldest unfinished request is {oldest_s / 3600:.0f}h old")
        return Health.judged(self._phase.state, failures, warnings)

    def _not_serving(self) -> Iterator[str]:
        """Why it takes no new requests in its present state."""
        request, state = self._coordinator.stop_request, self._phase.state
        if state is ServiceState.STOPPED:
            yield "it has stopped"
        elif request is not None:  # the phase changes later, when the stop is on record
            by = request.by if request.source == "signal" else request.source
            is_taken_over = request.final and request.source in {"operator", "rollout"}
            yield f"drain by {by}{', final by a signal' * is_taken_over}{self._left()}"
        elif state is not ServiceState.SERVING:
            yield f"it is {state.value}"

    def _left(self) -> str:
        deadline = self._phase.deadline
        if deadline is None:
            return ""
        return f", {max(0.0, deadline - self._clock.loop()):.0f}s left"

    def _cut_off(self) -> Iterator[str]:
        if self._phase.cut_off is not None:
            yield "the store cannot be reached"
        if self._phase.deaf is not None:
            yield "requests cannot be read"

    def _worth_a_look(self) -> Iterator[str]:
        now = self._clock.loop()
        for lane, server in self._servers.items():
            if (failure := server.failure) is not None and now - failure.since >= LOST_S:
                yield f"{lane.value} cannot be read for {now - failure.since:.0f}s"
        if (longest_s := self._engine.commits.longest_s()) > SLOW_COMMIT_S:
            yield f"a commit takes {longest_s:.0f}s"
