"""A service with one method, and a call to it.

In one terminal, anywhere (two files, `gracekit.db` and `gracekit-store.db`, are made there):

    gracekit run --app-dir examples ex01_hello:svc

In another, in the same directory:

    python examples/ex01_hello.py World

Ctrl-C in the first terminal drains it: it takes no more requests, ends what
runs, and leaves. A call that is sent meanwhile waits in `gracekit.db` for the
next start, or until its timeout.
"""

from __future__ import annotations

import asyncio
import sys

from gracekit import Context, Service

svc = Service("hello")


@svc.rpc
async def greet(ctx: Context, name: str) -> str:
    """Say hello; the request id is the same in the log, the journal and here."""
    await asyncio.sleep(0.1)
    return f"Hello, {name}! (request {ctx.request_id[:8]}, attempt {ctx.attempt})"


async def main(name: str) -> None:
    """Call it once."""
    async with svc.client("sqlite:///gracekit.db") as client:
        answer = await client.prepare(timeout="10s").call(greet, name=name)
    print(answer)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["you"]))
