"""Ids and times that come from the clock."""

from __future__ import annotations

import asyncio
import itertools
import uuid

import pytest

from gracekit.clock import Clock, SharedTimeouts
from gracekit.testing import loop
from tests.played import VirtualClock


class SetClock(Clock):
    """A clock whose wall time is set by hand."""

    at = 1_800_000_000.125

    def wall(self) -> float:
        return self.at


def test_request_ids_are_version_7_uuids_of_their_moment():
    """32 hex digits; the first twelve are the milliseconds since the epoch."""
    made = uuid.UUID(hex=SetClock().new_request_id())

    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == 1_800_000_000_125


def test_request_ids_sort_by_time_and_do_not_repeat():
    """A later one is larger; of one millisecond all differ."""
    clock = SetClock()
    of_now = {clock.new_request_id() for _ in range(10_000)}
    clock.at += 0.001
    later = clock.new_request_id()

    assert len(of_now) == 10_000
    assert all(one < later for one in of_now)


def test_periodic_work_of_one_process_wakes_at_the_same_moments():
    """Whenever it began and whatever its period, it waits for a tick, and no longer than it
    asked.
    """

    async def wakes_of(every_s: float, *, after_s: float, clock: Clock) -> list[float]:
        await asyncio.sleep(after_s)
        wakes = [clock.loop()]
        for _ in range(5):
            await clock.wait_tick(every_s)
            wakes.append(clock.loop())
        return wakes

    async def all_wakes() -> list[list[float]]:
        clock = VirtualClock()
        periods = [(1.0, 0.1), (1.0, 0.47), (2.5, 0.6), (5.0, 3.3)]
        return await asyncio.gather(
            *(wakes_of(every_s, after_s=after_s, clock=clock) for every_s, after_s in periods)
        )

    every, *others = loop.run(all_wakes())

    assert [round(at, 6) for at in every] == [0.1, 1.1, 2.1, 3.1, 4.1, 5.1]
    assert set(others[0][1:]) == set(every[1:])
    for wakes, every_s in zip(others, (1.0, 2.5, 5.0), strict=True):
        assert all(round(at - every[1], 6).is_integer() for at in wakes[1:])
        assert all(0 < b - a < every_s + 1e-6 for a, b in itertools.pairwise(wakes))


def test_a_wait_of_less_than_a_second_is_no_wait_for_a_tick():
    """Then a tick would come too late."""

    async def woken_at() -> float:
        clock = VirtualClock()
        await clock.wait_tick(1.0)
        return 1000 * (await clock.wait_tick(0.02)) + clock.loop()

    assert round(loop.run(woken_at()), 6) == 21.02


def test_a_wait_for_a_tick_ends_with_what_it_waits_beside():
    """Also with a future that is done already."""

    async def woken_at() -> list[float]:
        clock, over = VirtualClock(), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.3, over.set_result, None)
        wakes = []
        for _ in range(2):
            await clock.wait_tick(5.0, unless=over)
            wakes.append(round(clock.loop(), 6))
        return wakes

    assert loop.run(woken_at()) == [0.3, 0.3]


# -- time-outs that share timers --------------------------------------------------------------


async def ended_after(shared: SharedTimeouts, seconds: float, work_s: float) -> float | str:
    """When a wait of *work_s* was over, or "timed out" and when, by the loop's time."""
    here = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as scope:
            shared.begin(scope, seconds)
            await asyncio.sleep(work_s)
    except TimeoutError:
        return f"timed out at {here.time():.3f}"
    finally:
        shared.end(scope, seconds)
    return round(here.time(), 3)


def timers() -> int:
    """Timers of the running loop that are not cancelled."""
    scheduled = asyncio.get_running_loop()._scheduled
    return sum(not handle.cancelled() for handle in scheduled)


def test_waits_with_a_shared_timer_end_each_at_its_own_time():
    """Whatever began before, and however long that still has."""

    async def all_ends() -> list[float | str]:
        shared = SharedTimeouts()

        async def later(after_s: float, seconds: float, work_s: float) -> float | str:
            await asyncio.sleep(after_s)
            return await ended_after(shared, seconds, work_s)

        waits = [(0, 5, 9), (1, 5, 2), (2, 5, 9), (0.5, 60, 99), (3, 1, 9), (3, 5, 4.9)]
        return await asyncio.gather(*(later(*wait) for wait in waits))

    assert loop.run(all_ends()) == [
        "timed out at 5.000",
        3,
        "timed out at 7.000",
        "timed out at 60.500",
        "timed out at 4.000",
        7.9,
    ]


def test_a_wait_after_its_timer_has_ended_gets_a_new_one():
    """The timer of an idle length is not kept for ever."""

    async def ends() -> list[float | str]:
        shared, found = SharedTimeouts(), list[float | str]()
        found.append(await ended_after(shared, 5, 1))
        await asyncio.sleep(20)
        found.append(timers())
        found.append(await ended_after(shared, 5, 9))
        return found

    assert loop.run(ends()) == [1, 0, "timed out at 26.000"]


def test_many_waits_of_one_length_have_one_timer():
    """And none once they are over and told so."""

    async def count() -> tuple[int, int]:
        shared = SharedTimeouts()
        over = asyncio.Event()

        async def wait() -> None:
            async with asyncio.timeout(None) as scope:
                shared.begin(scope, 60)
                await over.wait()
            shared.end(scope, 60)

        tasks = [asyncio.create_task(wait()) for _ in range(100)]
        await asyncio.sleep(0)
        meanwhile = timers()
        over.set()
        await asyncio.wait(tasks)
        shared.stop()
        return meanwhile, timers()

    assert loop.run(count()) == (1, 0)


def test_hastened_waits_end_soon_or_at_their_own_time_if_that_comes_first():
    """A wait that begins later lasts as long as it asks. No timer is left for what is over."""

    async def ends() -> tuple[list[float | str], float | str, int]:
        shared = SharedTimeouts()
        waits = [asyncio.create_task(ended_after(shared, one, 99)) for one in (2.2, 5, 5, 60)]
        waits.append(asyncio.create_task(ended_after(shared, 5, 2.1)))
        await asyncio.sleep(2)
        shared.hasten(0.5)
        early = await asyncio.gather(*waits)
        late = await ended_after(shared, 5, 99)
        shared.stop()
        return early, late, timers()

    early, late, left = loop.run(ends())

    assert early == [*(f"timed out at {at}" for at in ("2.200", "2.500", "2.500", "2.500")), 2.1]
    assert (late, left) == ("timed out at 7.500", 0)


@pytest.mark.parametrize("number", [8, 9, 200])
def test_waits_of_many_lengths_end_in_time_and_leave_few_timers(number: int):
    """A program that computes each time-out anew gets what `asyncio.timeout` gives it."""

    async def ends() -> tuple[list[float | str], int, list[float | str]]:
        shared = SharedTimeouts()
        lengths = [5 + n / 100 for n in range(number)]
        over = await asyncio.gather(*(ended_after(shared, one, 1) for one in lengths))
        left = timers()
        late = await asyncio.gather(*(ended_after(shared, one, 99) for one in lengths))
        return over, left, late

    over, left, late = loop.run(ends())

    assert over == [1] * number
    assert left <= 8
    assert late == [f"timed out at {6 + n / 100:.3f}" for n in range(number)]


def test_the_timers_of_a_loop_that_has_ended_are_forgotten():
    """Else a wait on the next loop would have no timer, and never end."""
    shared = SharedTimeouts()

    ends = [loop.run(ended_after(shared, 5, work_s)) for work_s in (1, 9)]

    assert ends == [1, "timed out at 5.000"]


def test_wall_time_is_that_of_the_store_once_it_is_followed():
    """Hosts that share a store compare its moments with one clock, not each with its own."""
    clock = Clock()
    own = clock.wall()
    clock.follow(lambda: 1_800_000_000.5)

    assert own != clock.wall() == 1_800_000_000.5
    assert uuid.UUID(hex=clock.new_request_id()).int >> 80 == 1_800_000_000_500
