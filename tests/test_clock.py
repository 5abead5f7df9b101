"""Ids and times that come from the clock."""

from __future__ import annotations

import asyncio
import itertools
import uuid

from gracekit.clock import Clock
from gracekit.testing import loop
from gracekit.testing.ports import VirtualClock


class SetClock(Clock):
    """A clock whose wall time is set by hand."""

    at = 1_800_000_000.125

    def wall(self) -> float:
        return self.at


def test_request_ids_are_version_7_uuids_of_their_moment():
    """
    32 hex digits; the first twelve are the milliseconds since the epoch.
    """
    made = uuid.UUID(hex=SetClock().new_request_id())

    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == 1_800_000_000_125


def test_request_ids_sort_by_time_and_do_not_repeat():
    """
    A later one is larger; of one millisecond all differ.
    """
    clock = SetClock()
    of_now = {clock.new_request_id() for _ in range(10_000)}
    clock.at += 0.001
    later = clock.new_request_id()

    assert len(of_now) == 10_000
    assert all(one < later for one in of_now)


def test_periodic_work_of_one_process_wakes_at_the_same_moments():
    """
    Whenever it began and whatever its period, it waits for a tick, and no longer than it asked.
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
    """
    Then a tick would come too late.
    """

    async def woken_at() -> float:
        clock = VirtualClock()
        await clock.wait_tick(1.0)
        return 1000 * (await clock.wait_tick(0.02)) + clock.loop()

    assert round(loop.run(woken_at()), 6) == 21.02


def test_a_wait_for_a_tick_ends_with_what_it_waits_beside():
    """
    Also with a future that is done already.
    """

    async def woken_at() -> list[float]:
        clock, over = VirtualClock(), asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.3, over.set_result, None)
        wakes = []
        for _ in range(2):
            await clock.wait_tick(5.0, unless=over)
            wakes.append(round(clock.loop(), 6))
        return wakes

    assert loop.run(woken_at()) == [0.3, 0.3]
