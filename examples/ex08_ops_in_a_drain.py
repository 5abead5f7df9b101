"""08 - Two topics: a drain closes the one for new requests, and the ops topic still answers.

    python examples/ex08_ops_in_a_drain.py

A task often needs a callback before it can end: here a render waits until the
film was delivered. If a drain closed everything at once, the callback would
find nobody, and the render would wait until it is cut. Methods marked `ops` are
served until the last task has ended; new requests wait in the queue, unharmed,
for the next start or another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from gracekit import Context, Draining, Service

svc = Service("studio")
waiting: dict[str, asyncio.Event] = {}


@svc.rpc(resource="film", on_interrupt="retry")
async def render(ctx: Context, film: str) -> str:
    """Render, then wait for the callback."""
    delivery = waiting[film] = asyncio.Event()
    print(f"{film} is rendered, and waits for its delivery", flush=True)
    await delivery.wait()
    return f"{film} was delivered{' during the drain' if ctx.draining else ''}"


@svc.ops
async def delivered(_ctx: Context, film: str) -> None:
    """The callback."""
    waiting[film].set()


@svc.ops
async def whats_up(ctx: Context) -> str:
    """Answers to the end."""
    return f"{'draining' if ctx.draining else 'serving'}, rendering {', '.join(waiting)}"


async def main() -> None:
    """A drain, seen by three callers."""
    async with svc.client("sqlite:///gracekit.db") as client:
        async with serving() as first:
            answer = asyncio.create_task(client.call(render, film="Alien"))
            await listen(first, until="waits for its delivery")
            first.terminate()
            await listen(first, until="intake.closed")
            print(f"SIGTERM was sent; the service says: {await client.call(whats_up)}")
            await client.cast(render, film="Brazil")
            print("a new film was cast; it waits in the queue")
            try:
                await client.prepare(ops=True).call(render, film="Casino")
            except Draining as error:
                print(f"a new film by the ops topic: {error}")
            await client.call(delivered, film="Alien")
            print(f"the first caller's answer: {await answer}")
            await listen(first)
        print(f"the first process has left with exit code {first.returncode}")

        async with serving(until="Brazil is rendered"):  # perhaps before it is ready
            await client.call(delivered, film="Brazil")


@contextlib.asynccontextmanager
async def serving(until: str = "service.serving") -> AsyncIterator[Process]:
    """The service as a process of its own: begins when it says *until*, ends by SIGTERM."""
    here = Path(__file__)
    run = ("-m", "gracekit", "run", "--app-dir", here.parent, f"{here.stem}:svc")
    service = await asyncio.create_subprocess_exec(sys.executable, *run, stdout=PIPE)
    try:
        await listen(service, until=until)
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
