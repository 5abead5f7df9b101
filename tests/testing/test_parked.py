"""What a test of a service sees of its parked tasks, and of what was sent about them."""

from __future__ import annotations

import pytest

from gracekit import Context, GracekitError, NoCapacity, Service
from gracekit.testing import InMemoryService, ParkedTask, Point, TaskState
from tests.testing.virtual import virtual


class Site:
    """A scheduler with some room.

    Attributes:
        free: How many machines may still be built.
    """

    def __init__(self) -> None:
        self.free = 0
        self.svc = Service("scheduler", task_api=True, defaults={"use_pending_state": True})

        @self.svc.rpc(resource="vm", on_interrupt="retry")
        async def build(ctx: Context, vm: str) -> str:
            if not self.free:
                raise NoCapacity("no host is free", requested={"machines": 1})
            self.free -= 1
            return f"{vm} is built"

        self.build = build


@pytest.fixture
def site() -> Site:
    return Site()


@virtual
async def test_parked_tasks_are_plain_values(site: Site):
    """With what an order about them needs, and in the order of their acceptance."""
    async with InMemoryService(site.svc, pending_timeout="5m") as one:
        ids = [await one.cast(site.build, vm=vm) for vm in ("a", "b")]
        await one.settled()

        assert one.pending() == [
            ParkedTask(
                task_id=task_id,
                method="build",
                resource=f"vm:{vm}",
                version=1,
                deadline=one.clock.wall() + 300,
                requested={"machines": 1},
                reason="no host is free",
            )
            for task_id, vm in zip(ids, "ab", strict=True)
        ]


@virtual
async def test_a_resolver_can_be_played_by_the_task_api(site: Site):
    """A retry that finds room ends the task; one that finds none parks it at the next version."""
    async with InMemoryService(site.svc) as one:
        tasks = one.prepare(ops=True, namespace="gracekit.tasks", version="1.1")
        task_id = await one.cast(site.build, vm="a")
        await one.settled()

        await tasks.call("retry", task_id=task_id, version=1)
        await one.settled()
        assert [task.version for task in one.pending()] == [2]

        site.free = 1
        await tasks.call("retry", task_id=task_id, version=2)
        await one.settled()
        assert (one.pending(), one.state_of(task_id)) == ([], TaskState.SUCCEEDED)


@virtual
async def test_a_deadline_passes_with_time(site: Site):
    """The parked task is ERRORED at it, and `pending` has it no more."""
    async with InMemoryService(site.svc) as one:
        task_id = await one.cast(site.build, vm="a")
        await one.settled()
        (task,) = one.pending()

        await one.pass_time(task.deadline - one.clock.wall() + 1)

        assert one.pending() == []
        assert one.state_of(task_id) is TaskState.ERRORED
        assert one.row(task_id)["reason"] == "expired"


@virtual
async def test_notifications_are_what_was_sent_so_far(site: Site):
    """Decoded, of both types or of one; also after a reader has taken them."""
    async with InMemoryService(site.svc) as one:
        assert one.notifications() == []
        task_id = await one.cast(site.build, vm="a")
        await one.settled()

        async with one.listening() as listener:
            read = [await anext(listener), await anext(listener)]

        sent = one.notifications()
        assert sorted(told.message_id for told in sent) == sorted(told.message_id for told in read)
        assert {told.event_type for told in sent} == {"task.update", "task.no_capacity"}
        (asking,) = one.notifications("task.no_capacity")
        assert (asking.priority, asking.payload["requested"]) == ("ERROR", {"machines": 1})
        assert asking.payload["task_id"] == task_id
        with pytest.raises(GracekitError, match=r"type 'task.updat'; did you mean task.update\?"):
            one.notifications("task.updat")


@virtual
async def test_settled_waits_for_notifications_also_after_a_crash(site: Site):
    """Of a process that was killed between commit and send, the next one sends them."""
    async with InMemoryService(site.svc) as one:
        one.crash_at(Point.NOTIFY, "before")
        await one.cast(site.build, vm="a")
        await one.wait_crashed()
        assert one.notifications() == []

        await one.start()
        await one.settled()

        assert len(one.notifications()) == 2


@virtual
async def test_another_service_of_the_machine_has_notifications_of_its_own(site: Site):
    """Each sees those of its own topic, and its own parked tasks."""
    other = Service("other", defaults={"use_pending_state": True})
    async with (
        InMemoryService(site.svc) as one,
        InMemoryService(other, beside=one, host="node-2") as beside,
    ):
        await one.cast(site.build, vm="a")
        await one.settled()

        assert (len(one.pending()), len(one.notifications())) == (1, 2)
        assert (beside.pending(), beside.notifications()) == ([], [])
