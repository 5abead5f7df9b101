"""An agent for virtual machines: what its users wish of them, and what is seen.

gracekit run examples.vms.agent
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from examples.vms.driver import Driver
from gracekit import Context, Found, NoCapacity, Service, Settled, Wait

ROOM = 1024  # MiB of this host
BUDGET, BUDGET_S = 5, 8 * 3600  # so many starts after a crash, in that time

svc = Service("vms", defaults={"reconciliation_interval": "60s"})
vm = svc.kind("vm", every=os.environ.get("VMS_EVERY", "1m"), stuck_after="0s")
driver = Driver(Path(os.environ.get("VMS_DIRECTORY", "machines")))
records = sqlite3.connect("records.db", check_same_thread=False, isolation_level=None)
records.row_factory = sqlite3.Row
records.execute("""
CREATE TABLE IF NOT EXISTS vm (
    name TEXT PRIMARY KEY, memory INTEGER, wanted TEXT, source TEXT, on_stop TEXT,
    state TEXT DEFAULT '', starts TEXT DEFAULT '[]', fence INTEGER DEFAULT 0)""")


def row(name: str) -> sqlite3.Row:
    """The record of one."""
    found = records.execute("SELECT * FROM vm WHERE name = ?", (name,)).fetchone()
    if found is None:
        raise LookupError(f"no vm {name}")
    return found  # type: ignore[no-any-return]


def status(one: sqlite3.Row) -> str:
    """What is wished, and what is seen: `up/crashed`."""
    return f"{one['wanted']}/{one['state'] or driver.seen(one['name'])}"


# -- rules --------------------------------------------------------------------------------


@vm.find
async def machines(ctx: Context, *, after: str | None, limit: int) -> list[Found]:
    """Those that are not as they are wished."""
    behind = records.execute("SELECT * FROM vm WHERE name > ? ORDER BY name", (after or "",))
    return [Found(one["name"], status(one)) for one in behind if status(one) in vm.rules][:limit]


@vm.write
async def write(ctx: Context, found: Found, new: str, facts: dict[str, Any]) -> bool:
    """Only if nobody has wished something else meanwhile, nor a later token has written."""
    wanted, state = new.split("/")
    changed = records.execute(
        "UPDATE vm SET wanted = ?, state = ?, source = coalesce(?, source), fence = ?"
        " WHERE name = ? AND wanted = ? AND fence <= ?",
        (
            *(wanted, state if state == "given up" else "", facts.get("source"), ctx.fence),
            *(found.id, found.status.split("/")[0], ctx.fence),
        ),
    )
    return changed.rowcount == 1


DEAD = ("crashed", "stopped", "rebooted")


@vm.act(*(f"up/{seen}" for seen in DEAD), done="up/absent", failed="up/given up", before_use=True)
async def clean(ctx: Context, found: Found) -> Settled | None:
    """Decide by the evidence, and destroy it: a dead one takes the memory that others need."""
    one, seen = row(found.id), found.status.split("/")[1]
    if seen == "crashed" and not charge(one):
        return Settled("up/given up")
    await asyncio.to_thread(driver.destroy, found.id)
    if seen == "stopped" and one["on_stop"] == "down":
        return Settled("down/absent", source="user")
    return None


def charge(one: sqlite3.Row) -> bool:
    """Count a start after a crash; false if there were too many lately."""
    lately = [at for at in json.loads(one["starts"]) if at > time.time() - BUDGET_S]
    if len(lately) >= BUDGET:
        return False
    starts = json.dumps([*lately, time.time()])
    records.execute("UPDATE vm SET starts = ? WHERE name = ?", (starts, one["name"]))
    return True


@vm.act(*(f"down/{seen}" for seen in DEAD), done="down/absent", failed="down/lost", before_use=True)
async def remove(ctx: Context, found: Found) -> None:
    """It is not wanted; its evidence was looked at, or is not asked for."""
    await asyncio.to_thread(driver.destroy, found.id)


@vm.act("up/absent", done="up/running", failed="up/given up")
async def start_again(ctx: Context, found: Found) -> Wait | None:
    """Start it where there is room."""
    one = row(found.id)
    if driver.memory() + one["memory"] > ROOM:
        return Wait("10s")
    driver.start(found.id, one["memory"])
    return None


@vm.act("down/running", done="down/absent", failed="down/lost")
async def stop_again(ctx: Context, found: Found) -> None:
    """A stop was cut off before it had ended it."""
    await asyncio.to_thread(driver.destroy, found.id)


# -- what users ask -----------------------------------------------------------------------


@svc.rpc(resource=("vm", "name"), on_interrupt="retry")
async def create(ctx: Context, name: str, memory: int, on_stop: str = "down") -> None:
    """Make one and start it; dead ones give up their memory first."""
    await ctx.settle("vm")
    if name not in driver.names() and driver.memory() + memory > ROOM:
        raise NoCapacity(f"{memory} MiB are not free")
    records.execute(
        "INSERT INTO vm (name, memory, wanted, source, on_stop) VALUES (?, ?, 'up', 'admin', ?)"
        " ON CONFLICT DO NOTHING",
        (name, memory, on_stop),
    )
    driver.start(name, memory)


@svc.rpc(resource=("vm", "name"), on_interrupt="retry")
async def wish(ctx: Context, name: str, wanted: str) -> None:
    """Start or stop one; a stop is right also for one that has stopped by itself."""
    row(name)
    records.execute(
        "UPDATE vm SET wanted = ?, source = 'admin', state = '', starts = '[]' WHERE name = ?",
        (wanted, name),
    )
    if wanted == "up":
        await ctx.settle("vm")
        driver.start(name, row(name)["memory"])
    else:
        await asyncio.to_thread(driver.destroy, name)


@svc.rpc
async def info(ctx: Context, name: str) -> dict[str, Any]:
    """What is wished, seen, and what that means; changes nothing."""
    one = row(name)
    seen = driver.seen(name)
    words = {
        "up/running": "runs",
        "up/stopped": "should run, but was shut down from inside",
        "up/crashed": f"should run, but has crashed ({driver.evidence(name) or 'no evidence'})",
        "up/rebooted": "should run, but its host was rebooted",
        "up/given up": f"should run, but has crashed {BUDGET} times in 8 hours: given up",
        "up/absent": "should run, and is about to be started",
    }
    down = f"down, as its {'user' if one['source'] == 'user' else 'operator'} wished"
    return {"wanted": one["wanted"], "source": one["source"], "seen": seen, "status": status(one),
            "words": words.get(status(one), down)}  # fmt: skip
