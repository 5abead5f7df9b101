"""Stop requests of the program, which are kept until there is a coordinator."""

from __future__ import annotations

from collections.abc import Callable

from gracekit.clock import Clock
from gracekit.config.choices import StopSource, choices_of
from gracekit.config.values import did_you_mean
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.drain.report import StopRequest
from gracekit.errors import ConfigError


class Stops:
    """Passes the program's stop requests to the coordinator, and keeps them until there is one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._coordinator: ShutdownCoordinator | None = None
        self._kept: list[Callable[[ShutdownCoordinator], None]] = []

    def ask(self, *, source: StopSource, by: str, reason: str, final: bool = True) -> None:
        """Ask for a drain; see `Runtime.request_stop`.

        Raises:
            ConfigError: there is no such source, or *by* or *reason* is no text.
        """
        sources = choices_of(StopSource)
        if source not in sources:
            hint = did_you_mean(str(source), sources)
            raise ConfigError(f"source={source!r} is none of {', '.join(sources)}{hint}")
        for name, text in (("by", by), ("reason", reason)):
            if not isinstance(text, str):
                raise ConfigError(f"{name}={text!r} is no text; say in words who asks, and why")

        def ask(coordinator: ShutdownCoordinator) -> None:
            at = self._clock.loop()  # a kept request counts from the opening, with its whole time
            coordinator.request_stop(
                StopRequest(source=source, by=by, reason=reason, final=final, at=at)
            )

        self._pass_on(ask)

    def fail(self, reason: str) -> None:
        """Note that the end is not in order; see `ShutdownCoordinator.fail`."""
        self._pass_on(lambda coordinator: coordinator.fail(reason))

    def _pass_on(self, step: Callable[[ShutdownCoordinator], None]) -> None:
        if self._coordinator is None:
            self._kept.append(step)
        else:
            step(self._coordinator)

    def hand_to(self, coordinator: ShutdownCoordinator) -> None:
        """Pass the kept requests to *coordinator*, in order, and later ones at once."""
        self._coordinator = coordinator
        kept, self._kept = self._kept, []
        for step in kept:
            step(coordinator)
