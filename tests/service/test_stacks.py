"""The dump of tasks and stacks, of whatever code of the application gracekit calls."""

from __future__ import annotations

import pytest

from gracekit import Context, Service
from gracekit.request.attempt import CALLERS
from gracekit.tracker.stacks import StackDump
from tests.service.kit import Doors, World

pytestmark = pytest.mark.looptime


async def test_frames_begin_with_the_code_of_the_application(world: World, svc: Service):
    """A handler's, a job's and a block's that a handler tracks: no frame of gracekit is above
    them.
    """
    doors = Doors()

    @svc.rpc
    async def handler(ctx: Context) -> None:
        async with ctx.track("more"):
            await doors.pass_("handler")

    @svc.periodic(every="1s")
    async def job(ctx: Context) -> None:
        await doors.pass_("job")

    life = await world.start(svc)
    await (await world.client(svc)).cast(handler)
    await doors.wait(2)

    stacks = StackDump(lambda: "x", life.runtime.wired.tracker, callers=CALLERS)
    told = stacks.text(now=0.0, loop_thread=0)

    first = [
        block.partition("  File ")[2].partition("\n")[0].rpartition("<locals>.")[2]
        for block in told.partition("\nthread ")[0].split("\ntask ")[1:]
    ]
    assert sorted(first) == ["handler", "handler", "job"]
    doors.open("handler", "job")
