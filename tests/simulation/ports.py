"""The ports of a story: as the test kit plays them, and held against the disk at each step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gracekit.config.settings import Settings
from gracekit.errors import DependencyError, StoreUnreachableError, UnknownCommitError
from gracekit.rpc.transport import Delivery, Message, Queue, QueueKind, Settlement
from gracekit.service import Service
from gracekit.store.batch import Batch, Row
from gracekit.store.engine import Aside, Rows
from gracekit.store.state import StoreState
from gracekit.testing.faults import Faults
from gracekit.testing.ports import VirtualClock
from tests.played import Life, Machine, NoCrash, PlayedEngine, PlayedProcess, PlayedTransport
from tests.simulation.beats import HostClock, keep_in_greenlet
from tests.simulation.threads import GreenProcess
from tests.simulation.truth import Violation, violate

if TYPE_CHECKING:
    from tests.simulation.story import Story


class SimEngine(PlayedEngine):
    """An engine whose commits the ledger reads, and whose host may be cut off from the store."""

    life: Any
    story: Story

    @property
    def faults(self) -> Faults:
        return self._faults

    def wall(self) -> float:
        return self.story.machine.clock.wall()

    def keep_aside(self, work: Callable[[Aside], float], *, within_s: float) -> Callable[[], None]:
        return keep_in_greenlet(self, work, within_s)

    def follow_reach(self) -> None:
        """Find out whether the store can be reached now."""
        if self.story.apart.reaches(self.life):
            self._become(StoreState.REACHABLE)
        else:
            self._become(StoreState.UNREACHABLE, StoreUnreachableError("the server is away"))

    async def start(self) -> None:
        if not self.story.apart.reaches(self.life):
            raise DependencyError("the server of the store does not answer")
        await super().start()

    async def query(self, sql: str, *params: Any) -> list[Row]:
        if not self.story.apart.reaches(self.life):
            raise StoreUnreachableError("the server does not answer")
        return await super().query(sql, *params)

    def submit(self, batch: Batch) -> asyncio.Future[Rows]:
        self.story.note_commit(self.life, batch.point)
        self.story.judged(self.story.inquirers.check_commit, self.life, batch.point)
        return super().submit(batch)

    def _carry_out(self) -> None:
        if not self.story.apart.reaches(self.life):
            line, self._line = self._line, []
            for _, future in line:
                self._answer_in(0.0, future, UnknownCommitError("the connection broke"))
            return
        try:
            super()._carry_out()
        finally:
            if not self.story.machine_is_closed:
                self.story.judged(self.story.ledger.read, self.life)


class SimTransport(PlayedTransport):
    """A connection whose acks and replies are held against the disk."""

    life: SimLife

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taken: list[Delivery] = []

    async def consume(self, queues: Any, on_delivery: Any, *, prefetch: int) -> Any:
        def take(delivery: Delivery) -> None:
            self.life.story.inquirers.watch(self.life)
            self.taken = [one for one in self.taken if not one.settled]
            self.taken.append(delivery)
            self._watch(delivery)
            on_delivery(delivery)

        return await super().consume(queues, take, prefetch=prefetch)

    def _watch(self, delivery: Delivery) -> None:
        settle = delivery.settle

        async def settle_judged(how: Settlement, reason: str) -> None:
            if how is Settlement.ACK:
                self.life.story.judged(self.life.story.watch.check_ack, self.life, delivery)
            await settle(how, reason)

        delivery.settle = settle_judged

    async def publish(self, queue: Queue, message: Message) -> None:
        if queue.kind is QueueKind.REPLY:
            self.life.story.judged(self.life.story.watch.check_reply, self.life, message)
        if queue.kind is QueueKind.NOTIFICATION:
            await self._notify(queue, message)
        else:
            await super().publish(queue, message)

    async def _notify(self, queue: Queue, message: Message) -> None:
        parked, said = self.life.story.parked, ""
        try:
            said = parked.check_sending(queue, message)
        except Violation as violation:
            self.life.story.judged(violate, str(violation))
        await super().publish(queue, message)
        parked.sent.add(said)


class SimLife(Life):
    """A process of the story.

    Attributes:
        closed: Its new-request intake is proven closed.
        had_company: When it died, a handler without a row, or a job, was at work in it.
    """

    process: GreenProcess

    def __init__(self, story: Story, service: Service, settings: Settings, number: int) -> None:
        self.story = story
        self.name = f"run{number}"
        self.closed = False
        self.closings = 0
        self.asked_at: float | None = None
        self.forced = False
        self.had_company = False
        super().__init__(story.machine, service, settings, signals=True)
        story.apart.settle(self)

    def _hear(self, name: str, fields: Any) -> None:
        super()._hear(name, fields)
        self.story.tell(f"{self.name} {name} {sorted(fields.items())}")
        if name == "reconciliation.started":
            self.story.records.note_pass(self)
        if fields.get("lane") != "requests":
            return
        if name == "intake.closed":
            self.closed = True
            self.closings += 1
            self.story.watch.note_closed(self)
        elif name == "intake.opened":
            self.closed = False

    def end(self) -> None:
        if self.process.lives:
            self.story.tell(f"{self.name} is gone")
            self.story.capacity.note_end(self)
            self.had_company = self.story.truth.has_company(self)
            end = self.process._end
            if end is not None and end.when() <= self.story.loop.time():
                self.story.ends["ended by the kernel"] += 1
        super().end()
        self.machine.resume(self)  # what is killed while it stands still comes to its end too


class SimMachine(Machine):
    """The machine of a story, with its kinds of ports."""

    story: Story

    def clock_of(self, life: Life) -> VirtualClock:
        return HostClock(self.clock) if self.story.apart.is_on else self.clock

    def make_process(self, life: Life) -> PlayedProcess:
        self._processes += 1
        return GreenProcess(
            self.living, 100 + self._processes, faults=life.faults, on_death=life.end
        )

    def make_engine(self, life: Life) -> PlayedEngine:
        engine = SimEngine(self.disk, life.process, life.faults)
        engine.life, engine.story = life, self.story
        return engine

    def engine_for(self, outsider: Any) -> PlayedEngine:
        """An engine of a process that is no service."""
        engine = SimEngine(self.disk, outsider.process, NoCrash(self.faults))
        engine.life, engine.story = outsider, self.story
        return engine

    def make_transport(self, life: Life) -> PlayedTransport:
        transport = SimTransport(self.broker, life.process, life.faults)
        transport.life = life  # type: ignore[assignment]
        return transport

    def make_life(self, service: Service, settings: Settings, *, signals: bool) -> Life:
        return SimLife(self.story, service, settings, len(self.lives))
