"""The service that systemd starts in these tests: each handler behaves in one way in a drain."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from gracekit import Context, Service

svc = Service("shop", defaults={"progress_every": "2s", "ops_quiet_timeout": "1s"})
STATE = Path("/var/lib/shop")


@svc.on_start
async def slow_start() -> None:
    """A start takes a second, of which systemd is to know."""
    await asyncio.sleep(float(os.environ.get("SHOP_START_S", "0")))
    (STATE / "started").touch()


@svc.rpc(on_interrupt="retry")
async def work(ctx: Context, s: float) -> None:
    """Take *s* seconds; at the second attempt none."""
    if ctx.attempt == 1:
        await asyncio.sleep(s)


@svc.rpc(on_interrupt="retry")
async def block(ctx: Context, s: float) -> None:
    """Block the event loop, at the first attempt."""
    if ctx.attempt == 1:
        time.sleep(s)
