"""A service whose callers look up, wait and cancel: `python -m tests.process.asked`."""

from __future__ import annotations

import asyncio
import logging

from gracekit import Context, Service
from tests.logs import configure_logging
from tests.process.served import GO, effect

svc = Service("asked", task_api="callers")


@svc.rpc(
    on_interrupt="retry",
    retry_on=ConnectionError,
    retries=5,
    backoff="200ms",
    max_attempts=1000,
    allow_cancel="anyone",
)
async def work(ctx: Context, key: str, fails: int = 0, waits: bool = False) -> str:
    """Fail so many times; then wait for the test's go, if that is asked for."""
    effect("start", key)
    while waits and not GO.exists():
        await asyncio.sleep(0.02)
    if ctx.attempt <= fails:
        raise ConnectionError(key)
    effect("done", key)
    return f"{key} is done"


if __name__ == "__main__":
    configure_logging(logging.INFO)
    svc.run()
