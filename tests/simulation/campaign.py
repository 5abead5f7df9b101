"""Many seeds, and what they met together."""

from __future__ import annotations

import gc
import time
from collections import Counter
from typing import Any

from tests.simulation.app import App
from tests.simulation.story import Played, play

COLLECT_EVERY = 50


class Campaign:
    """Plays seeds and adds up what happened.

    Attributes:
        broken: The broken promise of each seed that broke one.
        edges: Steps of the state machine.
        faults: By (port, step, kind).
        ends: How processes ended, and what was done to them.
    """

    def __init__(self) -> None:
        self.app = App()
        self.broken: dict[int, str] = {}
        self.edges: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[tuple[str, str, str]] = Counter()
        self.ends: Counter[str] = Counter()
        self.seeds = self.runs = self.iterations = 0
        self.fewest_runs = 1000
        self.took_s = 0.0
        gc.freeze()  # what the modules hold is no garbage, and would be looked through each time

    def play(self, seed: int) -> Played | None:
        """Play a seed; None if it broke a promise."""
        begun = time.process_time()
        try:
            played = play(seed, self.app)
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed is not good
            self.broken[seed] = f"{type(error).__name__}: {error}"
            return None
        finally:
            self.seeds += 1
            if self.seeds % COLLECT_EVERY == 0:
                gc.collect()  # it is off while a seed is played
            self.took_s += time.process_time() - begun
        self.edges += played.edges
        self.faults += played.faults
        self.ends += played.ends
        self.runs += played.runs
        self.iterations += played.iterations
        self.fewest_runs = min(self.fewest_runs, played.runs)
        return played

    def kinds(self) -> set[tuple[str, str]]:
        """(port, kind) of each fault that was met."""
        return {(port, kind) for port, _, kind in self.faults}

    def as_json(self) -> dict[str, Any]:
        """What a test asks of it, as plain data."""
        return {
            "broken": self.broken,
            "fewest_runs": self.fewest_runs,
            "edges": sorted(self.edges),
            "kinds": sorted(self.kinds()),
            "ends": dict(self.ends),
        }

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds, {len(self.broken)} broken, {self.runs} runs, "
            f"{self.iterations} iterations, {self.took_s:.1f} s of CPU"
        )


def tell_table(campaign: Campaign) -> str:
    """Steps, faults and ends, as text."""
    lines = ["", "step of a row                     times"]
    for (before, after), times in sorted(campaign.edges.items()):
        lines.append(f"{before or '(new)':>11} -> {after:<14} {times:>10}")
    lines += ["", "fault                             times, by step"]
    steps: dict[tuple[str, str], list[str]] = {}
    for (port, step, kind), times in sorted(campaign.faults.items()):
        steps.setdefault((port, kind), []).append(f"{step} {times}")
    for (port, kind), found in sorted(steps.items()):
        lines.append(f"{port:<10} {kind:<12} {', '.join(found)}")
    lines += ["", "ends and what brought them about"]
    lines += [f"{what:<24} {times:>10}" for what, times in sorted(campaign.ends.items())]
    return "\n".join(lines)
