"""A service that loses its environment while it lives: from then on nothing more can be loaded."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading

from gracekit import Context, Service
from tests.logs import configure_logging
from tests.process.served import effect

LOADED_WITHIN_S = 5.0

svc = Service("uprooted")


@svc.rpc
async def lose_environment(ctx: Context) -> bool:
    """Returns whether what threads need was loaded by then, though no thread has run."""
    loaded = False
    for _ in range(int(LOADED_WITHIN_S / 0.05)):
        loaded = "anyio._backends._asyncio" in sys.modules
        if loaded:
            break
        await asyncio.sleep(0.05)
    sys.meta_path.clear()
    return loaded


@svc.rpc(on_interrupt="error")
def in_thread(ctx: Context) -> bool:
    return threading.current_thread() is threading.main_thread()


@svc.on_stop
def stop() -> None:
    effect("on_stop", "-")


if __name__ == "__main__":
    configure_logging("text", level=logging.DEBUG)
    svc.run()
