"""Handles the process's signals for one Runtime: passes them from the signal thread to its loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from gracekit.process import Process
from gracekit.signals import (
    DUMP_SIGNAL,
    HANGUP_SIGNAL,
    STOP_SIGNALS,
    SignalWatch,
    signals_of,
)
from gracekit.telemetry.telemetry import Telemetry

STANDARD_INPUT: Final = 0


class StopSignals:
    """Watches the signals of a service, from `take` to `give_back`.

    Args:
        alarm_s: Returns how many seconds after the first stop signal the kernel's alarm ends the
            process; called when that signal comes, in the signal thread.
        on_dump: Called in the signal thread when SIGUSR1 asks for the stacks.

    Attributes:
        for_good: Whether the process ends when the service ends.
        first: Number of the first stop signal; None before it.
    """

    def __init__(
        self,
        process: Process,
        telemetry: Telemetry,
        *,
        alarm_s: Callable[[], float],
        on_dump: Callable[[], None],
    ) -> None:
        self._process = process
        self._telemetry = telemetry
        self._alarm_s = alarm_s
        self._on_dump = on_dump
        self._watch: SignalWatch | None = None
        self._left: SignalWatch | None = None  # to be ended by `close`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came: deque[tuple[int, float]] = deque()  # signals that are not handled yet
        self._obey: Callable[[int, float], None] | None = None
        self._act: Callable[[int], None] | None = None
        self._record: Callable[[str], None] | None = None
        self._has_terminal = False
        self.for_good = False
        self.first: int | None = None

    def take(self, *, for_good: bool = False) -> None:
        """Watch the signals, from the main thread. Signals that arrive before `follow` are kept.

        A second call does nothing.

        Args:
            for_good: Whether the process ends when the service ends. If so, the signals are
                ignored at the end, and the alarm stays armed.

        Raises:
            DeclarationError: this is not the main thread, or another Runtime has the signals.
        """
        if self._watch is None:
            self.for_good = for_good
            # Checked now, as a terminal may be closed later.
            self._has_terminal = os.isatty(STANDARD_INPUT)
            watch = self._process.watch_signals(self._arrive, has_terminal=self._has_terminal)
            watch.__enter__()
            self._watch = watch

    def record_by(self, record: Callable[[str], None]) -> None:
        """Call *record* with the name of the first stop signal, in the signal thread.

        The loop may be blocked then, so *record* must not wait for it.
        """
        self._record = record

    def follow(self, obey: Callable[[int, float], None], act: Callable[[int], None]) -> None:
        """From now on call *obey* and *act* on the running loop.

        Args:
            obey: Called with the number of each stop signal, and the loop time of its arrival.
            act: Called with the number of each other signal: SIGHUP, SIGTSTP, SIGCONT.
        """
        self._loop = asyncio.get_running_loop()
        self._obey, self._act = obey, act
        self._deliver()

    def keep(self) -> None:
        """Set our handlers of stop signals, and the wake-up, again if something replaced them."""
        if self._watch is not None:
            for number, by in self._watch.take_back().items():
                self._telemetry.emit("signal.taken", signal=number.name, by=by)

    def _arrive(self, number: int) -> None:
        """Handle one signal; called in the signal thread."""
        if number == DUMP_SIGNAL:
            self._on_dump()
            return
        # The same clock as loop.time(); a loop in virtual time gets no signals.
        self._came.append((number, time.monotonic()))
        self._call_soon(self._deliver)
        if self.first is None and self._is_stop(number):
            self.first = number
            self._process.arm_alarm(self._alarm_s())
            if self._record is not None:
                self._record(signal.Signals(number).name)

    def _call_soon(self, step: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(step)

    def came(self, number: int, at: float) -> None:
        """Handle a stop signal that came at loop time *at*; call it on the loop."""
        self._came.append((number, at))
        self._deliver()

    def _deliver(self) -> None:
        while self._obey is not None and self._act is not None and self._came:
            number, at = self._came.popleft()
            if self._is_stop(number):
                self._obey(number, at)
            else:
                self._act(number)

    def _is_stop(self, number: int) -> bool:
        """SIGHUP stops a service whose terminal was closed; elsewhere it asks for a reload."""
        return number in STOP_SIGNALS or (number == HANGUP_SIGNAL and self._has_terminal)

    def give_back(self, *, served: bool, must_die: bool) -> None:
        """Restore the old handlers, and disarm the alarm unless the process must end.

        If the process ends when the service ends, `close` restores them.

        Args:
            served: Whether a drain has ended, so that the stop is on record.
            must_die: Whether only the end of the process frees its resources; the alarm then stays
                armed.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if self.for_good:
            self._left = watch
            if served:
                # The stop is on record, so another signal while the interpreter closes must not
                # change the exit code. The watch does not restore handlers that were replaced.
                for number in signals_of(has_terminal=self._has_terminal):
                    signal.signal(number, signal.SIG_IGN)
            return
        watch.__exit__(None, None, None)
        if not must_die:
            self._process.disarm_alarm()  # now no further signal can arm it

    def close(self) -> None:
        """End the watch of a process that ends, after its loop was closed.

        Not before: when uvloop ends, it sets the wake-up descriptor that it found when it began,
        and raises OSError if that one is closed.
        """
        watch, self._watch, self._left = self._watch or self._left, None, None
        if watch is not None:
            watch.__exit__(None, None, None)
