"""What a signal asks of one run: a drain, its end at once, a change of the intake, new settings."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

from gracekit import background
from gracekit.control.reload import Reload
from gracekit.control.verbs import Control
from gracekit.drain.coordinator import ShutdownCoordinator
from gracekit.drain.report import StopRequest
from gracekit.errors import GracekitError
from gracekit.phase import Phase, ServiceState
from gracekit.telemetry.telemetry import Telemetry

TERM_WAIT_S: Final = 0.1
"""Seconds to wait at a SIGCONT for a SIGTERM sent before it, as threads may take them in another
order."""


class SignalOrders:
    """Obeys the signals of the process, for its run."""

    def __init__(
        self,
        control: Control,
        coordinator: ShutdownCoordinator,
        phase: Phase,
        reload: Reload,
        telemetry: Telemetry,
    ) -> None:
        self._control = control
        self._coordinator = coordinator
        self._phase = phase
        self._reload = reload
        self._telemetry = telemetry
        self._obeying: set[asyncio.Task[None]] = set()  # signals that ask for no drain
        self._one_signal = asyncio.Lock()
        self._interrupted = False  # whether a SIGINT has come

    def stop(self, number: int, at: float) -> None:
        """Drain after a stop signal; after a second SIGINT, or SIGQUIT, hand over at once.

        Args:
            number: Number of the signal.
            at: Loop time at which it came.
        """
        name = signal.Signals(number).name
        again, self._interrupted = self._interrupted, self._interrupted or number == signal.SIGINT
        self._telemetry.emit("signal.received", signal=name)
        if number == signal.SIGQUIT or (number == signal.SIGINT and again):
            self._coordinator.force()
        elif number == signal.SIGINT:
            self._telemetry.emit("signal.hint", text="Ctrl-C again hands over now")
        self._coordinator.request_stop(
            StopRequest(source="signal", by=name, reason=f"signal {name}", final=True, at=at)
        )

    def act(self, number: int) -> None:
        """Read the settings after SIGHUP, close the intake after SIGTSTP, open it after SIGCONT."""
        name = signal.Signals(number).name
        step = self._reload.reload() if number == signal.SIGHUP else self._change_intake(name)
        background.run_beside(self._obeying, step, f"gracekit-{name}")

    async def _change_intake(self, name: str) -> None:
        async with self._one_signal:  # signals are handled in the order in which they came
            if name == "SIGCONT":
                await asyncio.sleep(TERM_WAIT_S)
            if name == "SIGCONT" and not self._is_quiet_by_signal():
                # systemd sends SIGCONT after each SIGTERM, and a debugger after each SIGSTOP. It
                # is a request only after SIGTSTP. So, unlike `gracekit resume`, it undoes neither
                # a quiet nor a drain that a command asked for.
                return
            self._telemetry.emit("signal.received", signal=name)
            control = self._control
            change = control.open_intake if name == "SIGCONT" else control.close_intake
            before, control.quieted_by_signal = control.quieted_by_signal, name == "SIGTSTP"
            try:
                await change({"by": f"signal {name}"})
            except GracekitError as error:
                control.quieted_by_signal = before
                self._telemetry.emit("signal.hint", text=f"{name} is ignored: {error}")

    def _is_quiet_by_signal(self) -> bool:
        is_quiet = self._phase.state is ServiceState.QUIET and not self._coordinator.stop_requested
        return is_quiet and self._control.quieted_by_signal
