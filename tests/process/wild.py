"""A service whose code ends more than itself, alone or embedded in a program that ends around it.

`python -m tests.process.wild` runs it alone; with a word behind it, embedded that way.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable

import anyio

from gracekit import Context, Runtime, Service
from tests.logs import configure_logging
from tests.process.served import GO, effect, until_go

svc = Service("wild")
armed = asyncio.Event()


# -- what is in flight meanwhile ----------------------------------------------------------------


@svc.rpc(on_interrupt="retry", resource="vm", settle=0.1)
async def retried(ctx: Context, key: str, vm: str) -> str:
    return await until_go(ctx, key)


@svc.rpc(on_interrupt="requeue")
async def fetched(ctx: Context, key: str) -> str:
    return await until_go(ctx, key)


@svc.rpc(on_interrupt="retry", resource="disk", settle=0.1)
def in_thread(ctx: Context, key: str, disk: str) -> str:
    effect("start", key, ctx.attempt)
    while not GO.exists():
        effect("beat", key)
        time.sleep(0.02)
    effect("done", key)
    return key


# -- what ends more than itself -----------------------------------------------------------------


async def leave() -> None:
    await asyncio.sleep(0.05)
    sys.exit(3)


@svc.rpc
async def exit_in_child(ctx: Context) -> None:
    child = asyncio.create_task(leave())
    await asyncio.wait({child})


@svc.rpc
async def exit_in_group(ctx: Context) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(leave())


@svc.rpc
async def exit_in_gather(ctx: Context) -> None:
    await asyncio.gather(leave(), asyncio.sleep(60))


@svc.rpc
async def exit_in_callback(ctx: Context) -> None:
    asyncio.get_running_loop().call_later(0.05, sys.exit, 3)


@svc.rpc
async def exit_in_job(ctx: Context) -> None:
    armed.set()


@svc.periodic(every=0.1)
async def job(ctx: Context) -> None:
    if armed.is_set():
        armed.clear()
        asyncio.get_running_loop().create_task(leave())


@svc.rpc
async def interrupt_in_callback(ctx: Context) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    asyncio.get_running_loop().call_soon(interrupt)


@svc.rpc
async def stop_loop(ctx: Context) -> None:
    asyncio.get_running_loop().stop()


@svc.rpc(on_interrupt="error")
async def close_every_file(ctx: Context) -> None:
    """As a daemon's set-up does, or a child before it becomes another program."""
    os.closerange(3, 65536)
    await asyncio.sleep(60)


@svc.rpc(on_interrupt="error")
def close_every_file_in_thread(ctx: Context) -> None:
    os.closerange(3, 65536)
    time.sleep(60)


@svc.rpc
async def cancel_everything(ctx: Context) -> None:
    effect("cancels", "-")
    for task in asyncio.all_tasks():
        task.cancel()


@svc.rpc
async def leave_a_task_that_stays(ctx: Context) -> None:
    async def stays() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                effect("swallowed", "-")

    svc.kept = asyncio.create_task(stays())  # type: ignore[attr-defined]
    await asyncio.sleep(0)


@svc.rpc
async def leave_a_task_that_blocks(ctx: Context) -> None:
    async def blocks() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            effect("swallowed", "-")
            time.sleep(3600)

    svc.kept = asyncio.create_task(blocks())  # type: ignore[attr-defined]
    await asyncio.sleep(0)


@svc.rpc
async def leave_a_hook_that_blocks(ctx: Context) -> None:
    def blocks() -> None:
        effect("swallowed", "-")
        time.sleep(3600)

    atexit.register(blocks)


@svc.rpc
async def leave_a_hook_that_keeps_the_interpreter(ctx: Context) -> None:
    def keeps() -> None:
        effect("kept", "-")
        ctypes.PyDLL(None).sleep(60)

    atexit.register(keeps)


@svc.rpc
async def leave_a_hook_in_c_that_hangs(ctx: Context) -> None:
    """As a C library's: it runs when Python has ended already."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc.pause, None)
    effect("kept", "-")


# -- programs around it ---------------------------------------------------------------------------


async def main_returns() -> None:
    """The Runtime lives in a task of its own, and `main` returns under it."""

    async def host() -> None:
        async with Runtime(svc) as runtime:
            await runtime.serve()

    hosting = asyncio.create_task(host())
    while not GO.with_name("end").exists():
        await asyncio.sleep(0.02)
    effect("leaves", "-")
    del hosting


async def scope_is_cancelled() -> None:
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when_told, scope.cancel)
            async with Runtime(svc) as runtime:
                await runtime.serve()
    effect("after", "-")


async def sibling_fails() -> None:
    def fail() -> None:
        raise ValueError("the sibling failed")

    async with asyncio.TaskGroup() as group:
        group.create_task(_cancel_when_told(fail))
        async with Runtime(svc) as runtime:
            await runtime.serve()


async def interrupted() -> None:
    """Ctrl-C is the program's: the first cancels `main`, the second leaves the loop."""
    async with Runtime(svc) as runtime:
        await runtime.serve()


async def nobody_serves() -> None:
    """As in a web framework's lifespan: nobody awaits `serve`."""
    async with Runtime(svc, signals=True) as runtime:
        while runtime.report is None:
            await asyncio.sleep(0.02)
        effect("report", "-", int(runtime.report.exit_code), runtime.report.finished)


async def _cancel_when_told(cancel: Callable[[], None]) -> None:
    while not GO.with_name("end").exists():
        await asyncio.sleep(0.02)
    effect("leaves", "-")
    cancel()


PROGRAMS = {
    function.__name__: function
    for function in (main_returns, scope_is_cancelled, sibling_fails, interrupted, nobody_serves)
}

if __name__ == "__main__":
    configure_logging("text", level=logging.DEBUG)
    if len(sys.argv) == 1:
        svc.run()
    try:
        asyncio.run(PROGRAMS[sys.argv[1]]())
    finally:
        effect("left", "-")
        os._exit(0)  # the interpreter would wait for a thread that never returns
