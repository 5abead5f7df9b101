"""A service whose callers ask what became of their requests: `python -m tests.process.copier`.

Its words are the `queues` of the service. A request ends once there is a file of its key.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from gracekit import Context, Service
from tests.logs import configure_logging
from tests.process.served import effect

svc = Service(
    "copies", task_api="callers", queues="directed" if "directed" in sys.argv[1:] else "all"
)


@svc.rpc(on_interrupt="retry", allow_cancel="sender")
async def copy(ctx: Context, key: str, size: int = 0) -> str:
    effect("start", key, ctx.host)
    while not Path(key).exists():
        await asyncio.sleep(0.02)
    effect("done", key)
    return f"{key} on {ctx.host}{' ' * size}"


if __name__ == "__main__":
    configure_logging("text", level=logging.DEBUG)
    sys.exit(svc.run())
