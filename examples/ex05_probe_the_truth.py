"""05 - After a crash, ask the truth instead of guessing: on_interrupt="probe".

    python examples/ex05_probe_the_truth.py

Creating a volume must not happen twice, and whether it has happened can be
asked: the "cloud" is a directory, a volume is a file in it. One process is
killed after the cloud has created the volume, and one before. Each time the
next start asks the probe: is it there? If so, the task is done, with the result
that its caller was to get; if not, it is run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from gracekit import Context, Done, Retry, Service

svc = Service("volumes")


@svc.rpc(resource="volume", on_interrupt="probe", settle="100ms")
async def create(ctx: Context, volume: str) -> str:
    """Order a volume, and wait until the cloud says that it is ready."""
    print(f"attempt {ctx.attempt} orders {volume}", flush=True)
    await asyncio.sleep(0.7 if ctx.attempt == 1 else 0)  # the cloud is slow, at first
    in_the_cloud(volume).touch(exist_ok=False)  # a second creation would fail, and be seen
    print(f"attempt {ctx.attempt} has created {volume}, and waits for the cloud", flush=True)
    await asyncio.sleep(5 if ctx.attempt == 1 else 0)
    return f"{volume} is ready"


@create.probe
async def ask_the_cloud(_ctx: Context, volume: str) -> Done | Retry:
    """What the next start asks before it decides; Fail and Wait are answers too."""
    found = in_the_cloud(volume).exists()
    print(f"probe: {volume} is {'there' if found else 'not there'}", flush=True)
    return Done(f"{volume} is ready") if found else Retry()


def in_the_cloud(volume: str) -> Path:
    """Where a volume is, if it is."""
    return Path(f"volume-{volume}")


async def main() -> None:
    """Two calls, each across a crash at another moment."""
    await call_across_a_crash("vol-1", kill_when="has created")
    await call_across_a_crash("vol-2", kill_when="orders")


async def call_across_a_crash(volume: str, kill_when: str) -> None:
    """Kill the service at a moment, start it again, and show what the caller is told."""
    async with svc.client("sqlite:///gracekit.db") as client:
        async with serving() as first:
            answer = asyncio.create_task(client.call(create, volume=volume))
            await listen(first, until=kill_when)
            first.kill()
            await first.wait()
        print("the process was killed")

        async with serving():
            said = await answer
        print(f"the caller's answer: {said}")


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
