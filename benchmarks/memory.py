"""Many tasks in flight: what each keeps in memory, and how long a full collection then stops all.

`bare` are asyncio tasks that wait; `tracked` have a record in the tracker
besides; `served` came as requests and are in the hands of the whole service.
A collection is told in processor time: on a busy machine it takes longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from benchmarks.child import Child, Measure
from benchmarks.measure import Figure, Goal, Plan, alone
from benchmarks.workload import Site, park, serving
from gracekit.tracker.task import Lane, TaskState, TrackedTask
from gracekit.tracker.tracker import Tracker

NAME: Final = "memory"
GOAL: Final = Goal(1.0)
SIZES: Final = (10_000, 50_000, 100_000)
MEASURED_FOR_MEMORY: Final = (10_000, 100_000)
COLLECTIONS: Final = 5


def run(plan: Plan) -> Iterator[Figure]:
    """KiB of a task above a bare one, then milliseconds of a collection."""
    sizes = SIZES if not plan.quick else (200,)
    for size in sizes:
        found = {kind: _rounds(plan, kind, size) for kind in PREPARE}
        bare = found["bare"]
        for kind, goal in (("tracked", GOAL), ("served", None)):
            above = [mine[0] - other[0] for mine, other in zip(found[kind], bare, strict=True)]
            if size in MEASURED_FOR_MEMORY or plan.quick:
                yield alone(NAME, f"{kind} above bare, {size:,}", above, "KiB a task", goal)
        for kind, rounds in found.items():
            yield alone(NAME, f"full collection, {size:,} {kind}", [r[1] for r in rounds], "ms")
        frozen = [r[2] for r in found["served"]]
        yield alone(NAME, f"the same after gc.freeze, {size:,} served", frozen, "ms")


def _rounds(plan: Plan, kind: str, size: int) -> list[list[float]]:
    """[KiB a task, ms of a collection, ms of one after a freeze], a process each."""
    found = []
    for number in range(plan.few(3)):
        directory = plan.directory / f"{kind}-{size}-{number}"
        directory.mkdir()
        with Child(NAME, kind, size, directory) as child:
            found.append(child.ready().measure(COLLECTIONS))
    return found


# -- in the child -----------------------------------------------------------------


@contextlib.asynccontextmanager
async def _bare(size: int, _directory: Path) -> AsyncIterator[Measure]:
    event = asyncio.Event()
    before = _resident_kib()
    tasks = [asyncio.create_task(_wait(event)) for _ in range(size)]
    await asyncio.sleep(0)
    yield _measuring((_resident_kib() - before) / size)
    event.set()
    await asyncio.gather(*tasks)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


@contextlib.asynccontextmanager
async def _tracked(size: int, _directory: Path) -> AsyncIterator[Measure]:
    event, tracker = asyncio.Event(), Tracker()
    ids = [f"{i:032}" for i in range(size)]  # the request has its id in any case
    before = _resident_kib()
    for request_id in ids:
        record = TrackedTask(request_id=request_id, method="work", lane=Lane.REQUESTS)
        tracker.add(record)
        record.advance(TaskState.RUNNING)
        tracker.started(record)
        record.handler = asyncio.create_task(_wait(event))
    await asyncio.sleep(0)
    yield _measuring((_resident_kib() - before) / size)
    event.set()
    await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _served(size: int, directory: Path) -> AsyncIterator[Measure]:
    site = Site()
    async with serving(site, directory, "served", drain_timeout_s=60.0) as (_, sender):
        gc.collect()
        before = _resident_kib()
        await park(site, sender, size)
        gc.collect()
        yield _measuring((_resident_kib() - before) / size)


def _measuring(kib: float) -> Measure:
    async def measure(collections: int) -> list[float]:
        collection = _collection_ms(collections)
        gc.freeze()
        frozen = _collection_ms(collections)
        gc.unfreeze()
        return [kib, collection, frozen]

    return measure


def _collection_ms(number: int) -> float:
    def once() -> float:
        begun = time.thread_time()
        gc.collect()
        return 1e3 * (time.thread_time() - begun)

    return statistics.median(once() for _ in range(number))


def _resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


PREPARE: Final = {"bare": _bare, "tracked": _tracked, "served": _served}
