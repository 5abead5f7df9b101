"""10 - Work that needs no journal: reads that any process may repeat, and periodic jobs.

    python examples/ex10_reads_and_jobs.py

A read with on_interrupt="requeue" costs no commit. It stays in the queue until
it is done, so when its process is killed the next one answers; and nobody
remembers it, so the same id sent again runs again. A periodic job comes back
by itself; with `singleton` one process of the store runs it at a time, and the
others skip their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from gracekit import Context, Service

svc = Service("weather")


@svc.rpc(on_interrupt="requeue")
async def temperature(_ctx: Context, town: str) -> str:
    """A read: harmless to repeat, and soon of no interest."""
    print(f"{town} is read by process {os.getpid()}", flush=True)
    await asyncio.sleep(1)
    return f"{town}: 21 degrees"


@svc.periodic(every="200ms", singleton=True)
def sweep(ctx: Context) -> None:
    """Clear up; two at a time would meet each other's half-done work."""
    with Path("broom").open("w") as broom:
        fcntl.flock(broom, fcntl.LOCK_EX | fcntl.LOCK_NB)  # would fail if another one swept
        time.sleep(0.02)
    print(f"swept by process {os.getpid()}, with token {ctx.fence}", flush=True)


async def main() -> None:
    """A job that two processes share, and a read whose process is killed."""
    async with svc.client("sqlite:///gracekit.db") as client:
        async with serving() as first:
            async with serving() as second:
                await asyncio.gather(listen(first, until="swept"), listen(second, until="swept"))
            print(f"process {second.pid} has left with exit code {second.returncode}")
            answer = asyncio.create_task(client.call(temperature, town="Oslo"))
            await listen(first, until="Oslo is read")
            first.kill()
            await first.wait()
        print(f"process {first.pid} was killed")
        async with serving():
            print(f"the caller's answer: {await answer}")


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Process]:
    """The service as a process of its own: begins when it takes requests, ends by SIGTERM."""
    here = Path(__file__)
    run = ("-m", "gracekit", "run", "--app-dir", here.parent, f"{here.stem}:svc")
    service = await asyncio.create_subprocess_exec(sys.executable, *run, stdout=PIPE)
    try:
        await listen(service, until="service.serving")
        yield service
    finally:
        if service.returncode is None:
            service.terminate()
        await listen(service)


async def listen(service: Process, until: str | None = None) -> None:
    """Pass on what the service prints, without its log, until it says *until* or has ended."""
    assert service.stdout is not None
    async for line in service.stdout:
        text = line.decode()
        if not text.startswith("{"):
            print(f"    {text}", end="")
        if until is not None and until in text:
            return
    await service.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
