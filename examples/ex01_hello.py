"""01 - A service with one method, and a call to it.

    python examples/ex01_hello.py World

The service and its caller share one process here, as in a test; the queue and
the journal are two files in a temporary directory. With two terminals, both in
one directory, it is the same service:

    gracekit run --app-dir examples ex01_hello:svc
    gracekit call hello greet name=World
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile

from gracekit import Context, Runtime, Service

svc = Service("hello")


@svc.rpc
async def greet(ctx: Context, name: str) -> str:
    """Say hello; the request has the same id in the log, in the journal and here."""
    return f"Hello, {name}! This is request {ctx.request_id[:8]}, attempt {ctx.attempt}."


async def main(name: str) -> None:
    """Serve, call, drain: leaving the block of the Runtime drains it."""
    async with Runtime(svc), svc.client("sqlite:///gracekit.db") as client:
        # The method itself is passed, so that a type checker knows its arguments and its result.
        print(await client.call(greet, name=name))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        asyncio.run(main(*sys.argv[1:2] or ["you"]))
