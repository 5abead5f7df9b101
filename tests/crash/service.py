"""The service that is killed: `python service.py`, in a directory of its own.

Everything that it does is one line in the file `effects`, appended by one write
each, so that a kill cuts no line and loses none. Its handlers wait for a file
called `gate` where a test wants them to be under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from gracekit import Context, Done, Found, NoCapacity, Retry, Service, Settled, Wait
from gracekit.runtime.process_life import run_service
from tests.process.volumes import RECORDS, VolumeRecords

POLICIES: Final = ("error", "retry", "probe", "requeue")
JOURNALED: Final = POLICIES[:3]
TOPIC: Final = "crash"

EFFECTS: Final = Path("effects")
GATE: Final = Path("gate")

svc = Service(TOPIC, task_api=True)
svc.answers_callers = True  # beside resolvers


def tell(what: str, ctx: Context, **more: Any) -> None:
    """Append one effect."""
    append({"what": what, "id": ctx.request_id, "attempt": ctx.attempt, "fence": ctx.fence, **more})


def append(line: dict[str, Any]) -> None:
    file = os.open(EFFECTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{json.dumps(line)}\n".encode())
    os.close(file)


async def gate(ctx: Context, *, or_drain: bool = False) -> None:
    while not GATE.exists() and not (or_drain and ctx.draining):
        await asyncio.sleep(0.005)


async def steps(ctx: Context) -> None:
    """Three items; in the second it waits, the first one's cursor being marked."""
    async for number in ctx.steps(range(3)):
        tell("item", ctx, number=number)
        if number == 1:
            await gate(ctx, or_drain=True)


async def stuck(ctx: Context) -> None:
    """Does not end when it is cancelled."""
    waiting = asyncio.create_task(gate(ctx))
    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(waiting)


async def borrow(ctx: Context, thing: str) -> None:
    async with ctx.lease("disk", thing) as guard:
        tell("borrowed", ctx, resource=f"disk:{thing}", token=guard.token)


def is_first(key: str) -> bool:
    """Whether it is the first time that a process comes here with this key."""
    with contextlib.suppress(FileExistsError):
        Path(f"seen-{key}").touch(exist_ok=False)
        return True
    return False


def die_once(key: str) -> None:
    """End the process, the first time that it comes here with this key."""
    if is_first(key):
        os.kill(os.getpid(), signal.SIGKILL)


def stop_short_once(how: str, key: str) -> None:
    if how == "die":
        die_once(key)
    elif is_first(key):
        raise TimeoutError("the backend is slow")


async def work(ctx: Context, how: str = "now", thing: str = "") -> str:
    """One request; *how* says what happens between its start and its end."""
    tell("start", ctx, resource=f"thing:{thing}" if ctx.fence else None)
    match how:
        case "gate":
            await gate(ctx)
        case "steps":
            await steps(ctx)
        case "stuck":
            await stuck(ctx)
        case "borrow":
            await borrow(ctx, thing)
        case "park" if not GATE.exists():
            raise NoCapacity("no room", requested={"thing": thing})
        case "hold":
            await ctx.hold("operation", thing, at_most="1h")
        case "end_hold":
            await ctx.end_hold("operation", thing)
        case "fail" | "die":
            stop_short_once(how, ctx.request_id)
    tell("done", ctx, resource=f"thing:{thing}" if ctx.fence else None)
    if how == "die_done":
        die_once(ctx.request_id)
    return "done"


async def probe(ctx: Context, **_: Any) -> Done | Retry:
    """The truth is what the file says."""
    done = any(one["what"] == "done" and one["id"] == ctx.request_id for one in effects())
    tell("probe", ctx)
    return Done("done") if done else Retry()


async def errored(ctx: Context, reason: str, **_: Any) -> None:
    tell("errored", ctx, reason=reason)


def effects(path: Path = EFFECTS) -> list[dict[str, Any]]:
    """What was done, in order."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def declare(name: str, **options: Any) -> None:
    async def handler(ctx: Context, how: str = "now", thing: str = "") -> str:
        return await work(ctx, how, thing)

    handler.__name__ = name
    method = svc.rpc(allow_cancel="anyone", **options)(handler)
    method.errored(errored)
    if options["on_interrupt"] == "probe":
        method.probe(probe)


# -- resources, where the test has written records of them ------------------------


def tell_of_rule(what: str, ctx: Context, found: Found) -> None:
    """Append one effect of a rule: each of its acts has a token of its own."""
    attempt = {"id": f"rule of {found.id}", "attempt": ctx.fence, "fence": ctx.fence}
    line = {"what": what, "volume": found.id, "resource": f"volume:{found.id}", **attempt}
    append(line)


def declare_volumes() -> None:
    """A kind whose rules tell what they do; `dies` and `waits` in an id say how they behave."""
    kind = svc.kind("volume")

    @kind.find
    def find(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        return VolumeRecords().page(after, limit)

    @kind.write
    async def write(ctx: Context, found: Found, status: str, facts: dict[str, object]) -> bool:
        if found.id.endswith("dies"):
            die_once(found.id)
        assert ctx.fence is not None
        done = VolumeRecords().write(found.id, status, seen=found.status, fence=ctx.fence)
        tell_of_rule("wrote" if done else "refused", ctx, found)
        return done

    @kind.probe("creating", failed="error")
    async def ask(ctx: Context, found: Found) -> Settled | Wait:
        is_first = not any(one["what"] == "ask" and one["volume"] == found.id for one in effects())
        tell_of_rule("ask", ctx, found)
        return Wait("50ms") if is_first and found.id.endswith("waits") else Settled("available")

    @kind.delete("deleting", done="deleted", failed="error_deleting")
    async def delete(ctx: Context, found: Found) -> None:
        tell_of_rule("delete", ctx, found)


if RECORDS.exists():
    declare_volumes()
for policy in POLICIES:
    declare(f"work_{policy}", on_interrupt=policy)
for policy in JOURNALED:
    again = {"retry_on": TimeoutError, "backoff": "50ms"}
    declare(f"thing_{policy}", on_interrupt=policy, resource="thing", **again)

if __name__ == "__main__":
    sys.exit(run_service(svc))
