"""The test kit for applications: a service in memory and in virtual time.

`InMemoryService` simulates one instance: it starts, drains, crashes and starts again
with the same disk and broker, while its callers go on. It runs the production code
on simulated ports; recovery and all decisions are the production code's.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar, get_args

from gracekit.config.loading import load
from gracekit.config.settings import Settings
from gracekit.config.values import did_you_mean
from gracekit.drain.report import DrainReport
from gracekit.errors import GracekitError
from gracekit.process import Point, Side
from gracekit.rpc.call_options import CallOptions
from gracekit.rpc.client import RpcClient
from gracekit.rpc.methods import Method
from gracekit.rpc.transport import directed_queue, shared_queue
from gracekit.runtime.face import Runtime
from gracekit.service import Service
from gracekit.telemetry.catalogue import CATALOGUE, UnknownEventError
from gracekit.testing.callers import Caller, Pending
from gracekit.testing.faults import Fault, PlannedFaults
from gracekit.testing.given import (
    check_condition,
    check_member,
    check_seconds,
    check_service,
    check_signal,
    check_where,
)
from gracekit.testing.instance import InstanceLife, InstanceMachine
from gracekit.testing.kind_passes import ByHand
from gracekit.testing.loop import NothingLeftError, VirtualLoop, waiting_at
from gracekit.testing.machine import EmittedEvent
from gracekit.testing.parked import ParkedSight
from gracekit.testing.ports import COMMIT_FAULTS, WIRE_STEPS, VirtualClock
from gracekit.testing.traps import Blow, Trap
from gracekit.tracker.task import TaskState

T = TypeVar("T")

PATIENCE_S: Final = 6 * 3600.0
"""Virtual seconds without any event after which a test counts as stuck."""

FAULTS_OF_THE_STORE: Final = frozenset(
    {
        "store.error",
        "store.unreachable",
        "store.fenced",
        "store.broken",
        "store.stranded",
        "drain.step_failed",
    }
)
NEVER_EXPECTED: Final = FAULTS_OF_THE_STORE | {
    "dispatch.failed",
    "background.failed",
    "hook.failed",
}
"""Events that fail a test, unless it has planned or expected them."""

_JSON: Final = ("args", "context", "cursor", "result", "failure")
_ONLY_HERE: Final = ("transport_url", "store_url", "log_format")


class ServiceFaultError(AssertionError):
    """Faults that no assertion of the test has noticed; the message lists them."""


class InMemoryService(Caller, ByHand, ParkedSight):
    """A service in memory: `async with InMemoryService(svc) as one: ...`.

    Entering the block starts its first process. Leaving it drains the last one, and
    raises ServiceFaultError for faults that the test has not noticed.

    Args:
        service: The service to test.
        beside: Another InMemoryService on whose machine to run, as one more process of its
            service, or as another service.
        seed: Of ids and random numbers. The order of events has another: `run(main(), seed=…)`.
        settings: As in `Settings`, `"5m"` for durations; here `look_every_s` is 60 s by default.

    Raises:
        ConfigError: a setting is unknown or wrong; the message names them all.

    Attributes:
        events: The events of all its processes, in order, as name and fields.
        report: The report of the last drain; None before the first.
        faults: The planned faults; see `fail_next`.
        calls: The calls that `start_call` has begun.
    """

    def __init__(
        self,
        service: Service,
        *,
        beside: InMemoryService | None = None,
        seed: int = 0,
        **settings: object,
    ) -> None:
        super().__init__(CallOptions())
        check_service(service)
        if not isinstance(beside, InMemoryService | None):
            raise GracekitError(
                f"beside={beside!r} is no InMemoryService: write beside=one, with the one whose "
                "machine it is to share"
            )
        self.service = service
        self.events: list[EmittedEvent] = []
        self.report: DrainReport | None = None
        self.faults = PlannedFaults()
        self.calls: list[Pending[Any]] = []
        self._settings = _checked(settings, service.defaults)
        self._beside = beside
        self._seed = seed
        self._machine: InstanceMachine | None = None
        self._outside: RpcClient | None = None
        self._life: InstanceLife | None = None
        self._traps: list[Trap] = []
        self._dies_at: tuple[Point, Side] | None = None
        self._expected: set[str] = set()
        self._news = asyncio.Event()
        self._quiet_until = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    # -- the block ----------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        loop = _virtual_loop()
        self._machine = self._beside.machine if self._beside else InstanceMachine.open(self._seed)
        self._note_news()
        self._alarm = loop.call_later(PATIENCE_S, self._look_for_news)
        try:
            ops_topic = self._settings.ops_topic_of(self.service.topic)
            self._outside = await self._machine.client(self.service, ops_topic=ops_topic)
            await self.start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        wrong: list[str] = []
        try:
            if error is None:
                wrong += self._failed_calls()
                if self.lives:
                    await self.drain()
                wrong += self._faults_told()
                wrong += self._not_happened()
        finally:
            await self._close()
        if wrong:
            raise ServiceFaultError("\n".join(wrong))

    async def _close(self) -> None:
        for call in self.calls:
            call.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        await self.machine.bury(self)
        if self._beside is None:
            await self.machine.close()

    def _line(self) -> InMemoryService:
        return self

    def _failed_calls(self) -> list[str]:
        return [
            f"{call.name} failed, and was never awaited: {error!r}"
            for call in self.calls
            if (error := call.unseen_error()) is not None
        ]

    def _faults_told(self) -> list[str]:
        unseen = NEVER_EXPECTED - self._expected
        if self.faults.met:
            unseen -= FAULTS_OF_THE_STORE
        return [
            f"{name}: {dict(fields)}; a test that means it says expect({name!r})"
            for name, fields in self.events
            if name in unseen
        ]

    def _not_happened(self) -> list[str]:
        asked = [f"{trap.asked}: {trap.left} more safe points were needed" for trap in self._traps]
        if self._dies_at is not None:
            point, side = self._dies_at
            asked.append(f"crash_at({point}, {side!r}): it was never passed")
        faults = self.faults.left()
        asked += [f"fail_next: {fault.name} at {port}.{step}" for port, step, fault in faults]
        return [f"was asked for and did not happen: {one}" for one in asked]

    # -- its parts ----------------------------------------------------------------------

    @property
    def machine(self) -> InstanceMachine:
        """The simulated machine: broker, disk and processes."""
        return _need(self._machine)

    @property
    def client(self) -> RpcClient:
        """The RpcClient of a caller outside of the service."""
        return _need(self._outside)

    @property
    def clock(self) -> VirtualClock:
        """The clock of the service: `wall()` reads its wall clock, and `shift_s` shifts it."""
        return self.machine.clock

    @property
    def runtime(self) -> Runtime:
        """The Runtime of the present process, or of the last one."""
        return _need(self._life).runtime

    @property
    def lives(self) -> bool:
        """Whether a process is alive now."""
        return self._life is not None and self._life.process.lives

    # -- one process after the other ----------------------------------------------------

    async def start(self) -> None:
        """Start the next process, with the disk and broker of the last; wait until it serves.

        Raises:
            GracekitError: as `Runtime`; or one lives already.
        """
        if self.lives:
            raise GracekitError(f"{self} lives: drain() or crash() it before the next start()")
        life = InstanceLife(self, self.machine, self.service, self._settings)
        life.watch_safe_points(self._traps)
        life.process.dies_at = self._dies_at
        self._life = life
        await life.start()

    async def drain(self, by: signal.Signals = signal.SIGTERM) -> DrainReport:
        """Drain by a signal, and wait for the end; SIGQUIT hands over at once."""
        self.interrupt(by)
        return await self.wait_stopped()

    def interrupt(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal: SIGTERM or SIGINT begin a drain, SIGQUIT or a second SIGINT end it.

        Raises:
            ValueError: gracekit handles no such signal.
        """
        check_signal(by)
        self._living().interrupt(by)

    def interrupt_at(self, n: int, *, of: Method[..., Any] | None = None) -> None:
        """Begin a drain at the *n*-th safe point from now, in this process or the next ones.

        The handler waits there until the drain has begun. Then it stops at that safe
        point, unless it is its last, or by its history it will end in time.

        Args:
            n: From 1.
            of: Count only safe points of this method.
        """
        self._lay("drain", "interrupt_at", n, of)

    async def wait_stopped(self, *, within_s: float = 7200.0) -> DrainReport:
        """Wait until its drain has ended, and the process with it.

        Raises:
            AssertionError: it was killed, or no drain ended within that time.
        """
        life = _need(self._life)
        await self._wait_over(life, within_s)
        if life.report is None:
            raise life.error or AssertionError(
                f"{self} was killed before its drain had ended; wait_crashed() waits for that"
            )
        self.report = life.report
        return life.report

    async def crash(self) -> None:
        """Kill -9, now: none of its code runs any more, not even a `finally`."""
        self._living().end()
        await asyncio.sleep(0)

    def crash_at(
        self, where: int | Point, side: Side = "after", *, of: Method[..., Any] | None = None
    ) -> None:
        """Kill -9 later, in this process or the next ones.

        Args:
            where: The n-th safe point from now; or a point, such as `Point.FINISH`.
            side: Before or after the point.
            of: Count only safe points of this method.

        Raises:
            ValueError: *where* is neither, or there is no such side.
        """
        check_where("crash_at", where)
        if not isinstance(where, Point):
            self._lay("crash", "crash_at", where, of)
            return
        if side not in get_args(Side):
            raise ValueError(f"crash_at: side={side!r} is none of {', '.join(get_args(Side))}")
        self._dies_at = (where, side)
        if self._life is not None and self.lives:
            self._life.process.dies_at = self._dies_at

    async def wait_crashed(self, *, within_s: float = 7200.0) -> None:
        """Wait until it was killed.

        Raises:
            AssertionError: it ended by a drain, or is still alive.
        """
        life = _need(self._life)
        await self._wait_over(life, within_s)
        if life.report is not None:
            raise AssertionError(f"{self} was not killed: it ended in order, {life.report}")

    async def _wait_over(self, life: InstanceLife, within_s: float) -> None:
        self._note_news(within_s)
        try:
            async with asyncio.timeout(within_s) as limit:
                await life.over.wait()
        except TimeoutError as error:
            if not limit.expired():
                raise
            laid = "".join(f"; {one}" for one in self._not_happened())
            raise AssertionError(
                f"{self} still serves after {within_s:g} s{self._in_flight()}{laid}"
            ) from error

    def ended(self, life: InstanceLife) -> None:
        """Called by a life at its end."""
        if life is self._life:
            self._dies_at = life.process.dies_at
        self._note_news()

    def _living(self) -> InstanceLife:
        life = _need(self._life)
        if not life.process.lives:
            raise GracekitError(f"no process of {self} lives: start() the next one")
        return life

    def _lay(self, blow: Blow, verb: str, n: int, of: Method[..., Any] | None) -> None:
        self._traps.append(Trap.laid(blow, verb, n, of))

    # -- faults -------------------------------------------------------------------------

    def fail_next(self, at: Point, fault: Fault, *, times: int = 1) -> None:
        """Cause a fault at the next commit, ack, reply or start of that name.

        Args:
            at: `Point.FINISH` and other commits; ACK, GIVE_BACK, DEAD_LETTER, REPLY,
                DELIVER; CONNECT is the start of the transport.
            fault: For example `LOST_AFTER`: the commit is done, but its answer is lost.
            times: How often.

        Raises:
            ValueError: that fault cannot happen there, or *times* is no count.
        """
        check_member("fail_next", at, Point)
        check_member("fail_next", fault, Fault)
        step, kinds = WIRE_STEPS.get(at, (at.value, COMMIT_FAULTS))
        if at is Point.PUBLISH:
            raise ValueError("Point.PUBLISH is a caller's step, and callers meet no faults here")
        if fault not in kinds:
            known = ", ".join(kind.name for kind in kinds)
            raise ValueError(f"{at} cannot meet {fault.name}; it can meet {known}")
        self.faults.plan("transport" if at in WIRE_STEPS else "store", step, fault, times=times)

    def expect(self, *events: str) -> None:
        """Allow events that would fail the test: `expect("hook.failed")`."""
        self._expected |= {_known(name) for name in events}

    def forget(self) -> None:
        """Cancel planned drains, crashes and faults that have not happened."""
        self._traps.clear()
        self._dies_at = None
        if self._life is not None:
            self._life.process.dies_at = None
        self.faults.forget()

    # -- time ---------------------------------------------------------------------------

    async def pass_time(self, seconds: float) -> None:
        """Let virtual time pass, and everything happen that is due meanwhile or at its end.

        Raises:
            ValueError: *seconds* is no number, negative or infinite.
        """
        check_seconds(seconds)
        self._note_news(seconds)
        await asyncio.sleep(seconds)
        await self.machine.settle()

    async def until(self, condition: Callable[[], bool], *, within_s: float = 600.0) -> None:
        """Let virtual time pass until *condition* holds.

        Raises:
            AssertionError: it did not within that time.
            TypeError: *condition* is no plain function.
        """
        check_condition(condition)
        if not await self._passed_until(condition, within_s):
            raise AssertionError(f"not within {within_s:g} s{self._in_flight()}")

    async def settled(self, *, within_s: float = 3600.0) -> None:
        """Wait until every request that was sent has ended and was answered.

        Parked tasks are not waited for, but the notifications about them are.

        Raises:
            AssertionError: something is still unfinished; the message lists it.
        """
        self._living()
        await self.machine.settle()
        self._write_riders()
        if not await self._passed_until(self._has_settled, within_s):
            raise AssertionError(
                f"unfinished after {within_s:g} s: {', '.join(self._unfinished())}"
            )

    async def _passed_until(self, condition: Callable[[], bool], within_s: float) -> bool:
        self._note_news(within_s)
        loop = asyncio.get_running_loop()
        limit, pause_s = loop.time() + within_s, 0.01
        await self.machine.settle()
        while not condition():
            if loop.time() >= limit:
                return False
            await asyncio.sleep(min(pause_s, limit - loop.time()))
            pause_s = min(5.0, pause_s * 1.2)
        return True

    def _has_settled(self) -> bool:
        self._write_riders()
        return not self._unfinished()

    def _write_riders(self) -> None:
        """Submit records that wait to be part of another commit, so that no time need pass."""
        if self.lives and (wired := self.runtime.wired) is not None:
            wired.journal.submit_riders()

    def _unfinished(self) -> list[str]:
        sql = """SELECT method, request_id, state FROM task WHERE service = ? AND state != 'pending'
                 AND (finished_at IS NULL OR errored_due = 1) ORDER BY id"""
        rows = self.machine.rows(sql, self.service.topic)
        found = [f"{row['method']} {row['request_id']} {row['state']}" for row in rows]
        tracked = self.runtime.ground.tracker
        known = {row["request_id"] for row in rows}
        found += [f"{task} in flight" for task in tracked if task.request_id not in known]
        sql = "SELECT 'notification', event_type, 'to be sent' FROM outbox WHERE service = ?"
        found += [" ".join(row.values()) for row in self.machine.rows(sql, self.service.topic)]
        waiting = {name: self.machine.broker.waiting(name) for name in self._queues()}
        return found + [f"{n} waiting in {name}" for name, n in waiting.items() if n]

    def _queues(self) -> list[str]:
        topics = (self.service.topic, self._settings.ops_topic_of(self.service.topic))
        host = self._settings.host
        shared = [shared_queue(topic).name for topic in topics]
        return shared + [directed_queue(topic, host).name for topic in topics]

    def _in_flight(self) -> str:
        listed = self._unfinished() if self._life is not None else []
        return f"; unfinished: {', '.join(listed)}" if listed else ""

    # -- events and the disk ------------------------------------------------------------

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        """Called by a life for each of its events."""
        self.events.append((name, dict(fields)))
        self._note_news()

    def told(self, name: str) -> list[Mapping[str, Any]]:
        """The fields of all events of that name so far, from all its processes."""
        _known(name)
        return [fields for each, fields in self.events if each == name]

    async def hears(self, name: str, number: int = 1) -> Mapping[str, Any]:
        """Wait for the *number*-th event of that name, counted from the beginning."""
        while len(self.told(name)) < number:
            self._news.clear()
            await self._news.wait()
        return self.told(name)[number - 1]

    def state_of(self, request_id: str) -> TaskState | None:
        """The state of a request on disk; None if it has no row, as with `requeue` methods."""
        rows = self.machine.rows("SELECT state FROM task WHERE request_id = ?", request_id)
        return TaskState(rows[0]["state"]) if rows else None

    def row(self, request_id: str) -> dict[str, Any]:
        """The journal's row of a request, with its JSON columns parsed.

        Raises:
            LookupError: there is no such row; the message lists the existing ones.
        """
        rows = self.machine.rows(
            "SELECT task.*, args, context FROM task LEFT JOIN content ON content.row_id = task.id "
            "WHERE request_id = ?",
            request_id,
        )
        if not rows:
            known = [row["request_id"] for row in self.machine.rows("SELECT request_id FROM task")]
            raise LookupError(f"no row of request {request_id!r}; there are {known}")
        row = rows[0]
        return row | {name: json.loads(row[name]) for name in _JSON if row[name] is not None}

    # -- tests that wait in vain ---------------------------------------------------------

    def _note_news(self, quiet_s: float = 0.0) -> None:
        self._news.set()
        self._quiet_until = max(self._quiet_until, self.clock.loop() + quiet_s)

    def _look_for_news(self) -> None:
        """Fail a stuck test: a living service always has timers, so the loop would never end."""
        loop = _virtual_loop()
        left = self._quiet_until + PATIENCE_S - loop.time()
        if left > 0:
            self._alarm = loop.call_later(left, self._look_for_news)
            return
        loop.give_up(
            NothingLeftError(
                f"nothing has happened for {PATIENCE_S:g} s of virtual time, and the test waits "
                f"for something that will not come (pass_time() lets more time pass)"
                f"{waiting_at(loop)}{self._in_flight()}"
            )
        )

    def __repr__(self) -> str:
        return f"<InMemoryService {self.service.topic}@{self._settings.host}>"


for _verb in (ByHand.reconcile, ParkedSight.pending, ParkedSight.notifications):
    _verb.__qualname__ = f"InMemoryService.{_verb.__name__}"  # as the errors of Python name it


def _need(part: T | None) -> T:
    if part is None:
        raise GracekitError("it is not open: use it as `async with InMemoryService(svc) as one:`")
    return part


def _virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise GracekitError(
            f"InMemoryService needs virtual time, and this is a {type(loop).__name__}: run the "
            "test as gracekit.testing.run(main()), or give pytest-asyncio VirtualLoop as its "
            "loop factory (docs/testing.md has the lines)"
        )
    return loop


def _known(name: str) -> str:
    if name not in CATALOGUE:
        raise UnknownEventError(f"no event {name!r}{did_you_mean(name, CATALOGUE)}")
    return name


def _checked(given: Mapping[str, object], defaults: Mapping[str, object]) -> Settings:
    for name in _ONLY_HERE:
        if name in given:
            raise GracekitError(f"{name} cannot be set here: queue and store are in memory")
    here = {"transport_url": "memory://", "store_url": "memory://"}
    mine = {"host": "node-1", "look_every_s": 60.0, **given, **here}
    return load(mine, env={}, defaults=defaults)
