"""Rules that have not ended although they were cancelled at their limit, as a thread that hangs.

Nothing can stop such a rule, and two must never act on one resource: so it keeps its lease until
it has ended. Its pass does not wait for it any longer, and no pass calls it again meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from gracekit.config.values import duration
from gracekit.leases.leases import Resource
from gracekit.recovery.resources.results import Result
from gracekit.recovery.shared import Shared
from gracekit.rpc.failures import words_of

InterimResult = asyncio.Future[Result]
"""Gets what is said of a resource while its rule goes on behind its limit."""


class _Unended(NamedTuple):
    """A rule that goes on: the task that ends it, and the loop time at which it began."""

    task: asyncio.Task[Result]
    since: float


class UnendedRules:
    """Those of one run.

    Args:
        on_end: Called at the end of one: its resource may be asked about again.
    """

    def __init__(self, shared: Shared, on_end: Callable[[], None]) -> None:
        self._telemetry = shared.telemetry
        self._clock = shared.clock
        self._on_end = on_end
        # Each may keep a thread. If all were kept, further rules would wait for one until their
        # limit, and then fail without having been called.
        self._most = max(1, shared.threads.number // 2)
        self._unended: dict[Resource, _Unended] = {}

    @property
    def tasks(self) -> list[asyncio.Task[Result]]:
        """One for each, which ends when its rule does; a stop of recovery cancels them."""
        return [one.task for one in self._unended.values()]

    def why_not(self, resource: Resource) -> str | None:
        """Why no rule may begin for *resource*; None if one may."""
        if (one := self._unended.get(resource)) is not None:
            return f"its rule has not ended for {duration(self._clock.loop() - one.since)}"
        if len(self._unended) >= self._most:
            return f"{len(self._unended)} rules have not ended, so no other one begins"
        return None

    async def wait_for(
        self, resource: Resource, settle: Callable[[InterimResult], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Settle *resource* in a task of its own, and wait for its end, or until it is overdue."""
        began = self._clock.loop()
        overdue: InterimResult = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(settle(overdue))
        try:
            await asyncio.wait({task, overdue}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        if task.done():
            return task.result()
        self._unended[resource] = _Unended(task, began)
        task.add_done_callback(partial(self._note_end, resource))
        return overdue.result()

    def _note_end(self, resource: Resource, task: asyncio.Task[Result]) -> None:
        del self._unended[resource]
        if task.cancelled():
            return  # by a stop: its lease is free when this process is dead
        if (error := task.exception()) is not None:
            self._telemetry.emit("store.error", what="resources", error=words_of(error))
        else:
            outcome = task.result().outcome.value
            self._telemetry.emit("resource.reconciled", kind=resource[0], outcome=outcome)
        self._on_end()
