"""Which faults a seed has: a random subset of all, each with its rate."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

from gracekit.testing.faults import Fault, Faults

RATES = (0.002, 0.01, 0.03)
DELAYS_S = (0.01, 0.3, 2.0, 7.0)
LATE_S = 0.3
LAG_RATE = 0.002
JUMPS_S = (-300.0, -5.0, 5.0, 300.0)


class Swarm(Faults):
    """Faults of one seed, until the quiet phase.

    Attributes:
        met: How often each fault happened, by (port, step, kind).
        slow_step: A step that is late more often than others, at the rate `slow_rate`.
        late_step: A step that is late each time by less than 0.3 s, in the quiet phase too.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.rates = {kind: rng.choice(RATES) for kind in Fault if rng.random() < 0.4}
        if Fault.CRASH in self.rates:
            self.rates[Fault.CRASH] = 0.002
        if Fault.BROKEN in self.rates:
            self.rates[Fault.BROKEN] = 0.002
        if Fault.JUMP in self.rates:
            self.rates[Fault.JUMP] = 0.0005
        self._lags = Fault.DELAY in self.rates
        self.met: Counter[tuple[str, str, str]] = Counter()
        self.is_off = False
        self.slow_step, self.slow_rate = "", 0.0
        self.late_step = ""

    def draw(self, port: str, step: str, kinds: Collection[Fault]) -> Fault | None:
        if self.late_step == step and Fault.DELAY in kinds:
            self.met[port, step, Fault.DELAY.name] += 1
            return Fault.DELAY
        if self.is_off:
            return None
        if self.slow_step == step and Fault.DELAY in kinds and self._rng.random() < self.slow_rate:
            self.met[port, step, Fault.DELAY.name] += 1
            return Fault.DELAY
        for kind in kinds:
            rate = self.rates.get(kind)
            if rate is not None and self._rng.random() < rate:
                self.met[port, step, kind.name] += 1
                return kind
        return None

    def seconds(self, port: str, step: str) -> float:
        if port == "clock":
            return self._rng.choice(JUMPS_S)
        longest = LATE_S if self.is_off else self._rng.choice(DELAYS_S)
        return longest * self._rng.random()

    def lag(self) -> float:
        """Seconds that an iteration of the loop comes late: something has blocked it."""
        if not self._lags or self.is_off or self._rng.random() > LAG_RATE:
            return 0.0
        self.met["clock", "loop", "DELAY"] += 1
        return self.seconds("loop", "lag") / 4

    @property
    def jumps(self) -> bool:
        """Whether the wall clock may be set in this seed."""
        return Fault.JUMP in self.rates
