"""The list of parts: down for a start, up for a stop; and each part under stress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from gracekit import Context, Service, Settings
from gracekit.background import Background
from gracekit.parts import ListedPart, PartList, StepPart
from gracekit.process import Process
from gracekit.runtime.wiring import wire
from gracekit.store.location import StoreLocation
from gracekit.testing import run
from tests.service.kit import World
from tests.stress import stress


class Noted:
    """A part that notes what is asked of it.

    Attributes:
        trouble: Raised by the next start or stop.
    """

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes
        self.trouble: BaseException | None = None

    async def start(self) -> None:
        self._note("start")

    async def stop(self) -> None:
        self._note("stop")

    def _note(self, what: str) -> None:
        self.notes.append(f"{what} {self.name}")
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble


class House:
    """Three parts, and what was asked of them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.store, self.record, self.server = (
            Noted(name, self.notes) for name in ("store", "record", "server")
        )
        self.limits: dict[str, float] = {}
        self.parts = PartList(
            [
                ListedPart("store", self.store),
                ListedPart("record", self.record, reserve_s=2.0),
                ListedPart("server", self.server),
            ]
        )

    async def around(self, what: str, stop: Awaitable[Any], by: float) -> None:
        self.limits[what] = by
        await stop

    async def quietly(self, what: str, stop: Awaitable[Any], by: float) -> None:
        try:
            await self.around(what, stop, by)
        except OSError:
            self.notes.append(f"{what} failed")


@pytest.fixture
def house() -> House:
    """A list of three."""
    return House()


# -- the list -------------------------------------------------------------------------------


async def test_starting_goes_down_the_list_and_stopping_up(house):
    """A part starts after those above it, and stops before them."""
    await house.parts.start()
    await house.parts.stop(house.around, by=10.0)

    assert house.notes == [
        *("start store", "start record", "start server"),
        *("stop server", "stop record", "stop store"),
    ]


async def test_a_list_can_be_started_and_stopped_in_two_halves(house):
    """Each part is started once and stopped once, however the halves meet."""
    await house.parts.start(through="record")
    assert house.notes == ["start store", "start record"]
    await house.parts.start()
    await house.parts.start()
    assert house.notes[2:] == ["start server"]

    await house.parts.stop(house.around, by=10.0, above="record")
    assert house.notes[3:] == ["stop server"]
    await house.parts.stop(house.around, by=10.0)
    await house.parts.stop(house.around, by=10.0)
    assert house.notes[4:] == ["stop record", "stop store"]


async def test_a_start_that_failed_goes_on_with_the_part_that_failed(house):
    """What works is not started again."""
    house.record.trouble = OSError("the disk is full")
    with pytest.raises(OSError, match="disk is full"):
        await house.parts.start()
    await house.parts.start()

    assert house.notes == ["start store", "start record", "start record", "start server"]


async def test_a_start_ends_before_the_next_part_once_a_stop_was_asked_for(house):
    """A hook may swallow the cancellation that came with the stop: nothing is started after it."""
    await house.parts.start(unless=lambda: len(house.notes) == 2)

    assert house.notes == ["start store", "start record"]


async def test_a_part_leaves_those_above_it_the_time_that_is_reserved_for_them(house):
    """A part that does not stop must not take the time of those that come after it."""
    await house.parts.stop(house.around, by=10.0)

    assert house.limits == {"stop of server": 8.0, "stop of record": 10.0, "stop of store": 10.0}


async def test_time_is_not_reserved_for_parts_that_are_not_stopped(house):
    """The stop record's time is counted by the drain, not by the list."""
    await house.parts.stop(house.around, by=10.0, above="record")

    assert house.limits == {"stop of server": 10.0}


async def test_a_stop_that_raises_does_not_keep_the_others(house):
    """Whoever runs the stops decides what a failure means, and a drain goes on."""
    house.server.trouble = OSError("reset by peer")
    await house.parts.stop(house.quietly, by=10.0)

    assert house.notes == ["stop server", "stop of server failed", "stop record", "stop store"]


async def test_a_stop_that_was_cut_is_taken_again(house):
    """A drain whose task is cancelled takes its step again, and stops what has not stopped."""
    house.record.trouble = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await house.parts.stop(house.around, by=10.0)
    await house.parts.stop(house.around, by=10.0)

    assert house.notes == ["stop server", "stop record", "stop record", "stop store"]


async def test_undo_stops_what_was_started_or_begun_to_be(house):
    """A start that failed leaves nothing, also if one of the stops fails; the rest is not
    touched.
    """
    house.record.trouble = OSError("the disk is full")
    with pytest.raises(OSError, match="disk is full"):
        await house.parts.start()
    house.record.trouble = OSError("the disk is still full")
    with pytest.raises(OSError, match="still full"):
        await house.parts.undo()

    assert house.notes == ["start store", "start record", "stop record", "stop store"]


async def test_a_step_is_taken_once_and_again_if_it_failed():
    """Two starts at once take one step."""
    notes: list[str] = []
    troubles: list[Exception] = [OSError("not yet")]

    async def step() -> None:
        notes.append("begun")
        await asyncio.sleep(0)
        if troubles:
            raise troubles.pop()
        notes.append("done")

    part = StepPart(step)
    with pytest.raises(OSError, match="not yet"):
        await part.start()
    await asyncio.gather(part.start(), part.start())

    assert notes == ["begun", "begun", "done"]


# -- each part under stress -------------------------------------------------------------------


def service() -> Service:
    """One with something for each part to do."""
    svc = Service("compute")

    @svc.rpc
    async def build(ctx: Context) -> None:
        """Do nothing."""

    @svc.periodic(every=0.01)
    async def look(ctx: Context) -> None:
        await asyncio.sleep(0.005)

    @svc.on_start
    async def warm() -> None:
        await asyncio.sleep(0)

    @svc.on_stop
    async def cool() -> None:
        await asyncio.sleep(0)

    return svc


async def parts_of(world: World) -> list[ListedPart]:
    """The parts of a service in their order; of these the seat is started."""
    life = world.life(service())
    await life.runtime.ground.seat.start()
    return list(wire(life.runtime.ground).parts._listed)


def names() -> list[str]:
    """Names of all parts, in their order."""

    async def ask() -> list[str]:
        world = World()
        listed = await parts_of(world)
        await world.close()
        return [one.name for one in listed]

    return asyncio.run(ask())


@pytest.mark.parametrize("name", names())
def test_a_part_of_a_service_leaves_nothing_however_it_is_started_and_stopped(name):
    """Each line of the list, with those above it started, 10 x 50 times and in virtual time."""

    async def main() -> None:
        world = World()
        listed = await parts_of(world)
        for above in listed:
            if above.name == name:
                break
            if not isinstance(above.part, Background):  # they need nothing of each other
                await above.part.start()
        await stress(above.part)
        await world.close()

    run(main())


async def test_an_engine_on_a_file_leaves_nothing_however_it_is_started_and_stopped(tmp_path):
    """The store, with its two threads."""
    tmp_path.chmod(0o700)
    engine = StoreLocation(Settings(store_url=f"sqlite:///{tmp_path / 'store.db'}")).engine(
        Process()
    )

    await stress(engine)
