"""The steps of a drain, each with a timeout, and the objects on which they act.

If a step fails, the next one is still taken. For the parts of a service see `parts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from gracekit.dispatcher import Dispatcher
from gracekit.hooks import ServiceHooks
from gracekit.journal.holds import Holds
from gracekit.periodic import PeriodicJobs
from gracekit.process import Process
from gracekit.recovery.reconciler import Reconciler
from gracekit.rpc.server import RpcServer
from gracekit.runs.own import OwnRecord, OwnSeat
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import Lane
from gracekit.tracker.tracker import Tracker


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """The objects on which a drain acts.

    Attributes:
        servers: The RPC server of each lane.
        alarm: Whether the kernel alarm may be armed: only if the Runtime owns the signals.
        ends_process: Whether the process ends with the service.
    """

    tracker: Tracker
    dispatcher: Dispatcher
    servers: Mapping[Lane, RpcServer]
    jobs: PeriodicJobs
    reconciler: Reconciler
    holds: Holds
    hooks: ServiceHooks
    seat: OwnSeat
    record: OwnRecord
    process: Process
    alarm: bool
    ends_process: bool


SLOW_STEP_S: Final = 1.0
"""If a step takes longer, that is logged while it goes on."""


class BoundedSteps:
    """Takes one step at a time.

    Attributes:
        under_way: Name of the step that is being taken; None between steps.
        taken: Number of steps taken, also failed ones, that count as progress.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.under_way: str | None = None
        self.taken = 0

    async def bounded(
        self, what: str, step: Awaitable[Any], timeout_s: float, *, advances: bool = True
    ) -> Any:
        """Take a step; if it fails or takes too long, log that and return None.

        Args:
            what: Name of the step.
            step: The step.
            timeout_s: Its timeout.
            advances: Whether it counts as progress. A step that only reads what the drain waits for
                does not, as systemd must not be asked for more time because of it.
        """
        loop, self.under_way = asyncio.get_running_loop(), what
        slow = loop.call_later(SLOW_STEP_S, self._report_slow, what, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await step
        except TimeoutError:
            self._telemetry.emit("drain.step_failed", step=what, error=f"took over {timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - the steps after it must still be taken
            self._telemetry.emit("drain.step_failed", step=what, error=repr(error))
        finally:
            slow.cancel()
            self.under_way = None
            self.taken += advances
        return None

    @staticmethod
    async def unless(event: asyncio.Event, step: Coroutine[Any, Any, None]) -> bool:
        """Take a step, but cancel it when *event* is set; returns whether it has ended."""
        taking, waiting = asyncio.create_task(step), asyncio.create_task(event.wait())
        try:
            await asyncio.wait({taking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return taking.done()
        finally:
            taking.cancel()
            waiting.cancel()

    def _report_slow(self, step: str, limit_s: float) -> None:
        self._telemetry.emit("drain.waiting", step=step, limit_s=round(limit_s, 1))
