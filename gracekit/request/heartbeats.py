"""Heartbeats: sent to callers that asked for them, from the arrival of a request to its answer.

Sent as an oslo server does: twice in the time after which the caller gives up
(`monitor_timeout`, whole seconds), at least 1 s apart. A caller that did not
ask never gets one, because an oslo client would crash on it. Each monitored
call has a timer of its own; the others cost only a look at their address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from gracekit import background
from gracekit.clock import Clock
from gracekit.journal.rows import Address
from gracekit.request.answers import REPLY_TIMEOUT_S, Answers, SendResult
from gracekit.rpc.message import Request
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import TrackedTask

SHORTEST_INTERVAL_S: Final = 1.0


def monitor_of(request: Request) -> float | None:
    """Seconds without a heartbeat after which the caller gives up; None if it gets none."""
    asked = request.monitor_timeout_s
    return asked if asked is not None and interval_s(asked) >= SHORTEST_INTERVAL_S else None


def interval_s(monitor_s: float) -> float:
    """Seconds between two heartbeats, as oslo counts them."""
    return int(monitor_s) / 2


class Heartbeats:
    """The callers to which this process sends heartbeats."""

    def __init__(self, answers: Answers, clock: Clock, telemetry: Telemetry) -> None:
        self._answers = answers
        self._clock = clock
        self._telemetry = telemetry
        self._beats: dict[TrackedTask | int, dict[tuple[str, str], _Beat]] = {}

    def keep(self, waiting: Sequence[tuple[int, Address]]) -> None:
        """Send heartbeats to callers of tasks that no run has, and to no others of the last call.

        Each run of the service does, as any of them may end: a caller may get more than it needs.
        """
        wanted = {row_id for row_id, _ in waiting}
        for row_id in [key for key in self._beats if isinstance(key, int) and key not in wanted]:
            self.end(row_id)
        for row_id, address in waiting:
            self.begin(row_id, address, at_once=True)

    def hand_on(self, task: TrackedTask) -> None:
        """Go on sending to the callers of *task*, which waits for its next try without a run."""
        if task.row_id is not None and (beats := self._beats.pop(task, None)) is not None:
            self._beats[task.row_id] = beats

    def begin(
        self, task: TrackedTask | int, address: Address | None, *, at_once: bool = False
    ) -> None:
        """Send heartbeats to a caller of *task* until `end`, or until the caller has given up.

        Args:
            task: The task that the caller waits for, or the id of its row.
            address: The caller; nothing is sent to None, or to one that did not ask.
            at_once: Send the first one now, because the caller has waited through a restart.
        """
        if address is None or address.monitor_s is None:
            return
        beats = self._beats.setdefault(task, {})
        if (key := _key(address)) not in beats:  # a redelivery has the same address
            beats[key] = _Beat(
                self._answers,
                address,
                address.monitor_s,
                self._clock,
                self._telemetry,
                at_once=at_once,
            )

    def end(self, task: TrackedTask | int, address: Address | None = None) -> None:
        """Stop the heartbeats of *task*, or of one caller of it; may be called twice."""
        beats = self._beats.get(task)
        if beats is None:
            return
        for key in list(beats) if address is None else [_key(address)]:
            if (beat := beats.pop(key, None)) is not None:
                beat.end()
        if not beats:
            del self._beats[task]


def _key(address: Address) -> tuple[str, str]:
    return address.queue, address.msg_id


class _Beat:
    """The heartbeats to one caller."""

    def __init__(
        self,
        answers: Answers,
        address: Address,
        monitor_s: float,
        clock: Clock,
        telemetry: Telemetry,
        *,
        at_once: bool,
    ) -> None:
        self._answers = answers
        self._address = address
        self._monitor_s = monitor_s
        self._clock = clock
        self._telemetry = telemetry
        self._heard_at = clock.loop()  # the caller counts from its sending, which is earlier
        self._over = False
        self._sending: asyncio.Task[None] | None = None
        self._timer = self._after(0.0 if at_once else interval_s(monitor_s), self._fall_due)

    def end(self) -> None:
        """Send no more; one that is on its way may still arrive, even after the answer."""
        self._over = True
        self._timer.cancel()

    def _fall_due(self) -> None:
        if not self._over and not self._caller_left():
            self._sending = background.start(
                self._send,
                f"heartbeat to {self._address.queue}",
                telemetry=self._telemetry,
                clock=self._clock,
            )
            self._sending.add_done_callback(_look_at)

    async def _send(self) -> None:
        if self._over or self._caller_left():
            return  # `background` repeats this call after an error, and it may be over by then
        began_at, pause_s = self._clock.loop(), interval_s(self._monitor_s)
        sent = await self._answers.beat(self._address, within_s=min(pause_s, REPLY_TIMEOUT_S))
        if sent is SendResult.GIVEN_UP:
            return  # its queue is gone, and with it the caller
        if sent is SendResult.YES:
            self._heard_at = began_at
        if not self._over:
            took_s = self._clock.loop() - began_at
            self._timer = self._after(max(0.0, pause_s - took_s), self._fall_due)

    def _caller_left(self) -> bool:
        """Whether the caller's time is up, or it got no heartbeat for too long and gave up."""
        expires_at = self._address.expires_at
        if expires_at is not None and self._clock.wall() >= expires_at:
            return True
        return self._clock.loop() - self._heard_at > self._monitor_s

    def _after(self, seconds: float, step: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, step)


def _look_at(done: asyncio.Task[None]) -> None:
    """Retrieve the exception, as no code awaits the task; a simulated process may die in it."""
    if not done.cancelled():
        done.exception()
