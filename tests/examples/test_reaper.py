"""The scheduler and the resolver of examples/reaper, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples.reaper import scheduler
from examples.reaper.cloud import Cloud, Machine
from examples.reaper.resolver import Resolver, choose, look_every
from examples.reaper.scheduler import PreemptibleRefusedError, build, delete, svc
from gracekit import NoCapacity, Parked
from gracekit.process import Side
from gracekit.testing import InMemoryService, Point, TaskState
from tests.testing.virtual import virtual

HOUR_S = 3600.0
OLD = [("p-1", 1024), ("p-2", 4096), ("p-3", 1024)]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """A host of 8192 MiB, of which preemptible machines have 6144."""
    found = Cloud(tmp_path / "cloud.db", room_mb=8192)
    found.create()
    monkeypatch.setattr(scheduler, "cloud", found)
    for vm, memory_mb in OLD:
        assert found.claim(Machine(vm=vm, memory_mb=memory_mb, preemptible=True))
    assert found.claim(Machine(vm="n-1", memory_mb=2048, preemptible=False))
    return found


def resolver_of(one: InMemoryService) -> Resolver:
    return Resolver(one.client)


async def waits(one: InMemoryService, vm: str, memory_mb: int) -> str:
    """Have a normal request parked; its task id."""
    with pytest.raises(Parked) as caught:
        await one.prepare(pending=True).call(build, vm=vm, memory_mb=memory_mb)
    return caught.value.task_id


def names(cloud: Cloud) -> list[str]:
    return [machine.vm for machine in cloud.machines()]


# -- which machines -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing_mb", "chosen"),
    [
        (-5, []),
        (0, []),
        (1, ["p-1"]),
        (1024, ["p-1"]),
        (1025, ["p-2"]),
        (4096, ["p-2"]),
        (5120, ["p-1", "p-2"]),
        (5121, ["p-1", "p-2", "p-3"]),
        (6144, ["p-1", "p-2", "p-3"]),
        (6145, None),
    ],
)
def test_the_oldest_machines_are_chosen_and_none_that_is_not_needed(
    missing_mb: int, chosen: list[str] | None
):
    """If all of them would not be enough, none is; a large one makes the small ones before it
    needless.
    """
    assert choose(OLD, missing_mb) == chosen


# -- the scheduler ------------------------------------------------------------------------


@virtual
async def test_a_normal_request_waits_and_a_preemptible_one_is_refused(cloud: Cloud):
    """The caller of either is answered at once; only the normal one is parked."""
    async with InMemoryService(svc) as one:
        await waits(one, "n-2", 1024)
        with pytest.raises(PreemptibleRefusedError, match="p-9 is preemptible"):
            await one.prepare(context={"preemptible": True}).call(build, vm="p-9", memory_mb=1024)

        (task,) = one.pending()
        assert (task.resource, task.requested) == ("vm:n-2", {"memory_mb": 1024})
        assert len(one.notifications("task.no_capacity")) == 1


@virtual
async def test_a_caller_that_does_not_know_pending_gets_no_capacity(cloud: Cloud):
    """Its task waits all the same."""
    async with InMemoryService(svc) as one:
        with pytest.raises(NoCapacity, match="1024 MiB are not free"):
            await one.call(build, vm="n-2", memory_mb=1024)

        assert [task.resource for task in one.pending()] == ["vm:n-2"]


@virtual
async def test_a_delete_takes_the_waiting_request_along(cloud: Cloud):
    """The parked build of the machine is CANCELLED, that of another one waits on."""
    async with InMemoryService(svc) as one:
        cancelled = await waits(one, "n-2", 1024)
        await waits(one, "n-3", 1024)

        await one.call(delete, vm="n-2")

        assert one.state_of(cancelled) is TaskState.CANCELLED
        assert [task.resource for task in one.pending()] == ["vm:n-3"]


@virtual
async def test_a_deadline_tells_the_user(cloud: Cloud):
    """The `errored` hook writes why the machine was not built."""
    async with InMemoryService(svc) as one:
        await waits(one, "n-2", 1024)
        await one.pass_time(HOUR_S + 1)

        assert cloud.failures() == {"n-2": "expired"}
        assert names(cloud) == ["p-1", "p-2", "p-3", "n-1"]


# -- the resolver -------------------------------------------------------------------------


@virtual
async def test_the_resolver_makes_room_for_what_waits(cloud: Cloud):
    """Oldest first, as much as is needed, for one request after the other."""
    async with InMemoryService(svc) as one:
        for n in (2, 3):
            await waits(one, f"n-{n}", 1024)
        await resolver_of(one).resolve_all()

        assert one.pending() == []
        assert names(cloud) == ["p-3", "n-1", "n-2", "n-3"]


@virtual
async def test_nothing_is_deleted_if_that_would_not_be_enough(cloud: Cloud):
    """The task waits on: a normal machine may go, and then the resolver needs no notification."""
    async with InMemoryService(svc) as one:
        task_id = await waits(one, "n-2", 8192)
        await resolver_of(one).resolve_all()
        assert (len(one.pending()), len(names(cloud))) == (1, 4)

        await one.call(delete, vm="n-1")
        await resolver_of(one).resolve_all()

        assert one.state_of(task_id) is TaskState.SUCCEEDED
        assert names(cloud) == ["n-2"]


@virtual
async def test_what_can_never_fit_is_given_up(cloud: Cloud):
    """With a reason on record, and the user is told."""
    async with InMemoryService(svc) as one:
        task_id = await waits(one, "n-2", 8193)
        await resolver_of(one).resolve_all()
        await one.settled()

        row = one.row(task_id)
        assert (row["state"], row["reason"]) == ("errored", "gave_up")
        assert "the host has 8192 MiB in all" in row["detail"]
        assert "reaper" in row["detail"]
        assert cloud.failures() == {"n-2": "gave_up"}
        assert len(names(cloud)) == 4


@virtual
async def test_a_resolver_that_ends_after_it_made_room_leaves_the_rest_to_the_next(cloud: Cloud):
    """The task waits meanwhile; the next one retries it, and deletes nothing more."""
    async with InMemoryService(svc) as one:
        task_id = await waits(one, "n-2", 1024)
        first = asyncio.ensure_future(Resolver(one.client, pause_s=HOUR_S).resolve_all())
        await one.until(lambda: "p-1" not in names(cloud))
        first.cancel()
        await one.pass_time(60)
        assert [task.version for task in one.pending()] == [1]

        await resolver_of(one).resolve_all()

        assert one.state_of(task_id) is TaskState.SUCCEEDED
        assert names(cloud) == ["p-2", "p-3", "n-1", "n-2"]


@virtual
async def test_no_room_is_made_for_what_its_user_has_deleted(cloud: Cloud):
    """Also if it was deleted after the resolver has listed what waits."""
    async with InMemoryService(svc) as one:
        await waits(one, "n-2", 1024)
        await waits(one, "n-3", 1024)
        resolving = asyncio.ensure_future(Resolver(one.client, pause_s=60).resolve_all())
        await one.until(lambda: "p-1" not in names(cloud))
        await one.call(delete, vm="n-3")
        await resolving

        assert names(cloud) == ["p-2", "p-3", "n-1", "n-2"]


@virtual
async def test_a_request_that_takes_the_room_first_parks_the_task_again(cloud: Cloud):
    """The next version has a notification of its own, and is resolved as the first one was."""
    async with InMemoryService(svc) as one:
        task_id = await waits(one, "n-2", 1024)
        resolving = asyncio.ensure_future(Resolver(one.client, pause_s=60).resolve_all())
        await one.until(lambda: "p-1" not in names(cloud))
        await one.call(build, vm="n-9", memory_mb=1024)
        await resolving
        assert [task.version for task in one.pending()] == [2]

        await resolver_of(one).resolve_all()

        assert one.state_of(task_id) is TaskState.SUCCEEDED
        asked = one.notifications("task.no_capacity")
        assert [told.payload["version"] for told in asked] == [1, 2]


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("point", [Point.PARK, Point.NOTIFY, Point.UNPARK, Point.OUTBOX_SENT])
@virtual
async def test_a_scheduler_that_is_killed_builds_each_machine_once(
    cloud: Cloud, point: Point, side: Side
):
    """Whichever step it is killed at, a later look of the resolver ends it as without the kill."""
    async with InMemoryService(svc) as one:
        one.crash_at(point, side)
        task_id = await one.cast(build, vm="n-2", memory_mb=1024)
        resolving = asyncio.ensure_future(look_every(resolver_of(one), 5))
        await one.wait_crashed()
        await one.start()
        await one.until(lambda: one.state_of(task_id) is TaskState.SUCCEEDED)
        resolving.cancel()

        assert cloud.log()[4:] == [("deleted", "p-1"), ("built", "n-2")]
