"""Figures: medians over rounds in which ours and the bare thing take turns.

A machine wanders by a third within minutes, so nothing here is judged by its
own speed where something bare can be timed in the same round beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FEWEST_ROUNDS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: How often each figure is taken.
        quick: Tiny sizes, which show that everything runs and nothing else.
        directory: On a disk: where stores and transports are made.
    """

    rounds: int
    quick: bool
    directory: Path

    def size(self, full: int, quick: int) -> int:
        """*full*, or *quick* in a quick run."""
        return quick if self.quick else full

    def few(self, most: int) -> int:
        """Rounds of a figure that takes long: at most *most*."""
        return min(self.rounds, most)


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit that a figure is to keep.

    Attributes:
        limit: Kept or not.
        at_least: Whether it is the lowest that will do, and not the highest.
        beyond: What would be better still; None if nothing is said of it.
    """

    limit: float
    at_least: bool = False
    beyond: float | None = None

    def met(self, value: float) -> bool:
        """Whether *value* keeps it."""
        return self._keeps(value, self.limit)

    def beaten(self, value: float) -> bool:
        """Whether *value* is beyond it as well."""
        return self.beyond is not None and self._keeps(value, self.beyond)

    def _keeps(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit

    def __str__(self) -> str:
        beyond = "" if self.beyond is None else f" ({self.beyond:g})"
        return f"{'>=' if self.at_least else '<='} {self.limit:g}{beyond}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        bench: Name of the module that took it.
        case: What was measured.
        ours: Median over the rounds, in *unit*.
        bare: Of the bare thing, likewise; None where there is none.
        value: What is judged: the median of the rounds' ratios ours / bare, or *ours* itself.
        low: Lower quartile of the values.
        high: Upper quartile of the values.
        worst: The worst of the values.
        goal: None where there is none.
    """

    bench: str
    case: str
    unit: str
    ours: float
    bare: float | None
    value: float
    low: float
    high: float
    worst: float
    goal: Goal | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is kept; None without one."""
        return None if self.goal is None else self.goal.met(self.value)


Pair = tuple[float, float]


def against(
    bench: str, case: str, pairs: Sequence[Pair], unit: str, goal: Goal | None = None
) -> Figure:
    """A figure of ratios, from one (ours, bare) a round."""
    ours, bare = zip(*pairs, strict=True)
    values = [one / other for one, other in pairs]
    spread = _spread(values, unit)
    return Figure(
        bench=bench,
        case=case,
        unit=unit,
        ours=statistics.median(ours),
        bare=statistics.median(bare),
        goal=goal,
        **spread,
    )


def alone(
    bench: str, case: str, values: Sequence[float], unit: str, goal: Goal | None = None
) -> Figure:
    """A figure that nothing bare stands beside."""
    spread = _spread(values, unit)
    return Figure(
        bench=bench, case=case, unit=unit, ours=spread["value"], bare=None, goal=goal, **spread
    )


def _spread(values: Sequence[float], unit: str) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "value": statistics.median(ordered),
        "low": quantile(ordered, 0.25),
        "high": quantile(ordered, 0.75),
        "worst": ordered[0] if unit.endswith("/s") and unit != "ms/s" else ordered[-1],
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which *share* of the *ordered* values lie, interpolated."""
    place = share * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


# -- taking turns -----------------------------------------------------------------


async def turns(
    rounds: int,
    ours: Callable[[], Awaitable[list[float]]],
    bare: Callable[[], Awaitable[list[float]]],
) -> list[list[Pair]]:
    """Measure *ours* and *bare* in turn, who is first in turn too.

    Returns:
        For each value that the two return, its pairs, one a round.
    """
    found: list[list[Pair]] = []
    for number in range(rounds):
        order = (ours, bare) if number % 2 == 0 else (bare, ours)
        first, second = [await _swept(one) for one in order]
        mine, other = (first, second) if order[0] is ours else (second, first)
        found.append(list(zip(mine, other, strict=True)))
    return [list(column) for column in zip(*found, strict=True)]


async def _swept(measure: Callable[[], Awaitable[list[float]]]) -> list[float]:
    gc.collect()
    return await measure()


@dataclass(slots=True)
class Taken:
    """What a number of steps took; filled at the end of `timed`.

    Attributes:
        rate: Steps a second.
        cpu_us: Microseconds of processor time a step, of all threads.
    """

    rate: float = 0.0
    cpu_us: float = 0.0

    def values(self) -> list[float]:
        """For `turns`."""
        return [self.rate, self.cpu_us]


@contextlib.contextmanager
def timed(number: int) -> Iterator[Taken]:
    """Time a block that takes *number* steps."""
    taken = Taken()
    begun, used = time.perf_counter(), time.process_time()
    yield taken
    taken.rate = number / (time.perf_counter() - begun)
    taken.cpu_us = 1e6 * (time.process_time() - used) / number


async def latencies(
    waiters: int, repeats: int, step: Callable[[], Awaitable[object]]
) -> tuple[list[float], float]:
    """Let *waiters* repeat *step* side by side.

    Returns:
        The seconds of each step, sorted, and of all together.
    """
    taken: list[float] = []

    async def wait() -> None:
        for _ in range(repeats):
            begun = time.perf_counter()
            await step()
            taken.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(wait() for _ in range(waiters)))
    return sorted(taken), time.perf_counter() - begun


def told_of_calls(taken: list[float], all_s: float) -> list[float]:
    """What `latencies` returned as p50 and p99 in milliseconds, and calls a second."""
    return [1e3 * quantile(taken, 0.5), 1e3 * quantile(taken, 0.99), len(taken) / all_s]


def calling(
    call: Callable[[], Awaitable[object]],
) -> Callable[[int, int], Awaitable[list[float]]]:
    """The measurement of a client: so many calls at one time, so many in all."""

    async def measure(at_once: int, number: int) -> list[float]:
        return told_of_calls(*await latencies(at_once, number // at_once, call))

    return measure


def numbered(prefix: str) -> Iterator[str]:
    """Ids that look like ours: 32 characters."""
    number = 0
    while True:
        number += 1
        yield f"{prefix}{number:0{32 - len(prefix)}}"


def command_line(
    prog: str, description: str | None, what: str, names: Iterable[str]
) -> argparse.ArgumentParser:
    """What all benches may be told; *what* says what *names*, of which some may be chosen, are."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar=what, help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=FEWEST_ROUNDS, help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw them there")
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="on the disk to measure; default: here"
    )
    return parser
