"""Isolates suspects: tasks that may have killed a process run alone until the killer is known.

A crash counts for each task that ran in the process, as any of them may have caused it. A
*suspect* is a task with two crashes, or with one attempt left. It begins when nothing else runs
in its process, and for a while nothing else begins beside it; its row records that (`alone`). Only
a row that was alone when its process died is given up, so an innocent one is not.

If something else runs for long, no suspect can be alone. Then two suspects begin together, then
four, then eight. Those with the most crashes begin first, and of these the ones that had begun
last before the crash. So nearly each crash halves the group that contains the killer, until the
killer is the first to begin, and alone.

All code of the application begins here: handlers, probes, errored hooks, periodic jobs. Ops
requests do not wait, because a task that runs alone may need their answer; if one ran beside a
suspect at a crash, adoption does not count the suspect as alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from gracekit import background, backoff
from gracekit.clock import Clock
from gracekit.errors import StoreError
from gracekit.telemetry.telemetry import Telemetry
from gracekit.tracker.task import SUSPECTED

ALONE_S: Final = 5.0
"""A suspect waits at most so long for others to end, and is alone at most so long. It is short,
because everything else waits meanwhile, and after two power cuts every task is a suspect."""
SHORT: Final = 3
"""After so many crashes as a suspect, both times double with each further crash, so that a task
that kills only late is alone then, too. Most killers are fast, and are found before."""
LONGEST_S: Final = 86_400.0
GATHER_S: Final = 1.0
"""The suspects of one crash arrive one after the other. The first waits so long for the others."""
TOGETHER_S: Final = 2.5
"""Suspects count as begun together if their last attempts began in the same span of this length."""
HOPELESS: Final = 10
"""A row ends after so many times `max_attempts` crashes, even if it was never alone and may be
innocent: otherwise it might be retried for ever."""

SuspectRow = tuple[str, int]
"""Table and id of the row that records whether its suspect is alone."""
Parole = Callable[[SuspectRow], Coroutine[Any, Any, None]]


class Suspicion(NamedTuple):
    """What is known of a suspect.

    Attributes:
        crashes: How many crashes happened while it ran.
        apart_s: Longest wait for others to end, and longest time alone, in seconds.
        began_at: Wall time at which its last attempt began; 0 if unknown.
    """

    crashes: int
    apart_s: float
    began_at: float


def suspicion(crashes: int, max_attempts: int, began_at: float | None = None) -> Suspicion | None:
    """How a row with so many crashes is to be isolated; None if it may run beside others."""
    known = max(1, min(SUSPECTED, max_attempts - 1))
    if crashes < known:
        return None
    doubled = max(0, min(crashes - known - SHORT, 20))
    return Suspicion(crashes, float(min(LONGEST_S, ALONE_S * 2**doubled)), began_at or 0.0)


def is_guilty(crashes: int, max_attempts: int, *, alone: bool) -> bool:
    """Whether a row is given up: its last allowed attempt crashed alone, or far too many did."""
    return crashes >= max_attempts * (1 if alone else HOPELESS)


class _Waiting(msgspec.Struct, frozen=True, eq=False):
    """A suspect that waits to begin; the future `admitted` gets whether it is alone."""

    who: object
    row: SuspectRow
    about: Suspicion
    admitted: asyncio.Future[bool]

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: suspects with the most crashes first; of these, those that had begun last.

        Most killers kill soon, so those that had run for longer are less likely the cause. Those
        that had begun together begin in the order of their arrival. After a further crash their
        order is shuffled, or a killer would begin beside the same tasks each time.
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
    """Decides what may begin in one process: tasks side by side, suspects one at a time.

    Other tasks may not begin while a suspect waits or is alone. After each such time they may
    begin for as long as they were kept out: so neither keeps out the other for ever.

    Args:
        clock: Measures the times of suspects.
        parole: Records that a suspect is no longer alone; until it has, nothing else begins.
        telemetry: Emits an unexpected failure of this code, which is then started again.
    """

    def __init__(self, clock: Clock, parole: Parole, telemetry: Telemetry) -> None:
        self._clock = clock
        self._parole = parole
        self._telemetry = telemetry
        self._inside: dict[object, None] = {}
        self._alone: object | None = None
        self._waiting: dict[object, _Waiting] = {}
        self._resting = False
        self._is_open = True  # computed by `_look`, as each request reads it
        self._closed_at: float | None = None  # loop time
        self._admitting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._listening = 0
        self._timer: asyncio.TimerHandle | None = None
        self._paroling: asyncio.Task[None] | None = None

    def enter_nowait(self, who: object) -> bool:
        """Let *who*, no suspect, begin; false if a suspect waits or is alone."""
        if not self._is_open:
            return False
        self._inside[who] = None
        return True

    async def enter(self, who: object, row: SuspectRow, about: Suspicion | None) -> bool:
        """Wait until *who* may begin.

        Args:
            who: Identifies it; to be passed to `leave` at its end.
            row: The row that records whether it is alone.
            about: Result of `suspicion`; None if it is no suspect.

        Returns:
            Whether it is alone; its row must then say so before it begins.
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
            self.leave(who)  # it may have been admitted just before the cancellation
            self._look()
            raise

    def leave(self, who: object) -> None:
        """Note that *who* has ended; may be called twice."""
        if self._inside.pop(who, self) is self:
            return
        if who is self._alone:
            self._alone = None
            self._cancel_timer()
        elif not self._listening:
            return  # nothing waits for a change; each request comes here, so this is the fast way
        self._look()

    @contextlib.asynccontextmanager
    async def beginning(self, row: SuspectRow, about: Suspicion | None) -> AsyncIterator[bool]:
        """Call `enter` before and `leave` after a block; yields whether the block is alone."""
        who = object()
        alone = await self.enter(who, row, about)
        try:
            yield alone
        finally:
            self.leave(who)

    def stop(self) -> None:
        """Stop all background work; nothing more is recorded or admitted."""
        self._cancel_timer()
        for task in (self._admitting, self._paroling):
            if task is not None:
                task.cancel()

    def _start(self, work: background.Work, name: str) -> asyncio.Task[None]:
        """Run *work*, again if it fails: otherwise nothing in this process would begin any more."""
        return background.start(work, name, telemetry=self._telemetry, clock=self._clock)

    def _look(self) -> None:
        """Compute whether others may begin, or since when they may not; wake all that wait."""
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
        """Admit suspects until none waits: one alone, or several together if none can be alone."""
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
        """The suspects that still wait, in the order in which they may begin."""
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
        """Wait until nothing runs, within the time of *one*; returns whether it can be alone."""
        while self._alone is not None:
            await self._wait_change()
        await self._rest(one.about.apart_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(one.about.apart_s):
                while self._inside and one.is_waiting:
                    await self._wait_change()
        return not self._inside and one.is_waiting

    async def _rest(self, for_s: float) -> None:
        """If others were kept out for *for_s* or longer, let them begin for as long."""
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
        """Let others begin beside the suspect, after its row says that it is no longer alone."""
        while self._alone is who:
            try:
                await self._parole(row)
            except StoreError:
                await asyncio.sleep(backoff.PAROLE_S)
                continue
            if self._alone is who:
                self._alone = None
                self._look()
