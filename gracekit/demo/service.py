"""The service that the demonstration drains: five kinds of work, each with its own end.

Each handler writes what it has done into a file of the working directory, so
that anybody can count afterwards what was done, how often, and by whom.
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
    """Which of the story's processes this is; its pid outside the story."""
    return os.environ.get(PROCESS_VARIABLE) or str(os.getpid())


def note(ctx: Context, item: str | int) -> None:
    """Write down that *item* of this task was done here."""
    entry = {"id": ctx.request_id, "item": item, "process": name(), "pid": os.getpid()}
    append(Path(EFFECTS), {**entry, "at": Clock().wall()})


@svc.rpc
async def charge(ctx: Context, account: str, seconds: float) -> str:
    """Must not happen twice: on_interrupt="error", the default."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return account


@svc.rpc(on_interrupt="retry")
async def resize(ctx: Context, vm: str, seconds: float) -> str:
    """May be done again from its beginning; has no safe point."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return vm


@svc.rpc(on_interrupt="retry", resource="vm")
async def reboot(ctx: Context, vm: str, seconds: float) -> str:
    """One at a time for each vm: the second waits in the line of its resource."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return vm


@svc.rpc(on_interrupt="retry", resource="disk")
async def copy(ctx: Context, disk: str, blocks: int, seconds: float) -> int:
    """A safe point after each block: a drain stops it there, the next run goes on from there."""
    async for block in ctx.steps(range(blocks)):
        await asyncio.sleep(seconds / blocks)
        note(ctx, block)
    return len(disk)


@svc.rpc(on_interrupt="probe", resource="volume")
async def attach(ctx: Context, volume: str, seconds: float) -> str:
    """Acts, then waits for a confirmation that does not come in time."""
    await asyncio.sleep(0.5)
    note(ctx, ATTACHED)
    await asyncio.sleep(seconds)
    return volume


@attach.probe
async def _(ctx: Context, volume: str, seconds: float) -> Done | Retry:  # noqa: ARG001
    """The truth is in the file: was it attached, or not?"""
    mine = [entry for entry in entries(Path(EFFECTS)) if entry["id"] == ctx.request_id]
    return Done(volume) if any(entry["item"] == ATTACHED for entry in mine) else Retry()


@svc.ops(on_interrupt="requeue")
async def ping(ctx: Context) -> dict[str, str | bool]:
    """Answers also in a drain."""
    return {"process": name(), "draining": ctx.draining}


@svc.periodic(every=1.0)
def leave_with_the_story(_: Context) -> None:
    """A story that was killed can stop nothing: leave when it is gone."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)
