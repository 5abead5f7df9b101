"""Control verbs to living runs, over the ops topic of each.

Every ask names the run id, so that a verb for a dead run does not hit its
successor, and expires with its timeout, so that nothing acts on it later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from gracekit.cli.call import check_transport
from gracekit.cli.records import label
from gracekit.clock import Clock
from gracekit.config import BROKERS
from gracekit.errors import (
    CallTimeoutError,
    ConfigError,
    DependencyError,
    GracekitError,
    StoreError,
    Undeliverable,
)
from gracekit.leases.members import Run
from gracekit.process import Process
from gracekit.request.arrivals import CONTROL_NAMESPACE
from gracekit.rpc.client import RpcClient
from gracekit.rpc.connect import open_transport
from gracekit.rpc.transport import Transport

STATUS_TIMEOUT_S: Final = 2.0
VERB_TIMEOUT_S: Final = 5.0

Answer = dict[str, Any]


class Desk:
    """Asks runs; one connection for each transport. An async context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._connecting = asyncio.Lock()
        self._transports: dict[str, Transport] = {}
        self._clients: dict[str, RpcClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def ask(
        self,
        run: Run,
        verb: str,
        args: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout_s: float = VERB_TIMEOUT_S,
    ) -> Answer:
        """Send *verb* to *run*, and return its answer.

        Raises:
            DependencyError: it cannot be reached, or does not answer in time.
            GracekitError: it refuses; the message says why.
        """
        if run.transport.partition(":")[0] in BROKERS:
            raise DependencyError(
                f"{label(run)} reads {run.transport}, and control verbs are off on a broker, where "
                f"anybody may send them: on its host, `kill -TERM {run.identity.pid}` drains it, "
                "-QUIT hands over at once, -USR1 writes its tasks to its log"
            )
        try:
            async with asyncio.timeout(timeout_s + 1.0):
                client = await self._client(run)
                view = client.prepare(
                    ops=True, host=run.instance, namespace=CONTROL_NAMESPACE, timeout=timeout_s
                )
                answer = await view.call(verb, run_id=run.run_id, **args)
        except (CallTimeoutError, TimeoutError) as error:
            raise DependencyError(
                f"{label(run)} (pid {run.identity.pid}) lives and did not answer to "
                f"{verb!r} within {timeout_s:g} s"
            ) from error
        except (ConfigError, DependencyError, StoreError, Undeliverable) as error:
            raise DependencyError(f"{label(run)} cannot be reached: {error}") from error
        if not isinstance(answer, dict):
            raise GracekitError(f"{label(run)} answered {verb!r} with a {type(answer).__name__}")
        return answer

    async def status(self, run: Run) -> Answer | None:
        """The run's own picture of itself; None if it does not answer within 2 s."""
        try:
            return await self.ask(run, "status", timeout_s=STATUS_TIMEOUT_S)
        except GracekitError:
            return None

    async def statuses(self, runs: list[Run]) -> dict[str, Answer]:
        """Run id to picture, of those that answer; all are asked at once."""
        answers = await asyncio.gather(*map(self.status, runs))
        return {run.run_id: answer for run, answer in zip(runs, answers, strict=True) if answer}

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
