"""Two hosts that share the store: neither can prove what has become of a run of the other.

The next start on its own host takes a dead run over, unless the machine was booted again
meanwhile. Otherwise it waits until an operator says `gracekit runs gone`, who errs at times: some
of the runs that are declared gone live, and must be fenced.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Final

from gracekit.errors import GracekitError
from gracekit.runs.run import gone, list_runs
from gracekit.store.location import StoreLocation
from gracekit.testing.ports import Died
from tests.simulation.operators import NAME, Operator

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
"""How often a run that stands still is declared gone, and how often one that is declared gone by
error stands still first."""
STILL_S: Final = 20.0
ERRS_WITHIN_S: Final = 60.0


class SharedLocation(StoreLocation):
    """The location of a store that hosts share."""

    is_shared = True


class HostsApart:
    """The hosts of one story, and the operator who declares their runs gone.

    Attributes:
        is_on: Whether a host cannot see the processes of the other.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._rng = random.Random(f"{story.seed} hosts apart")  # of its own: the rest stays
        self._boots: Counter[str] = Counter()
        self._errs_at: list[float] = []
        self.is_on = False

    def draw(self, hosts: list[str]) -> None:
        """Decide whether the hosts of this story are apart."""
        self.is_on = len(hosts) > 1 and self._rng.random() < SHARE
        number = self._rng.choice([0, 1, 1, 2])
        self._errs_at = sorted(self._rng.random() * ERRS_WITHIN_S for _ in range(number))

    # -- what a process can see ------------------------------------------------------------

    def settle(self, life: SimLife) -> None:
        """Put a new process on its host."""
        if self.is_on:
            host = life.runtime.settings.host
            life.process.move_to(f"boot {self._boots[host]} of {host}")
            life.runtime.ground.location.__class__ = SharedLocation

    def note_end(self, life: SimLife) -> None:
        """Its process has ended; at times its host is booted again."""
        if self.is_on and self._rng.random() < REBOOTS:
            self._boots[life.runtime.settings.host] += 1
            self._story.ends["host booted again"] += 1

    def note_silent(self, life: SimLife) -> None:
        """A process stands still, and looks dead."""
        if self.is_on and self._rng.random() < SILENT:
            self._story.spawn(self._declare_later(life))

    # -- the operator -----------------------------------------------------------------------

    async def work(self) -> None:
        """Declare dead runs gone until the story is over, and at times a run that lives."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / LOOKS_EVERY_S))
            for run_id in self._open_runs():
                life = self._story.ledger.runs.get(run_id)
                if life is not None and life.process.lives:
                    if self._errs():
                        self._story.spawn(self._err(life))
                elif self._story.truth.is_quiet or self._rng.random() < 0.5:
                    await self._declare(run_id)

    def _open_runs(self) -> list[str]:
        if not self._story.ledger.is_ready:
            return []
        sql = "SELECT run_id FROM run WHERE adopted_at IS NULL AND gone_at IS NULL ORDER BY run_id"
        return [row["run_id"] for row in self._story.machine.rows(sql)]

    async def _err(self, life: SimLife) -> None:
        """Declare a run gone that lives: it may stand still, and go on after others act for it."""
        is_still = self._rng.random() < SILENT
        if is_still:
            self._story.machine.pause(life)
        await self._declare(life.runtime.run_id)
        if is_still:
            await asyncio.sleep(self._rng.random() * STILL_S)
            self._story.machine.resume(life)

    def _errs(self) -> bool:
        if self._story.truth.is_quiet or not self._errs_at:
            return False
        if self._story.loop.time() < self._errs_at[0] or self._rng.random() < 0.5:
            return False
        del self._errs_at[0]
        return True

    async def _declare_later(self, life: SimLife) -> None:
        await asyncio.sleep(self._rng.random() * STILL_S)
        if life.runtime.run_id in self._open_runs():
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
