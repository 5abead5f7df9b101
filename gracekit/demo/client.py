"""The callers of the demonstration: `python -m gracekit.demo.client send|ping`.

`send` casts the requests that it reads from standard input, one JSON object on each
line. It records an id only after the transport has confirmed the request, which
must not be lost from then on. `ping` calls the ops method until it is stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from gracekit.clock import Clock
from gracekit.config.loading import load
from gracekit.demo.files import CONFIRMED, PINGS, Entry, append
from gracekit.demo.service import name, ping, svc
from gracekit.errors import RpcError
from gracekit.rpc.client import RpcClient

PING_EVERY_S = 0.5


async def cast(client: RpcClient, request: Entry) -> str:
    """Send one request; return its id, which is then recorded as confirmed."""
    request_id = await client.cast(request["method"], **request["args"])
    entry = {"id": request_id, "sender": name(), "at": Clock().wall()}
    append(Path(CONFIRMED), entry | request)
    return request_id


async def send() -> None:
    """Cast each line of standard input, until its end."""
    async with svc.client(load().transport_url) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            await cast(client, json.loads(line))


async def pings() -> None:
    """Call `ping` and record who answered, until the parent process is gone."""
    parent, clock = os.getppid(), Clock()
    async with svc.client(load().transport_url) as client:
        view = client.prepare(timeout=1.0)
        while os.getppid() == parent:
            began = clock.loop()
            try:
                answer = await view.call(ping)
            except RpcError:
                answer = None
            took_s = round(clock.loop() - began, 4)
            append(Path(PINGS), {"at": clock.wall(), "answer": answer, "took_s": took_s})
            await asyncio.sleep(PING_EVERY_S)


if __name__ == "__main__":
    asyncio.run({"send": send, "ping": pings}[sys.argv[1]]())
