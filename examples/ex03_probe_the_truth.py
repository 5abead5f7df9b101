"""A task that must not be done twice, and whose truth can be asked after a crash.

The "cloud" is a directory `cloud`; a volume is a file in it. In one terminal:

    gracekit run --app-dir examples ex03_probe_the_truth:svc

In another, in the same directory:

    python examples/ex03_probe_the_truth.py vol-1

Then kill the service with `kill -9` while it says "waiting for the cloud", and
start it again. The journal knows that the task was started and not how it
ended, so the next start asks the probe: is there such a volume? If so the
task is done, with the result that the caller was to get; if not, it is run
again. (The start waits 10 s first, because a last request of the dead process
may still be on its way; GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS.)
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gracekit import Context, Done, Retry, Service

svc = Service("volumes")


def cloud() -> Path:
    """Where the volumes are."""
    Path("cloud").mkdir(exist_ok=True)
    return Path("cloud")


@svc.rpc(resource="volume", on_interrupt="probe")
async def create(ctx: Context, volume: str) -> str:
    """Ask the cloud for a volume, and wait until it says that it is ready."""
    (cloud() / volume).touch(exist_ok=False)  # a second creation would be a fault, and would show
    print(f"{volume}: created by attempt {ctx.attempt}, waiting for the cloud", flush=True)
    await asyncio.sleep(10)
    return f"{volume} is ready"


@create.probe
async def ask_the_cloud(_ctx: Context, volume: str) -> Done | Retry:
    """What the next start asks, before it decides."""
    found = (cloud() / volume).exists()
    print(f"{volume}: probe says {'done' if found else 'retry'}", flush=True)
    return Done(f"{volume} is ready") if found else Retry()


async def main(volume: str) -> None:
    """Wait for the volume, also across a restart of the service."""
    async with svc.client("sqlite:///gracekit.db") as client:
        answer = await client.prepare(timeout="2m").call(create, volume=volume)
    print(answer)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["vol-1"]))
