"""03 - A drain stops a long task at a safe point; the next start goes on from there.

    python examples/ex03_drain_and_resume.py

The service runs in a process of its own. While it copies a disk it gets
SIGTERM, as from Kubernetes or systemd: it ends the block at hand, writes down
where it stopped, and leaves with exit code 75, "unfinished work is in the
journal". The next process goes on with the next block. Nothing is copied
twice, and the caller, who has waited all the time, gets its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from gracekit import Context, Service

svc = Service("copier")


@svc.rpc(resource="disk", on_interrupt="retry")
async def copy(ctx: Context, disk: str, blocks: int) -> str:
    """Copy block after block; `ctx.steps` makes a safe point after each."""
    async for block in ctx.steps(range(blocks)):
        await asyncio.sleep(0.15)
        print(f"attempt {ctx.attempt} has copied block {block}", flush=True)
    return f"{disk} has all {blocks} blocks"


async def main() -> None:
    """One call across two processes."""
    async with svc.client("sqlite:///gracekit.db") as client:
        async with serving() as first:
            answer = asyncio.create_task(client.call(copy, disk="disk-1", blocks=10))
            await listen(first, until="block 2")
            first.terminate()
            print("SIGTERM was sent")
            await listen(first)
        print(f"the first process has left with exit code {first.returncode}")

        async with serving() as second:
            await listen(second, until="block 9")
            print(f"the caller's answer: {await answer}")
        print(f"the second process has left with exit code {second.returncode}")


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
