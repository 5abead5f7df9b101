"""A service of equal requests, each of which ends when the test says so."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from gracekit import Context, Service
from tests.logs import configure_logging
from tests.process.served import effect

GO = "GRACEKIT_TEST_GO"
"""Variable: a directory. A request ends once it has a file that is named for its key."""

svc = Service("equal")


def may_end(key: str) -> bool:
    return Path(os.environ[GO], key).exists()


async def waits(ctx: Context, key: str) -> None:
    effect("start", key)
    while not may_end(key):
        await asyncio.sleep(0.01)
    effect("done", key)


def blocks(ctx: Context, key: str) -> None:
    effect("start", key)
    while not may_end(key):
        time.sleep(0.01)
    effect("done", key)


if __name__ == "__main__":
    configure_logging("text")
    (word,) = sys.argv[1:]
    svc.rpc(on_interrupt="error")({"waits": waits, "blocks": blocks}[word])
    sys.exit(svc.run())
