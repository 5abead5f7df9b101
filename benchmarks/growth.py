"""What a task costs beside many: in flight, in the history, among methods, among resources.

Each size has a process of its own; they take turns, and each line of the table
sets a size against the smallest one, in processor time of all threads: waiting
for a disk that others use says nothing. Flat is 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from itertools import count, cycle, islice
from pathlib import Path
from typing import Final

import apsw

from benchmarks.child import Child, Measure
from benchmarks.measure import Figure, Goal, Plan, against
from benchmarks.plain import ARGS
from benchmarks.workload import Site, park, serving

NAME: Final = "growth"
GOAL: Final = Goal(1.2)
AT_ONCE: Final = 32
SIZES: Final = {
    "in flight": (1, 1_000, 10_000, 100_000),
    "in history": (0, 10_000, 100_000, 1_000_000),
    "in history, leased": (0, 10_000, 1_000_000),
    "methods": (1, 100, 1_000),
    "resources": (1, 1_000, 100_000),
}

# Tasks a measurement; one after the other where they take leases.
NUMBERS: Final = {
    "in flight": 1000,
    "in history": 1000,
    "in history, leased": 40,
    "methods": 1000,
    "resources": 200,
}


def run(plan: Plan) -> Iterator[Figure]:
    """Each kind in its sizes."""
    for kind, sizes in SIZES.items():
        yield from _kind(plan, kind, sizes if not plan.quick else (sizes[0], 20))


def _kind(plan: Plan, kind: str, sizes: tuple[int, ...]) -> Iterator[Figure]:
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child(NAME, kind, size, plan.directory)).ready() for size in sizes
        ]
        number = plan.size(NUMBERS[kind], 4)
        for child in children:
            child.measure(number)  # the first one fills caches
        rounds = [[child.measure(number)[0] for child in children] for _ in range(plan.rounds)]
    smallest, *larger = zip(*rounds, strict=True)
    for size, times in zip(sizes[1:], larger, strict=True):
        pairs = list(zip(times, smallest, strict=True))
        case = f"{size:,} {kind} / {sizes[0]:,}"
        yield against(NAME, case, pairs, "us a task", GOAL)


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
async def _in_history(size: int, directory: Path) -> AsyncIterator[Measure]:
    name = f"history-{size}"
    async with serving(Site(), directory, name):
        pass  # makes the store
    _add_history(directory / f"{name}.db", size)
    async with serving(Site(), directory, name, retention_s=10 * 365 * 86400.0) as (_, sender):

        async def measure(number: int) -> list[float]:
            return [(await sender.repeat("work", at_once=AT_ONCE, number=number)).cpu_us]

        yield measure


@contextlib.asynccontextmanager
async def _in_history_leased(size: int, directory: Path) -> AsyncIterator[Measure]:
    """Each task takes and gives back the lease of a resource that was used before."""
    name = f"history-leased-{size}"
    async with serving(Site(), directory, name) as (_, sender):
        await sender.repeat("work_on", at_once=1, number=1)
    _add_history(directory / f"{name}.db", size)
    async with serving(Site(), directory, name, retention_s=10 * 365 * 86400.0) as (_, sender):

        async def measure(number: int) -> list[float]:
            return [(await sender.repeat("work_on", at_once=1, number=number)).cpu_us]

        yield measure


def _add_history(path: Path, size: int) -> None:
    """Ended rows, as a service leaves them; their ids are as random as real ones."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute(
        """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, state, owner, attempts, accepted_at, started_at,
    finished_at, result)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
SELECT lower(hex(randomblob(16))), '', 'bench', 'requests', 'bench', 'shared', '', 'work', '1.0',
    lower(hex(randomblob(16))), 'error', 10.0, 'succeeded', 'earlier', 1,
    unixepoch() - 1000000 + i * 0.1, unixepoch() - 1000000 + i * 0.1,
    unixepoch() - 1000000 + i * 0.1, 'null'
FROM n WHERE ?1 > 0""",
        (size,),
    )
    connection.execute("UPDATE tally SET n = n + ? WHERE what = 'accepted'", (size,))
    connection.close()


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
    "in history": _in_history,
    "in history, leased": _in_history_leased,
    "methods": _methods,
    "resources": _resources,
}
