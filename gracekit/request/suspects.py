"""Who may begin beside whom: what may have killed a process runs apart until it is known.

After a crash each task that ran is charged with it, as nobody knows which has caused it. A
*suspect* is one that was charged twice, or has one attempt left. It begins when nothing else runs
in its process, and for a while nothing else begins beside it; the row says so (`alone`). Only a
row that was alone when its process died is given up, so only what has caused a crash can be.

If something else runs for long, no suspect can be alone. Then two suspects begin together, then
four, then eight. Those with the most crashes begin first, and of these the ones that had begun
last before the crash. So the group that holds the killer halves with most crashes, until the killer
is the first to begin, and alone.

Every part of a process in which the application's code begins passes here: handlers, probes,
errored hooks, periodic jobs. Ops requests are let through, because whoever runs may need their
answer; adoption sees their rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.errors import StoreError
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import SUSPECTED

ALONE_S: Final = 5.0
"""A suspect waits so long at most for others to end, and is alone for so long at most. Whatever
else the process has to do waits meanwhile, and after two power cuts all are suspects."""
SHORT: Final = 3
"""After so many crashes of a suspect, both times double with each further one, so that a slow
killer is met alone in the end. Most killers are fast, and are found before."""
LONGEST_S: Final = 86_400.0
GATHER_S: Final = 1.0
"""The suspects of one crash come one after the other: the first waits so long for those behind."""
TOGETHER_S: Final = 2.5
"""Suspects whose last attempts began within the same span of this length began together."""
HOPELESS: Final = 10
"""So many times `max_attempts` crashes end a row, whoever caused them: nothing goes on for ever."""

SuspectRow = tuple[str, int]
"""Table and id of the row that says that its suspect is alone."""
Parole = Callable[[SuspectRow], Coroutine[Any, Any, None]]


class Suspicion(NamedTuple):
    """What is known of a suspect.

    Attributes:
        crashes: That met it while it ran.
        apart_s: How long it is kept apart from others.
        began_at: Wall time at which its last attempt began; 0 if unknown.
    """

    crashes: int
    apart_s: float
    began_at: float


def suspicion(crashes: int, max_attempts: int, began_at: float | None = None) -> Suspicion | None:
    """Whether a row with so many crashes is a suspect; None if it may run beside others."""
    known = max(1, min(SUSPECTED, max_attempts - 1))
    if crashes < known:
        return None
    doubled = max(0, min(crashes - known - SHORT, 20))
    return Suspicion(crashes, float(min(LONGEST_S, ALONE_S * 2**doubled)), began_at or 0.0)


def is_guilty(crashes: int, max_attempts: int, *, alone: bool) -> bool:
    """Whether a row has used up its attempts: the last one alone, or hopelessly many."""
    return crashes >= max_attempts * (1 if alone else HOPELESS)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A suspect that waits to begin; `admitted` becomes whether it is alone."""

    who: object
    row: SuspectRow
    about: Suspicion
    admitted: asyncio.Future[bool]

    @property
    def rank(self) -> tuple[int, float, str]:
        """Suspects with the most crashes first; of these, the ones that had begun last.

        Those that had run for longer did not kill soon, as most killers do. Ones that had begun
        together begin in the order of their arrival. After a further crash that order is
        shuffled, differently each time: otherwise a killer would begin beside the same ones again.
        """
        crashes, _, began_at = self.about
        if crashes <= SUSPECTED:
            return -crashes, 0.0, ""
        shuffled = hashlib.blake2b(repr((self.row, crashes)).encode(), digest_size=8).hexdigest()
        return -crashes, -(began_at // TOGETHER_S), shuffled

    @property
    def is_waiting(self) -> bool:
        """Whether it was neither admitted nor cancelled."""
        return not self.admitted.done()


class Suspects:
    """Beginnings in one process: innocent ones side by side, suspects one at a time.

    Doors are closed to innocent ones while a suspect waits or is alone, but for no longer than
    they were open before: neither keeps the other out for ever.

    Args:
        clock: For the times of a suspect.
        parole: Records that a suspect is no longer alone; nothing begins before it has.
        telemetry: Hears of an unforeseen failure, after which the admission begins again.
    """

    def __init__(self, clock: Clock, parole: Parole, telemetry: Telemetry) -> None:
        self._clock = clock
        self._parole = parole
        self._telemetry = telemetry
        self._inside: dict[object, None] = {}
        self._alone: object | None = None
        self._waiting: dict[object, _Waiting] = {}
        self._resting = False
        self._is_open = True  # kept by `_look`, as each request asks for it
        self._closed_at: float | None = None  # loop time
        self._admitting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._listening = 0
        self._timer: asyncio.TimerHandle | None = None
        self._paroling: asyncio.Task[None] | None = None

    def enter_nowait(self, who: object) -> bool:
        """Let an innocent one begin, unless a suspect waits or is alone."""
        if not self._is_open:
            return False
        self._inside[who] = None
        return True

    async def enter(self, who: object, row: SuspectRow, about: Suspicion | None) -> bool:
        """Wait until *who* may begin.

        Args:
            who: Passed to `leave` at its end.
            row: Says whether it is alone.
            about: As `suspicion` says; None for an innocent one.

        Returns:
            Whether it is alone, and its row must say so before it begins.
        """
        if about is None:
            while not self.enter_nowait(who):
                await self._wait_change()
            return False
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[who] = _Waiting(who, row, about, admitted)
        self._look()
        if self._admitting is None or self._admitting.done():
            self._admitting = self._start(self._admit_all, "admission of suspects")
        try:
            return await admitted
        except asyncio.CancelledError:
            self._waiting.pop(who, None)
            self.leave(who)  # it may have been admitted in this very step
            self._look()
            raise

    def leave(self, who: object) -> None:
        """What *who* had begun is over; may be called twice."""
        if self._inside.pop(who, self) is self:
            return
        if who is self._alone:
            self._alone = None
            self._cancel_timer()
        elif not self._listening:
            return  # each request passes here, and nearly always nobody waits
        self._look()

    @contextlib.asynccontextmanager
    async def beginning(self, row: SuspectRow, about: Suspicion | None) -> AsyncIterator[bool]:
        """`enter` and `leave` around a block; as its value whether the block is alone."""
        who = object()
        alone = await self.enter(who, row, about)
        try:
            yield alone
        finally:
            self.leave(who)

    def stop(self) -> None:
        """Record nothing more."""
        self._cancel_timer()
        for task in (self._admitting, self._paroling):
            if task is not None:
                task.cancel()

    def _start(self, work: background.Work, name: str) -> asyncio.Task[None]:
        """Begin *work* again if it fails: otherwise the doors would stay shut."""
        return background.start(work, name, telemetry=self._telemetry, clock=self._clock)

    def _look(self) -> None:
        """The doors may have moved: note since when they are closed, and let all ask again."""
        self._is_open = self._alone is None and (not self._waiting or self._resting)
        if self._is_open:
            self._closed_at = None
        elif self._closed_at is None:
            self._closed_at = self._clock.loop()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_change(self) -> None:
        self._listening += 1
        try:
            await self._changed.wait()
        finally:
            self._listening -= 1

    async def _admit_all(self) -> None:
        """Admit suspects until none waits: one alone, or several if none can be alone."""
        await asyncio.sleep(GATHER_S)
        together = 1
        while waiting := self._by_rank():
            first = waiting[0]
            if await self._wait_alone(first):
                together = 1
                self._admit_alone(first)
            elif first.is_waiting:
                together *= 2
                for one in self._by_rank()[:together]:
                    self._admit(one, alone=False)

    def _by_rank(self) -> list[_Waiting]:
        """The suspects that still wait, in the order in which they begin."""
        waiting = (one for one in self._waiting.values() if one.is_waiting)
        return sorted(waiting, key=lambda one: one.rank)

    def _admit_alone(self, one: _Waiting) -> None:
        self._alone = one.who
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(one.about.apart_s, self._time_up, one.who, one.row)
        self._admit(one, alone=True)

    def _admit(self, one: _Waiting, *, alone: bool) -> None:
        del self._waiting[one.who]
        self._inside[one.who] = None
        one.admitted.set_result(alone)
        self._look()

    async def _wait_alone(self, one: _Waiting) -> bool:
        """Wait until nothing runs, but for no longer than it may; whether it can be alone."""
        while self._alone is not None:
            await self._wait_change()
        await self._rest(one.about.apart_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(one.about.apart_s):
                while self._inside and one.is_waiting:
                    await self._wait_change()
        return not self._inside and one.is_waiting

    async def _rest(self, for_s: float) -> None:
        """Open the doors as long as they were closed, if that was long."""
        closed_s = self._clock.loop() - (self._closed_at or self._clock.loop())
        if closed_s < for_s:
            return
        self._resting = True
        self._look()
        try:
            await asyncio.sleep(closed_s)
        finally:
            self._resting = False
            self._look()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_up(self, who: object, row: SuspectRow) -> None:
        self._paroling = self._start(partial(self._end_alone, who, row), "end of being alone")

    async def _end_alone(self, who: object, row: SuspectRow) -> None:
        """Others may begin beside it, once its row says that it is not alone any more."""
        while self._alone is who:
            try:
                await self._parole(row)
            except StoreError:
                await asyncio.sleep(backoff.PAROLE_S)
                continue
            if self._alone is who:
                self._alone = None
                self._look()
