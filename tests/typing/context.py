"""Checked by mypy, never run: what a handler gets from its Context has public types."""

from __future__ import annotations

from typing import assert_type

from gracekit import Context, Guard, TaskState, testing


async def copy(ctx: Context, disk: str) -> int:
    """A handler that takes a further lease."""
    async with ctx.lease("disk", disk) as guard:
        assert_type(guard, Guard)
        assert_type(guard.resource, tuple[str, str])
    return guard.token


def ended(one: testing.InMemoryService, request_id: str) -> bool:
    """What a test asks."""
    assert_type(one.state_of(request_id), TaskState | None)
    return one.state_of(request_id) is testing.TaskState.SUCCEEDED
