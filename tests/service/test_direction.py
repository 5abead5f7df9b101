"""Calls go down the house: what is above commands what is below, and not the other way round."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import pytest

from gracekit import Context, Service
from tests.service.kit import World
from tests.test_architecture import PACKAGE, floor_of

pytestmark = pytest.mark.looptime

MOST: Final = 5
# Everybody's, and of no floor: subscribers of events; the list of parts, which starts them all.
OF_NO_FLOOR: Final = {"telemetry", "tracing", "background", "parts", "testing"}


def room_of(frame: FrameType) -> str | None:
    """The top-level part of the package that a frame runs in; None outside of it."""
    inside = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")
    room = inside.split("/")[0].removesuffix(".py")
    return None if inside == frame.f_code.co_filename or room in OF_NO_FLOOR else room


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls from one floor of the package to a higher one, by their two ends."""
    upward: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None:
            return
        here, below = room_of(frame), room_of(caller)
        if here is not None and below is not None and floor_of(below) < floor_of(here):
            upward[f"{caller.f_code.co_qualname} calls {frame.f_code.co_qualname}"] += 1

    sys.setprofile(look)
    try:
        yield upward
    finally:
        sys.setprofile(None)


async def test_a_drain_and_a_start_call_upward_five_times_at_most(world: World, svc: Service):
    """A drain with handlers to wait for and to hand over, and the start that settles what it
    left.
    """

    @svc.rpc(on_interrupt="retry")
    async def build(ctx: Context) -> None:
        await asyncio.sleep(10_000 if ctx.attempt == 1 else 1)

    @svc.rpc(on_interrupt="requeue")
    async def peek(ctx: Context) -> None:
        await asyncio.sleep(1)

    life = await world.start(svc)
    client = await world.client(svc)
    for _ in range(3):
        await client.cast(build)
    await client.cast(peek)
    await asyncio.sleep(0.1)

    with counted() as of_the_drain:
        report = await life.drain()
    with counted() as of_the_start:
        life = await world.start(svc)
        await world.until(lambda: set(world.states().values()) == {"succeeded"})

    assert len(report.handed_over) == 3
    assert of_the_drain.total() <= MOST, of_the_drain
    assert of_the_start.total() <= MOST, of_the_start
