"""One machine in memory: a broker, a disk, processes that live and die, all in virtual time.

A `Life` is one process with a real Runtime. It ends by a drain, or by a crash: then its
connections are cut in the middle of whatever it did, its tasks never run another line of
consequence, and the next life finds broker and disk as they were.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import apsw

from gracekit import DrainReport, RpcClient, Runtime, Service, Settings
from gracekit.clock import Clock
from gracekit.errors import StoreBrokenError, StoreError, UnknownCommitError
from gracekit.process import Identity, Phase, Point, Process
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.transport import (
    Consumer,
    Delivery,
    Message,
    OnDelivery,
    Queue,
    Settlement,
)
from gracekit.runtime import MIGRATIONS
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import MemoryEngine, Rows
from gracekit.store.migrate import load_migrations
from gracekit.telemetry import Telemetry

EPOCH_S: Final = 1_800_000_000.0
PATIENCE_S: Final = 7200.0  # of virtual time, for what must happen

_life: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class Died(BaseException):
    """A simulated process came to its end here."""


class VirtualClock(Clock):
    """Wall time that goes with the loop; ids that count."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = 0
        self.shift_s = 0.0

    def loop(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return EPOCH_S + self._loop.time() + self.shift_s

    def new_id(self) -> str:
        self._ids += 1
        return f"{self._ids:032x}"

    def jitter(self, seconds: float) -> float:
        return seconds


class PlayedProcess(Process):
    """A process of its own: its identity, its life, and a place to die at."""

    def __init__(self, living: set[Identity], number: int) -> None:
        self.identity = Identity(boot_id="boot", pid_ns=1, pid=number, start_ticks=number)
        self._living = living
        self.alarms: list[float | None] = []
        self.dies_at: tuple[Point, Phase] | None = None
        self.on_death: Callable[[], None] = lambda: None
        living.add(self.identity)

    @property
    def lives(self) -> bool:
        return self.identity in self._living

    def reach(self, point: Point, phase: Phase) -> None:
        if self.dies_at == (point, phase):
            self.dies_at = None
            self.on_death()
            raise Died(f"{point.value} {phase}")

    def is_alive(self, other: Identity, lock_path: Path) -> bool:
        return other in self._living

    def arm_alarm(self, seconds: float) -> None:
        self.alarms.append(seconds)

    def disarm_alarm(self) -> None:
        self.alarms.append(None)

    def exit_now(self, code: int) -> NoReturn:
        raise AssertionError(f"left with {code}")


class Fault(enum.Enum):
    """What a commit may meet on its way to the disk."""

    LOST_BEFORE = "nothing was done, and nobody knows"
    LOST_AFTER = "it was done, and nobody knows"
    REFUSED = "nothing was done"
    BROKEN = "the disk is gone"


class FaultyEngine(MemoryEngine):
    """The engine in memory with planned faults, and a plug that can be pulled."""

    def __init__(self, disk: apsw.Connection, process: Process) -> None:
        super().__init__(load_migrations(MIGRATIONS), process=process, connection=disk)
        self._plan: dict[Point, list[Fault]] = {}
        self.lost_reads = 0

    def plan(self, point: Point, fault: Fault, *, times: int = 1) -> None:
        """Let the next commits of *point* meet *fault*."""
        self._plan.setdefault(point, []).extend([fault] * times)

    def forget_plans(self) -> None:
        """No more faults."""
        self._plan.clear()
        self.lost_reads = 0

    def pull_plug(self) -> None:
        """From now on nothing reaches the disk."""
        self._connection = None

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        planned = self._plan.get(batch.point)
        if not planned or self.broken is not None:
            return self._refused(self.broken) if self.broken else super().submit(batch)
        match planned.pop(0):
            case Fault.LOST_BEFORE:
                return self._refused(UnknownCommitError("the connection broke"))
            case Fault.LOST_AFTER:
                super().submit(batch).exception()
                return self._refused(UnknownCommitError("the connection broke"))
            case Fault.REFUSED:
                return self._refused(StoreError("locked; nothing was committed"))
            case Fault.BROKEN:
                broken = StoreBrokenError("the disk is gone")
                self._break(broken)
                return self._refused(broken)

    async def query(self, sql: str, *params: Any) -> list[Row]:
        if self.lost_reads:
            self.lost_reads -= 1
            raise StoreError("the read failed")
        return await super().query(sql, *params)

    def _refused(self, error: StoreError) -> asyncio.Future[Rows]:
        future: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future


class OwnedTransport(MemoryTransport):
    """A connection whose deliveries belong to the life that reads them.

    Attributes:
        failing_acks: So many acks from now on find the transport's file locked.
        refused_consumes: So many subscriptions from now on do.
        slow_consume_s: Seconds that a subscription takes.
    """

    failing_acks = 0
    refused_consumes = 0
    slow_consume_s = 0.0

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> Consumer:
        if self.refused_consumes:
            self.refused_consumes -= 1
            raise StoreError("the transport's file stayed locked")
        await asyncio.sleep(self.slow_consume_s)
        context = contextvars.copy_context()

        def deliver(delivery: Delivery) -> None:
            settle = delivery.settle

            async def settle_or_fail(how: Settlement, reason: str) -> None:
                if how is Settlement.ACK and self.failing_acks:
                    self.failing_acks -= 1
                    raise StoreError("the transport's file stayed locked")
                await settle(how, reason)

            delivery.settle = settle_or_fail
            context.copy().run(on_delivery, delivery)

        return await super().consume(queues, deliver, prefetch=prefetch)


Event = tuple[str, Mapping[str, Any]]


class Life:
    """One process of a service."""

    def __init__(
        self, world: World, service: Service, settings: dict[str, Any], *, signals: bool = False
    ) -> None:
        self.world = world
        self.process = PlayedProcess(world.living, len(world.lives) + 100)
        self.engine = FaultyEngine(world.disk, self.process)
        self.transport = OwnedTransport(world.broker, self.process)
        self.events: list[Event] = []
        self.telemetry = Telemetry()
        self.telemetry.subscribe(self._hear)
        self.runtime = Runtime(
            service,
            Settings(**{"transport_url": "memory://", "store_url": "memory://"} | settings),
            process=self.process,
            clock=world.clock,
            signals=signals,
            engine=self.engine,
            transport=self.transport,
            telemetry=self.telemetry,
        )
        self.process.on_death = self._die
        self.report: DrainReport | None = None
        self.over = asyncio.Event()
        self._news = asyncio.Event()
        self._serving: asyncio.Task[DrainReport] | None = None

    # -- what it says -------------------------------------------------------------------

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        self.events.append((name, dict(fields)))
        self._news.set()

    def names(self) -> list[str]:
        """The events so far, by name."""
        return [name for name, _ in self.events]

    def told(self, name: str) -> list[Mapping[str, Any]]:
        """The fields of each event of that name."""
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
        """Open, start, and serve in the background."""
        try:
            await self.world.run_as(self, self.runtime.__aenter__())
        except BaseException:
            self._die()
            raise
        self._serving = self.world.spawn_as(self, self.runtime.serve())

    def ask_to_stop(self, *, source: str = "signal", final: bool = True) -> None:
        """What a signal or an operator does."""
        self.runtime.request_stop(source=source, by="test", reason="test", final=final)

    async def wait_end(self) -> DrainReport:
        """Wait for the end of a drain that somebody asked for; then the process is gone."""
        assert self._serving is not None
        async with asyncio.timeout(PATIENCE_S):
            self.report = await self._serving
        self._die()
        await asyncio.sleep(0)
        return self.report

    async def drain(self) -> DrainReport:
        """A drain from the request to the end of the process."""
        self.ask_to_stop()
        return await self.wait_end()

    async def crash(self) -> None:
        """kill -9, now."""
        self._die()
        await asyncio.sleep(0)

    def crash_at(self, point: Point, phase: Phase) -> None:
        """kill -9 at a point; `over` is set then."""
        self.process.dies_at = (point, phase)

    def _die(self) -> None:
        self.world.living.discard(self.process.identity)
        self.engine.pull_plug()
        self.transport.crash()
        self.world.cancel_tasks_of(self)
        self.over.set()


class Doors:
    """Handlers that wait here until they are let through, and who came in which order."""

    def __init__(self) -> None:
        self.entered: list[object] = []
        self.ended: list[object] = []
        self._doors: dict[object, asyncio.Event] = {}
        self._news = asyncio.Event()

    def _door(self, name: object) -> asyncio.Event:
        return self._doors.setdefault(name, asyncio.Event())

    async def pass_(self, name: object) -> None:
        """Called by a handler: wait here for `open`."""
        self.entered.append(name)
        self._news.set()
        await self._door(name).wait()
        self.ended.append(name)

    def open(self, *names: object) -> None:
        """Let these through, now and later."""
        for name in names:
            self._door(name).set()

    async def wait(self, number: int) -> list[object]:
        """Wait until so many have entered."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.entered) < number:
                self._news.clear()
                await self._news.wait()
        return self.entered


class World:
    """The machine."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.disk = apsw.Connection(":memory:")
        self.clock = VirtualClock()
        self.living: set[Identity] = set()
        self.lives: list[Life] = []
        self.expects_faults = False
        self._clients: list[RpcClient] = []
        self._owners: weakref.WeakKeyDictionary[asyncio.Future[Any], Life | None] = (
            weakref.WeakKeyDictionary()
        )
        asyncio.get_running_loop().set_task_factory(self._make_task)

    # -- processes ----------------------------------------------------------------------

    def life(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        """A process that is not started yet."""
        one = Life(self, service, {"host": "node-1"} | settings, signals=signals)
        self.lives.append(one)
        return one

    async def start(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        """A process that serves."""
        one = self.life(service, signals=signals, **settings)
        await one.start()
        return one

    async def client(self, service: Service) -> RpcClient:
        """A caller on this machine, in no process that could crash."""
        one = RpcClient(
            OwnedTransport(self.broker, PlayedProcess(set(), 1)),
            service.topic,
            exceptions=service.exceptions,
            clock=self.clock,
        )
        await one.start()
        await one._transport.start()  # a transport that was passed in is the test's to start
        self._clients.append(one)
        return one

    async def verb(self, life: Life, verb: str, **args: Any) -> Any:
        """An operator's control verb."""
        client = await self.client(life.runtime.service)
        view = client.prepare(
            namespace="gracekit", ops=True, host=life.runtime.instance, timeout=10
        )
        return await view.call(verb, run_id=life.runtime.run_id, **args)

    async def deliver(self, queue: str, body: bytes) -> None:
        """Put raw bytes into a queue."""
        transport = MemoryTransport(self.broker, PlayedProcess(set(), 2))
        await transport.start()
        await transport.publish(queue, Message(body=body))

    async def close(self) -> None:
        for life in self.lives:
            life._die()
        for client in self._clients:
            await client.stop()
        await self.settle()

    async def settle(self) -> None:
        """Let everything that can go on without time passing go on."""
        for _ in range(100):
            await asyncio.sleep(0)

    # -- whose tasks ---------------------------------------------------------------------

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        context = options.get("context") or contextvars.copy_context()
        task = asyncio.Task(coro, loop=loop, **options)
        self._owners[task] = context.get(_life)
        return task

    def spawn_as(self, life: Life, step: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(_life.set, life)
        return asyncio.get_running_loop().create_task(step, context=context)

    async def run_as(self, life: Life, step: Coroutine[Any, Any, Any]) -> Any:
        return await self.spawn_as(life, step)

    def cancel_tasks_of(self, life: Life) -> None:
        me = asyncio.current_task()
        for task, owner in list(self._owners.items()):
            if owner is life and task is not me and not task.done():
                task.cancel()

    # -- what is on disk -----------------------------------------------------------------

    def rows(self, sql: str, *params: Any) -> list[dict[str, Any]]:
        """What a query of the disk finds, by column."""
        cursor = self.disk.cursor()
        found = cursor.execute(sql, params)
        try:
            names = [column[0] for column in cursor.get_description()]
        except apsw.ExecutionCompleteError:
            return []
        return [dict(zip(names, row, strict=True)) for row in found]

    def task(self, request_id: str, recipient: str = "") -> dict[str, Any]:
        """The row of a request."""
        sql = "SELECT * FROM task WHERE request_id = ? AND recipient = ?"
        (row,) = self.rows(sql, request_id, recipient)
        return row

    def state(self, request_id: str) -> str:
        """Empty for a request that is not on record."""
        rows = self.rows("SELECT state FROM task WHERE request_id = ?", request_id)
        return str(rows[0]["state"]) if rows else ""

    def states(self) -> dict[str, str]:
        rows = self.rows("SELECT request_id, state FROM task WHERE state <> 'rejected' ORDER BY id")
        return {row["request_id"]: row["state"] for row in rows}

    def tally(self) -> dict[str, int]:
        return {row["what"]: row["n"] for row in self.rows("SELECT what, n FROM tally")}

    def incidents(self, what: str) -> list[dict[str, Any]]:
        return self.rows("SELECT * FROM incident WHERE what = ? ORDER BY id", what)

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Let virtual time pass until *condition* holds."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + within_s
        while not condition():
            assert loop.time() < limit, f"not within {within_s:g} s: {self.states()}"
            await asyncio.sleep(max(0.05, within_s / 4000))

    def check_accounts(self) -> None:
        """P9: accepted = terminal + transient + removed."""
        (row,) = self.rows("SELECT count(*) AS n FROM task WHERE state <> 'rejected'")
        tally = self.tally()
        assert tally.get("accepted", 0) == row["n"] + tally.get("removed", 0)

    def check_faults(self) -> None:
        """gracekit itself had no fault."""
        if not self.expects_faults:
            for life in self.lives:
                if life.process.lives or life.report is not None:
                    assert life.told("dispatch.failed") == []
                    assert life.told("drain.step_failed") == []
