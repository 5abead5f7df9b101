"""A simulated machine in memory: a broker, a disk, and processes in virtual time.

A `Life` is one process with a real Runtime. It ends by a drain or by a crash. At a crash
its connections are cut at once and its tasks have no further effect; the next life
finds broker and disk as they were.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.life import Identity
from gracekit.rpc.client import RpcClient
from gracekit.rpc.memory import MemoryBroker
from gracekit.runtime.face import Runtime
from gracekit.service import Service
from gracekit.store.files import look_up, open_memory
from gracekit.telemetry.telemetry import Telemetry
from gracekit.testing.faults import Faults
from gracekit.testing.loop import VirtualLoop, owned_by, owner
from gracekit.testing.ports import (
    Died,
    PlayedEngine,
    PlayedProcess,
    PlayedTransport,
    VirtualClock,
)

T = TypeVar("T")

CLOSING_ROUNDS: Final = 5

EmittedEvent = tuple[str, Mapping[str, Any]]


class LifeTelemetry(Telemetry):
    """Logs nothing after the end of its process: at the end of a test its tasks are cancelled.

    Args:
        process: The process.
    """

    def __init__(self, process: PlayedProcess) -> None:
        super().__init__()
        self._process = process

    def _log(self, *event: Any) -> None:
        if self._process.lives:
            super()._log(*event)


class Life:
    """One process of a service; its events go to `_hear`.

    Attributes:
        report: The report of its drain; None before its end, and after a crash.
        over: Set at its end.
    """

    def __init__(
        self, machine: Machine, service: Service, settings: Settings, *, signals: bool
    ) -> None:
        self.machine = machine
        self.faults = machine.faults_of(self)
        self.process = machine.make_process(self)
        self.engine = machine.make_engine(self)
        self.transport = machine.make_transport(self)
        telemetry = LifeTelemetry(self.process)
        telemetry.subscribe(self._hear)
        self.runtime = Runtime(
            service,
            settings,
            process=self.process,
            clock=machine.clock_of(self),
            signals=signals,
            engine=self.engine,
            transport=self.transport,
            telemetry=telemetry,
        )
        self.report: DrainReport | None = None
        self.over = asyncio.Event()

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """End the process: cut its connections, and cancel its tasks; may be called twice."""
        self.process.ended()
        self.engine.pull_plug()
        self.transport.crash()
        self.machine.cancel_tasks_of(self)
        self.over.set()


class Machine:
    """The machine on which lives run.

    Args:
        seed: Of ids and random numbers.

    Attributes:
        disk: The database of the store, which survives crashes.
        living: Processes that have not ended.
        lives: All lives so far, in order.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.broker = MemoryBroker()
        self.disk = open_memory()
        self.clock = VirtualClock(seed)
        self.living: set[Identity] = set()
        self.lives: list[Life] = []
        self._clients: list[tuple[RpcClient, PlayedTransport]] = []
        self._processes = 0
        self._owners: weakref.WeakKeyDictionary[asyncio.Future[Any], object] = (
            weakref.WeakKeyDictionary()
        )
        asyncio.get_running_loop().set_task_factory(self._make_task)  # type: ignore[arg-type]  # typed by hand

    # -- processes ----------------------------------------------------------------------

    def faults_of(self, life: Life) -> Faults:
        """The faults of the ports of a life."""
        raise NotImplementedError

    def clock_of(self, life: Life) -> VirtualClock:  # noqa: ARG002 - for machines of many hosts
        """The clock of a life."""
        return self.clock

    def make_process(self, life: Life) -> PlayedProcess:
        """Make the process of a life."""
        self._processes += 1
        return PlayedProcess(self.living, 100 + self._processes, on_death=life.end)

    def make_engine(self, life: Life) -> PlayedEngine:
        """Make the engine of a life."""
        return PlayedEngine(self.disk, life.process, life.faults)

    def make_transport(self, life: Life) -> PlayedTransport:
        """Make the transport of a life."""
        return PlayedTransport(self.broker, life.process, life.faults)

    def make_caller(self) -> PlayedTransport:
        """Make the transport of a caller, in a process that does not crash."""
        return PlayedTransport(self.broker, PlayedProcess(set(), 1))

    async def client(self, service: Service, *, ops_topic: str | None = None) -> RpcClient:
        """A caller on this machine."""
        transport = self.make_caller()
        await transport.start()
        one = RpcClient(
            transport,
            service.topic,
            ops_topic=ops_topic,
            exceptions=service.exceptions,
            clock=self.clock,
        )
        await one.start()
        self._clients.append((one, transport))
        return one

    def _loop(self) -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "processes are paused on a VirtualLoop only"
        return loop

    async def close(self) -> None:
        """Kill all living processes, and wait for the end of their tasks."""
        for life in self.lives:
            life.end()
        for client, transport in self._clients:
            await client.stop()
            await transport.stop()
        for _ in range(CLOSING_ROUNDS):  # some tasks need several rounds to clean up
            for life in self.lives:
                self.cancel_tasks_of(life)
            await self.settle()
            if all(task.done() for task, who in self._owners.items() if isinstance(who, Life)):
                break
        for task in self._owners:
            if task.done() and isinstance(task._exception, Died):  # noqa: SLF001 - as below
                task.exception()  # else asyncio logs it, when it collects the task some time
        self.disk.close()

    async def settle(self) -> None:
        """Run the loop until everything is done that needs no time to pass."""
        for _ in range(100):
            await asyncio.sleep(0)

    # -- owners of tasks -----------------------------------------------------------------

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        context = options.get("context") or contextvars.copy_context()
        task = asyncio.Task(coro, loop=loop, **options)
        self._owners[task] = context.get(owner)
        return task

    def spawn_as(self, life: Life, step: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run *step* in that process."""
        return asyncio.get_running_loop().create_task(step, context=owned_by(life))

    def cancel_tasks_of(self, life: Life) -> None:
        """Cancel all tasks of that process, except the calling one."""
        me = asyncio.current_task()
        for task, who in list(self._owners.items()):
            if who is life and task is not me and not task.done():
                task.cancel()

    # -- the disk ------------------------------------------------------------------------

    def rows(self, sql: str, *params: Any) -> list[dict[str, Any]]:
        """The rows of a query on the disk, as dictionaries by column."""
        return look_up(self.disk, sql, *params)
