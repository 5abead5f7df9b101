"""The machine of `gracekit.testing`, and its processes as the tests of gracekit start them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from gracekit.config.choices import StopSource
from gracekit.config.settings import Settings
from gracekit.drain.report import DrainReport
from gracekit.errors import DependencyError, StoreError
from gracekit.life import Alive, Identity, Liveness, RecordedLife
from gracekit.process import Point, Side
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.transport import DEPTH_TIMEOUT_S, Consumer, Message, OnDelivery, Queue
from gracekit.service import Service
from gracekit.store.batch import Row
from gracekit.testing import machine, ports
from gracekit.testing.faults import NO_FAULTS, Fault, Faults
from gracekit.testing.machine import EmittedEvent
from gracekit.testing.ports import _PUBLISH

T = TypeVar("T")

PATIENCE_S: Final = 7200.0
"""Timeout of waits, in virtual seconds."""


_QUERY: Final = (Fault.DELAY, Fault.REFUSED, Fault.CRASH)
_SUBSCRIBE: Final = (Fault.DELAY, Fault.REFUSED, Fault.CRASH)


@functools.cache
def _step(point: Point, side: Side) -> str:
    return f"{point.value}.{side}"


# -- the ports, with the faults that applications cannot plan ---------------------------


class VirtualClock(ports.VirtualClock):
    """Wall time that a fault may change."""

    def __init__(self, seed: int = 0, faults: Faults = NO_FAULTS) -> None:
        super().__init__(seed)
        self._faults = faults

    def wall(self) -> float:
        if self._faults.draw("clock", "wall", (Fault.JUMP,)):
            self.shift_s += self._faults.seconds("clock", "wall")
        return super().wall()


class PlayedProcess(ports.PlayedProcess):
    """A process that a fault may kill at any point, or of which nothing may be proven."""

    def __init__(
        self,
        living: set[Identity],
        number: int,
        *,
        faults: Faults = NO_FAULTS,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(living, number, on_death=on_death)
        self._faults = faults

    def reach(self, point: Point, side: Side) -> None:
        if self.lives and self.dies_at != (point, side):
            step = _step(point, side)
            if self._faults.draw("process", step, (Fault.CRASH,)):
                self.dies_at = None
                self.die(step)
        super().reach(point, side)

    def judge(
        self, life: RecordedLife, directory: Path | None, *, is_shared: bool = False
    ) -> Liveness:
        if self._faults.draw("process", "judge", (Fault.NO_PROOF,)) is not None:
            return Liveness(Alive.NOT_PROVEN, "nothing can be seen of it now")
        return super().judge(life, directory, is_shared=is_shared)


class PlayedEngine(ports.PlayedEngine):
    """A store that may not open, and may not answer queries."""

    async def start(self) -> None:
        await _open(self._faults, self._played, "store")
        await super().start()

    async def query(self, sql: str, *params: Any) -> list[Row]:
        match self._faults.draw("store", "query", _QUERY):
            case Fault.DELAY:
                await asyncio.sleep(self._faults.seconds("store", "query"))
            case Fault.REFUSED:
                raise StoreError("the read failed")
            case Fault.CRASH:
                self._played.die("query")
        return await super().query(sql, *params)


class PlayedTransport(ports.PlayedTransport):
    """A transport whose queues may not be declared, read or counted."""

    async def start(self) -> None:
        await _open(self._faults, self._played, "transport")
        await MemoryTransport.start(self)

    async def declare(self, queues: Sequence[Queue]) -> None:
        await self._meet("declare", _SUBSCRIBE)
        await super().declare(queues)

    async def publish_fanout(self, topic: str, message: Message) -> None:
        fault = await self._meet("publish_fanout", _PUBLISH)
        await super().publish_fanout(topic, message)
        self._lose_answer(fault)

    async def depth(self, queues: Sequence[Queue]) -> int:
        try:
            async with asyncio.timeout(DEPTH_TIMEOUT_S):
                await self._meet("depth", _QUERY)
        except (StoreError, TimeoutError) as error:
            raise DependencyError(f"the queues were not counted: {error!r}") from error
        return await super().depth(queues)

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> Consumer:
        await self._meet("consume", _SUBSCRIBE)
        return await super().consume(queues, on_delivery, prefetch=prefetch)


class NoCrash(Faults):
    """The same faults without crashes, for processes that must not be killed."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def draw(self, port: str, step: str, kinds: Collection[Fault]) -> Fault | None:
        """See `Faults.draw`."""
        return self._faults.draw(port, step, [kind for kind in kinds if kind is not Fault.CRASH])

    def seconds(self, port: str, step: str) -> float:
        """See `Faults.seconds`."""
        return self._faults.seconds(port, step)


async def _open(faults: Faults, process: ports.PlayedProcess, port: str) -> None:
    match faults.draw(port, "start", _SUBSCRIBE):
        case Fault.DELAY:
            await asyncio.sleep(faults.seconds(port, "start"))
        case Fault.REFUSED:
            raise DependencyError(f"the {port} cannot be reached now")
        case Fault.CRASH:
            process.die(f"{port}.start")


# -- processes and their machine ---------------------------------------------------------


class Life(machine.Life):
    """One process of a service; `Machine.life` makes it.

    Attributes:
        events: The events that it emitted, in order, as name and fields.
    """

    machine: Machine

    def __init__(
        self, machine: Machine, service: Service, settings: Settings, *, signals: bool
    ) -> None:
        self.events: list[EmittedEvent] = []
        self._news = asyncio.Event()
        self._serving: asyncio.Task[DrainReport] | None = None
        super().__init__(machine, service, settings, signals=signals)

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


class Machine(machine.Machine):
    """The machine on which lives run.

    Args:
        seed: Of ids and random numbers.
        faults: The faults of its ports.
    """

    def __init__(self, *, seed: int = 0, faults: Faults = NO_FAULTS) -> None:
        super().__init__(seed=seed)
        self.faults = faults
        self.clock = VirtualClock(seed, faults)

    def faults_of(self, life: machine.Life) -> Faults:
        return self.faults

    def make_process(self, life: machine.Life) -> ports.PlayedProcess:
        self._processes += 1
        return PlayedProcess(
            self.living, 100 + self._processes, faults=life.faults, on_death=life.end
        )

    def make_engine(self, life: machine.Life) -> ports.PlayedEngine:
        return PlayedEngine(self.disk, life.process, life.faults)

    def make_transport(self, life: machine.Life) -> ports.PlayedTransport:
        return PlayedTransport(self.broker, life.process, life.faults)

    def make_caller(self) -> ports.PlayedTransport:
        return PlayedTransport(self.broker, PlayedProcess(set(), 1), NoCrash(self.faults))

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

    def pause(self, life: machine.Life) -> None:
        """Freeze a process, as SIGSTOP does."""
        self._loop().freeze(life)

    def resume(self, life: machine.Life) -> None:
        """Let a process go on, as SIGCONT does."""
        self._loop().thaw(life)

    async def run_as(self, life: machine.Life, step: Coroutine[Any, Any, T]) -> T:
        """Run *step* in that process, and wait for it."""
        return await self.spawn_as(life, step)

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Let virtual time pass until *condition* holds."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + within_s
        while not condition():
            assert loop.time() < limit, f"not within {within_s:g} s"
            await asyncio.sleep(max(0.05, within_s / 4000))
