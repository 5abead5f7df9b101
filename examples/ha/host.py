"""A host of the cluster: it runs the virtual machine whenever it gets the lease.

`python -m examples.ha.host NAME` is one of them; `play` starts three.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from gracekit import HeldLease, LeaseHeld, Leases, Settings
from gracekit.errors import GracekitError

EFFECTS = "HA_EFFECTS"
STEP_S = 0.1


async def run_vm(host: str, lease: HeldLease) -> None:
    """Run it until the lease is lost: here it is a line in a file, ten times a second."""
    print(f"{host}: vm-1 runs here, token {lease.token}", flush=True)
    while not lease.lost.is_set():
        effect(host, lease.token)
        await asyncio.sleep(STEP_S)
    print(f"{host}: vm-1 is stopped: {lease.why_lost}", flush=True)


def effect(host: str, token: int) -> None:
    """What the machine does to the world; a backend would refuse a token below the highest."""
    with Path(os.environ[EFFECTS]).open("a") as file:
        file.write(f"{time.monotonic():.3f} {host} {token}\n")


async def main(host: str) -> None:
    """Take the lease whenever nobody else has it; after trouble with the store, join again."""
    while True:
        try:
            async with Leases(settings=settings(host)) as leases:
                while True:
                    async with leases.hold("vm", "vm-1", wait="1h", settle="1s") as lease:
                        await run_vm(host, lease)
        except LeaseHeld:
            continue
        except GracekitError as error:
            print(f"{host}: {error}", flush=True)
            await asyncio.sleep(1)


def settings(host: str) -> Settings:
    """Shorter times than the default ones: others take over within ten seconds."""
    return Settings(
        store_url=os.environ["GRACEKIT_STORE_URL"],
        run_directory=os.environ["GRACEKIT_RUN_DIRECTORY"],
        host=host,
        beat_s=0.8,
        fail_after_s=4.0,
        hard_after_s=6.0,
        dead_after_s=8.5,
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
