"""Starts the parts of an open run; a stop request cuts the start short, and the run drains."""

from __future__ import annotations

import asyncio

from gracekit.errors import GracekitError
from gracekit.exits import exit_code_of
from gracekit.runtime.built import Ground, Wired
from gracekit.runtime.ending import DrainTask
from gracekit.telemetry.safe_text import Sentence
from gracekit.upkeep import Starting


class Start:
    """The start of one run: starts all parts below `RECORD` in order, then reports readiness.

    Args:
        starting: Reports the progress of the start, and its end, to systemd.
    """

    def __init__(self, ground: Ground, wired: Wired, starting: Starting) -> None:
        self._ground = ground
        self._wired = wired
        self._starting = starting

    async def run_unless_stopped(self, ending: DrainTask) -> None:
        """Start, unless a stop was asked for; a stop request meanwhile cuts the start short.

        Args:
            ending: If the start fails, drains what was started before the error is raised.
        """
        coordinator = self._wired.coordinator
        if coordinator.stop_requested:
            return
        starting = asyncio.create_task(self._start(), name="gracekit-start")
        stopping = asyncio.create_task(coordinator.wait_requested())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._cut_short(starting)
            self._check_started(starting)
        except BaseException as error:
            await self._cut_short(starting)
            self._ask_stop(error)
            await ending.wait()
            raise
        finally:
            stopping.cancel()

    async def _start(self) -> None:
        ground, coordinator = self._ground, self._wired.coordinator
        await self._wired.parts.start(unless=lambda: coordinator.stop_requested)
        if coordinator.stop_requested:
            return  # the stop request cancelled the start, but a hook swallowed the cancellation
        ground.telemetry.emit(
            "service.serving",
            service=ground.service.topic,
            instance=ground.seat.instance,
            run=ground.seat.run_id,
            took_s=round(self._starting.took_s, 3),
        )
        self._starting.end_ready()

    async def _cut_short(self, starting: asyncio.Task[None]) -> None:
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting}, timeout=self._ground.settings.handover_grace_s)
        if not starting.done():
            self._wired.coordinator.fail("the start did not end when it was cancelled")

    def _check_started(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() and not self._wired.coordinator.stop_requested:
            raise GracekitError(
                "the start was cancelled although no stop was asked for: an on_start hook "
                "raised CancelledError"
            )
        if starting.done() and not starting.cancelled():
            starting.result()

    def _ask_stop(self, error: BaseException) -> None:
        reason = f"start failed: {error!r}"
        if isinstance(error, Exception):
            text = Sentence(f"{type(error).__name__}: {error}")
            self._ground.telemetry.emit("service.start_failed", error=text)
        self._wired.coordinator.fail(reason, exit_code_of(error))
        self._ground.stops.ask(source="error", by="start", reason=reason)
