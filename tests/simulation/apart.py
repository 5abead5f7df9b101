"""Two hosts that share the store: neither can prove what has become of a run of the other.

They watch each other's beats. They are cut off from the store, alone or together, stand still, are
booted again, and come back as a copy of themselves; and an operator errs: he says of runs that live
that they are gone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gracekit.errors import GracekitError
from gracekit.runs.heart import Heart
from gracekit.runs.run import gone, list_runs
from gracekit.store.location import StoreLocation
from gracekit.store.state import StoreState
from gracekit.testing.loop import owned_by
from gracekit.testing.ports import Died
from tests.simulation.operators import NAME, Operator
from tests.simulation.truth import violate

if TYPE_CHECKING:
    from tests.simulation.ports import SimLife
    from tests.simulation.story import Story

SHARE: Final = 0.6
"""Of the seeds with two hosts."""
REBOOTS: Final = 0.4
"""How often a host is booted again after the end of its process."""
LOOKS_EVERY_S: Final = 4.0
"""Between two looks of the operator at the list of runs."""
SILENT: Final = 0.6
"""How often a run that is declared gone by error stands still first."""
STILL_S: Final = 20.0
ERRS_WITHIN_S: Final = 60.0
BLOWS_WITHIN_S: Final = 45.0
BUSY: Final = 0.8
"""How often a blow falls on a process in which something acts, if there is one."""
FAIL_S, HARD_S, DEAD_S = 12.0, 20.0, 30.0
LENGTHS_S: Final = (
    *((0.0, FAIL_S), (FAIL_S, HARD_S), (HARD_S, DEAD_S)),
    *((DEAD_S, 2 * DEAD_S), (DEAD_S, 2 * DEAD_S)),
)
"""Of a cut-off or a stand-still: from, and to."""
KILLED_STARTS: Final = 0.15
LOOK_S: Final = 0.05


class SharedLocation(StoreLocation):
    """The location of a store that hosts share."""

    is_shared = True


class HostsApart:
    """The hosts of one story, what befalls them, and an operator who errs.

    Attributes:
        is_on: Whether a host cannot see the processes of the other.
        was_any_cut: Whether a host was cut off from the store at some time.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._rng = random.Random(f"{story.seed} hosts apart")  # of its own: the rest stays
        self._boots: Counter[str] = Counter()
        self._errs_at: list[float] = []
        self._cut: Counter[str | None] = Counter()  # None: the store is away for all
        self._still: Counter[SimLife] = Counter()
        self._blows: list[asyncio.Task[None]] = []
        self.is_on = False
        self.was_any_cut = False

    def draw(self, hosts: list[str]) -> None:
        """Decide whether the hosts of this story are apart."""
        self.is_on = len(hosts) > 1 and self._rng.random() < SHARE
        number = self._rng.choice([0, 1, 1, 2])
        self._errs_at = sorted(self._rng.random() * ERRS_WITHIN_S for _ in range(number))

    def begin(self) -> None:
        """Let it befall them."""
        self._story.spawn(self._err_at_times())
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *(self._cut_one, self._cut_one, self._store_away, self._stand_still),
            *(self._stand_still_and_cut, self._back_in_time, self._copy, self._twin),
        ]
        for _ in range(self._rng.choice([0, 1, 2, 3, 4])):
            blow = self._rng.choice(kinds)
            self._blows.append(self._story.spawn(self._later(blow)))

    async def wait_blows(self) -> None:
        """Before the quiet phase: let them have their effect."""
        if self._blows:
            await asyncio.wait(self._blows, timeout=2 * DEAD_S)

    def end(self) -> None:
        """The quiet phase begins."""
        for blow in self._blows:
            blow.cancel()

    async def _later(self, blow: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(self._rng.random() * BLOWS_WITHIN_S)
        name = blow.__name__.strip("_").replace("_", " ")
        self._story.tell(f"blow: {name}")
        self._story.ends[f"hosts: {name}"] += 1
        await blow()

    # -- what a process can see ------------------------------------------------------------

    def settle(self, life: SimLife) -> None:
        """Put a new process on its host."""
        if self.is_on:
            host = life.runtime.settings.host
            life.process.move_to(f"boot {self._boots[host]} of {host}")
            life.runtime.ground.location.__class__ = SharedLocation
            life.runtime.ground.clock.off_s = self._story.beats.off_s(host)  # type: ignore[attr-defined]

    def reaches(self, life: Any) -> bool:
        """Whether the store can be reached from there; an operator is beside it."""
        settings = getattr(life.runtime, "settings", None)
        return not (self._cut[None] or (settings is not None and self._cut[settings.host]))

    def note_start(self, life: SimLife) -> None:
        """A process starts; at times it is killed soon, and its host booted again."""
        if self.is_on and self._rng.random() < KILLED_STARTS and not self._story.truth.is_quiet:
            self._story.spawn(self._kill_start(life, self._rng.random() * 1.2 * DEAD_S))

    async def _kill_start(self, life: SimLife, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if life.process.lives and life not in self._story.served_at:
            self._story.tell(f"{life.name} is killed as it starts")
            self._story.ends["hosts: start killed"] += 1
            life.end()
            self.note_end(life)

    def note_end(self, life: SimLife) -> None:
        """Its process has ended; at times its host is booted again."""
        if self.is_on and self._rng.random() < REBOOTS:
            self._boots[life.runtime.settings.host] += 1
            self._story.ends["host booted again"] += 1

    # -- what befalls hosts -----------------------------------------------------------------

    def _length_s(self) -> float:
        least_s, most_s = self._rng.choice(LENGTHS_S)
        return least_s + self._rng.random() * (most_s - least_s)

    def pause_s(self, rng: random.Random) -> float:
        """How long a process stands still as its fate."""
        return rng.random() * (2 * DEAD_S if self.is_on else 40)

    def _host(self) -> str:
        return self._rng.choice(self._story.hosts)

    def _some_life(self) -> SimLife | None:
        serving = self._story.serving()
        lives = [life for life in self._story.served_at if life in serving]
        if self._rng.random() < BUSY:
            lives = [life for life in lives if self._story.truth.bound(life)] or lives
        return self._rng.choice(lives) if lives else None

    @contextmanager
    def _cutting(self, host: str | None) -> Iterator[None]:
        """The store cannot be reached from *host*; None: from anywhere."""
        since, self.was_any_cut = self._story.loop.time(), True
        self._cut[host] += 1
        self._follow_reach()
        self._story.tell(f"cut off: {host or 'all'}")
        try:
            yield
        finally:
            self._cut[host] -= 1
            self._story.beats.note_blind(host, since)
            self._story.tell(f"not cut off any more: {host or 'all'}")
            self._follow_reach()

    def _follow_reach(self) -> None:
        loop = self._story.loop
        for life in self._story.machine.lives:
            if life.process.lives:
                follow: Any = life.engine.follow_reach  # type: ignore[attr-defined]
                loop.call_soon(follow, context=owned_by(life))

    @contextmanager
    def standing_still(self, life: SimLife) -> Iterator[None]:
        """A process stands still, as by SIGSTOP."""
        since = self._story.loop.time()
        self._still[life] += 1
        self._story.machine.pause(life)
        self._story.tell(f"{life.name} stands still")
        try:
            yield
        finally:
            self._still[life] -= 1
            if not self._still[life]:
                self._story.beats.note_blind(life, since)
                self._story.tell(f"{life.name} goes on")
                self._story.machine.resume(life)

    async def _cut_one(self) -> None:
        with self._cutting(self._host()):
            await asyncio.sleep(self._length_s())

    async def _store_away(self) -> None:
        with self._cutting(None):
            await asyncio.sleep(self._length_s())

    async def _stand_still(self) -> None:
        if (life := self._some_life()) is not None:
            with self.standing_still(life):
                await asyncio.sleep(self._length_s())

    async def _stand_still_and_cut(self) -> None:
        """As the answer of its beat is on its way; and it is cut off once it has read that."""
        if (life := self._some_life()) is None:
            return
        with ExitStack() as until_then:
            cut = partial(until_then.enter_context, self._cutting(life.runtime.settings.host))
            await self._story.beats.next_answer(life, cut)
            with self.standing_still(life):
                await asyncio.sleep(HARD_S * self._rng.random())
            await asyncio.sleep(DEAD_S + self._rng.random() * 10)

    async def _back_in_time(self) -> None:
        """A host is cut off until somebody finds that it is silent, and then beats at once."""
        host = self._host()
        with self._cutting(host):
            for _ in range(int(2 * DEAD_S / LOOK_S)):
                await asyncio.sleep(LOOK_S)
                if self._is_found_silent(host):
                    break

    def _is_found_silent(self, host: str) -> bool:
        silent = set[str]()
        for life in self._story.served_at:
            heart = life.runtime.ground.seat.heart
            if life.process.lives and heart is not None:
                silent |= set(heart.silent)
        runs = [self._story.ledger.runs.get(run_id) for run_id in silent]
        return any(one and one.process.lives and one.runtime.settings.host == host for one in runs)

    async def _copy(self) -> None:
        """A machine is resumed from a snapshot: a copy of a process beats where it has beaten."""
        if (life := self._some_life()) is None or (heart := life.runtime.ground.seat.heart) is None:
            return
        engine = self._story.machine.engine_for(Operator(self._story, self._rng))
        copy = Heart(engine, engine.life.process, self._story.machine.clock, heart.timings)  # type: ignore[attr-defined]
        for name in ("_run_id", "_since", "_confirmed", "_origin"):
            setattr(copy, name, getattr(heart, name))
        known = copy._confirmed
        copy._sent = heart._sent.copy()
        run_id = life.runtime.run_id
        for _ in range(100):
            await asyncio.sleep(LOOK_S * 20)
            rows = self._story.machine.rows("SELECT number FROM beat WHERE run_id = ?", run_id)
            if not rows or rows[0]["number"] not in copy._sent:
                break
        else:
            return
        try:
            await engine.start()
        except (GracekitError, Died):
            return
        copy.start()
        for _ in range(200):
            await asyncio.sleep(LOOK_S)
            if engine.status.state is StoreState.FENCED:
                self._story.ends["hosts: copy fenced"] += 1
                break
            if copy._confirmed != known:
                self._story.judged(violate, f"beat: a copy of {run_id} goes on")
                break
        copy.leave()
        copy.stop()
        await engine.stop()

    async def _twin(self) -> None:
        """Somewhere else a process starts under the name of an instance."""
        if (life := self._some_life()) is None:
            return
        names = {"host": self._host(), "instance": life.runtime.settings.instance}
        svc, settings = self._story.app.svc, self._story.settings
        twin: Any = self._story.machine.life(svc, **names, **settings)
        twin.process.move_to(f"boot of a twin of {twin.runtime.settings.host}")
        try:
            await twin.start()
        except (GracekitError, Died, asyncio.CancelledError) as error:
            self._story.tell(f"{twin.name}, a twin, did not start: {type(error).__name__}")
            self._story.ends[f"hosts: twin, {type(error).__name__}"] += 1
            twin.end()
            return
        self._story.note_serves(twin)
        self._story.ends["hosts: twin serves"] += 1
        try:
            await asyncio.sleep(self._rng.random() * 10)
        finally:
            twin.end()

    # -- the operator -----------------------------------------------------------------------

    async def _err_at_times(self) -> None:
        """Declare runs gone that live."""
        while self._errs_at and not self._story.truth.is_quiet:
            await asyncio.sleep(self._rng.expovariate(1 / LOOKS_EVERY_S))
            if self._story.loop.time() < self._errs_at[0] or self._rng.random() < 0.5:
                continue
            if (life := self._some_life()) is not None:
                del self._errs_at[0]
                self._story.spawn(self._err(life))

    async def _err(self, life: SimLife) -> None:
        """It may stand still, and go on after others act for it."""
        if self._rng.random() < SILENT:
            with self.standing_still(life):
                await self._declare(life.runtime.run_id)
                await asyncio.sleep(self._rng.random() * STILL_S)
        else:
            await self._declare(life.runtime.run_id)

    async def _declare(self, run_id: str) -> None:
        """As `gracekit runs gone` does, on the other host: nothing is proven there."""
        story, answer = self._story, "done"
        engine = story.machine.engine_for(Operator(story, self._rng))
        try:
            await engine.start()
            (run,) = [one for one in await list_runs(engine) if one.run_id == run_id]
            at = story.machine.clock.wall()
            await engine.commit(gone(run, by=NAME, reason="simulated", at=at))
        except (GracekitError, Died) as error:
            answer = f"{type(error).__name__}: {error}"
        finally:
            await engine.stop()
        story.tell(f"operator: gone {run_id}: {answer}")
        serving = story.serving()
        for life in story.machine.lives:  # the command wakes them; a set has no order of its own
            if life in serving:
                life.runtime.wired.trigger.poke()
