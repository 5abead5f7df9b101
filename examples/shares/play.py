"""Records that nobody works on any more, a crash in the middle, and what a start makes of them.

    python -m examples.shares.play

Three shares are made by requests. Then somebody changes records behind the
manager's back, as lost requests and restored databases do, and the manager is
started again. It is killed while it asks the backend for a share. Its next life
settles the rest. The log of the backend says what was asked, and by which life.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from examples.shares.api import Api, set_status, show
from examples.shares.database import TRANSIENT, Record
from examples.shares.driver import DummyDriver, Thing
from examples.shares.manager import config, database, svc

CHECKOUT = Path(__file__).parents[2]
SETTINGS = {"GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "100ms"}
LIMIT_S = 30.0

backend = DummyDriver(config.backend)


async def main() -> None:
    """Shares by request, a mess, a crash, and order."""
    async with manager():
        await make_shares()
    make_a_mess()
    print("\nnobody works on these:")
    show()
    backend.plant("sh-3", "hang")
    async with manager() as killed:
        await until(lambda: waiting() == ["sh-3", "sn-1"] and "sh-3" in asked_by(killed))
        killed.kill()
        await killed.wait()
    print("\nthe manager was killed while the backend did not answer for sh-3")
    backend.mend("sh-3")
    async with manager() as again:
        await until(lambda: not waiting())
    print("\nafter the next start:")
    show()
    print(f"\nwhat that one has asked the backend for: {', '.join(sorted(asked_by(again)))}")


async def make_shares() -> None:
    """As users do: a record and a request for each."""
    async with svc.client("sqlite:///gracekit.db") as client:
        api = Api(database, client, config.host)
        for share in ("sh-1", "sh-2", "sh-3"):
            await api.create_share(share, size=5)
        await until(lambda: not waiting())
    print("made by requests:")
    show()


def make_a_mess() -> None:
    """Statuses without a request, in a backend that has gone its own way."""
    for share, status in (("sh-1", "extending"), ("sh-2", "deleting"), ("sh-3", "creating")):
        set_status("share", share, status)
    there = Thing(size=9, export_locations=["nas-1:/sh-1"], fence=1)
    backend.put("share", "sh-1", there)  # it was extended, and nobody has heard of it
    for kind, id_, status, parent in (
        ("share_server", "srv-7", "creating", None),
        ("share", "sh-4", "creating", "srv-7"),  # its server will not be there
        ("share", "sh-5", "creating", None),  # the backend has never heard of it
        ("share", "sh-6", "server_migrating", None),
        ("snapshot", "sn-1", "manage_starting", "sh-1"),
    ):
        database.insert(Record(kind=kind, id=id_, host=config.host, status=status, parent=parent))


def waiting() -> list[str]:
    """Ids of the records that a rule or a request is to settle."""
    records = [record for record in database.all() if record.status in TRANSIENT[record.kind]]
    return [record.id for record in records if record.status != "server_migrating"]


def asked_by(service: Process) -> list[str]:
    """Ids of what one process has called the backend about."""
    log = backend.root / "backend.log"
    calls = map(json.loads, log.read_text().splitlines() if log.exists() else [])
    return [call["id"] for call in calls if call["pid"] == service.pid]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds, for a while."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - files of other processes
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def manager() -> AsyncIterator[Process]:
    """The service as a process: begins when it takes requests, ends by SIGTERM."""
    run = ("-m", "gracekit", "run", "--app-dir", CHECKOUT, "examples.shares.manager:svc")
    service = await asyncio.create_subprocess_exec(
        sys.executable, *run, stdout=PIPE, env={**os.environ, **SETTINGS}
    )
    try:
        await listen(service, until="service.serving")
        yield service
    finally:
        if service.returncode is None:
            service.terminate()
        await listen(service)


async def listen(service: Process, until: str | None = None) -> None:
    """Pass on what a service prints, without its log, until it says *until* or has ended."""
    assert service.stdout is not None
    async for line in service.stdout:
        text = line.decode()
        if not text.startswith("{"):
            print(f"    {text}", end="")
        if until is not None and until in text:
            return
    code = await service.wait()
    assert until is None, f"it ended with {code} before {until!r}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
