"""The end that the kernel would give a process, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from gracekit.testing.loop import VirtualLoop, owned_by
from gracekit.testing.ports import PlayedProcess, VirtualClock
from tests.testing.virtual import virtual


def played() -> tuple[PlayedProcess, list[float]]:
    """A process, and the loop times of its death."""
    deaths: list[float] = []

    def die() -> None:
        deaths.append(asyncio.get_running_loop().time())
        process.ended()

    process = PlayedProcess(set(), 1, on_death=die)
    return process, deaths


@virtual
async def test_a_played_process_dies_at_its_time():
    """The last time counts."""
    process, deaths = played()

    process.end_at(5.0)
    await asyncio.sleep(4)
    process.end_at(20.0)
    process.end_at(10.0)
    await asyncio.sleep(100)

    assert deaths == [10.0]


@virtual
async def test_a_frozen_process_dies_at_its_time():
    """As the kernel ends a stopped process: its own timers wait until it goes on."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    process, deaths = played()
    own: list[float] = []
    inside = owned_by("it")
    inside.run(process.end_at, 10.0)
    loop.call_at(5.0, lambda: own.append(loop.time()), context=inside)

    loop.freeze("it")
    await asyncio.sleep(100)

    assert (deaths, own) == ([10.0], [])


@pytest.mark.parametrize("disarm", [lambda one: one.end_at(None), PlayedProcess.ended])
def test_no_time_is_left_when_it_is_disarmed_or_has_ended(disarm):
    """The process does not die, or not a second time."""

    async def test() -> None:
        process, deaths = played()
        process.end_at(10.0)

        disarm(process)

        await asyncio.sleep(100)
        assert deaths == []

    virtual(test)()


@virtual
async def test_a_process_that_has_ended_gets_no_time():
    """Its code may still run while it is taken down."""
    process, deaths = played()
    process.ended()

    process.end_at(10.0)

    await asyncio.sleep(100)
    assert deaths == []


@virtual
async def test_boot_time_is_the_loops_and_no_step_of_the_clock_moves_it():
    """Wall time moves."""
    clock = VirtualClock()
    await asyncio.sleep(7)
    wall = clock.wall()

    clock.shift_s += 3600

    assert (clock.boot(), clock.wall()) == (7.0, wall + 3600)
