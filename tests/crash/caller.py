"""A caller that is killed: `python caller.py METHOD REQUEST_ID` casts one request."""

from __future__ import annotations

import asyncio
import os
import sys

from gracekit.rpc.client import RpcClient
from tests.crash.service import TOPIC


async def main(method: str, request_id: str) -> None:
    async with RpcClient(os.environ["GRACEKIT_TRANSPORT_URL"], TOPIC) as client:
        await client.prepare(request_id=request_id).cast(method)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
