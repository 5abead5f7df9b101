"""The beats of hosts apart: how they reach the store, and when a run may be declared dead.

A beat takes time on its way there and back, may land although nobody waits for it any more, and its
answer may find a process that has stood still meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import greenlet

from gracekit.errors import StoreUnreachableError
from gracekit.runs.runs_sql import BEAT_ON
from gracekit.runs.watch import READS_IN_DEAD
from gracekit.store.batch import Row
from gracekit.store.engine import Aside
from gracekit.testing.loop import owned_by
from gracekit.testing.machine import Life as PlayedLife
from gracekit.testing.ports import PlayedAside, VirtualClock
from tests.simulation.threads import sleep
from tests.simulation.truth import Violation

if TYPE_CHECKING:
    from tests.simulation.ports import SimEngine, SimLife
    from tests.simulation.story import Story

SLOWEST_S: Final = (0.0, 0.0, 0.2, 1.5, 4.0)
"""How long a beat is on its way at most, and as long its answer; of each seed one."""
OFF_S: Final = (-3600.0, 0.0, 3600.0)
"""How far the wall clock of a host may be off."""


class HostClock(VirtualClock):
    """The clock of one host, whose wall clock is off until it follows that of the store."""

    def __init__(self, common: VirtualClock) -> None:
        self._loop = asyncio.get_running_loop()
        self._common = common
        self.off_s = 0.0

    def wall(self) -> float:
        if self._wall_of_store is not None:
            return self._wall_of_store()
        return self._common.wall() + self.off_s

    def new_id(self) -> str:
        return self._common.new_id()

    def jitter(self, seconds: float) -> float:
        return self._common.jitter(seconds)


class SimAside(PlayedAside):
    """A connection whose statements and answers take time; its thread is a greenlet."""

    def __init__(self, engine: SimEngine, within_s: float) -> None:
        super().__init__(engine, engine.faults, within_s)
        self._engine: SimEngine = engine
        self._story = engine.story

    def origin(self) -> str:
        self._check_reach()
        return super().origin()

    def ask(self, sql: str, *params: Any) -> list[Row]:
        beats, within_s = self._story.beats, self._within_s
        there, back = beats.on_its_way_s(), beats.on_its_way_s()
        self._check_reach()
        if there > within_s:
            loop = asyncio.get_running_loop()
            loop.call_later(there, self._land_late, sql, params, context=owned_by(None))
            sleep(within_s)
            raise StoreUnreachableError(f"no answer within {within_s:g} s")
        sleep(there)
        self._check_reach()
        rows = super().ask(sql, *params)
        in_time = there + back <= within_s
        self._note(sql, params, rows, is_awaited=in_time and back > 0)
        sleep(min(back, within_s - there))
        self._check_reach()
        if not in_time:
            raise StoreUnreachableError(f"no answer within {within_s:g} s")
        beats.note_answered(self._engine.life)
        return rows

    def _check_reach(self) -> None:
        if not self._story.apart.reaches(self._engine.life):
            raise StoreUnreachableError("the server does not answer")

    def _land_late(self, sql: str, params: Sequence[Any]) -> None:
        """Nobody waits for it any more."""
        life = self._engine.life
        if self._story.apart.reaches(life) and not self._story.machine_is_closed:
            rows = self._story.machine.disk.execute(sql, params).fetchall()
            self._note(sql, params, rows, is_awaited=False)

    def _note(self, sql: str, params: Sequence[Any], rows: list[Row], *, is_awaited: bool) -> None:
        if sql == BEAT_ON and rows:
            life = self._engine.life if is_awaited else None
            self._story.beats.note_landed(str(params[1]), awaited_by=life)


def keep_in_greenlet(
    engine: SimEngine, work: Callable[[Aside], float], within_s: float
) -> Callable[[], None]:
    """As `Engine.keep_aside`; what the thread waits for, the loop does not."""
    loop, aside = asyncio.get_running_loop(), SimAside(engine, within_s)
    life, has_ended = engine.life, asyncio.Event()

    def begin() -> None:
        if life.process.lives and not has_ended.is_set():
            thread = greenlet.greenlet(work)
            thread.gr_context = contextvars.copy_context()
            go_on(thread, aside)

    def go_on(thread: greenlet.greenlet, *given: Any) -> None:
        if not life.process.lives:
            return
        pause_s = thread.switch(*given)
        if thread.dead:
            engine.story.beats.note_silent(life)
            loop.call_later(pause_s, begin)
        else:
            loop.call_later(pause_s, go_on, thread)

    loop.call_later(0, begin)
    return has_ended.set


class Beats:
    """What has become of all beats, and what may follow from it."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._rng = random.Random(f"{story.seed} beats")
        self._slowest_s = self._rng.choice(SLOWEST_S)
        self._off_s: dict[str, float] = {}
        self._landed: dict[str, float] = {}
        self._found_silent: dict[tuple[Any, str], float] = {}
        self._blind: list[tuple[Any, float, float]] = []
        self._awaited: dict[Any, asyncio.Event] = {}
        self._on_answer: dict[Any, Callable[[], Any]] = {}

    def on_its_way_s(self) -> float:
        """Seconds until a statement, or its answer, is there."""
        longest_s = min(self._slowest_s, 0.05) if self._story.swarm.is_off else self._slowest_s
        return longest_s * self._rng.random() ** 2

    def off_s(self, host: str) -> float:
        """How far the wall clock of that host is off, in seconds."""
        return self._off_s.setdefault(host, self._rng.choice(OFF_S))

    # -- what happens ---------------------------------------------------------------------

    def note_landed(self, run_id: str, awaited_by: Any = None) -> None:
        """A beat is in the store, or the row for it; a process may wait for the answer."""
        self._landed[run_id] = self._story.loop.time()
        if awaited_by in self._awaited:
            self._awaited.pop(awaited_by).set()

    def note_answered(self, life: Any) -> None:
        """The answer has come."""
        self._on_answer.pop(life, lambda: None)()

    async def next_answer(self, life: SimLife, then: Callable[[], Any]) -> None:
        """Wait until a beat of it has landed; call *then* as soon as its answer is there."""
        self._slowest_s = max(self._slowest_s, 1.5)
        await self._awaited.setdefault(life, asyncio.Event()).wait()
        self._on_answer[life] = then

    def note_blind(self, who: Any, since: float) -> None:
        """Until now a process stood still, or a host (None: each) was cut off from the store."""
        self._blind.append((who, since, self._story.loop.time()))

    def note_silent(self, life: Any) -> None:
        """It has read the beats, and says who is silent."""
        seat = getattr(life.runtime, "ground", None) and life.runtime.ground.seat
        silent = seat.heart.silent if seat and seat.heart else {}
        for key in [one for one in self._found_silent if one[0] is life and one[1] not in silent]:
            del self._found_silent[key]
        for run_id in silent:
            self._found_silent.setdefault((life, run_id), self._story.loop.time())

    # -- what is held against it ----------------------------------------------------------

    def check_declared(self, actor: Any, run_id: str) -> None:
        """A run was declared dead: it was silent, and somebody saw that all the time."""
        now, life = self._story.loop.time(), self._story.ledger.runs.get(run_id)
        dead_s = (life or actor).runtime.settings.timings.dead_s
        if life is not None and not life.process.lives and life.process.shares_boot(actor.process):
            return  # it was proven on its host
        beaten = self._landed.get(run_id)
        if beaten is not None and now - beaten < dead_s:
            raise Violation(f"beat: {run_id} is declared dead {now - beaten} s after a beat")
        found = self._found_silent.get((actor, run_id), now)
        host = actor.runtime.settings.host
        for who, since, until in self._blind:
            is_long = until - since > dead_s / READS_IN_DEAD
            if who in {None, host, actor} and is_long and found - dead_s < until <= found:
                raise Violation(f"beat: {actor.name} declares {run_id} dead, and was blind")
        if life is not None and life.process.lives:
            self._check_idle(life)

    def _check_idle(self, life: PlayedLife) -> None:
        """Its process may live, if nothing in it acts."""
        for request_id in self._story.truth.bound(life):
            raise Violation(f"beat: {life.runtime.run_id} is dead, but {request_id} acts in it")

    def check_alone(self, life: SimLife) -> None:
        """A process serves: no other one of its instance may act."""
        for other in self._story.machine.lives:
            is_same = other.runtime.instance == life.runtime.instance and other is not life
            may_act = other.process.lives and other.runtime.run_id not in self._story.ledger.out
            if is_same and may_act and other in self._story.served_at:
                raise Violation(f"beat: {other.runtime.run_id} and {life.name} are one instance")
