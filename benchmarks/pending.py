"""Tasks without capacity: what parking one and its retry cost, and what 100,000 parked ones cost.

Commits are the transactions of the store, whatever else they carry; the rest is processor time of
all threads, because waiting for a disk that others use says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import apsw

from benchmarks.child import Child, Measure
from benchmarks.measure import Figure, Goal, Plan, against, alone, timed
from benchmarks.workload import TOPIC, Sender, Site, serving
from gracekit import Context, NoCapacity, RpcClient
from gracekit.rpc.memory import MemoryTransport
from gracekit.runtime.face import Runtime

NAME: Final = "pending"
AT_ONCE: Final = 32
PARKED: Final = 100_000
MORE_COMMITS: Final = Goal(3.0)
BESIDE: Final = Goal(1.2)


def run(plan: Plan) -> Iterator[Figure]:
    """Park and retry beside a plain run; then a request, and a sweep, beside many parked tasks."""
    for at_once in (1, AT_ONCE):
        yield from _turns(plan, at_once=at_once)
    yield from _beside_many(plan)


def _turns(plan: Plan, *, at_once: int) -> Iterator[Figure]:
    """Processor time of a task, and its commits, parked once and plain."""
    with contextlib.ExitStack() as stack:
        parked, plain = (
            stack.enter_context(Child(NAME, kind, at_once, plan.directory)).ready()
            for kind in ("parked once", "plain")
        )
        number = plan.size(1000, 4)
        for child in (parked, plain):
            child.measure(number)  # the first one fills caches
        rounds = [(parked.measure(number), plain.measure(number)) for _ in range(plan.rounds)]
    times = [(mine[0], other[0]) for mine, other in rounds]
    case = f"{at_once} at once"
    yield against(NAME, f"parked and retried / plain, {case}", times, "us a task")
    more = [mine[1] - other[1] for mine, other in rounds]
    yield alone(NAME, f"commits more of that, {case}", more, "a task", MORE_COMMITS)


def _beside_many(plan: Plan) -> Iterator[Figure]:
    size = plan.size(PARKED, 20)
    with contextlib.ExitStack() as stack:
        many, none = (
            stack.enter_context(Child(NAME, "beside", one, plan.directory)).ready()
            for one in (size, 0)
        )
        number = plan.size(1000, 4)
        for child in (many, none):
            child.measure(number)
        rounds = [(many.measure(number), none.measure(number)) for _ in range(plan.rounds)]
    for place, case in enumerate(("a request", "a sweep that finds nothing")):
        pairs = [(mine[place], other[place]) for mine, other in rounds]
        goal = None if place else BESIDE
        yield against(NAME, f"{case} beside {size:,} parked / 0", pairs, "us", goal)


# -- in the child -----------------------------------------------------------------


def _site(*, parks: bool) -> Site:
    """A service whose `build` finds room at its second attempt, or at once."""
    site = Site(task_api=True)

    @site.service.rpc
    async def build(ctx: Context, vm: str, note: str) -> None:  # noqa: ARG001 - as sent
        if parks and ctx.attempt == 1:
            raise NoCapacity("no room", requested={"memory_mb": 8192})

    return site


@contextlib.asynccontextmanager
async def _once(at_once: int, directory: Path, *, parks: bool) -> AsyncIterator[Measure]:
    name = f"{'parked' if parks else 'plain'}-{at_once}"
    # No beat of the run is to count as a commit of its tasks.
    site = _site(parks=parks)
    serves = serving(site, directory, name, use_pending_state=True, look_every_s=60.0)
    async with serves as (runtime, sender), _resolver(runtime) as resolver:
        commits: list[float] = []
        runtime.ground.engine.commits.on_commit(commits.append)

        async def measure(number: int) -> list[float]:
            before = len(commits)
            with timed(number) as taken:
                await _lanes(sender, resolver if parks else None, number, at_once)
            return [taken.cpu_us, (len(commits) - before) / number]

        yield measure


@contextlib.asynccontextmanager
async def _resolver(runtime: Runtime) -> AsyncIterator[RpcClient]:
    assert isinstance(runtime.ground.transport, MemoryTransport)
    async with RpcClient(runtime.ground.transport, TOPIC) as client:
        yield client


async def _lanes(sender: Sender, resolver: RpcClient | None, number: int, at_once: int) -> None:
    numbers = iter(range(number))

    async def lane() -> None:
        for _ in numbers:
            task_id = await sender.finish("build")
            if resolver is not None:
                again = sender.leaving(task_id)
                options = {"namespace": "gracekit.tasks", "version": "1.1", "ops": True}
                tasks = resolver.prepare(**options)  # type: ignore[arg-type]  # as they are
                await tasks.call("retry", task_id=task_id, version=1)
                await again

    await asyncio.gather(*(lane() for _ in range(at_once)))


@contextlib.asynccontextmanager
async def _parked_once(at_once: int, directory: Path) -> AsyncIterator[Measure]:
    async with _once(at_once, directory, parks=True) as measure:
        yield measure


@contextlib.asynccontextmanager
async def _plain(at_once: int, directory: Path) -> AsyncIterator[Measure]:
    async with _once(at_once, directory, parks=False) as measure:
        yield measure


@contextlib.asynccontextmanager
async def _beside(size: int, directory: Path) -> AsyncIterator[Measure]:
    name = f"beside-{size}"
    async with serving(Site(), directory, name):
        pass  # makes the store
    _add_parked(directory / f"{name}.db", size)
    async with serving(Site(), directory, name, use_pending_state=True) as (runtime, sender):
        assert runtime.wired is not None
        recovery = runtime.wired.reconciler

        async def measure(number: int) -> list[float]:
            taken = await sender.repeat("work", at_once=AT_ONCE, number=number)
            began = time.perf_counter()
            for _ in range(number):
                await recovery.overdue.end_all()
            return [taken.cpu_us, 1e6 * (time.perf_counter() - began) / number]

        yield measure


def _add_parked(path: Path, size: int) -> None:
    """Parked rows, as a service leaves them, with deadlines in a day."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute(
        """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version,
    content_hash, on_interrupt, settle_s, state, reason, detail, attempts, accepted_at,
    started_at, parkings, parked_at, parked_ahead_s, pending_deadline, requested,
    resource_kind, resource_id)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
SELECT lower(hex(randomblob(16))), '', 'bench', 'requests', 'bench', 'shared', '', 'work', '1.0',
    lower(hex(randomblob(16))), 'retry', 10.0, 'pending',
    'no_capacity', 'no room', 1, unixepoch(), unixepoch(), 1, unixepoch(), 0.0,
    unixepoch() + 86400 + i * 0.1, '{"memory_mb":8192}', 'vm', 'vm-' || i
FROM n WHERE ?1 > 0""",
        (size,),
    )
    connection.execute(
        "INSERT INTO content "
        """SELECT id, '{"vm":"vm-1","note":"x"}', '{}' FROM task WHERE state = 'pending'"""
    )
    connection.execute(
        "INSERT INTO tally (what, n) VALUES ('accepted', ?1) "
        "ON CONFLICT (what) DO UPDATE SET n = tally.n + ?1",
        (size,),
    )
    connection.close()


PREPARE: Final = {"parked once": _parked_once, "plain": _plain, "beside": _beside}
