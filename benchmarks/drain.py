"""How long a stop takes: idle, after the last task, and with ten thousand tasks to hand over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.measure import Figure, Goal, Plan, alone
from benchmarks.processes import service
from benchmarks.served import ENDED, svc, through_drain
from benchmarks.workload import Site, park, serving

NAME: Final = "drain"
IDLE: Final = Goal(0.3)
LAST: Final = Goal(0.04, beyond=0.03)
TIMES: Final = 20
HANDED_OVER: Final = 10_000


def run(plan: Plan) -> Iterator[Figure]:
    """Real processes twenty times each, then a hand-over in this one."""
    times = plan.size(TIMES, 1)
    directory = plan.directory / "drain"
    directory.mkdir()
    idle, last = [], []
    for number in range(times):
        idle.append(_idle_exit(directory))
        last.append(_last_task_to_exit(directory, number))
    yield alone(NAME, f"idle exit, {times} times", idle, "s", IDLE)
    yield alone(NAME, f"last task's end to exit, {times} times", last, "s", LAST)
    number = plan.size(HANDED_OVER, 50)
    handed = [asyncio.run(_hand_over(plan.directory, i, number)) for i in range(plan.few(3))]
    taken, not_in_time = zip(*handed, strict=True)
    yield alone(NAME, f"hand-over of {number:,} tasks", taken, "s")
    yield alone(NAME, "of them not written within grace and flush", not_in_time, "tasks")


def _idle_exit(directory: Path) -> float:
    with service(directory) as process:
        process.serving()
        time.sleep(0.2)  # what begins with serving has begun
        asked, gone = process.terminate()
        return (gone - asked) / 1e9


def _last_task_to_exit(directory: Path, number: int) -> float:
    ended = directory / f"ended-{number}"
    with service(directory, **{ENDED.removeprefix("GRACEKIT_"): ended}) as process:
        process.serving()
        asyncio.run(_cast_through_drain(directory))
        while not ended.with_suffix(".begun").exists():
            time.sleep(0.01)
        _, gone = process.terminate()
        return (gone - int(ended.read_text())) / 1e9


async def _cast_through_drain(directory: Path) -> None:
    async with svc.client(f"sqlite:///{directory / 'transport.db'}") as client:
        await client.cast(through_drain)


async def _hand_over(directory: Path, turn: int, number: int) -> tuple[float, float]:
    """Seconds of a drain whose time is up at once, and tasks that it could not hand over."""
    site = Site()
    async with serving(site, directory, f"hand-over-{turn}", drain_timeout_s=0.0) as (
        runtime,
        sender,
    ):
        await park(site, sender, number)
        begun = time.perf_counter()
        runtime.request_stop(source="user", by="bench", reason="bench")
        report = await runtime.serve()
        taken = time.perf_counter() - begun
    return taken, float(number - len(report.handed_over))
