"""A service with room for few builds, and its resolver: `python -m tests.process.roomy [resolver]`.

The room and the builds are in a SQLite database of the application's own, which alone judges what
was built. What becomes of a task that waits is in the name of its VM: `late-` ones are left to
their deadline, `huge-` ones given up, `spare-` ones cancelled, and for any other the resolver
makes room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw

from gracekit import Context, GracekitError, NoCapacity, NotificationListener, RpcClient, Service
from tests.logs import configure_logging
from tests.process.served import GO, effect

RECORDS = Path("rooms.db")
TABLES = """
CREATE TABLE room (id INTEGER PRIMARY KEY, total INTEGER NOT NULL);
CREATE TABLE built (vm TEXT NOT NULL, attempt INTEGER NOT NULL);
"""
LOOK_EVERY_S = 0.3
UNTIL_GO = "GRACEKIT_TEST_UNTIL_GO"
"""If set, a build waits for the test's go."""

svc = Service("rooms", task_api=True)


@contextlib.contextmanager
def records(path: Path = RECORDS) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(path))
    try:
        connection.set_busy_timeout(10_000)
        connection.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing by it
        yield connection
    finally:
        connection.close()


def make_room(total: int, path: Path = RECORDS) -> None:
    """Add so many places; the first time, make the tables."""
    with records(path) as connection, connection:
        if not connection.execute("SELECT 1 FROM sqlite_schema").fetchall():
            connection.execute(TABLES)
            connection.execute("INSERT INTO room VALUES (1, 0)")
        connection.execute("UPDATE room SET total = total + ?", (total,))


def has_built(vm: str) -> bool:
    with records() as connection:
        return bool(connection.execute("SELECT 1 FROM built WHERE vm = ?", (vm,)).fetchall())


def take_room(vm: str, attempt: int) -> bool:
    """Build it, if there is room; nothing keeps a caller from doing so twice."""
    with records() as connection:
        connection.execute(
            "INSERT INTO built SELECT ?, ? FROM room WHERE total > (SELECT count(*) FROM built)",
            (vm, attempt),
        )
        return connection.changes() == 1


@svc.rpc(on_interrupt="retry", resource="vm", settle="0.2s")
async def build(ctx: Context, vm: str) -> str:
    """Look whether it is built; take a moment; build it."""
    effect("start", vm, ctx.attempt, ctx.fence)
    while UNTIL_GO in os.environ and not GO.exists():
        await asyncio.sleep(0.02)
    if not has_built(vm):
        await asyncio.sleep(0.01)
        if not take_room(vm, ctx.attempt):
            raise NoCapacity("no room", requested={"rooms": 1})
    await asyncio.sleep(0.02)
    return vm


@build.errored
async def _(ctx: Context, vm: str, reason: str) -> None:
    effect("errored", vm, reason)


# -- the resolver -----------------------------------------------------------------


async def resolve(client: RpcClient, task: dict[str, object]) -> None:
    """Decide about one task; what comes too late is no fault."""
    vm = str(task["resource"]).removeprefix("vm:")
    api = client.prepare(ops=True, namespace="gracekit.tasks", version="1.1", timeout=5)
    which = {"task_id": task["task_id"], "version": task["version"]}
    with contextlib.suppress(GracekitError):
        match vm.partition("-")[0]:
            case "late":
                return
            case "huge":
                await api.call("give_up", **which, reason="too large")
            case "spare":
                await api.call("cancel", **which, reason="not needed")
            case _:
                make_room(1)  # killed here, it leaves room that nobody was told of
                await api.call("retry", **which)
        effect("resolved", vm)


async def look(client: RpcClient) -> None:
    """Go through all that waits: notifications may have come while no resolver lived."""
    api = client.prepare(ops=True, namespace="gracekit.tasks", version="1.1", timeout=5)
    after: int | None = 0
    with contextlib.suppress(GracekitError):
        while after is not None:
            page = await api.call("list_pending", after=after, limit=20)
            for task in page["tasks"]:
                await resolve(client, task)
            after = page["next"]


async def listen(client: RpcClient, url: str) -> None:
    async with NotificationListener(url, "rooms-notifications", priorities=("error",)) as listener:
        async for one in listener:
            effect("notified", one.payload["task_id"], one.message_id)
            await resolve(client, one.payload)


async def be_resolver() -> None:
    url = os.environ["GRACEKIT_TRANSPORT_URL"]
    async with svc.client(url) as client, asyncio.TaskGroup() as group:
        group.create_task(listen(client, url))
        while True:
            await look(client)
            await asyncio.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    if sys.argv[1:] == ["resolver"]:
        asyncio.run(be_resolver())
    configure_logging("text", level=logging.DEBUG)
    sys.exit(svc.run())
