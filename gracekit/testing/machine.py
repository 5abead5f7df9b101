"""A simulated machine in memory: a broker, a disk, and processes in virtual time.

A `Life` is one process with a real Runtime. It ends by a drain or by a crash. At a crash
its connections are cut at once and its tasks have no further effect; the next life
finds broker and disk as they were.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from gracekit.config.choices import StopSource
from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.life import Identity
from gracekit.process import Point, Side
from gracekit.rpc.client import RpcClient
from gracekit.rpc.memory import MemoryBroker
from gracekit.runtime.face import Runtime
from gracekit.service import Service
from gracekit.store.files import look_up, open_memory
from gracekit.telemetry.telemetry import Telemetry
from gracekit.testing.faults import NO_FAULTS, Faults, NoCrash
from gracekit.testing.loop import VirtualLoop, owner
from gracekit.testing.ports import (
    Died,
    PlayedEngine,
    PlayedProcess,
    PlayedTransport,
    VirtualClock,
    owned_by,
)

T = TypeVar("T")

CLOSING_ROUNDS: Final = 5
PATIENCE_S: Final = 7200.0
"""Timeout of waits, in virtual seconds."""

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
    """One process of a service; `Machine.life` makes it.

    Attributes:
        events: The events that it emitted, in order, as name and fields.
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
        self.events: list[EmittedEvent] = []
        telemetry = LifeTelemetry(self.process)
        telemetry.subscribe(self._hear)
        self.runtime = Runtime(
            service,
            settings,
            process=self.process,
            clock=machine.clock,
            signals=signals,
            engine=self.engine,
            transport=self.transport,
            telemetry=telemetry,
        )
        self.report: DrainReport | None = None
        self.over = asyncio.Event()
        self._news = asyncio.Event()
        self._serving: asyncio.Task[DrainReport] | None = None

    # -- events -------------------------------------------------------------------------

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        self.events.append((name, dict(fields)))
        self._news.set()

    def told(self, name: str) -> list[Mapping[str, Any]]:
        """The fields of all events of that name so far."""
        return [fields for each, fields in self.events if each == name]

    async def hears(self, name: str, number: int = 1) -> Mapping[str, Any]:
        """Wait for the *number*-th event of that name."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.told(name)) < number:
                self._news.clear()
                await self._news.wait()
        return self.told(name)[number - 1]

    # -- its life -----------------------------------------------------------------------

    async def start(self) -> None:
        """Open, start, and serve in the background.

        Raises:
            GracekitError: as `Runtime`; the process has then ended.
        """
        try:
            await self.machine.run_as(self, self.runtime.__aenter__())
        except BaseException:
            self.end()
            raise
        self._serving = self.machine.spawn_as(self, self.runtime.serve())

    def ask_to_stop(self, *, source: StopSource = "signal", final: bool = True) -> None:
        """Request a stop, as a signal or an operator does."""
        self.runtime.request_stop(source=source, by="test", reason="test", final=final)

    async def wait_end(self) -> DrainReport:
        """Wait for the end of a drain under way, and end the process."""
        assert self._serving is not None, "start() it first"
        async with asyncio.timeout(PATIENCE_S):
            self.report = await self._serving
        self.end()
        await asyncio.sleep(0)
        return self.report

    async def drain(self) -> DrainReport:
        """Drain, from the request to the end of the process."""
        self.ask_to_stop()
        return await self.wait_end()

    async def crash(self) -> None:
        """Kill -9, now."""
        self.end()
        await asyncio.sleep(0)

    def crash_at(self, point: Point, side: Side) -> None:
        """Plan a kill -9 at a point; `over` is set when it happens."""
        self.process.dies_at = (point, side)

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
        faults: The faults of its ports.

    Attributes:
        disk: The database of the store, which survives crashes.
        living: Processes that have not ended.
        lives: All lives so far, in order.
    """

    def __init__(self, *, seed: int = 0, faults: Faults = NO_FAULTS) -> None:
        self.faults = faults
        self.broker = MemoryBroker()
        self.disk = open_memory()
        self.clock = VirtualClock(seed, faults)
        self.living: set[Identity] = set()
        self.lives: list[Life] = []
        self._clients: list[tuple[RpcClient, PlayedTransport]] = []
        self._processes = 0
        self._owners: weakref.WeakKeyDictionary[asyncio.Future[Any], object] = (
            weakref.WeakKeyDictionary()
        )
        asyncio.get_running_loop().set_task_factory(self._make_task)  # type: ignore[arg-type]  # typed by hand

    # -- processes ----------------------------------------------------------------------

    def faults_of(self, life: Life) -> Faults:  # noqa: ARG002 - for overrides
        """The faults of the ports of a life."""
        return self.faults

    def make_process(self, life: Life) -> PlayedProcess:
        """Make the process of a life."""
        self._processes += 1
        return PlayedProcess(
            self.living, 100 + self._processes, faults=life.faults, on_death=life.end
        )

    def make_engine(self, life: Life) -> PlayedEngine:
        """Make the engine of a life."""
        return PlayedEngine(self.disk, life.process, life.faults)

    def make_transport(self, life: Life) -> PlayedTransport:
        """Make the transport of a life."""
        return PlayedTransport(self.broker, life.process, life.faults)

    def life(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        """Make a process, without starting it.

        Args:
            service: Its service.
            signals: Whether it handles signals, and so arms the kernel's alarm.
            settings: Settings by name, as in `Settings`.
        """
        given = {"transport_url": "memory://", "store_url": "memory://", "host": "node-1"}
        one = self.make_life(service, Settings(**(given | settings)), signals=signals)
        self.lives.append(one)
        return one

    def make_life(self, service: Service, settings: Settings, *, signals: bool) -> Life:
        """Make a life; a test may override this to use a subclass."""
        return Life(self, service, settings, signals=signals)

    async def start(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        """Make and start a process."""
        one = self.life(service, signals=signals, **settings)
        await one.start()
        return one

    async def client(self, service: Service, *, ops_topic: str | None = None) -> RpcClient:
        """A caller on this machine, in a process that does not crash."""
        process = PlayedProcess(set(), 1)
        transport = PlayedTransport(self.broker, process, NoCrash(self.faults))
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

    def pause(self, life: Life) -> None:
        """Freeze a process, as SIGSTOP does."""
        self._loop().freeze(life)

    def resume(self, life: Life) -> None:
        """Let a process go on, as SIGCONT does."""
        self._loop().thaw(life)

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

    async def run_as(self, life: Life, step: Coroutine[Any, Any, T]) -> T:
        """Run *step* in that process, and wait for it."""
        return await self.spawn_as(life, step)

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

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Let virtual time pass until *condition* holds."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + within_s
        while not condition():
            assert loop.time() < limit, f"not within {within_s:g} s"
            await asyncio.sleep(max(0.05, within_s / 4000))
