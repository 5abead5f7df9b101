"""11 - A service as a class, and holds: one operation in several calls keeps its host.

    python examples/ex11_class_with_holds.py

The destination of a live migration prepares a place, and is called again when
the vm has arrived. Between the two calls nothing runs here, and yet a drain
must not end the process. A hold says so, until it is ended or lapses. The
methods belong to an object with a state of its own, and are served in a
namespace at a version: callers that ask for a newer one are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

from gracekit import Context, Service, UnsupportedVersionError, ops_method, rpc_method


class Destination:
    """What a host does for the vms that migrate to it."""

    def __init__(self, host: str) -> None:
        self.host = host

    @rpc_method(resource="vm", on_interrupt="retry")
    async def expect(self, ctx: Context, vm: str) -> str:
        """Make room for a vm, and stay until it is here."""
        await ctx.hold("migration", vm, at_most="15m")
        return f"{self.host} expects {vm}"

    @ops_method
    async def copied(self, ctx: Context, vm: str, percent: int) -> str:
        """Progress; the ops topic answers in a drain."""
        return f"{percent} % of {vm} {'in the drain' if ctx.draining else 'as usual'}"

    @ops_method
    async def arrived(self, ctx: Context, vm: str) -> bool:
        """The end of the operation, from whoever moved the vm."""
        return await ctx.end_hold("migration", vm)


svc = Service("compute")
svc.include(Destination("host-b"), namespace="migration", version="1.3")


async def main() -> None:
    """One migration, with a drain in its middle."""
    async with svc.client("sqlite:///gracekit.db") as client, serving() as host:
        try:
            await client.prepare(version="1.4").call(Destination.expect, vm="vm-7")
        except UnsupportedVersionError as error:
            print(f"a newer caller is told: {error}")
        print(await client.call(Destination.expect, vm="vm-7"))
        host.terminate()
        await listen(host, until="intake.closed")
        print("SIGTERM was sent; nothing runs, and the process stays")
        for percent in (50, 100):
            print(await client.call(Destination.copied, vm="vm-7", percent=percent))
        print(f"the hold is ended: {await client.call(Destination.arrived, vm='vm-7')}")
        await listen(host)
    print(f"the process has left with exit code {host.returncode}")


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
