"""The room in the played world: which requests find none, and what stories with parked tasks set.

In half of the seeds some requests need room. In most of those their tasks wait as PENDING. What
resolvers, operators and handlers ask of a parked task is noted here, so that its end can be judged.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from gracekit import NoCapacity
from gracekit.process import Point, Side
from gracekit.tracker.task import Verb

if TYPE_CHECKING:
    from tests.simulation.ports import SimLife
    from tests.simulation.story import Story

SHARE: Final = 0.5
"""Of the seeds in which requests need room."""
POINTS: Final = (Point.PARK, Point.UNPARK, Point.NOTIFY, Point.OUTBOX_SENT)


class Capacity:
    """The room of one story.

    Attributes:
        is_on: Whether requests need room at all.
        parks: Whether their tasks wait for it.
        free: How much there is.
        most: Of the tasks that may wait.
        timeout_s: How long they may.
        resolvers: How many there are.
        asked: What somebody has ordered of parked tasks, by request id, whatever came of it.
        dropped: Resources whose parked tasks some handler has cancelled.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._rng = random.Random(f"{story.seed} capacity")  # of its own: the rest stays
        pick = self._rng.choice
        self.is_on = self._rng.random() < SHARE
        self.parks = self.is_on and self._rng.random() < 0.9
        self.free = pick([0, 0, 1, 3])
        self.most = pick([1, 3, 1000, 1000])
        self.timeout_s = pick([5.0, 20.0, 40.0, 80.0])
        self.resolvers = pick([0, 1, 1, 2]) if self.parks else 0
        self._share = pick([0.3, 0.6])
        if self.parks and self._rng.random() < 0.5:
            story.swarm.slow_step, story.swarm.slow_rate = Point.UNPARK.value, 0.4
        self._armed: dict[SimLife, str] = {}
        self.asked: dict[str, set[Verb]] = defaultdict(set)
        self.dropped: set[str] = set()

    def settings(self) -> dict[str, Any]:
        """Of the service."""
        if not self.parks:
            return {}
        return {
            "use_pending_state": True,
            "pending_timeout_s": self.timeout_s,
            "pending_max": self.most,
        }

    # -- who needs it ---------------------------------------------------------------------

    def needs(self, request_id: str) -> int:
        """How much room a request needs; 0 for none."""
        rng = random.Random(f"{self._story.seed} {request_id} needs")
        return rng.choice([1, 2, 4]) if self.is_on and rng.random() < self._share else 0

    def take(self, request_id: str, needs: int) -> None:
        """Take room for a request, or say that there is none."""
        if needs > self.free:
            self._story.ends["no capacity"] += 1
            raise NoCapacity(f"{request_id} finds no room", requested={"units": needs})
        self.free -= needs

    def make_room(self, units: int) -> None:
        """A resolver frees some."""
        self.free += units

    # -- where processes die --------------------------------------------------------------

    def arm(self, life: SimLife) -> None:
        """Let a process die at some step of a parked task, at times."""
        if not self.parks or self._story.truth.is_quiet or self._rng.random() > 0.3:
            return
        point = self._rng.choice(POINTS)
        side: Side = self._rng.choice(["before", "after"])
        self._armed[life] = f"killed {side} {point.value}"
        life.crash_at(point, side)

    def disarm(self) -> None:
        """The faults are over."""
        for life in self._armed:
            life.process.dies_at = None
        self._armed.clear()

    def note_end(self, life: SimLife) -> None:
        """A process has ended; counted if it was here that it died."""
        where = self._armed.pop(life, None)
        if where is not None and life.process.dies_at is None:
            self._story.ends[where] += 1
