"""Which cases of our workers are set against which other worker's, and what the ratio should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.measure import Figure, Goal, against, alone
from benchmarks.standings import (
    CPU_OF_A_CALL,
    CPU_OF_A_CAST,
    IDLE,
    KEPT,
    OWN,
    OWN_CPU_OF_A_CALL,
    RATE_OF_CASTS,
    Standing,
    latency,
    rate_of_calls,
)
from benchmarks.workers import BARE, OURS

NAME: Final = "rabbitmq"
UNWATCHED: Final = "retry"
"""Of the worker that operators watch: the same without endpoint, scrapes and sampled traces."""
BESIDE: Final[Mapping[str, str]] = {"retry-watched": UNWATCHED, "requeue-uvloop": "requeue"}
"""Workers of gracekit that differ from another one in one thing, and are compared with it too."""

UNITS: Final = {
    CPU_OF_A_CAST: "us",
    RATE_OF_CASTS: "casts/s",
    rate_of_calls(1): "calls/s",
    latency("p50", 1): "ms",
    latency("p99", 1): "ms",
    CPU_OF_A_CALL: "us",
    rate_of_calls(32): "calls/s",
    rate_of_calls(256): "calls/s",
    latency("p50", 1) + OWN: "ms",
    rate_of_calls(32) + OWN: "calls/s",
    OWN_CPU_OF_A_CALL: "us",
    KEPT: "KiB",
}
"""Cases that are set against another worker's."""

Judged = tuple[str, str, str]
"""A worker of ours, in a case, against whom."""


def _tuned_or_not(name: str, goals: Mapping[str, Goal]) -> dict[Judged, Goal]:
    """The same *goals* by case for the worker *name* and for the one with default settings."""
    return {
        (worker, case, BARE): goal
        for worker in (name, f"{name}-defaults")
        for case, goal in goals.items()
    }


GOALS: Final[Mapping[Judged, Goal]] = {
    ("requeue", CPU_OF_A_CAST, BARE): Goal(1.0, beyond=0.5),
    ("requeue", RATE_OF_CASTS, "faststream"): Goal(2.0, at_least=True, beyond=4.0),
    ("requeue", RATE_OF_CASTS, "oslo.messaging"): Goal(3.5, at_least=True, beyond=7.0),
    ("requeue", CPU_OF_A_CALL, BARE): Goal(0.7, beyond=0.4),
    ("requeue", rate_of_calls(32), BARE): Goal(1.2, at_least=True, beyond=2.0),
    ("requeue", rate_of_calls(32), "oslo.messaging"): Goal(6.0, at_least=True, beyond=10.0),
    ("requeue", latency("p50", 1), BARE): Goal(1.1),
    ("requeue", KEPT, BARE): Goal(1.1),
    **_tuned_or_not(
        "requeue",
        {
            rate_of_calls(32) + OWN: Goal(1.5, at_least=True, beyond=2.0),
            latency("p50", 1) + OWN: Goal(0.95, beyond=0.75),
            OWN_CPU_OF_A_CALL: Goal(0.5, beyond=0.35),
        },
    ),
    **_tuned_or_not(
        "retry",
        {
            CPU_OF_A_CAST: Goal(1.0, beyond=0.7),
            RATE_OF_CASTS: Goal(1.1, at_least=True, beyond=1.5),
            CPU_OF_A_CALL: Goal(1.0, beyond=0.8),
            rate_of_calls(32): Goal(1.2, at_least=True, beyond=1.6),
            rate_of_calls(32) + OWN: Goal(1.2, at_least=True, beyond=1.6),
            latency("p50", 1): Goal(1.8, beyond=1.5),
            latency("p50", 1) + OWN: Goal(1.8, beyond=1.5),
        },
    ),
    ("retry-watched", CPU_OF_A_CAST, UNWATCHED): Goal(1.1),
    ("retry-watched", RATE_OF_CASTS, UNWATCHED): Goal(0.9, at_least=True),
    ("retry-watched", rate_of_calls(32), UNWATCHED): Goal(0.9, at_least=True),
}
IDLE_GOAL: Final = Goal(0.5, beyond=0.2)
"""Of a worker of ours, itself and not its ratio."""

AGAINST_TOO: Final = ("faststream", "oslo.messaging")
CASES_TOO: Final = (RATE_OF_CASTS, rate_of_calls(32))


def figures_of(standings: Mapping[str, Standing]) -> Iterator[Figure]:
    """Ours against the bare one in every case, and against others in some; then idle times."""
    for ours in (name for name in OURS if name in standings):
        wanted = [(case, BARE) for case in UNITS]
        wanted += [(case, other) for other in AGAINST_TOO for case in CASES_TOO]
        if ours in BESIDE:
            wanted += [(case, BESIDE[ours]) for case in UNITS]
        for case, other in wanted:
            if other in standings and case in standings[ours].values:
                yield _figure(standings, ours, case, other)
    for name, one in standings.items():
        goal = IDLE_GOAL if name in OURS and name != "retry-watched" else None
        yield alone(NAME, f"{name}, {IDLE}", one.values[IDLE], "ms/s", goal)


def _figure(standings: Mapping[str, Standing], ours: str, case: str, other: str) -> Figure:
    pairs = zip(standings[ours].values[case], standings[other].values[case], strict=True)
    told = f"{ours}, {case}" if other == BARE else f"{ours}, {case} / {other}"
    return against(NAME, told, list(pairs), UNITS[case], GOALS.get((ours, case, other)))
