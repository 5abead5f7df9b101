"""A program with a SIGTERM handler of its own, which lends its signals to an embedded service."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from gracekit import Runtime
from tests.logs import configure_logging
from tests.loops import LOOPS
from tests.process.served import effect, svc

LEND = os.environ.get("GRACEKIT_TEST_LEND", "yes") == "yes"


async def main() -> int:
    """Serve until the Runtime has drained, then go on until the program's own handler is called."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def mine(*_: object) -> None:
        effect("mine", "-")
        loop.call_soon_threadsafe(told.set)

    signal.signal(signal.SIGTERM, mine)
    runtime = Runtime(svc, signals=LEND)
    try:
        async with runtime:
            report = await runtime.serve()
    except RuntimeError as error:
        effect("failed", "-", *str(error).split())
    else:
        effect("report", "-", int(report.exit_code), report.finished)
    alarm_s, _ = signal.getitimer(signal.ITIMER_REAL)
    restored = signal.getsignal(signal.SIGTERM) is mine
    effect("after", "-", "restored" if restored else "taken", alarm_s)
    await told.wait()
    return 3


if __name__ == "__main__":
    configure_logging("text", level=logging.DEBUG)
    with asyncio.Runner(loop_factory=LOOPS[os.environ.get("GRACEKIT_TEST_LOOP", "asyncio")]) as on:
        sys.exit(on.run(main()))
