"""12 - Test your own handlers, probes and hooks: played drains and crashes, in milliseconds.

    python examples/ex12_test_your_service.py

`gracekit.testing` plays queue, journal, clock and process in memory, under the
same code that runs in production. Each function below is a test: pytest runs
them as well (`pytest examples/ex12_test_your_service.py`). Minutes of virtual
time pass in each of them, and none of yours.
"""

from __future__ import annotations

import asyncio

from gracekit import Context, Done, Retry, Service
from gracekit.testing import Fault, InMemoryService, Point, run

svc = Service("resizer")

BIG = 8  # a size


class Cloud:
    """The world outside: what tests look at."""

    sizes: dict[str, int]
    orders: int
    moved: list[int]

    def begin_anew(self) -> None:
        """A new world for each test."""
        self.sizes, self.orders, self.moved = {}, 0, []


cloud = Cloud()


# -- the service: what you would test ---------------------------------------------


@svc.rpc(resource="vm", on_interrupt="probe")
async def resize(_ctx: Context, vm: str, size: int) -> int:
    """Ordered once, however often the process dies."""
    cloud.orders += 1
    await asyncio.sleep(60)
    cloud.sizes[vm] = size
    await asyncio.sleep(60)
    return size


@resize.probe
async def is_resized(_ctx: Context, vm: str, size: int) -> Done | Retry:
    """The truth is in the cloud."""
    return Done(size) if cloud.sizes.get(vm) == size else Retry()


@svc.rpc(resource="vm", on_interrupt="retry")
def move(ctx: Context, vm: str) -> str:
    """A plain function: it runs in a thread, in tests too."""
    for block in ctx.steps(range(5)):
        cloud.moved.append(block)
    return f"{vm} is moved"


# -- the tests ----------------------------------------------------------------------


def test_a_drain_stops_the_move_at_a_safe_point() -> None:
    """Two blocks in the first process, three in the second; the caller lives on."""

    async def main() -> None:
        cloud.begin_anew()
        async with InMemoryService(svc) as one:
            one.interrupt_at(2)
            pending = one.start_call(move, vm="vm-1")
            report = await one.wait_stopped()
            assert (report.exit_code, cloud.moved) == (75, [0, 1])

            await one.start()
            assert await pending == "vm-1 is moved"
            assert cloud.moved == [0, 1, 2, 3, 4]

    run(main())


def test_after_a_crash_the_probe_finds_what_is_done() -> None:
    """Killed before and after the effect: one more order only where it is missing."""

    async def main(seconds: float, orders: int) -> None:
        cloud.begin_anew()
        async with InMemoryService(svc) as one:
            pending = one.prepare(timeout="1h").start_call(resize, vm="vm-1", size=BIG)
            await one.pass_time(seconds)
            await one.crash()
            await one.start()
            assert await pending == BIG
            assert cloud.orders == orders

    run(main(seconds=30, orders=2))
    run(main(seconds=90, orders=1))


def test_a_lost_answer_of_the_database_resizes_once() -> None:
    """The outcome is on disk, and the process does not know: it looks, and repeats nothing."""

    async def main() -> None:
        cloud.begin_anew()
        async with InMemoryService(svc) as one:
            one.fail_next(Point.FINISH, Fault.LOST_AFTER)
            assert await one.prepare(timeout="1h").call(resize, vm="vm-1", size=BIG) == BIG
            assert cloud.orders == 1

    run(main())


if __name__ == "__main__":
    for test in (
        test_a_drain_stops_the_move_at_a_safe_point,
        test_after_a_crash_the_probe_finds_what_is_done,
        test_a_lost_answer_of_the_database_resizes_once,
    ):
        test()
        print(f"passed: {test.__name__.removeprefix('test_').replace('_', ' ')}")
