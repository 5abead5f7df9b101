"""The beats of this run in a store that hosts share, and since when others may rely on the last.

A beat is a compare-and-set from the number that this process has sent last to a random one. Trust
counts from the *start* of the last beat that succeeded. While a run is trusted, a timer of the
kernel is armed that ends it at `hard_after`, before anybody may declare it dead: so nobody else
acts while it can.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from gracekit import backoff
from gracekit.clock import Clock
from gracekit.config.timings import Timings
from gracekit.errors import StoreError
from gracekit.life import Alive, Liveness
from gracekit.process import Process
from gracekit.runs import runs_sql as sql
from gracekit.runs.watch import BeatWatch, SeenBeat
from gracekit.store.batch import Value
from gracekit.store.engine import Aside, Engine

SENT_KEPT: Final = 1000
"""So many numbers of earlier beats are still ours, if a server takes over that lacks later ones."""


class Heart:
    """Beats, and watches the beats of others, on a thread and a connection of its own.

    Attributes:
        silent: The last number of each run that may be declared dead now.
        may_act: Whether the timer is needed, asked after each beat; True for a service, where
            something acts nearly always.
    """

    def __init__(self, engine: Engine, process: Process, clock: Clock, timings: Timings) -> None:
        self._engine = engine
        self._process = process
        self._clock = clock
        self.timings: Final = timings
        self._watch = BeatWatch()
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looked = asyncio.Event()
        self._run_id: str | None = None
        self._since = 0.0  # CLOCK_BOOTTIME; minus infinity once another run acts in our place
        self._confirmed = 0
        self._sent = deque([0], maxlen=SENT_KEPT)
        self._beat_at = 0.0  # CLOCK_BOOTTIME of the next beat
        self._look_at = 0.0
        self._origin: str | None = None
        self.silent: Mapping[str, int] = {}
        self.may_act: Callable[[], bool] = lambda: True

    # -- on the loop ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch; the beats begin with `join`."""
        if self._stop is None:
            self._loop = asyncio.get_running_loop()
            self._stop = self._engine.keep_aside(self.work, within_s=self.timings.op_s)

    def stop(self) -> None:
        """End the thread; the timer stays armed if the run has not left."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def arm(self) -> float:
        """Arm the timer before the commit that joins; returns the time from which trust counts."""
        since = self._clock.boot()
        self._process.end_at(since + self.timings.hard_s)
        return since

    def join(self, run_id: str, since: float) -> None:
        """Beat for that run from now on, whose row has the number 0."""
        with self._lock:
            self._run_id, self._since = run_id, since
            self._beat_at = since + self._pause_s()

    def arm_again(self) -> None:
        """Arm the timer before a commit after which something acts; `may_act` must be true now."""
        with self._lock:
            if self._run_id is not None and self._since > 0:
                self._process.end_at(self._since + self.timings.hard_s)

    def leave(self) -> None:
        """Beat no more: nothing of this run can act, and its row is removed."""
        with self._lock:
            self._run_id = None
        self._process.end_at(None)

    @property
    def trust_s(self) -> float:
        """Seconds since the last beat that succeeded began; 0 while there need be none."""
        return 0.0 if self._run_id is None else self._clock.boot() - self._since

    def disarm_if_failed(self) -> None:
        """Nothing acts any more: disarm the timer, unless a beat has succeeded meanwhile."""
        with self._lock:
            if self.trust_s >= self.timings.fail_s:
                self._process.end_at(None)

    @property
    def seen(self) -> Mapping[str, SeenBeat]:
        """What was seen of all runs, this one included, by id."""
        return self._watch.seen

    def judge(self, run_id: str) -> Liveness | None:
        """That a run lives, if its beat was seen to change lately; None if nothing is known."""
        seen = self._watch.seen.get(run_id)
        if seen is None or not seen.has_changed or seen.fail_s is None:
            return None
        ago_s = self._clock.boot() - seen.since
        return Liveness(Alive.ALIVE, f"it beat {ago_s:.0f} s ago") if ago_s < seen.fail_s else None

    async def next_look(self) -> None:
        """Wait until the beats were read, or could not be."""
        self._looked.clear()
        await self._looked.wait()

    # -- on the thread --------------------------------------------------------------------

    def work(self, aside: Aside) -> float:
        """Do what is due; returns the seconds until there is more."""
        now = self._clock.boot()
        try:
            self._follow_origin(aside)
            if self._run_id is not None and now >= self._beat_at:
                self._beat(aside, self._run_id)
            if now >= self._look_at:
                self._look(aside)
        except StoreError:
            self._watch.lose()
            self.silent = {}
            self._tell_looked()
            return backoff.BEAT_S
        due = self._look_at if self._run_id is None else min(self._look_at, self._beat_at)
        return max(0.0, due - self._clock.boot())

    def _follow_origin(self, aside: Aside) -> None:
        """What another server says does not go on with what was read before."""
        if (origin := aside.origin()) != self._origin:
            self._origin = origin
            self._watch.lose()

    def _beat(self, aside: Aside, run_id: str) -> None:
        since, new = self._clock.boot(), int(self._clock.new_id()[-15:], 16)
        self._sent.append(new)
        is_ours = self._beat_from(aside, run_id, self._confirmed, new)
        with self._lock:
            if self._run_id is None:  # it has left meanwhile
                return
            if not is_ours:
                self._engine.fence()
                self._since = -math.inf
                self._beat_at = math.inf  # the timer stays armed
                return
            self._confirmed, self._since = new, since
            self._process.end_at(since + self.timings.hard_s if self.may_act() else None)
        self._beat_at = since + self._pause_s()

    def _beat_from(self, aside: Aside, run_id: str, known: Value, new: int) -> bool:
        """Returns whether the row was ours: it is not if we are dead, or a copy of us has beaten.

        Another number than *known* is ours if we have sent it: its answer was lost, or a server
        took over that lacks our last beats. The numbers are random, as a copy of this process
        knows all that were sent before it was made.
        """
        while not aside.ask(sql.BEAT_ON, new, run_id, known):
            rows = aside.ask(sql.BEAT_OF, run_id)
            if not rows or rows[0][0] not in self._sent:
                return False
            known = rows[0][0]
        return True

    def _pause_s(self) -> float:
        """To the next beat, plus or minus a tenth."""
        return self.timings.beat_s * (0.5 + self._clock.jitter(1.0) / 2)

    def _look(self, aside: Aside) -> None:
        asked_at = self._clock.boot()
        rows = aside.ask(sql.BEATS)
        answered_at = self._clock.boot()
        self.silent = self._watch.note(rows, asked_at=asked_at, answered_at=answered_at)
        self._look_at = asked_at + self._watch.every_s(self.timings.beat_s)
        self._tell_looked()

    def _tell_looked(self) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._looked.set)
        except RuntimeError:  # the loop is closed
            return
