"""The service of the demonstration, its callers, and the files in which they record what they do.

The service has five methods of different policies. `python -m gracekit.demo.app send|ping` is a
caller. All of them write into files of the working directory, one JSON object on each line, so that
one can check afterwards what was done, how often, and by which process. A line is written by one
`write` to a file opened for appending. So lines of several processes never mix, and a killed
process leaves only whole lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from gracekit.clock import Clock
from gracekit.config.loading import load
from gracekit.errors import GracekitError, RpcError
from gracekit.recovery.decisions import Done, Retry
from gracekit.request.context import Context
from gracekit.rpc.client import RpcClient
from gracekit.service import Service

CONFIRMED: Final = "confirmed.jsonl"
"""From the senders, once confirmed: {"id", "label", "method", "args", "items", …}."""
EFFECTS: Final = "effects.jsonl"
"""From the handlers: {"id", "item", "process", "pid", "at"}."""
PROCESSES: Final = "processes.jsonl"
"""From the story, when a process ends: {"name", "pid", "exit_code", "cursors": {id: cursor}}."""
PINGS: Final = "pings.jsonl"
"""From the pinger: {"at", "answer": null or {"process", "draining"}, "took_s"}."""

PING_EVERY_S: Final = 0.5
PROCESS_VARIABLE: Final = "DEMO_PROCESS"
PARENT_VARIABLE: Final = "DEMO_PARENT"
TOPIC_VARIABLE: Final = "DEMO_TOPIC"
START: Final = "start"
DONE: Final = "done"
ATTACHED: Final = "attached"

Entry = dict[str, Any]


class DemoError(GracekitError):
    """The demonstration could not be played or judged."""


def append(path: Path, entry: Entry) -> None:
    """Add one line."""
    line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def entries(path: Path) -> list[Entry]:
    """All complete lines; empty if there is no file."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


# -- the service ----------------------------------------------------------------------

svc = Service(os.environ.get(TOPIC_VARIABLE, "demo"))


def name() -> str:
    """The name of this process in the story; its pid outside of a story."""
    return os.environ.get(PROCESS_VARIABLE) or str(os.getpid())


def note(ctx: Context, item: str | int) -> None:
    """Record that *item* of this task was done in this process."""
    entry = {"id": ctx.request_id, "item": item, "process": name(), "pid": os.getpid()}
    append(Path(EFFECTS), {**entry, "at": Clock().wall()})


@svc.rpc
async def charge(ctx: Context, account: str, seconds: float) -> str:
    """A charge, which must not happen twice: on_interrupt="error", the default."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return account


@svc.rpc(on_interrupt="retry")
async def resize(ctx: Context, vm: str, seconds: float) -> str:
    """A resize, which may be repeated from the beginning; it has no safe point."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return vm


@svc.rpc(on_interrupt="retry", resource="vm")
async def reboot(ctx: Context, vm: str, seconds: float) -> str:
    """A reboot, one at a time for each vm: the second waits for the first one's lease."""
    note(ctx, START)
    await asyncio.sleep(seconds)
    note(ctx, DONE)
    return vm


@svc.rpc(on_interrupt="retry", resource="disk")
async def copy(ctx: Context, disk: str, blocks: int, seconds: float) -> int:
    """A copy with a safe point after each block: a drain stops it there, the next run resumes."""
    async for block in ctx.steps(range(blocks)):
        await asyncio.sleep(seconds / blocks)
        note(ctx, block)
    return len(disk)


@svc.rpc(on_interrupt="probe", resource="volume")
async def attach(ctx: Context, volume: str, seconds: float) -> str:
    """An attachment: it acts, then waits for a confirmation that does not come in time."""
    await asyncio.sleep(0.5)
    note(ctx, ATTACHED)
    await asyncio.sleep(seconds)
    return volume


@attach.probe
async def _(ctx: Context, volume: str, seconds: float) -> Done | Retry:  # noqa: ARG001
    """Look in the file whether the volume was attached."""
    mine = [entry for entry in entries(Path(EFFECTS)) if entry["id"] == ctx.request_id]
    return Done(volume) if any(entry["item"] == ATTACHED for entry in mine) else Retry()


@svc.ops(on_interrupt="requeue")
async def ping(ctx: Context) -> dict[str, str | bool]:
    """Answers even during a drain."""
    return {"process": name(), "draining": ctx.draining}


@svc.periodic(every=1.0)
def leave_with_the_story(_: Context) -> None:
    """End this process when the story is gone: a killed story cannot stop its processes."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)


# -- its callers ----------------------------------------------------------------------


async def cast(client: RpcClient, request: Entry) -> str:
    """Send one request; return its id, which is then recorded as confirmed.

    The transport has taken it then, so it must not be lost from then on.
    """
    request_id = await client.cast(request["method"], **request["args"])
    entry = {"id": request_id, "sender": name(), "at": Clock().wall()}
    append(Path(CONFIRMED), entry | request)
    return request_id


async def send() -> None:
    """Cast the requests on standard input, one JSON object on each line, until its end."""
    async with svc.client(load().transport_url) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            await cast(client, json.loads(line))


async def pings() -> None:
    """Call `ping` and record who answered, until the parent process is gone."""
    parent, clock = os.getppid(), Clock()
    async with svc.client(load().transport_url) as client:
        view = client.prepare(timeout=1.0)
        while os.getppid() == parent:
            began = clock.loop()
            try:
                answer = await view.call(ping)
            except RpcError:
                answer = None
            took_s = round(clock.loop() - began, 4)
            append(Path(PINGS), {"at": clock.wall(), "answer": answer, "took_s": took_s})
            await asyncio.sleep(PING_EVERY_S)


if __name__ == "__main__":
    asyncio.run({"send": send, "ping": pings}[sys.argv[1]]())
