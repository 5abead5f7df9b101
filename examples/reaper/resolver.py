"""The resolver: makes room for the tasks that wait for it, in a process of its own.

    python -m examples.reaper.resolver

It needs nothing but the broker. It keeps nothing either: what waits is asked
for each time, at its start, after each notification and every few seconds. So
it may be killed at any moment, and a notification that is lost or comes twice
does no harm.

    what waits                                what it does
    ------------------------------------     ---------------------------------------
    more than the host has                    gives up
    as much as is free                        retries
    less than is free with preemptible ones   deletes of those what it needs, retries
    anything else                             nothing: room may come, or the deadline
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from examples.reaper.scheduler import NOTIFICATIONS, reclaim, survey, svc
from gracekit import (
    Gone,
    GracekitError,
    NotificationListener,
    RpcClient,
    StaleVersionError,
)

TAKEN_WITHIN_S: Final = 10.0
"""A retried task has taken its room by then, or is parked again."""
MOVING: Final = {"accepted", "running"}


def choose(machines: Sequence[tuple[str, int]], missing_mb: int) -> list[str] | None:
    """Which machines to delete: the oldest ones, and none that is not needed.

    Args:
        machines: Name and MiB of each, the oldest first.
        missing_mb: How much room is to be made; 0 or less for none.

    Returns:
        Their names; None if all of them would not be enough.
    """
    chosen: list[tuple[str, int]] = []
    spare_mb = -missing_mb
    for machine in machines:
        if spare_mb >= 0:
            break
        chosen.append(machine)
        spare_mb += machine[1]
    if spare_mb < 0:
        return None
    for machine in reversed(chosen[:-1]):  # a large one may have made smaller ones needless
        if machine[1] <= spare_mb:
            chosen.remove(machine)
            spare_mb -= machine[1]
    return [vm for vm, _ in chosen]


class Resolver:
    """Makes room, one task after the other.

    Args:
        client: To the scheduler.
        pause_s: Between freeing room and the retry; so that somebody can kill it there.
    """

    def __init__(self, client: RpcClient, *, pause_s: float = 0.0) -> None:
        self._scheduler = client.prepare(timeout=TAKEN_WITHIN_S)
        self._tasks = client.prepare(
            ops=True,
            namespace="gracekit.tasks",
            version="1.1",
            timeout=TAKEN_WITHIN_S,
            context={"user_id": "reaper"},  # for the record of the task
        )
        self._pause_s = pause_s
        self._at_work = asyncio.Lock()

    async def resolve_all(self) -> None:
        """Look at every task that waits, and do what can be done for it."""
        async with self._at_work:
            async for task in self._pending():
                with contextlib.suppress(Gone, StaleVersionError):  # somebody else was faster
                    await self._resolve(task)

    async def _pending(self) -> AsyncIterator[dict[str, Any]]:
        """All parked tasks, the oldest first, in pages."""
        after: int | None = 0
        while after is not None:
            page = await self._tasks.call("list_pending", after=after)
            for task in page["tasks"]:
                yield task
            after = page["next"]

    async def _resolve(self, task: dict[str, Any]) -> None:
        needed_mb = task["requested"].get("memory_mb")
        if needed_mb is None or not await self._still_waits(task):
            return  # of a method that this resolver does not know; or its user has deleted it
        there = await self._scheduler.call(survey)
        if needed_mb > there["room_mb"]:
            await self._give_up(task, f"the host has {there['room_mb']} MiB in all")
        elif (vms := choose(there["preemptible"], needed_mb - there["free_mb"])) is not None:
            await self._free(task, vms)
            await self._retry(task)

    async def _free(self, task: dict[str, Any], vms: list[str]) -> None:
        for vm in vms:
            freed_mb = await self._scheduler.call(reclaim, vm=vm)
            print(f"freed {freed_mb} MiB of {vm} for {task['resource']}", flush=True)
        if vms:
            await asyncio.sleep(self._pause_s)

    async def _give_up(self, task: dict[str, Any], why: str) -> None:
        await self._order("give_up", task, reason=why)
        print(f"gave {task['resource']} up: {why}", flush=True)

    async def _retry(self, task: dict[str, Any]) -> None:
        """Let it run again, and wait until it has taken its room: only then is known what is free.

        Somebody else may have taken the room. Then the task is parked again, at its next version,
        and there is a new notification.
        """
        await self._order("retry", task)
        print(f"retried {task['resource']}", flush=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKEN_WITHIN_S):
                while (await self._now(task))["state"] in MOVING:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.05)

    async def _order(self, verb: str, task: dict[str, Any], **more: str) -> None:
        await self._tasks.call(verb, task_id=task["task_id"], version=task["version"], **more)

    async def _still_waits(self, task: dict[str, Any]) -> bool:
        """Whether it waits as it was listed: no room is to be made for what has moved on."""
        now = await self._now(task)
        return bool(now["state"] == "pending" and now["version"] == task["version"])

    async def _now(self, task: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = await self._tasks.call("get", task_id=task["task_id"])
        return found


async def look(resolver: Resolver) -> None:
    """Look once; if the scheduler does not answer, the next look is soon."""
    try:
        await resolver.resolve_all()
    except GracekitError as error:
        print(f"nothing could be done now: {error}", flush=True)


async def look_every(resolver: Resolver, seconds: float) -> None:
    """Look at the start, and again and again: room may come without any notification."""
    while True:
        await look(resolver)
        await asyncio.sleep(seconds)


async def run(url: str, *, every_s: float, pause_s: float) -> None:
    """Resolve until the process is ended."""
    async with (
        svc.client(url) as client,
        NotificationListener(url, NOTIFICATIONS, priorities=("error",)) as listener,
        asyncio.TaskGroup() as group,
    ):
        print("listening", flush=True)
        resolver = Resolver(client, pause_s=pause_s)
        group.create_task(look_every(resolver, every_s))
        async for _ in listener:  # task.no_capacity: somebody waits
            await look(resolver)


def main() -> None:
    """Read the command line, and run until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="resolver")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    given = parser.parse_args()
    url = os.environ.get("GRACEKIT_TRANSPORT_URL", "sqlite:///gracekit.db")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(url, every_s=given.every, pause_s=given.pause))


if __name__ == "__main__":
    main()
