"""Checked by mypy, never run: the test kit types calls as a client does."""

from __future__ import annotations

from typing import Any, assert_type

from gracekit import Context, DrainReport, Service
from gracekit.testing import Caller, InMemoryService, Pending, Point, TaskState, run

svc = Service("compute")


@svc.rpc
async def migrate(ctx: Context, vm: str, dest: int = 0) -> dict[str, str]:
    """A method of a service."""
    return {}


@svc.rpc
def plain(ctx: Context, n: int) -> int:
    """A plain one."""
    return n


async def main() -> bool:
    """What a checker knows of a test."""
    async with InMemoryService(svc, drain_timeout="5s") as one:
        assert_type(await one.call(migrate, vm="vm"), dict[str, str])
        assert_type(await one.cast(plain, n=1), str)
        pending = one.start_call(plain, n=1)
        assert_type(pending, Pending[int])
        assert_type(await pending, int)
        assert_type(await one.start_call("by name", n=1), Any)
        assert_type(one.prepare(timeout="1h"), Caller)
        assert_type(await one.prepare(host="h").start_call(migrate, vm="vm"), dict[str, str])
        one.interrupt_at(1, of=plain)
        one.crash_at(Point.FINISH, "before")
        assert_type(await one.drain(), DrainReport)
        assert_type(one.state_of("id"), TaskState | None)

        await one.call(migrate, dest=1)  # type: ignore[call-overload]
        one.start_call(plain, n="1")  # type: ignore[call-overload]
        one.prepare(timout=3)  # type: ignore[call-arg]
        one.crash_at(Point.FINISH, "later")  # type: ignore[arg-type]
    return True


assert_type(run(main()), bool)
