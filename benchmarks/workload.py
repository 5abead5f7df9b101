"""A service in this process, and a sender that keeps so many requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Taken, numbered, timed
from benchmarks.plain import ARGS
from gracekit import Context, Service, Settings
from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.message import Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Message, Transport, shared_queue
from gracekit.runtime.face import Runtime
from gracekit.tracker.task import TrackedTask

TOPIC: Final = "bench"
ROOMY: Final = 200_000
"""Places and slots: no bench but its own question should meet a limit."""

AHEAD: Final = 512
"""How far sending may run ahead of starting."""


class Site:
    """The service and its two ends: handlers that may be parked, and who waits for ends."""

    def __init__(self, methods: int = 1, *, task_api: bool = False) -> None:
        self.service = Service(TOPIC, task_api=task_api)
        self.let_go = asyncio.Event()
        self._parked = 0
        self._more_parked = asyncio.Event()
        self._declare()
        for number in range(methods - 1):
            self.service.rpc(_named(f"more_{number}"))

    def _declare(self) -> None:
        @self.service.rpc
        async def work(ctx: Context, vm: str, note: str) -> None:
            """Do nothing."""

        @self.service.rpc(resource="vm")
        async def work_on(ctx: Context, vm: str, note: str) -> None:
            """Do nothing, with a lease."""

        @self.service.rpc(on_interrupt="requeue")
        async def read(ctx: Context, vm: str, note: str) -> None:
            """Do nothing, without a row."""

        @self.service.rpc(on_interrupt="retry")
        async def park(ctx: Context, vm: str, note: str) -> None:  # noqa: ARG001 - as sent
            """Stay in flight."""
            self._parked += 1
            self._more_parked.set()
            await self.let_go.wait()

    async def wait_parked(self, number: int) -> None:
        """Wait until so many handlers of `park` have begun."""
        while self._parked < number:
            self._more_parked.clear()
            await self._more_parked.wait()


def _named(name: str) -> Any:
    async def handler(ctx: Context, vm: str, note: str) -> None:
        """Do nothing."""

    handler.__name__ = name
    return handler


class Sender:
    """Sends casts and waits until their tasks left the tracker.

    Args:
        transport: Its own, to the broker or file of the service.
        runtime: The service, in this process.
        ids: Of the requests.
    """

    def __init__(self, transport: Transport, runtime: Runtime, ids: Iterator[str]) -> None:
        self._transport = transport
        self._ids = ids
        self._waiting: dict[str, asyncio.Future[None]] = {}
        assert runtime.wired is not None
        tracker = runtime.wired.tracker
        self._remove = tracker.remove
        # The product has no need to know when a task leaves; a benchmark of one at a time has.
        tracker.remove = self._removed  # type: ignore[method-assign]

    def _removed(self, task: TrackedTask) -> None:
        self._remove(task)
        if (future := self._waiting.pop(task.request_id, None)) is not None:
            future.set_result(None)

    def leaving(self, request_id: str) -> asyncio.Future[None]:
        """Done when the task of that id leaves the tracker the next time."""
        return self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())

    async def finish(self, method: str) -> str:
        """Send one and wait until its task has left the tracker; its id."""
        request_id, message = self._encoded(method, ARGS)
        await self._finish(request_id, message)
        return request_id

    async def cast(self, method: str) -> None:
        """Send one."""
        await self._transport.publish(shared_queue(TOPIC), self._encoded(method, ARGS)[1])

    async def run(
        self, requests: Iterable[tuple[str, Mapping[str, Any]]], *, at_once: int
    ) -> Taken:
        """Send (method, arguments) after (method, arguments) and wait for their ends.

        What is timed goes from the send to the removal from the tracker; the
        messages are written before.
        """
        encoded = [self._encoded(method, args) for method, args in requests]
        rest = iter(encoded)

        async def lane() -> None:
            for one in rest:
                await self._finish(*one)

        with timed(len(encoded)) as taken:
            await asyncio.gather(*(lane() for _ in range(at_once)))
        return taken

    async def repeat(self, method: str, *, at_once: int, number: int) -> Taken:
        """As `run`, of one request *number* times."""
        return await self.run(repeat((method, ARGS), number), at_once=at_once)

    async def keep_busy(self, method: str, until: asyncio.Future[Any], *, at_once: int) -> None:
        """Keep *at_once* requests in flight until *until* is done, each written when it is sent."""

        async def lane() -> None:
            while not until.done():
                await self._finish(*self._encoded(method, ARGS))

        await asyncio.gather(*(lane() for _ in range(at_once)))

    def _encoded(self, method: str, args: Mapping[str, Any]) -> tuple[str, Message]:
        request_id = next(self._ids)
        request = Request(method=method, args=dict(args), request_id=request_id)
        return request_id, Message(body=encode_request(request))

    async def _finish(self, request_id: str, message: Message) -> None:
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        await self._transport.publish(shared_queue(TOPIC), message)
        await future


@contextlib.asynccontextmanager
async def serving(
    site: Site,
    directory: Path,
    name: str,
    *,
    process: Process | None = None,
    new_id: Callable[[], str] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Runtime, Sender]]:
    """Serve *site* on the memory transport and a store on disk; drained at the end.

    Requests are numbered unless *new_id* is given, and numbers fall into one page of an index.
    """
    broker = MemoryBroker()
    given: dict[str, Any] = {
        "transport_url": "memory://",
        "store_url": f"sqlite:///{directory / name}.db",
        "host": "bench",
        "max_accepted": ROOMY,
        "max_running": ROOMY,
        "prefetch": ROOMY,
        "drain_timeout_s": 10.0,
    }
    transport = MemoryTransport(broker, Process())
    await transport.start()
    # A store in memory would not do what a service pays for.
    runtime = Runtime(site.service, Settings(**given | settings), broker=broker, process=process)
    async with runtime:
        try:
            ids = numbered(name) if new_id is None else iter(new_id, None)
            yield runtime, Sender(transport, runtime, ids)
        finally:
            site.let_go.set()
    await transport.stop()


@contextlib.asynccontextmanager
async def serving_files(
    site: Site, directory: Path, name: str, *, new_id: Callable[[], str], **settings: Any
) -> AsyncIterator[tuple[Runtime, Sender]]:
    """As `serving`, with the defaults of places and slots, and the transport in a file too."""
    path = queues_of(directory, name)
    given: dict[str, Any] = {
        "transport_url": f"sqlite:///{path}",
        "store_url": f"sqlite:///{directory / name}.db",
        "host": "bench",
    }
    transport = SqliteTransport(path, process=Process(), clock=Clock())
    async with Runtime(site.service, Settings(**given | settings)) as runtime:
        await transport.start()
        yield runtime, Sender(transport, runtime, iter(new_id, None))
        await transport.stop()


def queues_of(directory: Path, name: str) -> Path:
    """The file of the transport of `serving_files`; the store's is named likewise."""
    return directory / f"{name}-queues.db"


async def park(site: Site, sender: Sender, number: int) -> None:
    """Bring *number* requests in flight whose handlers wait."""
    for sent in range(1, number + 1):
        await sender.cast("park")
        await site.wait_parked(sent - AHEAD)
    await site.wait_parked(number)
