"""A program that builds its Runtime first and forks then: `daemon` or `workers`."""

from __future__ import annotations

import asyncio
import logging
import os

from gracekit.runtime.face import Runtime
from tests.logs import configure_logging
from tests.process import served

HOW = "GRACEKIT_TEST_FORKED"


async def live(runtime: Runtime) -> None:
    async with runtime:
        await runtime.serve()


def main() -> None:
    configure_logging("text", level=logging.DEBUG)
    runtime = Runtime(served.svc, signals=True)
    if os.environ[HOW] == "daemon":
        if os.fork():
            os._exit(0)  # the parent is gone; the child is the service
        asyncio.run(live(runtime))
        return
    workers = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            asyncio.run(live(runtime))
            os._exit(0)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
