"""Sends control verbs to runs without a door, by the ops topic of a local queue.

Such runs are of older versions, or they begin or end just now. Commands load this only for them,
because the client and the transports are half of what a command would load.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from gracekit.cli.call import check_transport
from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.request.arrivals import CONTROL_NAMESPACE
from gracekit.rpc.client import RpcClient
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import Transport
from gracekit.runs.run import Run


class OlderRuns:
    """Asks runs without a door.

    Args:
        stack: Closes what is opened here.
    """

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._connecting = asyncio.Lock()
        self._transports: dict[str, Transport] = {}
        self._clients: dict[str, RpcClient] = {}

    async def ask(self, run: Run, verb: str, args: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The answer of *run* to *verb*; raises what any caller of a method would get."""
        client = await self._client(run)
        view = client.prepare(
            ops=True, host=run.instance, namespace=CONTROL_NAMESPACE, timeout=timeout_s
        )
        return await view.call(verb, run_id=run.run_id, **args)

    async def _client(self, run: Run) -> RpcClient:
        async with self._connecting:
            if run.run_id not in self._clients:
                transport = await self._transport(run.transport)
                client = RpcClient(transport, run.topic, ops_topic=run.ops_topic)
                self._clients[run.run_id] = await self._stack.enter_async_context(client)
        return self._clients[run.run_id]

    async def _transport(self, url: str) -> Transport:
        if url not in self._transports:
            check_transport(url)
            transport = open_transport(url, process=Process(), clock=Clock())
            await transport.start()
            self._stack.push_async_callback(transport.stop)
            self._transports[url] = transport
        return self._transports[url]
