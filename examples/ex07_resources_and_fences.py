"""07 - One task at a time for each resource, and a token that shuts out a stale owner.

    python examples/ex07_resources_and_fences.py

`resource="vm"` names the argument that says what a request acts on. Requests
for one vm wait in a line, others pass by. Whoever has its turn holds a lease,
and the lease has a fencing token that only rises. gracekit cannot call back a
write that is already on its way; the backend can refuse it, if it is told the
token (`ctx.fence`) and remembers the highest that it has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile

from gracekit import Context, Runtime, Service

svc = Service("compute")


class Hypervisor:
    """A backend that is proof against stale writes; in SQL: `... WHERE fence <= :fence`."""

    def __init__(self) -> None:
        self.size: dict[str, str] = {}
        self.fence: dict[str, int] = {}

    def resize(self, vm: str, size: str, fence: int) -> None:
        """Change a vm, unless a later owner has been here."""
        if fence < self.fence.get(vm, 0):
            raise PermissionError(f"{vm}: token {fence} is stale, {self.fence[vm]} has been here")
        self.size[vm], self.fence[vm] = size, fence


hypervisor = Hypervisor()
begun = asyncio.Event()


@svc.rpc(resource="vm", on_interrupt="retry")
async def resize(ctx: Context, vm: str, size: str) -> int:
    """Resize a vm; meanwhile nobody else's request acts on it."""
    assert ctx.fence is not None  # a method with a resource has one
    print(f"{vm} -> {size}: begins, with token {ctx.fence}")
    begun.set()
    await asyncio.sleep(0.2)
    hypervisor.resize(vm, size, ctx.fence)
    print(f"{vm} -> {size}: ends")
    return ctx.fence


async def main() -> None:
    """Two requests for one vm, one for another, and a write that comes too late."""
    async with Runtime(svc), svc.client("sqlite:///gracekit.db") as client:
        first = asyncio.create_task(client.call(resize, vm="vm-1", size="small"))
        await begun.wait()
        second = asyncio.create_task(client.call(resize, vm="vm-1", size="large"))
        other = asyncio.create_task(client.call(resize, vm="vm-2", size="large"))
        old_token, new_token, _ = await asyncio.gather(first, second, other)

    print(f"vm-1 is {hypervisor.size['vm-1']}, and its token rose from {old_token} to {new_token}")
    try:  # as if a packet of the first request had been on its way all the time
        hypervisor.resize("vm-1", "small", old_token)
    except PermissionError as error:
        print(f"a late write of the first request is refused: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
