"""Checked by mypy, never run: what `find` returns, what a probe may answer, what `write` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from gracekit import (
    Absent,
    Context,
    Done,
    Found,
    ResourceKind,
    Retry,
    Service,
    Settled,
    Wait,
    testing,
)

svc = Service("share-manager")
server = svc.kind("share_server")
share = svc.kind("share", after=[server], statuses={"creating"}, stuck_after="1m", max_wait=60)
assert_type(share, ResourceKind)
assert_type(share.of("sh-1"), tuple[str, str] | None)


@share.find
async def shares(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
    """Those of this host."""
    return [Found(id=7, status="creating", since=1.5, busy=False, needs=[server.of("srv-1")])]


@share.find
def shares_plain(ctx: Context, *, after: str | None, limit: int) -> Sequence[Found]:
    """A plain one."""
    return ()


@share.find  # type: ignore[type-var]
async def names(ctx: Context, *, after: str | None, limit: int) -> list[str]:
    """No list of Found."""
    return []


@share.write
async def write(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> bool:
    """Whether it was changed."""
    return found.status == status


@share.write
def write_plain(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> bool:
    """A plain one."""
    return True


@share.write  # type: ignore[type-var]
async def write_blindly(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> None:
    """Says nothing."""


@share.probe("creating", failed="error")
async def created(ctx: Context, found: Found) -> Settled | Absent | Wait:
    """All that it may answer."""
    match found.id:
        case "1":
            return Settled("available", exports=["a"], size=3)
        case "2":
            return Absent("no such volume")
        case _:
            return Wait("30s")


@share.probe("creating", failed="error")
def created_plain(ctx: Context, found: Found) -> Settled:
    """One of them, in a thread."""
    return Settled("available")


@share.probe("creating", failed="error")  # type: ignore[type-var]
async def done(ctx: Context, found: Found) -> Done:
    """What the probe of a method answers is no status."""
    return Done()


@share.probe("creating", failed="error")  # type: ignore[type-var]
async def again(ctx: Context, found: Found) -> Settled | Retry:
    """A resource is not run again."""
    return Retry()


@share.probe("creating", failed="error")  # type: ignore[type-var]
def told(ctx: Context, found: Found) -> str:
    """A status alone."""
    return "available"


@share.delete("deleting", done="deleted", failed="error_deleting")
async def delete(ctx: Context, found: Found) -> None:
    """Returns nothing."""


@share.delete("deleting", done="deleted", failed="error_deleting")  # type: ignore[type-var]
async def delete_and_say(ctx: Context, found: Found) -> bool:
    """Says something that nobody hears."""
    return True


share.mark({"in-restore": "error"}, restoring="error")
share.mark(restoring=1)  # type: ignore[arg-type]
share.mark("restoring", "error")  # type: ignore[call-arg, arg-type]
share.leave("migrating", why="its continue task goes on")
share.leave(why=1)  # type: ignore[arg-type]


@share.mark(reverting="error")  # type: ignore[func-returns-value, misc, untyped-decorator]
async def reverted(ctx: Context, found: Found) -> None:
    """A mark calls no function."""


Settled(1)  # type: ignore[arg-type]
Found(id="1", status=1)  # type: ignore[arg-type]


async def by_hand(one: testing.InMemoryService) -> list[testing.Result]:
    """One pass in a test."""
    results = await one.reconcile(kind=share)
    assert_type(results, list[testing.Result])
    assert_type(results[0].outcome, testing.ResourceOutcome)
    assert_type(results[0].written, str | None)
    await one.reconcile(resource="share:sh-1")  # type: ignore[arg-type]
    return await one.reconcile(resource=share.of("sh-1"), dry_run=True)
