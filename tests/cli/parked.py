"""A service that parks tasks, for the tests of the command line; its store, as it is on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import apsw

from tests.cli.kit import PATIENCE_S, Running, gracekit, write_service

PARKING: Final = """
from __future__ import annotations

import asyncio

from gracekit import Context, NoCapacity, Service

svc = Service("compute")
go = asyncio.Event()


@svc.rpc(resource="vm", on_interrupt="retry")
async def build(
    ctx: Context, vm: str, memory_mb: int = 8192, key: str = "", why: str = "", zone: str = "a"
) -> str:
    if memory_mb > 4096:
        requested = {"memory_mb": memory_mb, **({"zone": zone} if zone != "a" else {})}
        raise NoCapacity(why or f"no host has {memory_mb} MiB free", requested=requested)
    print("built", vm, memory_mb, flush=True)
    return vm


@build.errored
async def failed(ctx: Context, vm: str, reason: str, **rest: object) -> None:
    print("gave up", vm, reason, flush=True)


@svc.rpc
async def echo(ctx: Context, value: object = None) -> object:
    return value


@svc.rpc(on_interrupt="requeue")
async def peek(ctx: Context) -> None:
    print("peeking", flush=True)
    await go.wait()
"""
CANARY: Final = "s3cret-canary"


def running(directory: Path, *words: str) -> Running:
    """`gracekit run` of a service that parks."""
    return Running(directory, *words, GRACEKIT_USE_PENDING_STATE="true")


def park(directory: Path, *task_ids: str, **args: Any) -> None:
    """Have a service that runs now park tasks, each for the vm of its id if no other is given."""
    for task_id in task_ids:
        given = {"vm": task_id, "key": CANARY, **args}
        words = [f"{name}={value}" for name, value in given.items()]
        called = ("call", "compute", "build", *words, "--id", task_id)
        answer = gracekit(directory, *called)
        assert (answer.code, "is parked" in answer.err) == (3, True), answer


def left_parked(directory: Path, *task_ids: str, text: str = PARKING, **args: Any) -> None:
    """A stopped service that left tasks parked, and has sent every notification."""
    write_service(directory, text=text)
    with running(directory) as run:
        park(directory, *task_ids, **args)
        wait_for(lambda: not rows(directory, "SELECT 1 FROM outbox"))
        run.process.terminate()
        assert run.wait() == 0


def rows(directory: Path, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    """What a query of the store finds; it may also change it."""
    connection = apsw.Connection(str(directory / "gracekit-store.db"))
    connection.set_busy_timeout(30_000)
    try:
        return list(connection.execute(sql, params))
    finally:
        connection.close()


def state(directory: Path, task_id: str) -> str:
    ((found,),) = rows(directory, "SELECT state FROM task WHERE request_id = ?", task_id)
    return str(found)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
