"""The service that systemd starts in these tests: each handler behaves in one way in a drain."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from gracekit import Context, Service

svc = Service("shop", defaults={"progress_every": "2s", "ops_quiet_timeout": "1s"})
STATE = Path("/var/lib/shop")


def begin(ctx: Context) -> None:
    """Make a file by which a test sees that the task runs."""
    Path("/run/shop", ctx.request_id).touch()


@svc.on_start
async def slow_start() -> None:
    """Make the start take a second, for which it asks systemd for time."""
    await asyncio.sleep(float(os.environ.get("SHOP_START_S", "0")))
    (STATE / "started").touch()


@svc.rpc(on_interrupt="retry")
async def work(ctx: Context, s: float) -> None:
    """Take *s* seconds at the first attempt, and none at the second."""
    begin(ctx)
    if ctx.attempt == 1:
        await asyncio.sleep(s)


@svc.rpc(on_interrupt="retry")
async def end_in_drain(ctx: Context, s: float) -> None:
    """End *s* seconds after a drain has begun."""
    begin(ctx)
    while not ctx.draining:
        await asyncio.sleep(0.05)
    await asyncio.sleep(s)


@svc.rpc
async def hold(ctx: Context, s: float) -> None:
    """Open a hold that nothing ends for *s* seconds."""
    await ctx.hold("move", ctx.request_id, at_most=s)


@svc.rpc
async def refusals(ctx: Context) -> dict[str, str]:
    """What this process may not do: each attempt, and its error."""
    tries: dict[str, Callable[[], object]] = {
        "write where all may": Path("/srv/open/file").touch,
        "be root": lambda: os.setuid(0),
        "have a namespace": make_namespace,
        "look into /tmp of others": Path("/tmp/of-others").read_text,
        "write its state": (STATE / "written").touch,
        "see other processes": Path("/proc/1/stat").read_text,
    }
    return {what: word for what, attempt in tries.items() if (word := refused(attempt))}


@svc.rpc
def who_sudo_is(ctx: Context) -> list[str]:
    """Who a program is that belongs to root and has the setuid bit, and its capabilities."""
    program = ("/srv/sudo/sh", "-p", "-c", "whoami; grep CapEff /proc/self/status")
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return done.stdout.split()


def make_namespace() -> None:
    """A user namespace, in which a process is root; Python's own function is younger than 3.11."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def refused(attempt: Callable[[], object]) -> str:
    """The name of the error, or nothing."""
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


@svc.rpc(on_interrupt="retry")
async def block(ctx: Context, s: float) -> None:
    """Block the event loop, at the first attempt."""
    begin(ctx)
    if ctx.attempt == 1:
        time.sleep(s)


@svc.ops
async def stop(ctx: Context, reason: str) -> None:
    """Stop this process from inside."""
    ctx.request_stop(reason)
