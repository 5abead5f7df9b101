"""The state of a service. Many modules read it; only its start and its drain change it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final

from gracekit.errors import IllegalTransitionError


class ServiceState(enum.Enum):
    """Where a service is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    QUIET = "quiet"  # intake closed; may resume
    DRAINING = "draining"
    STOPPED = "stopped"


_NEXT: Final[Mapping[ServiceState, frozenset[ServiceState]]] = {
    ServiceState.STARTING: frozenset(
        {ServiceState.SERVING, ServiceState.DRAINING, ServiceState.STOPPED}
    ),
    ServiceState.SERVING: frozenset({ServiceState.QUIET, ServiceState.DRAINING}),
    ServiceState.QUIET: frozenset({ServiceState.SERVING, ServiceState.DRAINING}),
    # Back to SERVING only by `resume`, while nothing was handed over.
    ServiceState.DRAINING: frozenset({ServiceState.SERVING, ServiceState.STOPPED}),
    ServiceState.STOPPED: frozenset(),
}


class Phase:
    """The state of the service, and in a drain its deadline.

    Args:
        blocked: Says why no request can be accepted now, or None, from any thread.

    Attributes:
        state: Changed only by `advance()`.
        has_served: Whether it has ever been SERVING.
        asked_at: Loop time at which the drain was requested; None outside one.
        deadline: Loop time at which a drain cancels what still runs; None outside one.
        deaf: Why requests cannot be read, set once that has lasted; None while they can.
        cut_off: Why the store cannot be reached; None while it can.
        unproven: Why others may soon think that this run is dead; None while they do not.
    """

    def __init__(self, blocked: Callable[[], str | None] = lambda: None) -> None:
        self._blocked = blocked
        self.state = ServiceState.STARTING
        self.has_served = False
        self.asked_at: float | None = None
        self.deadline: float | None = None
        self.deaf: str | None = None
        self.cut_off: str | None = None
        self.unproven: str | None = None

    @property
    def not_ready(self) -> str | None:
        """Why no new requests should be sent here now; None if the service is ready."""
        if self.state is not ServiceState.SERVING:
            return f"it is {self.state.value}"
        return self.trouble

    @property
    def trouble(self) -> str | None:
        """Why a service that is SERVING cannot do its work; None if it can."""
        store = self.cut_off or self.unproven
        return "; ".join(filter(None, (store, self.deaf, self.blocked))) or None

    @property
    def blocked(self) -> str | None:
        """Why the store takes no writes; None if it does."""
        return self._blocked()

    @property
    def drain_timeout(self) -> float | None:
        """Seconds from the request for the drain to its deadline; None outside one."""
        if self.asked_at is None or self.deadline is None:
            return None
        return self.deadline - self.asked_at

    @property
    def draining(self) -> bool:
        """Whether a drain is under way or done."""
        return self.state is ServiceState.DRAINING or self.state is ServiceState.STOPPED

    def advance(self, to: ServiceState) -> None:
        """Take one step of the service's life.

        Raises:
            IllegalTransitionError: *to* does not follow the present state.
        """
        if to not in _NEXT[self.state]:
            raise IllegalTransitionError(
                f"the service cannot go from {self.state.value} to {to.value}"
            )
        self.state = to
        self.has_served = self.has_served or to is ServiceState.SERVING
