"""The machine in memory of `gracekit.testing`, and what the service tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from pathlib import Path
from typing import Any, Final, cast

from gracekit import Context, Service, Settings
from gracekit.control.door_wire import line_of_answer, read_answer
from gracekit.process import Point
from gracekit.rpc.memory import MemoryTransport
from gracekit.rpc.transport import Message, shared_queue
from gracekit.testing.faults import Fault, PlannedFaults
from tests.played import PATIENCE_S, Machine, PlayedProcess, VirtualClock
from tests.played import Life as BaseLife
from tests.store.remote import PlayedRemoteEngine


def now() -> float:
    return asyncio.get_running_loop().time()


def run_row(world: World) -> dict[str, Any]:
    return world.rows("SELECT * FROM run ORDER BY started_at DESC LIMIT 1")[0]


class Life(BaseLife):
    """One process of a service, with faults of its own."""

    faults: PlannedFaults

    def plan(self, step: Point | str, fault: Fault, *, times: int = 1) -> None:
        """Let the next commits of a point, or the next uses of the transport, meet *fault*."""
        if isinstance(step, Point):
            self.faults.plan("store", step.value, fault, times=times)
        else:
            self.faults.plan("transport", step, fault, times=times)

    def names(self) -> list[str]:
        """The events so far, by name."""
        return [name for name, _ in self.events]


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


class Systemd:
    """A notification socket, and what was sent to it, each with its loop time in seconds."""

    EVERY_S: Final = 0.05
    """It is emptied so often: a socket keeps about ten messages, and further ones are lost."""

    def __init__(self, path: Path) -> None:
        self.told: list[tuple[float, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._listening: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Hear what comes from now on; called in the test, where time is virtual."""
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.told.append((now(), self._socket.recv(4096).decode()))
            await asyncio.sleep(self.EVERY_S)

    def close(self) -> None:
        """Hear nothing more."""
        if self._listening is not None:
            self._listening.cancel()
        self._socket.close()

    def texts(self, what: str) -> list[str]:
        """The messages so far in which *what* occurs."""
        return [text for _, text in self.told if what in text]

    def statuses(self) -> list[str]:
        """The lines for `systemctl status` so far."""
        lines = [line for _, text in self.told for line in text.splitlines()]
        return [line.removeprefix("STATUS=") for line in lines if line.startswith("STATUS=")]

    def longest_gap(self, *, since: float, until: float) -> float:
        """The longest time between two moments at which the watchdog was fed, and these ends."""
        fed = [at for at, text in self.told if "WATCHDOG=1" in text and since <= at <= until]
        moments = [since, *fed, until]
        return max(after - before for before, after in itertools.pairwise(moments))


class SteadyClock(VirtualClock):
    """Moments that are round numbers: looptime rounds time, and a timer in between fires early."""

    def jitter(self, seconds: float) -> float:
        return seconds


class World(Machine):
    """The machine, and questions about its disk."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SteadyClock()
        self.expects_faults = False

    def make_engine(self, life: BaseLife) -> PlayedRemoteEngine:
        return PlayedRemoteEngine(self.disk, life.process, life.faults)

    def faults_of(self, life: BaseLife) -> PlannedFaults:
        return PlannedFaults()

    def make_life(self, service: Service, settings: Settings, *, signals: bool) -> Life:
        return Life(self, service, settings, signals=signals)

    def life(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        return cast("Life", super().life(service, signals=signals, **settings))

    async def start(self, service: Service, *, signals: bool = False, **settings: Any) -> Life:
        return cast("Life", await super().start(service, signals=signals, **settings))

    async def verb(self, life: Life, verb: str, **args: Any) -> Any:
        """An operator's control verb."""
        control, run_id = life.runtime.wired.control, life.runtime.run_id
        return read_answer(line_of_answer(await control.carry_out(verb, run_id, args)))

    async def deliver(self, queue: str, body: bytes) -> None:
        """Put raw bytes into a queue."""
        transport = MemoryTransport(self.broker, PlayedProcess(set(), 2))
        await transport.start()
        await transport.publish(shared_queue(queue), Message(body=body))

    # -- what is on disk -----------------------------------------------------------------

    def task(self, request_id: str, recipient: str = "") -> dict[str, Any]:
        """The row of a request, with what is kept of its arguments and context."""
        sql = (
            "SELECT * FROM task LEFT JOIN content ON row_id = id "
            "WHERE request_id = ? AND recipient = ?"
        )
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
                    assert life.told("background.failed") == []
                    assert life.told("drain.step_failed") == []
                    assert life.told("store.stranded") == []


async def start_with_work(world: World, svc: Service) -> tuple[Life, Doors]:
    """A service with one request of `work` in flight, which waits at the door `work`."""
    doors = Doors()

    @svc.rpc
    async def work(ctx: Context) -> None:
        await doors.pass_("work")

    life = await world.start(svc)
    await (await world.client(svc)).cast(work)
    await doors.wait(1)
    return life, doors
