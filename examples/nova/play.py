"""Live migrations and a resize, and drains and a crash in the middle of them.

    python -m examples.nova.play

Three hosts are processes with a store each. host-b is told to leave while vm-1
is on its way to it: it stays until vm-1 is there, and vm-2 goes to host-c
instead. Then host-a is killed at the worst moment, when vm-3 is paused: its next
life asks the hypervisor, lets the vm run again, and goes on. At last host-c is told
to leave while it resizes vm-2: it stays until that is done, half a minute later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from examples.nova.compute import manager
from examples.nova.conductor import boot, migrate, resize, show

CHECKOUT = Path(__file__).parents[2]
SETTINGS = {
    "GRACEKIT_OPS_TOPIC": "compute-alt",
    "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "100ms",
}


async def main() -> None:
    """Three migrations and a resize."""
    os.environ.update(SETTINGS)
    for vm in ("vm-1", "vm-2", "vm-3"):
        boot(vm, "host-a", pages=4)
    async with host("host-a") as a, host("host-c") as c:
        async with host("host-b") as b:
            await drain_the_destination(a, b)
        print(f"host-b has left with exit code {b.returncode}")
        await kill_the_source(a)
        await resize_in_a_drain(c)
        print(f"host-c has left with exit code {c.returncode}")
    show()


async def drain_the_destination(source: Process, dest: Process) -> None:
    """One vm arrives in the drain, another goes elsewhere."""
    with halt("vm-1", "page-1"):
        first = asyncio.create_task(migrate("vm-1", ["host-b"]))
        await listen(source, until="vm-1 page-1")
        dest.terminate()
        await listen(dest, until="intake.closed")
        print("SIGTERM was sent to host-b; nothing runs there, and it stays")
        second = asyncio.create_task(migrate("vm-2", ["host-b", "host-c"]))
        await listen(source, until="vm-2 cleared")
        await second
    await listen(source, until="vm-1 cleared")
    await first
    await listen(dest)


async def kill_the_source(source: Process) -> None:
    """Its next life goes on, and answers the conductor."""
    with halt("vm-3", "paused"):
        third = asyncio.create_task(migrate("vm-3", ["host-c"]))
        await listen(source, until="vm-3 paused")
        source.kill()
        await source.wait()
    print("host-a was killed")
    async with host("host-a") as again:
        await listen(again, until="vm-3 cleared")
        await third


async def resize_in_a_drain(service: Process) -> None:
    """It ends although its host is told to leave, and the caller is answered."""
    growing = asyncio.create_task(resize("vm-2", 8))
    await listen(service, until="vm-2 resizing")
    service.terminate()
    print("SIGTERM was sent to host-c; a drain waits for the resize")
    await listen(service, until="vm-2 resized")
    await growing
    await listen(service)


@contextlib.contextmanager
def halt(vm: str, step: str) -> Iterator[None]:
    """During the block the vm waits when it has come to that step."""
    file = manager.halt / f"{vm}.{step}"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@contextlib.asynccontextmanager
async def host(name: str) -> AsyncIterator[Process]:
    """A host's service as a process: begins when it takes requests, ends by SIGTERM."""
    own = {"GRACEKIT_HOST": name, "GRACEKIT_STORE_URL": f"sqlite:///{name}.db"}
    run = ("-m", "gracekit", "run", "--app-dir", CHECKOUT, "examples.nova.compute:svc")
    service = await asyncio.create_subprocess_exec(
        sys.executable, *run, stdout=PIPE, env={**os.environ, **own}
    )
    try:
        await listen(service, until="service.serving")
        yield service
    finally:
        if service.returncode is None:
            service.terminate()
        await listen(service)


async def listen(service: Process, until: str | None = None) -> None:
    """Pass on what a service prints, without its log, until it says *until* or has ended."""
    assert service.stdout is not None
    async for line in service.stdout:
        text = line.decode()
        if not text.startswith("{"):
            print(f"    {text}", end="")
        if until is not None and until in text:
            return
    code = await service.wait()
    assert until is None, f"it ended with {code} before {until!r}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
