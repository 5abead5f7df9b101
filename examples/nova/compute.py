"""The compute service of one host: moves virtual machines to other hosts while they run.

The flow is that of Nova's live migration; README.md has the drawing. The step
that starts work is a new request. Every later one goes by the ops topic, which
a drain leaves open: neither host can strand the other in the middle.

One host: `GRACEKIT_HOST=src gracekit run examples.nova.compute:svc`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from examples.nova.hypervisor import Hypervisor
from gracekit import (
    Context,
    Done,
    Draining,
    Method,
    Retry,
    Service,
    UnconfirmedError,
    Undeliverable,
    Wait,
    ops_method,
    rpc_method,
)

PAGE_S = 0.1
"""How long a page takes."""
RESIZE_S = float(os.environ.get("NOVA_RESIZE_S", "30"))
"""How long a resize takes."""


class ComputeManager:
    """What a host does for vms that go and come.

    Args:
        hypervisor: Of this host.
        halt: Directory of files named `vm-1.paused`: the vm waits at that step while there is one.
        at_most: How long this host waits in its drain for a vm that does not come.
    """

    def __init__(self, hypervisor: Hypervisor, *, halt: Path, at_most: str) -> None:
        self.hypervisor = hypervisor
        self.halt = halt
        self.at_most = at_most

    # -- the source -------------------------------------------------------------------

    @rpc_method(resource="vm", on_interrupt="probe")
    async def live_migration(self, ctx: Context, vm: str, dest: str) -> str:
        """Move a vm to *dest*, and tell where it is then. Killed at any step, it may begin anew."""
        assert ctx.fence is not None, "a method with a resource has one"
        self.hypervisor.begin(vm, dest, fence=ctx.fence)
        try:
            await self._move(ctx, vm, dest, fence=ctx.fence)
            return await self._finish(ctx, vm, dest)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and ctx.draining:
                raise  # no failure: the next start goes on
            if self.hypervisor.owns(vm):
                await self._roll_back(ctx, vm, dest)
                raise
            return await self._finish(ctx, vm, dest)

    async def _move(self, ctx: Context, vm: str, dest: str, *, fence: int) -> None:
        """All that can be undone."""
        await self._step(vm, "begun")
        to_dest = ctx.client().prepare(host=dest, timeout="2m")
        there = await to_dest.call(self.pre_live_migration, vm=vm)
        await self._step(vm, "prepared")
        pages = self.hypervisor.record(vm).pages
        # The cursor says what was copied, the destination what is left of it.
        async for page in ctx.steps(
            lambda last: range(0 if last is None else min(last + 1, there), pages)
        ):
            await asyncio.sleep(PAGE_S)
            self.hypervisor.copy_page(vm, page, fence=fence)
            await self._step(vm, f"page-{page}")
        await self._step(vm, "copied")
        self.hypervisor.pause(vm, fence=fence)
        await self._step(vm, "paused")
        self.hypervisor.hand_over(vm, fence=fence)

    async def _finish(self, ctx: Context, vm: str, dest: str) -> str:
        """What cannot be undone any more is done to the end; again, if it was interrupted."""
        await self._step(vm, "handed-over")
        self.hypervisor.start(vm)
        await self._step(vm, "started")
        await self._tell(ctx, dest, self.post_live_migration_at_destination, vm)
        await self._step(vm, "told")
        self.hypervisor.clear(vm)
        await self._step(vm, "cleared")
        return dest

    async def _roll_back(self, ctx: Context, vm: str, dest: str) -> None:
        """It stays here; its place on the other host is of no use."""
        await self._step(vm, "failed")
        self.hypervisor.abandon(vm)
        await self._step(vm, "abandoned")
        await self._tell(ctx, dest, self.rollback_live_migration_at_destination, vm)

    async def _tell(self, ctx: Context, host: str, method: Method[..., None], vm: str) -> None:
        """Cast, until the broker has it: the host may be away for a while, and must learn it."""
        while True:
            try:
                await ctx.client().prepare(host=host).cast(method, vm=vm)
            except UnconfirmedError:
                await asyncio.sleep(1)
            except Undeliverable:
                return  # there never was such a host
            else:
                return

    @live_migration.probe
    async def where_is_it(self, ctx: Context, vm: str, dest: str) -> Done | Retry:
        """After an interruption the hypervisor knows: handed over, or still here."""
        if not self.hypervisor.owns(vm):
            return Done(await self._finish(ctx, vm, dest))
        self.hypervisor.resume(vm)
        await self._step(vm, "resumed")
        return Retry()

    @live_migration.errored
    async def give_up(self, ctx: Context, vm: str, dest: str, reason: str) -> None:
        """Nobody tries again: to one end or the other, nothing stays half done."""
        print(f"{self.hypervisor.host}: {vm} is given up: {reason}", flush=True)
        if self.hypervisor.owns(vm):
            await self._roll_back(ctx, vm, dest)
        else:
            await self._finish(ctx, vm, dest)

    # -- the destination --------------------------------------------------------------

    @ops_method(on_interrupt="retry")
    async def pre_live_migration(self, ctx: Context, vm: str) -> int:
        """Make a place for a vm, and stay until it is here; how many of its pages there are."""
        await self._step(vm, "asked")
        # Before anything is looked at: a drain either sees the hold, or is seen here.
        await ctx.hold("migration", vm, at_most=self.at_most)
        await self._step(vm, "held")
        try:
            self._check_open(ctx, vm)
            pages = self.hypervisor.make_place(vm, fence=ctx.fence)
        except Exception:
            if not self.hypervisor.has_place(vm):  # else one who came later has made it
                await ctx.end_hold("migration", vm)
            raise
        await self._step(vm, "placed")
        return pages

    def _check_open(self, ctx: Context, vm: str) -> None:
        """What has begun goes on in a drain, and nothing else begins."""
        if ctx.draining and not self.hypervisor.has_place(vm):
            raise Draining(f"{self.hypervisor.host} is draining: take {vm} to another host")

    @pre_live_migration.probe
    async def is_it_coming(self, ctx: Context, vm: str) -> Done | Wait:
        """Asked about the hold that an earlier run left: ends it, or takes it on."""
        if not self.hypervisor.awaits(vm):
            self.hypervisor.clear(vm)
            return Done()
        await ctx.hold("migration", vm, at_most=self.at_most)
        return Wait(60)

    @ops_method(on_interrupt="retry")
    async def post_live_migration_at_destination(self, ctx: Context, vm: str) -> None:
        """It is here, and at home."""
        await self._step(vm, "arriving")
        self.hypervisor.arrive(vm)
        await self._step(vm, "arrived")
        await ctx.end_hold("migration", vm)
        await self._step(vm, "released")

    @ops_method(on_interrupt="retry")
    async def rollback_live_migration_at_destination(self, ctx: Context, vm: str) -> None:
        """It does not come; unless a next try has begun meanwhile."""
        await self._step(vm, "leaving")
        self.hypervisor.clear(vm)
        await self._step(vm, "left")
        if not self.hypervisor.has_place(vm):
            await ctx.end_hold("migration", vm)
        await self._step(vm, "let-go")

    # -- one host alone ---------------------------------------------------------------

    @ops_method(resource="vm", on_interrupt="retry")
    async def resize_instance(self, _ctx: Context, vm: str, pages: int) -> int:
        """Give a vm more memory. As it comes by the ops topic, a drain waits for its end."""
        await self._step(vm, "resizing")
        await asyncio.sleep(RESIZE_S)
        self.hypervisor.grow(vm, pages)
        await self._step(vm, "resized")
        return pages

    # -- what people and tests see ------------------------------------------------------

    async def _step(self, vm: str, step: str) -> None:
        """Say how far a vm is, and wait while somebody wants to look at it."""
        print(f"{self.hypervisor.host}: {vm} {step}", flush=True)
        halt = self.halt / f"{vm}.{step}"
        while halt.exists():  # noqa: ASYNC110 - made and removed by hand, or by another process
            await asyncio.sleep(0.02)


# Each request names its host. Nova's services have 180 s to stop, too.
svc = Service("compute", queues="directed", defaults={"drain_timeout": "180s"})

CLOUD = Path(os.environ.get("NOVA_CLOUD", "cloud"))
manager = ComputeManager(
    Hypervisor(CLOUD, os.environ.get("GRACEKIT_HOST", socket.gethostname())),
    halt=CLOUD / "halt",
    at_most=os.environ.get("NOVA_HOLD", "15m"),
)
svc.include(manager)
