"""The service of the demonstration, with five methods of different policies.

Each handler records its effects in a file of the working directory, so that one can
check afterwards what was done, how often, and by which process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Final

from gracekit.clock import Clock
from gracekit.demo.files import EFFECTS, append, entries
from gracekit.recovery.decisions import Done, Retry
from gracekit.request.context import Context
from gracekit.service import Service

PROCESS_VARIABLE: Final = "DEMO_PROCESS"
PARENT_VARIABLE: Final = "DEMO_PARENT"
TOPIC_VARIABLE: Final = "DEMO_TOPIC"
START: Final = "start"
DONE: Final = "done"
ATTACHED: Final = "attached"

svc = Service(os.environ.get(TOPIC_VARIABLE, "demo"))


def name() -> str:
    """The name of this process in the story; its pid outside of a story."""
    return os.environ.get(PROCESS_VARIABLE) or str(os.getpid())


def note(ctx: Context, item: str | int) -> None:
    """Record that *item* of this task was done in this process."""
    entry = {"id": ctx.request_id, "item": item, "process": name(), "pid": os.getpid()}
    append(Path(EFFECTS), {**entry, "at": Clock().wall()})


@svc.rpc
async def charge(ctx: Context, account: str, seconds: float) -> str:
    """A charge, which must not happen twice: on_interrupt="error", the default."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return account


@svc.rpc(on_interrupt="retry")
async def resize(ctx: Context, vm: str, seconds: float) -> str:
    """A resize, which may be repeated from the beginning; it has no safe point."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return vm


@svc.rpc(on_interrupt="retry", resource="vm")
async def reboot(ctx: Context, vm: str, seconds: float) -> str:
    """A reboot, one at a time for each vm: the second waits for the first one's lease."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return vm


@svc.rpc(on_interrupt="retry", resource="disk")
async def copy(ctx: Context, disk: str, blocks: int, seconds: float) -> int:
    """A copy with a safe point after each block: a drain stops it there, the next run resumes."""
    async for block in ctx.steps(range(blocks)):
        await asyncio.sleep(seconds / blocks)
        note(ctx, block)
    return len(disk)


@svc.rpc(on_interrupt="probe", resource="volume")
async def attach(ctx: Context, volume: str, seconds: float) -> str:
    """An attachment: it acts, then waits for a confirmation that does not come in time."""
    await asyncio.sleep(0.5)
    note(ctx, ATTACHED)
    await asyncio.sleep(seconds)
    return volume


@attach.probe
async def _(ctx: Context, volume: str, seconds: float) -> Done | Retry:  # noqa: ARG001
    """Look in the file whether the volume was attached."""
    mine = [entry for entry in entries(Path(EFFECTS)) if entry["id"] == ctx.request_id]
    return Done(volume) if any(entry["item"] == ATTACHED for entry in mine) else Retry()


@svc.ops(on_interrupt="requeue")
async def ping(ctx: Context) -> dict[str, str | bool]:
    """Answers even during a drain."""
    return {"process": name(), "draining": ctx.draining}


@svc.periodic(every=1.0)
def leave_with_the_story(_: Context) -> None:
    """End this process when the story is gone: a killed story cannot stop its processes."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)
