"""When each step of a drain must end, so that there is time left for the stop record."""

from __future__ import annotations

import math
from typing import Final

from gracekit.clock import Clock
from gracekit.config.live import LiveSettings
from gracekit.config.settings import ALARM_AFTER_HARD_LIMIT_S
from gracekit.config.values import format_duration
from gracekit.drain.report import StopRequest
from gracekit.errors import GracekitError
from gracekit.phase import Phase

SHORTEST_STEP_S: Final = 0.25
"""Seconds that a step gets at least, even after the deadline."""


class Times:
    """The times of one drain: moments as loop times, durations in seconds.

    Attributes:
        is_cut_short: Whether a second signal has ended all waiting.
    """

    def __init__(self, phase: Phase, settings: LiveSettings, clock: Clock) -> None:
        self._phase = phase
        self._settings = settings
        self._clock = clock
        self.is_cut_short = False

    @property
    def now(self) -> float:
        """Loop time."""
        return self._clock.loop()

    @property
    def deadline(self) -> float:
        """When running handlers are cancelled; may be moved after the drain has begun."""
        assert self._phase.deadline is not None
        return self._phase.deadline

    @property
    def hard_limit(self) -> float:
        """When the process should have exited."""
        return self.hard_limit_after(self.deadline)

    @property
    def flush_by(self) -> float:
        """When outcomes and replies must be done; the rest is left to the next start."""
        return self.hard_limit - self._settings.now.exit_margin_s

    @property
    def stop_by(self) -> float:
        """When the steps before the stop record must have ended; they are cancelled then.

        The record has a quarter of `exit_margin`, and the time from the hard limit to the alarm.
        """
        return self.hard_limit - self._settings.now.exit_margin_s / 4

    def deadline_of(self, request: StopRequest) -> float:
        """The deadline that *request* asks for."""
        wait_s = request.timeout_s
        return request.at + (self._settings.now.drain_timeout_s if wait_s is None else wait_s)

    def hard_limit_after(self, deadline: float) -> float:
        """The hard limit of a drain with that deadline."""
        settings = self._settings.now
        return deadline + settings.handover_s + settings.exit_margin_s

    def until_alarm(self, deadline: float) -> float:
        """Seconds until the alarm ends a process whose drain has that deadline."""
        left = self.hard_limit_after(deadline) - self.now
        return max(0.1, left + ALARM_AFTER_HARD_LIMIT_S)

    @property
    def alarm_at(self) -> float:
        """Wall time at which the alarm ends the process."""
        return self._clock.wall() + self.until_alarm(self.deadline)

    def check_return(
        self, request: StopRequest | None, handed_over: int, *, wait_over: bool
    ) -> None:
        """Check that the drain may be resumed.

        Args:
            request: The request of the drain; None if there is none.
            handed_over: How many tasks it has handed over.
            wait_over: Whether it no longer waits for tasks and holds.

        Raises:
            GracekitError: the drain is final; the message has the one reason.
        """
        if why := self._why_final(request, handed_over, wait_over=wait_over):
            raise GracekitError(
                f"the drain is final: {why}; start the service again when it has stopped"
            )

    def _why_final(self, request: StopRequest | None, handed_over: int, *, wait_over: bool) -> str:
        if request is not None and request.final:
            return request.why_final
        if handed_over:
            number = "1 task was" if handed_over == 1 else f"{handed_over} tasks were"
            return f"{number} handed over already"
        return "it waits for no task and no hold any more" if wait_over else ""

    def check_extension(self, request: StopRequest, by_s: float, *, wait_over: bool) -> None:
        """Check that the deadline of the drain may be moved.

        Args:
            request: The request of the drain.
            by_s: Seconds by which the deadline is to be moved later.
            wait_over: Whether the drain no longer waits for tasks and holds.

        Raises:
            GracekitError: the drain is final, or waits for nothing any more, or the platform would
                kill the process before its end; `kill_after` counts from the request.
        """
        if request.final:
            raise GracekitError(
                f"the drain is final: {request.why_final}, so its deadline stands; set "
                "GRACEKIT_DRAIN_TIMEOUT for the next drain"
            )
        passed = self._phase.deadline is not None and self.now >= self.deadline
        if passed or wait_over or self.is_cut_short:
            raise GracekitError(
                "the drain waits for nothing any more: its tasks have ended, or were handed over "
                "at the deadline; start the service again when it has stopped"
            )
        if by_s <= 0:
            raise GracekitError(
                f"an extension by {format_duration(by_s)} is not possible: a deadline only moves "
                "later; write --by 5m"
            )
        kill_s = self._settings.now.kill_after_s
        if kill_s is None:
            return
        kill_at = request.at + kill_s
        room_s = round(kill_at - self.hard_limit_after(self.deadline_of(request)), 3)
        if by_s >= room_s:
            most = math.ceil(room_s) - 1
            left = f"leaves {most}s more at most: --by {most}s" if most > 0 else "leaves no more"
            raise GracekitError(
                f"kill_after = {format_duration(kill_s)} {left}; {format_duration(by_s)} later "
                "the platform would have killed the process before it could hand its tasks over"
            )

    def until(self, end: float) -> float:
        """Seconds for a step that must end at *end*; at least `SHORTEST_STEP_S`."""
        return max(SHORTEST_STEP_S, end - self.now)

    def within(self, limit_s: float) -> float:
        """Seconds for a step: *limit_s*, but not past the deadline, when the hand-over begins."""
        end = self.now + limit_s
        if self._phase.deadline is not None:
            end = min(end, self._phase.deadline)
        return SHORTEST_STEP_S if self.is_cut_short else self.until(end)
