"""A service with a kind of resources: volumes, their records, and a backend that tells what it did.

The records are a SQLite database of the application's own. The backend is a directory with a file
for each volume that was built; its log are lines in the effects file: `ask` and `delete` when a
rule calls it, `built` by a handler, `wrote` and `refused` by the record. How a rule behaves is in
the name of the volume: one that begins with `gated-` keeps its rule until the test says go, and
the rule of one that begins with `kills-` is the end of its process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time

from gracekit import Absent, Context, Found, Service, Settled
from gracekit.recovery.resources.schedule import QueueWait
from tests.logs import configure_logging
from tests.process.served import GO, effect
from tests.process.volumes import BACKEND, VolumeRecords

LATE = "GRACEKIT_TEST_LATE"
"""If set, a write waits for the test's go between its call and the change of the record."""
PLANTED = "GRACEKIT_TEST_PLANTED"
STUCK_AFTER = os.environ.get("GRACEKIT_TEST_STUCK_AFTER", "10m")

svc = Service("volumes")
volumes = svc.kind("volume", stuck_after=STUCK_AFTER)


# -- rules ------------------------------------------------------------------------


@volumes.find
def transient(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
    effect("find", after or "-")
    return VolumeRecords().page(after, limit)


@volumes.write
def write(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> bool:
    assert ctx.fence is not None
    if LATE in os.environ:
        effect("late", found.id, ctx.fence)
    while LATE in os.environ and not GO.exists():
        time.sleep(0.02)
    done = VolumeRecords().write(found.id, status, seen=found.status, fence=ctx.fence)
    effect("wrote" if done else "refused", found.id, status, ctx.fence)
    return done


async def gate(name: str) -> None:
    while name.startswith("gated-") and not GO.exists():
        await asyncio.sleep(0.02)


@volumes.probe("creating", failed="error")
async def was_it_built(ctx: Context, found: Found) -> Settled | Absent:
    effect("ask", found.id, ctx.fence)
    if found.id.startswith("kills-"):
        os.kill(os.getpid(), signal.SIGKILL)
    await gate(found.id)
    return Settled("available") if (BACKEND / found.id).exists() else Absent()


@volumes.delete("deleting", done="deleted", failed="error_deleting")
async def delete_again(ctx: Context, found: Found) -> None:
    effect("delete", found.id, ctx.fence)
    await gate(found.id)
    (BACKEND / found.id).unlink(missing_ok=True)


# -- requests ---------------------------------------------------------------------


@svc.rpc(on_interrupt="retry", resource="volume")
async def create(ctx: Context, volume: str, s: float) -> bool:
    """Build it, which takes *s* seconds; whether its record was still waiting for that."""
    assert ctx.fence is not None
    await asyncio.sleep(s)
    (BACKEND / volume).touch()
    effect("built", volume, ctx.fence)
    records = VolumeRecords()
    return records.write(volume, "available", seen="creating", fence=ctx.fence)


@svc.rpc(on_interrupt="retry", resource="volume")
async def use(ctx: Context, volume: str) -> None:
    effect("used", volume, ctx.fence)


@svc.rpc(on_interrupt="error", resource="volume", settle=6)
async def use_until_go(ctx: Context, volume: str) -> None:
    effect("used", volume, ctx.fence)
    while not GO.exists():
        await asyncio.sleep(0.02)


@svc.rpc(on_interrupt="retry", resource="volume")
async def create_again(ctx: Context, volume: str) -> None:
    """As its record says from now on, until the test says go."""
    assert ctx.fence is not None
    VolumeRecords().begin_again(volume, fence=ctx.fence)
    effect("again", volume, ctx.fence)
    while not GO.exists():
        await asyncio.sleep(0.02)


# -- planted faults ---------------------------------------------------------------


async def _wait_for_nothing(_: QueueWait) -> None:
    """In the place of the wait for what stands in the queues."""


if __name__ == "__main__":
    if os.environ.get(PLANTED) == "no wait for the queue":
        QueueWait.wait_read = _wait_for_nothing  # type: ignore[method-assign]
    configure_logging("text", level=logging.DEBUG)
    sys.exit(svc.run())
