"""What recovery is asked for: to look now, or to see whether a run has died.

Requests in flight, periodic jobs and operators ask here; the reconciler, which stands above
them, waits for it.
"""

from __future__ import annotations

import asyncio
import math


class RecoveryTrigger:
    """When recovery looks: at once when a row has lost its owner, else now and then.

    Attributes:
        is_paused: A drain has said that nothing more may be started.
        looks_around: Rows of others may have come or gone: the next pass lists them.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.looks_around = True
        self._is_set = False
        self._asked_after: dict[str, None] = {}
        self._woken = asyncio.Event()
        self._deadline = math.inf  # loop time; the earliest one noted since the last wait
        self._waits_until = -math.inf  # loop time; long ago while nobody waits
        self._nearer = asyncio.Event()

    def poke(self) -> None:
        """Look now: a row may have lost its owner."""
        self.looks_around = True
        self.go_on()

    def go_on(self) -> None:
        """Another pass now, over what is known."""
        self._is_set = True
        self._woken.set()

    def look_after(self, run_id: str) -> None:
        """A lease of that run is in somebody's way: if the run has died, take over now."""
        self._asked_after[run_id] = None
        self._woken.set()

    def begin(self) -> None:
        """A pass begins: what is asked for from now on is for the next one."""
        self._is_set = False
        self._rest()

    def take_asked_after(self) -> list[str]:
        """Runs that somebody has asked about since the last call."""
        asked, self._asked_after = list(self._asked_after), {}
        self._rest()
        return asked

    def _rest(self) -> None:
        if not self._is_set and not self._asked_after:
            self._woken.clear()

    @property
    def is_set(self) -> bool:
        """Whether another pass is due."""
        return self._is_set

    async def wait(self) -> None:
        """Wait until a pass is due, or a run is asked about."""
        await self._woken.wait()

    # -- deadlines of parked tasks ------------------------------------------------------

    def note_deadline(self, moment: float) -> None:
        """A parked task is overdue at that loop time."""
        self._deadline = min(self._deadline, moment)
        if moment < self._waits_until:
            self._nearer.set()

    async def wait_deadline(self, seconds: float, now: float) -> None:
        """Wait so many seconds from loop time *now*, or less: until a deadline that is noted."""
        self._waits_until = min(now + seconds, max(now, self._deadline))
        self._deadline = math.inf
        self._nearer.clear()
        try:
            async with asyncio.timeout(self._waits_until - now):
                await self._nearer.wait()
        except TimeoutError:
            pass
        finally:
            self._waits_until = -math.inf
