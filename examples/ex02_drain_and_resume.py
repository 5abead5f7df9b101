"""A long task with safe points: a drain stops it there, the next start goes on from there.

In one terminal:

    gracekit run --app-dir examples ex02_drain_and_resume:svc

In another, in the same directory, order a copy of 20 blocks:

    python examples/ex02_drain_and_resume.py disk-1 20

While blocks are being copied, press Ctrl-C in the first terminal, or send
SIGTERM to the process. It stops after the block at hand and leaves (exit code
75 after SIGTERM: unfinished work is in the journal). Start it again with the
same command: it goes on with the next block. No block is copied twice; only a
crash (kill -9) may repeat what was done within the last second, and with
on_interrupt="retry" this method says that it may be repeated.
"""

from __future__ import annotations

import asyncio
import sys

from gracekit import Context, Service

svc = Service("copier")


@svc.rpc(resource="disk", on_interrupt="retry")
async def copy(ctx: Context, disk: str, blocks: int) -> str:
    """Copy block after block; one task at a time for each disk."""
    async for block in ctx.steps(range(blocks)):
        await asyncio.sleep(0.25)
        print(f"{disk}: block {block} copied by attempt {ctx.attempt}", flush=True)
    return f"{disk}: all {blocks} blocks"


async def main(disk: str, blocks: int) -> None:
    """Order a copy; once the id is printed, the order is not lost."""
    async with svc.client("sqlite:///gracekit.db") as client:
        print(await client.cast(copy, disk=disk, blocks=blocks))


if __name__ == "__main__":
    words = sys.argv[1:] or ["disk-1", "20"]
    asyncio.run(main(words[0], int(words[1])))
