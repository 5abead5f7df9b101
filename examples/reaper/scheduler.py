"""The scheduler: builds machines while there is room, and lets normal requests wait for it.

A normal request for which there is no room raises `NoCapacity`: its task is
parked, and a resolver makes room (`resolver.py`). A request of a preemptible
user is refused at once: it raises an exception of the example's own, and only
`NoCapacity` parks. Which of them it is, the handler reads in the context of
the request.

`gracekit run examples.reaper.scheduler:svc`
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from examples.reaper.cloud import Cloud, Machine
from gracekit import Context, NoCapacity, Service

cloud = Cloud(
    Path(os.environ.get("REAPER_CLOUD", "cloud.db")),
    room_mb=int(os.environ.get("REAPER_ROOM_MB", "8192")),
)


class PreemptibleRefusedError(Exception):
    """There is no room, and a preemptible machine does not wait for it."""


svc = Service(
    "scheduler",
    # Clients rebuild it, by the name of its module and its own.
    exceptions={f"{__name__}.PreemptibleRefusedError": PreemptibleRefusedError},
    defaults={"use_pending_state": True},  # off by default
    task_api=True,  # for the resolver; whoever may send to the ops topic may use it
)
NOTIFICATIONS: Final = "scheduler-notifications"


@svc.on_start
async def create_cloud() -> None:
    """Make the file of the cloud."""
    cloud.create()


# -- for users ----------------------------------------------------------------------------


@svc.rpc(resource="vm", on_interrupt="retry")
async def build(ctx: Context, vm: str, memory_mb: int) -> str:
    """Build a machine; the same request twice builds one."""
    preemptible = ctx.get("preemptible") is True
    if cloud.claim(Machine(vm=vm, memory_mb=memory_mb, preemptible=preemptible)):
        return f"{vm} is built"
    if preemptible:
        raise PreemptibleRefusedError(f"{memory_mb} MiB are not free, and {vm} is preemptible")
    raise NoCapacity(f"{memory_mb} MiB are not free", requested={"memory_mb": memory_mb})


@build.errored
async def not_built(ctx: Context, vm: str, memory_mb: int, reason: str) -> None:
    """Tell the user: the resolver gave up, or nobody made room until the deadline."""
    cloud.fail(vm, reason)


@svc.rpc(resource="vm", on_interrupt="retry")
async def delete(ctx: Context, vm: str) -> None:
    """Delete a machine, and a request to build it that still waits for room."""
    await ctx.cancel_pending("vm", vm, reason="its user has deleted it")
    cloud.delete(vm)


# -- for the resolver ---------------------------------------------------------------------


@svc.rpc(resource="vm", on_interrupt="retry")
async def reclaim(ctx: Context, vm: str) -> int:
    """Delete a preemptible machine; returns the MiB that this has freed."""
    return cloud.delete(vm, only_preemptible=True)


@svc.ops
async def survey(ctx: Context) -> dict[str, Any]:
    """How much room there is, and which machines could make more, the oldest first."""
    machines = cloud.machines()
    return {
        "room_mb": cloud.room_mb,
        "free_mb": cloud.room_mb - sum(machine.memory_mb for machine in machines),
        "preemptible": [[one.vm, one.memory_mb] for one in machines if one.preemptible],
    }
