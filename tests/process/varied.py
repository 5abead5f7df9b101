"""A service of every kind of request, which tells what its process holds at the moment."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from pathlib import Path

from gracekit import Context, Done, Fail, Retry, Service
from tests.logs import configure_logging

svc = Service("varied")


@svc.rpc(on_interrupt="requeue")
async def read(ctx: Context, text: str = "") -> str:
    return text


@svc.rpc(on_interrupt="retry", resource="vm")
async def leased(ctx: Context, vm: str) -> int | None:
    return ctx.fence


@svc.rpc(on_interrupt="probe")
async def probed(ctx: Context) -> None:
    async with ctx.track("beside it"):
        await asyncio.sleep(0.001)


@probed.probe
async def _(ctx: Context) -> Done | Retry | Fail:
    return Retry()


@svc.rpc(on_interrupt="retry")
async def stepped(ctx: Context, items: int) -> None:
    async for _ in ctx.steps(range(items)):
        await asyncio.sleep(0)


@svc.rpc
async def boom(ctx: Context, text: str) -> None:
    raise LookupError(text)


@svc.rpc(timeout=0.02)
async def late(ctx: Context) -> None:
    await asyncio.sleep(60)


@svc.rpc
def plain(ctx: Context) -> int:
    return threading.get_ident()


@svc.rpc
async def held(ctx: Context, key: str) -> None:
    await ctx.hold("operation", key, at_most="1s")


@svc.ops
async def release(ctx: Context, key: str) -> None:
    await ctx.end_hold("operation", key)


@svc.rpc
async def everywhere(ctx: Context) -> None:
    """What a fanout reaches."""


@svc.periodic(every="1s")
async def tick(ctx: Context) -> None:
    await asyncio.sleep(0)


@svc.ops
async def measure(ctx: Context) -> dict[str, int]:
    """Objects, descriptors, threads, tasks and resident KiB of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - only their number
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "resident KiB": int(status.partition("VmRSS:")[2].split()[0]),
    }


if __name__ == "__main__":
    configure_logging("text")
    sys.exit(svc.run())
