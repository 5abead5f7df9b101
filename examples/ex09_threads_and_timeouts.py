"""09 - A plain function runs in a thread; a timeout can only ask it to end.

    python examples/ex09_threads_and_timeouts.py

Blocking work is written as `def`, not `async def`: gracekit runs it in a worker
thread, and the event loop goes on serving others. Python cannot stop a thread.
When the method's `timeout` is over its caller is told at once, but the task
stays in flight, with its place and its lease, until the function has returned.
So a function that may take long looks at `ctx.cancelled` from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading

from gracekit import Context, MethodTimeoutError, Runtime, Service

svc = Service("tapes")
slots = {"tape-1": threading.Event(), "tape-2": threading.Event()}
begun = threading.Event()


@svc.rpc(resource="tape", timeout="1s")
def read(ctx: Context, tape: str) -> str:
    """Block until the tape is in its slot, as drivers do, and look up now and then."""
    print(f"{tape}: the thread waits for it")
    begun.set()
    while not slots[tape].wait(timeout=0.05):
        if ctx.cancelled:
            print(f"{tape}: the thread was asked to end, and does")
            return "read by nobody"
    return f"{tape} was read"


@svc.rpc
async def insert(_ctx: Context, tape: str) -> None:
    """Runs on the event loop, which no blocked thread holds up."""
    slots[tape].set()
    print(f"{tape}: inserted meanwhile")


async def main() -> None:
    """A tape that comes in time, and one that never comes."""
    async with Runtime(svc), svc.client("sqlite:///gracekit.db") as client:
        answer = asyncio.create_task(client.call(read, tape="tape-1"))
        await asyncio.to_thread(begun.wait)
        await client.call(insert, tape="tape-1")
        print(f"the caller's answer: {await answer}")
        told = None
        try:
            await client.call(read, tape="tape-2")
        except MethodTimeoutError as error:
            told = error
    # Not before the thread is done: two that print at once mix their lines.
    print(f"the caller was told: {told}")
    print("drained: the thread has returned, so nothing was left behind")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main())
