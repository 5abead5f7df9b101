"""When a run writes its signs of life, and what follows if it cannot write them any more.

Runs of several hosts on one store in PostgreSQL prove to each other by *beats* that they live. All
times but those of a beat itself count from the start of the last beat that succeeded.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

from gracekit.config.choices import LivenessPreset

PRESETS: Final = MappingProxyType[LivenessPreset, tuple[float, float, float, float]](
    {"normal": (3.0, 12.0, 20.0, 30.0), "slow": (15.0, 75.0, 90.0, 120.0)}
)
"""Seconds of beat, fail, hard and dead."""
LONGEST_OP_S: Final = 5.0
"""Most seconds that one attempt to write a beat may take."""
BEATS: Final = 3.3
"""Three beats, each of which may come 10 % late: two may be lost, and the third one is in time."""
DRIFT: Final = 1.05
"""The clocks of two hosts may run 5 % apart."""
MARGIN_S: Final = 2.0
"""Seconds from the latest end of a process by the clock of another host to its death."""


class Timings(NamedTuple):
    """The times of a run's signs of life, in seconds.

    Attributes:
        beat_s: Time between the starts of two beats.
        op_s: Time within which the store must have answered a beat.
        warn_s: After this time without a beat the run warns.
        fail_s: After this time it cancels its handlers.
        hard_s: After this time the kernel ends its process.
        dead_s: After this time other runs may declare it dead, and take its tasks over.
    """

    beat_s: float
    op_s: float
    warn_s: float
    fail_s: float
    hard_s: float
    dead_s: float

    @property
    def least_fail_s(self) -> float:
        """What `fail_s` must not be below, so that a run may lose two beats."""
        return BEATS * self.beat_s + self.op_s

    @property
    def least_dead_s(self) -> float:
        """What `dead_s` must not be below, so that no process lives that was declared dead."""
        return DRIFT * self.hard_s + MARGIN_S

    def least_hard_s(self, grace_s: float) -> float:
        """What `hard_s` must not be below, so that cancelled handlers have *grace_s* to return."""
        return self.fail_s + grace_s

    def later(self, grace_s: float) -> Timings:
        """These times, with those raised to whole seconds that come too early."""
        late = self._replace(fail_s=_at_least(self.least_fail_s, self.fail_s))
        late = late._replace(hard_s=_at_least(late.least_hard_s(grace_s), self.hard_s))
        return late._replace(dead_s=_at_least(late.least_dead_s, self.dead_s))


def _at_least(least_s: float, now_s: float) -> float:
    # `math.ceil` would raise for infinity, which another rule reports.
    return now_s if now_s >= least_s else -(-least_s // 1)


def timings_of(
    liveness: LivenessPreset,
    *,
    beat_s: float | None = None,
    fail_after_s: float | None = None,
    hard_after_s: float | None = None,
    dead_after_s: float | None = None,
) -> Timings:
    """The times of the preset *liveness*, except for those that are given."""
    given = (beat_s, fail_after_s, hard_after_s, dead_after_s)
    beat, fail, hard, dead = (
        preset if one is None else one for one, preset in zip(given, PRESETS[liveness], strict=True)
    )
    return Timings(
        beat_s=beat,
        op_s=min(beat * 2 / 3, LONGEST_OP_S),
        warn_s=fail - beat,
        fail_s=fail,
        hard_s=hard,
        dead_s=dead,
    )
