"""Asks recovery to make a pass, or to check whether a run has died.

Requests in flight, periodic jobs and operators call this object, and the reconciler waits on it.
So they need not import the reconciler, which imports them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any


class RecoveryTrigger:
    """When recovery makes its next pass, and which runs it checks.

    Attributes:
        is_paused: Whether a drain is under way: recovery may start nothing more.
        looks_around: Whether the next pass must list rows, because some may have come or gone.
        sleeps_until: Loop time of the next pass if nobody asks for one; inf during a pass.
        settle: Follows the rules with `before_use` of a kind, for so many seconds, but not for the
            caller's own resource; returns what became of the resources. Set by recovery.
    """

    sleeps_until: float = math.inf
    settle: Callable[[str, float, tuple[str, str]], Awaitable[Sequence[Any]]]

    def __init__(self) -> None:
        self.is_paused = False
        self.looks_around = True
        self._is_set = False
        self._asked_after: dict[str, None] = {}
        self._woken = asyncio.Event()
        self._deadline = math.inf  # loop time of the earliest deadline noted since the last wait
        self._waits_until = -math.inf  # loop time at which `wait_deadline` ends; -inf outside it
        self._nearer = asyncio.Event()

    def poke(self) -> None:
        """Ask for a pass now that lists all rows, because one may have lost its owner."""
        self.looks_around = True
        self.go_on()

    def go_on(self) -> None:
        """Ask for a pass now over the rows that recovery knows."""
        self._is_set = True
        self._woken.set()

    def note_due(self, moment: float) -> None:
        """Note that an accepted task may begin at that loop time, which may be before a pass."""
        if moment < self.sleeps_until:
            self.go_on()

    def look_after(self, run_id: str) -> None:
        """Ask to check now whether that run has died, because a request waits for its lease."""
        self._asked_after[run_id] = None
        self._woken.set()

    def begin(self) -> None:
        """Note that a pass begins: what is asked for from now on needs another one."""
        self._is_set, self.sleeps_until = False, math.inf
        self._rest()

    def take_asked_after(self) -> list[str]:
        """The runs given to `look_after` since the last call."""
        asked, self._asked_after = list(self._asked_after), {}
        self._rest()
        return asked

    def _rest(self) -> None:
        if not self._is_set and not self._asked_after:
            self._woken.clear()

    @property
    def is_set(self) -> bool:
        """Whether a pass was asked for since the last one began."""
        return self._is_set

    async def wait(self) -> None:
        """Wait until a pass is asked for, or a check of a run."""
        await self._woken.wait()

    # -- deadlines of parked tasks ------------------------------------------------------

    def note_deadline(self, moment: float) -> None:
        """Note that a parked task is overdue at that loop time, which may end `wait_deadline`."""
        self._deadline = min(self._deadline, moment)
        if moment < self._waits_until:
            self._nearer.set()

    async def wait_deadline(self, seconds: float, now: float) -> None:
        """Wait *seconds* from loop time *now* on, or until the earliest noted deadline."""
        self._waits_until = min(now + seconds, max(now, self._deadline))
        self._deadline = math.inf
        self._nearer.clear()
        try:
            async with asyncio.timeout_at(self._waits_until):
                await self._nearer.wait()
        except TimeoutError:
            pass
        finally:
            self._waits_until = -math.inf
