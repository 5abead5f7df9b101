"""Checked by mypy, never run: what handlers, callers, resolvers and tests know of PENDING."""

from __future__ import annotations

from typing import Any, assert_type

from gracekit import Context, NoCapacity, Notification, NotificationListener, Parked, Service
from gracekit.testing import InMemoryService, ParkedTask

svc = Service("scheduler", task_api=True)


@svc.rpc(resource="vm", pending_timeout="5m")
async def build(ctx: Context, vm: str) -> str:
    """A handler that finds no capacity."""
    assert_type(ctx.version, str)
    error = NoCapacity("no host is free", requested={"memory_mb": 8192})
    assert_type(error.requested, dict[str, Any])
    raise error


@svc.rpc(resource="vm")
async def delete(ctx: Context, vm: str) -> int:
    """One that takes the parked tasks of its resource along."""
    number = await ctx.cancel_pending("vm", vm, reason="deleted")
    assert_type(number, int)
    await ctx.cancel_pending("vm")  # type: ignore[call-arg]
    return number


async def call(url: str) -> float:
    """A caller that knows PENDING."""
    async with svc.client(url) as client:
        try:
            assert_type(await client.prepare(pending=True).call(build, vm="81"), str)
        except Parked as parked:
            assert_type(parked.task_id, str)
            assert_type(parked.version, int)
            return parked.deadline
        client.prepare(pending="yes")  # type: ignore[arg-type]
    return 0.0


async def resolve(url: str) -> None:
    """A resolver."""
    async with NotificationListener(url, "scheduler-notifications", priorities=("error",)) as news:
        async for told in news:
            assert_type(told, Notification)
            assert_type(told.payload, dict[str, Any])


async def look() -> None:
    """A test of the service."""
    async with InMemoryService(svc, use_pending_state=True) as one:
        assert_type(one.pending(), list[ParkedTask])
        assert_type(one.notifications("task.no_capacity"), list[Notification])
        async with one.listening() as listener:
            assert_type(await anext(listener), Notification)


NoCapacity("no host is free", requested=8192)  # type: ignore[arg-type]
Service("scheduler", task_api="yes")  # type: ignore[arg-type]
