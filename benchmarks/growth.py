"""What a task costs beside many: in flight, in the history, among methods, among resources.

Each size has a process of its own; they take turns, and each line of the table
sets a size against the smallest one, in processor time of all threads: waiting
for a disk that others use says nothing. Flat is 1.

Beside a history a cast goes its whole way: published to a queue in a file, taken from there,
accepted, run, ended and removed, with ids such as clients make. All pages of both files are dropped
from the page cache before each measurement, as those of a long record are not all in it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Final

import apsw

from benchmarks.child import Child, Measure
from benchmarks.history import GRACEKIT, OSLO, Ids, add_history, drop_pages, remove_later
from benchmarks.measure import Figure, Goal, Plan, against
from benchmarks.plain import ARGS
from benchmarks.workload import Site, park, queues_of, serving, serving_files

NAME: Final = "growth"
GOAL: Final = Goal(1.1)
LONGEST: Final = Goal(1.1, beyond=1.05)
"""Beside the longest history."""
AT_ONCE: Final = 32
_LONG_S: Final = 10 * 365 * 86400.0


@dataclass(frozen=True, slots=True)
class _History:
    """What is served beside a history: with which ids, by which method, how many at one time."""

    ids: Ids
    method: str = "work"
    at_once: int = AT_ONCE


# Ids of our own clients get lines of their own as soon as they are not as random as oslo's.
_KINDS_OF_IDS: Final = [OSLO] if GRACEKIT.sql == OSLO.sql else [OSLO, GRACEKIT]
HISTORIES: Final = {
    f"in history{ids.words}{words}": _History(ids, method, at_once)
    for ids in _KINDS_OF_IDS
    for words, method, at_once in (("", "work", AT_ONCE), (", leased", "work_on", 1))
}
SIZES: Final = {
    "in flight": (1, 1_000, 10_000, 100_000),
    **{
        kind: (0, 1_000_000) if history.method == "work_on" else (0, 1_000_000, 10_000_000)
        for kind, history in HISTORIES.items()
    },
    "methods": (1, 100, 1_000),
    "resources": (1, 1_000, 100_000),
}

# Tasks a measurement; fewer where one comes after the other, as they take leases.
NUMBERS: Final = {
    "in flight": 1000,
    **{kind: 40 if one.at_once == 1 else 500 for kind, one in HISTORIES.items()},
    "methods": 1000,
    "resources": 200,
}


def run(plan: Plan) -> Iterator[Figure]:
    """Each kind in its sizes."""
    for kind, sizes in SIZES.items():
        yield from _kind(plan, kind, sizes if not plan.quick else (sizes[0], 20))


def _kind(plan: Plan, kind: str, sizes: tuple[int, ...]) -> Iterator[Figure]:
    rounds = _rounds(plan, kind, sizes)
    for place, size in enumerate(sizes[1:], 1):
        case = f"{size:,} {kind} / {sizes[0]:,}"
        goal = LONGEST if size == max(SIZES["in history"]) else GOAL
        pairs = [(found[place][0], found[0][0]) for found in rounds]
        yield against(NAME, case, pairs, "us a task", goal)
        if kind in HISTORIES:
            pairs = [(found[place][1], found[0][1]) for found in rounds]
            yield against(NAME, f"rate of that, {case}", pairs, "tasks/s")


def _rounds(plan: Plan, kind: str, sizes: tuple[int, ...]) -> list[list[list[float]]]:
    """What each size measured, in each round."""
    directory = plan.directory / _name(kind)
    directory.mkdir()
    number, rounds = plan.size(NUMBERS[kind], 4), []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)  # ten million rows are some gigabytes
        children = {
            size: stack.enter_context(Child(NAME, kind, size, directory)).ready() for size in sizes
        }
        for child in children.values():
            child.measure(number)  # the first one fills caches
        for _ in range(plan.rounds):
            found: list[list[float]] = []
            for size, child in children.items():
                if kind in HISTORIES:
                    _make_cold(directory, _name(kind, size))
                found.append(child.measure(number))
            rounds.append(found)
    return rounds


def _make_cold(directory: Path, name: str) -> None:
    drop_pages(directory / f"{name}.db")
    drop_pages(queues_of(directory, name))


def _name(*words: object) -> str:
    """For files."""
    return "-".join(str(word).replace(", ", "-").replace(" ", "-") for word in words)


# -- in the child -----------------------------------------------------------------


@contextlib.asynccontextmanager
async def _in_flight(size: int, directory: Path) -> AsyncIterator[Measure]:
    site = Site()
    async with serving(site, directory, f"in-flight-{size}") as (_, sender):
        await park(site, sender, size)

        async def measure(number: int) -> list[float]:
            return [(await sender.repeat("work", at_once=AT_ONCE, number=number)).cpu_us]

        yield measure


@contextlib.asynccontextmanager
async def _in_history(
    kind: str, history: _History, size: int, directory: Path
) -> AsyncIterator[Measure]:
    name, new_id, method = _name(kind, size), history.ids.new, history.method
    serves = partial(serving_files, Site(), directory, name, new_id=new_id, retention_s=_LONG_S)
    async with serves() as (_, sender):
        await sender.repeat(method, at_once=1, number=1)  # a lease was used before
    store = directory / f"{name}.db"
    last = add_history(store, size, history.ids)
    async with serves() as (_, sender):

        async def measure(number: int) -> list[float]:
            taken = await sender.repeat(method, at_once=history.at_once, number=number)
            remove_later(store, last)
            return [taken.cpu_us, taken.rate]

        yield measure


@contextlib.asynccontextmanager
async def _methods(size: int, directory: Path) -> AsyncIterator[Measure]:
    async with serving(Site(methods=size), directory, f"methods-{size}") as (_, sender):
        method = "work" if size == 1 else f"more_{size - 2}"

        async def measure(number: int) -> list[float]:
            return [(await sender.repeat(method, at_once=AT_ONCE, number=number)).cpu_us]

        yield measure


@contextlib.asynccontextmanager
async def _resources(size: int, directory: Path) -> AsyncIterator[Measure]:
    """A lease row for each, and every task on another one; alone, or they would wait in line."""
    name = f"resources-{size}"
    async with serving(Site(), directory, name):
        pass
    connection = apsw.Connection(str(directory / f"{name}.db"))
    connection.execute(
        """
INSERT INTO lease (kind, id, lver, acquired_at, released_at)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
SELECT 'vm', 'vm-' || i, 1, unixepoch(), unixepoch() FROM n""",
        (size,),
    )
    connection.close()
    # A stride over all of them, so that neighbours in time are none in the table.
    names = ({**ARGS, "vm": f"vm-{i * 7919 % size}"} for i in count())
    requests = zip(cycle(["work_on"]), names, strict=False)
    async with serving(Site(), directory, name) as (_, sender):

        async def measure(number: int) -> list[float]:
            return [(await sender.run(islice(requests, number), at_once=1)).cpu_us]

        yield measure


PREPARE: Final = {
    "in flight": _in_flight,
    **{kind: partial(_in_history, kind, history) for kind, history in HISTORIES.items()},
    "methods": _methods,
    "resources": _resources,
}
