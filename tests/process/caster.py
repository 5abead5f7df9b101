"""A client process: casts at a steady rate and prints each id that was confirmed.

Usage: caster.py URL PREFIX COUNT PER_SECOND [ENOUGH]
With ENOUGH, the path of a file, it goes on behind COUNT until there is such a file.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

from gracekit import RpcClient, Undeliverable
from gracekit.rpc.client import ClientView

SHORT_S, LONG_S, LONG_EVERY, VMS = 0.04, 0.4, 7, 12
METHODS = ("retried", "probed", "slow")


async def main(
    url: str, prefix: str, count: int, per_second: float, enough: Path | None = None
) -> None:
    loop = asyncio.get_running_loop()
    async with RpcClient(url, "shop") as client:
        begin = loop.time()
        for n in itertools.count():
            if n >= count and (enough is None or enough.exists()):
                return
            await asyncio.sleep(begin + n / per_second - loop.time())
            method = METHODS[n % len(METHODS)]
            key = f"{prefix}-{method}-{n}"
            args = {"key": key, "s": LONG_S if n % LONG_EVERY == 0 else SHORT_S}
            if method == "retried":
                args["vm"] = f"vm-{n % VMS}"
            await cast(client.prepare(request_id=key), method, args)
            print(key, flush=True)  # noqa: T201 - what the tests read


async def cast(view: ClientView, method: str, args: dict[str, Any]) -> None:
    """Until it is confirmed: a queue that somebody has deleted is soon made again."""
    while True:
        try:
            await view.cast(method, **args)
        except Undeliverable:
            await asyncio.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    given = (sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    asyncio.run(main(*given, *map(Path, sys.argv[5:])))
