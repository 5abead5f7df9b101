"""Simulations of the four ports, on which production code runs unchanged in virtual time.

Each step asks its `Faults` for a fault. The engine commits in a later iteration of the
loop and answers in another, as real ones do, so that a crash can come before and after
the commit.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

from gracekit.clock import Clock
from gracekit.errors import (
    DependencyError,
    StoreBrokenError,
    StoreClosedError,
    StoreError,
    StoreUnreachableError,
    UnknownCommitError,
)
from gracekit.life import Alive, Identity, Liveness, RecordedLife
from gracekit.process import Point, Process, Side, Threads
from gracekit.rpc.memory import MemoryBroker, MemoryTransport
from gracekit.rpc.transport import (
    Consumer,
    Delivery,
    Message,
    OnDelivery,
    Queue,
    ReadFailure,
    Settlement,
)
from gracekit.signals import SignalWatch
from gracekit.store.batch import Batch, BatchOutcome, Row
from gracekit.store.commit_times import CommitTimes
from gracekit.store.engine import Aside, Rows
from gracekit.store.files import Database
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.store.sqlite.threads import read
from gracekit.testing.faults import NO_FAULTS, Fault, Faults
from gracekit.testing.loop import VirtualLoop, owned_by

T = TypeVar("T")

EPOCH_S: Final = 1_800_000_000.0
SETTLE_AGAIN_S: Final = 2.0

_CONNECT: Final = (Fault.DELAY, Fault.REFUSED)
_COMMIT: Final = (
    Fault.DELAY,
    Fault.REFUSED,
    Fault.LOST_BEFORE,
    Fault.LOST_AFTER,
    Fault.BROKEN,
)
_ASIDE: Final = (Fault.REFUSED, Fault.LOST_AFTER)
_PUBLISH: Final = (
    Fault.DELAY,
    Fault.REFUSED,
    Fault.LOST_BEFORE,
    Fault.LOST_AFTER,
    Fault.DUPLICATE,
)
_SETTLE: Final = (Fault.DELAY, Fault.REFUSED, Fault.LOST_BEFORE, Fault.LOST_AFTER)
_DELIVER: Final = (Fault.DELAY, Fault.DUPLICATE, Fault.REORDER)

# By point: the step that a port passes to `Faults.draw`, and the possible faults. For a commit the
# step is the point's name.
WIRE_STEPS: Final[Mapping[Point, tuple[str, Sequence[Fault]]]] = MappingProxyType(
    {
        Point.CONNECT: ("start", _CONNECT),
        Point.DELIVER: ("deliver", _DELIVER),
        Point.ACK: ("ack", _SETTLE),
        Point.GIVE_BACK: ("give_back", _SETTLE),
        Point.DEAD_LETTER: ("dead_letter", _SETTLE),
        Point.REPLY: ("publish", _PUBLISH),
    }
)
COMMIT_FAULTS: Final = _COMMIT


class Died(BaseException):
    """A simulated process ended here."""


class VirtualClock(Clock):
    """Wall time that follows the loop's time, and random numbers by seed.

    Attributes:
        shift_s: Seconds by which the wall clock was changed.
    """

    def __init__(self, seed: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(seed)  # noqa: S311 - a replay
        self._ids = 0
        self.shift_s = 0.0

    def loop(self) -> float:
        """See `Clock.loop`."""
        return self._loop.time()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return EPOCH_S + self._loop.time() + self.shift_s

    def boot(self) -> float:
        """See `Clock.boot`; the loop's time."""
        return self._loop.time()

    def machine(self) -> float:
        """See `Clock.machine`; always 0, because a simulation measures nothing."""
        return 0.0

    def new_id(self) -> str:
        """See `Clock.new_id`; ids are counted up."""
        self._ids += 1
        return f"{self._ids:032x}"

    def new_request_id(self) -> str:
        """See `Clock.new_request_id`; counted up like other ids."""
        return self.new_id()

    def jitter(self, seconds: float) -> float:
        """See `Clock.jitter`."""
        return seconds * self._random.uniform(0.8, 1.2)


class CountedThreads(Threads):
    """Real threads; virtual time stands still while one works."""

    async def run(self, function: Callable[[], T], *, abandon: bool = False) -> T:
        """See `Threads.run`."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            return await super().run(function, abandon=abandon)
        loop.thread_begins()
        inside = contextvars.copy_context()
        # Owned by no process: if the process is killed, its tasks stop, but the end of the thread
        # must still be counted, or virtual time would stand still for ever.
        nobody = owned_by(None)
        running = super().run(partial(inside.run, function), abandon=abandon)
        work = loop.create_task(running, context=nobody)
        work.add_done_callback(lambda _: loop.thread_ended(), context=nobody)
        return await work


class PlayedProcess(Process):
    """A simulated process, with an identity, and points at which it can die.

    Args:
        living: The living processes of the machine; this one is added.
        number: Its pid.
        on_death: Called once at its death, whatever it is doing then.

    Attributes:
        lives: Whether it has not ended; changed only by `ended`.
    """

    def __init__(
        self,
        living: set[Identity],
        number: int,
        *,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.identity = Identity(boot_id="boot", pid_ns=1, pid=number, start_ticks=number)
        self._living = living
        self._alarm: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self.alarms: list[float | None] = []
        self.dies_at: tuple[Point, Side] | None = None
        self.on_death = on_death
        self.lives = True
        living.add(self.identity)

    def die(self, why: str) -> NoReturn:
        """Kill the process at this point.

        Raises:
            Died: always; no code must catch it.
        """
        if self.lives:
            self.on_death()
        raise Died(why)

    def ended(self) -> None:
        """Mark it as ended, and disarm its alarm and its end."""
        self.lives = False
        self._living.discard(self.identity)
        self.disarm_alarm()
        self.end_at(None)

    def reach(self, point: Point, side: Side) -> None:
        """See `Process.reach`; dies at `dies_at`."""
        if not self.lives:
            raise Died(f"{point.value}.{side} of a process that has ended")
        if self.dies_at == (point, side):
            self.dies_at = None
            self.die(f"{point.value}.{side}")

    def identify(self) -> Identity:
        """See `Process.identify`."""
        return self.identity

    def catch_crash(self, file: Path | None) -> None:
        """Does nothing: it shares the interpreter."""

    async def host_is_stopping(self) -> bool:
        """See `Process.host_is_stopping`."""
        return False

    def judge(
        self,
        life: RecordedLife,
        directory: Path | None,  # noqa: ARG002 - the machine knows who lives
        *,
        is_shared: bool = False,  # noqa: ARG002
    ) -> Liveness:
        """See `Process.judge`."""
        if life.identity in self._living:
            return Liveness(Alive.ALIVE, "it has not ended")
        return Liveness(Alive.DEAD, "it has ended")

    def arm_alarm(self, seconds: float) -> None:
        """See `Process.arm_alarm`."""
        self.disarm_alarm()
        self.alarms.append(seconds)
        loop = asyncio.get_running_loop()
        self._alarm = loop.call_later(seconds, self._kill)

    def disarm_alarm(self) -> None:
        """See `Process.disarm_alarm`."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
            self.alarms.append(None)

    def end_at(self, at: float | None) -> None:
        """See `Process.end_at`; *at* is a time of the loop, and also ends a frozen process."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if at is not None and self.lives:
            loop = asyncio.get_running_loop()
            self._end = loop.call_at(at, self._kill, context=owned_by(None))

    def watch_signals(
        self,
        on_signal: Callable[[int], None],  # noqa: ARG002 - see below
        *,
        has_terminal: bool,  # noqa: ARG002
    ) -> SignalWatch:
        """See `Process.watch_signals`; a simulated process gets no signals."""
        return _NoSignals()

    def _kill(self) -> None:
        if self.lives:
            self.on_death()

    def threads(self, number: int) -> Threads:
        """See `Process.threads`."""
        return CountedThreads(number)

    def exit_within(self, seconds: float, code: int) -> None:
        """See `Process.exit_within`; does nothing, as nothing can delay a simulated exit."""

    def has_ended(self) -> bool:
        """See `Process.has_ended`."""
        return not self.lives

    def exit_now(self, code: int) -> NoReturn:
        """See `Process.exit_now`."""
        self.die(f"left with {code}")


class _NoSignals(nullcontext[None]):
    """The signal watch of a simulated process, which gets no signals."""

    def take_back(self) -> dict[signal.Signals, str]:
        """See `SignalWatch.take_back`."""
        return {}


class PlayedEngine(MemoryEngine):
    """SQL on a database that outlives the process; it commits in a later iteration of the loop.

    Args:
        disk: The database of the machine.
        process: The process that uses the engine.
    """

    def __init__(self, disk: Database, process: PlayedProcess, faults: Faults = NO_FAULTS) -> None:
        super().__init__(load_migrations(MIGRATIONS), process=process, connection=disk)
        self.commits = CommitTimes(self._loop_time)
        self._played = process
        self._faults = faults
        self._line: list[tuple[Batch, asyncio.Future[Rows]]] = []

    def pull_plug(self) -> None:
        """From now on write nothing to the disk, and answer nothing."""
        self._connection = None
        self._line.clear()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._carry_out()
        await super().stop()

    def keep_aside(self, work: Callable[[Aside], float], *, within_s: float) -> Callable[[], None]:
        """See `Engine.keep_aside`; timers of the loop take the place of a thread."""
        aside, loop = PlayedAside(self, self._faults, within_s), asyncio.get_running_loop()
        timers = list[asyncio.TimerHandle]()

        def step() -> None:
            if self._played.lives:
                timers[:] = [loop.call_later(work(aside), step)]

        timers.append(loop.call_later(0, step))
        return lambda: timers.pop().cancel() if timers else None

    def ask_aside(self, sql: str, params: Sequence[Any]) -> list[Row]:
        """Commit one statement at once, without the guard."""
        if self._connection is None:
            raise StoreUnreachableError("the store is not open")
        return self._connection.execute(sql, params).fetchall()

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        """See `Engine.submit`; done on a later iteration of the loop."""
        if self._connection is None or self.status.error is not None:
            return _answered(self.status.error or StoreClosedError("the store is not open"))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Rows] = loop.create_future()
        self._line.append((batch, future))
        if len(self._line) == 1:
            self.commits.begin(self.commits.now())
            if self._faults.draw("store", batch.point.value, (Fault.DELAY,)):
                loop.call_later(self._faults.seconds("store", "commit"), self._carry_out)
            else:
                loop.call_soon(self._carry_out)
        return future

    def _carry_out(self) -> None:
        """Commit all waiting batches as one group."""
        if self._connection is None or self._group is None or not self._line:
            return
        line, self._line = self._line, []
        drawn = [self._faults.draw("store", batch.point.value, _COMMIT) for batch, _ in line]
        if Fault.BROKEN in drawn:
            self.break_(StoreBrokenError("the disk is gone"))
        todo = [
            batch
            for (batch, _), fault in zip(line, drawn, strict=True)
            if self.status.error is None and fault not in {Fault.REFUSED, Fault.LOST_BEFORE}
        ]
        outcomes = iter(self._group.run(todo))
        self.commits.end()
        for (_, future), fault in zip(line, drawn, strict=True):
            answer: Any
            if (refusal := self.status.refusal()) is not None:
                answer = refusal
            elif fault is Fault.REFUSED:
                answer = StoreError("locked; nothing was committed")
            elif fault is Fault.LOST_BEFORE:
                answer = UnknownCommitError("the connection broke")
            else:
                answer = next(outcomes)
                if fault is Fault.LOST_AFTER:
                    answer = UnknownCommitError("the connection broke")
            delay = self._faults.seconds("store", "answer") if fault is Fault.DELAY else 0.0
            self._answer_in(delay, future, answer)

    def _loop_time(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def _answer_in(self, seconds: float, future: asyncio.Future[Rows], answer: Any) -> None:
        loop = asyncio.get_running_loop()
        if seconds:
            loop.call_later(seconds, _settle, future, answer)
        else:
            _settle(future, answer)

    async def query(self, sql: str, *params: Any) -> list[Row]:
        """See `Engine.query`."""
        if self._connection is None:
            raise StoreClosedError("the store is not open")
        rows = read(self._connection, (sql, params), self.break_)
        if isinstance(rows, StoreError):
            raise rows
        await asyncio.sleep(0)  # as with a real engine, other tasks run before the answer
        return rows

    def _run(self, batch: Batch) -> BatchOutcome:
        return self.status.refusal() or super()._run(batch)


class PlayedAside:
    """The connection of a played engine beside the one that commits."""

    def __init__(self, engine: PlayedEngine, faults: Faults, within_s: float) -> None:
        self._engine = engine
        self._faults = faults
        self._within_s = within_s

    def origin(self) -> str:
        """See `Aside.origin`; there is one server."""
        return "played"

    def ask(self, sql: str, *params: Any) -> list[Row]:
        """See `Aside.ask`."""
        fault = self._faults.draw("store", "aside", _ASIDE)
        if fault is Fault.REFUSED:
            raise StoreUnreachableError(f"no answer within {self._within_s:g} s")
        rows = self._engine.ask_aside(sql, params)
        if fault is Fault.LOST_AFTER:
            raise StoreUnreachableError(f"no answer within {self._within_s:g} s")
        return rows


def _settle(future: asyncio.Future[Rows], answer: Any) -> None:
    if future.done():
        return
    if isinstance(answer, StoreError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _answered(error: StoreError) -> asyncio.Future[Rows]:
    future: asyncio.Future[Rows] = asyncio.get_running_loop().create_future()
    future.set_exception(type(error)(str(error)))
    return future


class PlayedTransport(MemoryTransport):
    """A memory transport with faults, whose callbacks belong to the process that reads."""

    def __init__(
        self, broker: MemoryBroker, process: PlayedProcess, faults: Faults = NO_FAULTS
    ) -> None:
        super().__init__(broker, process)
        self._played = process
        self._faults = faults

    async def start(self) -> None:
        """See `Transport.start`."""
        match self._faults.draw("transport", "start", _CONNECT):
            case Fault.DELAY:
                await asyncio.sleep(self._faults.seconds("transport", "start"))
            case Fault.REFUSED:
                raise DependencyError("the transport cannot be reached now")
        await super().start()

    async def publish(self, queue: Queue, message: Message) -> None:
        """See `Transport.publish`."""
        fault = await self._meet("publish", _PUBLISH)
        await super().publish(queue, message)
        if fault is Fault.DUPLICATE:
            self._broker.put(queue.name, message)
        self._lose_answer(fault)

    async def consume(
        self, queues: Sequence[Queue], on_delivery: OnDelivery, *, prefetch: int
    ) -> Consumer:
        """See `Transport.consume`."""
        played = _PlayedConsumer(self._broker, self._faults, on_delivery, self._settle_with_faults)
        played.inner = await super().consume(queues, played.deliver, prefetch=prefetch)
        return played

    async def _settle_with_faults(
        self, settle: Callable[[Settlement, str], Any], how: Settlement, reason: str
    ) -> None:
        try:
            fault = await self._meet(how.value, _SETTLE)
        except StoreError:
            self._settle_later(settle, how, reason)
            raise
        await settle(how, reason)
        self._lose_answer(fault)

    def _settle_later(
        self, settle: Callable[[Settlement, str], Any], how: Settlement, reason: str
    ) -> None:
        """Settle a delivery later, as real transports retry by themselves."""

        def again() -> None:
            asyncio.ensure_future(settle(how, reason))  # noqa: RUF006 - done in one iteration

        asyncio.get_running_loop().call_later(SETTLE_AGAIN_S, again)

    async def _meet(self, step: str, kinds: Sequence[Fault]) -> Fault | None:
        """Draw a fault, and apply it if it comes before the step; return it."""
        fault = self._faults.draw("transport", step, kinds)
        match fault:
            case Fault.DELAY:
                await asyncio.sleep(self._faults.seconds("transport", step))
            case Fault.REFUSED:
                raise StoreError("the transport's file stayed locked; nothing was done")
            case Fault.LOST_BEFORE:
                raise UnknownCommitError("the connection broke")
            case Fault.CRASH:
                self._played.die(step)
        return fault

    def _lose_answer(self, fault: Fault | None) -> None:
        if fault is Fault.LOST_AFTER:
            raise UnknownCommitError("the connection broke")


class _PlayedConsumer:
    """A consumer whose deliveries may come late, twice or out of order.

    Its callback runs in the context of its process.
    """

    inner: Any

    def __init__(
        self,
        broker: MemoryBroker,
        faults: Faults,
        on_delivery: OnDelivery,
        settle: Callable[..., Any],
    ) -> None:
        self._broker = broker
        self._faults = faults
        self._on_delivery = on_delivery
        self._settle = settle
        self._context = contextvars.copy_context()
        self._late: list[Delivery] = []
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def failure(self) -> ReadFailure | None:
        """See `Consumer.failure`."""
        found: ReadFailure | None = self.inner.failure
        return found

    def pause(self) -> None:
        """See `Consumer.pause`."""
        self.inner.pause()

    def resume(self) -> None:
        """See `Consumer.resume`."""
        self.inner.resume()

    def deliver(self, delivery: Delivery) -> None:
        """Deliver a message; called by the broker, outside of the process's context."""
        settle = delivery.settle

        async def settle_or_fail(how: Settlement, reason: str) -> None:
            await self._settle(settle, how, reason)

        delivery.settle = settle_or_fail
        loop = asyncio.get_running_loop()
        fault = self._faults.draw("transport", "deliver", _DELIVER)
        if fault is Fault.DUPLICATE:
            # Give it back while it is being processed; the later ack then has no effect.
            seconds = self._faults.seconds("transport", "deliver")
            loop.call_later(seconds, self._take_back, settle, context=self._context.copy())
        if fault in {Fault.DELAY, Fault.REORDER} or self._late:
            self._late.append(delivery)
            if fault is Fault.REORDER:
                self._late.reverse()
            seconds = self._faults.seconds("transport", "deliver")
            self._timers.append(
                loop.call_later(seconds, self._deliver_late, context=self._context.copy())
            )
            return
        self._context.copy().run(self._on_delivery, delivery)

    def _take_back(self, settle: Callable[[Settlement, str], Any]) -> None:
        asyncio.ensure_future(settle(Settlement.GIVE_BACK, ""))  # noqa: RUF006 - done in one iteration

    def _deliver_late(self) -> None:
        late, self._late = self._late, []
        for delivery in late:
            self._context.copy().run(self._on_delivery, delivery)

    async def cancel(self) -> None:
        """See `Consumer.cancel`; messages on their way arrive before the cancel-ok."""
        try:
            if self._faults.draw("transport", "cancel", (Fault.DELAY,)):
                await asyncio.sleep(self._faults.seconds("transport", "cancel"))
        finally:  # who does not wait for the cancel-ok has cancelled, too
            await self.inner.cancel()
            self._deliver_late()
