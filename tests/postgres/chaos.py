"""Machines that suffer at random, each with a service manager; and what must be true in the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import psycopg

from tests.postgres.fleet import Fleet, Host, now
from tests.process.caster import VMS
from tests.process.helpers import Effect, ServiceProcess
from tests.store.postgres import Postgres

AT_ONCE: Final = 3
"""Troubles at a time, each of another machine."""
PATIENCE_S: Final = 90.0
"""For something that other trouble may prevent."""
RESTART_S: Final = 0.5
"""After so long the service manager starts an ended process again."""


class Machine:
    """A host whose process is started again whenever it has ended.

    Attributes:
        ends: The exit code of each process that ended by itself, or by the kernel's timer.
    """

    def __init__(self, fleet: Fleet, host: Host, dice: random.Random) -> None:
        self._fleet = fleet
        self._dice = dice
        self.host = host
        self.service = self._start()
        self.ends: list[int] = []
        self._up = asyncio.Event()
        self._up.set()
        self._killed: ServiceProcess | None = None

    def _start(self) -> ServiceProcess:
        return self.host.start(max_attempts=30, max_running=8)

    async def keep(self) -> None:
        """Be the service manager, until cancelled."""
        while True:
            while not self.service.ended:
                await asyncio.sleep(0.05)
            if self.service is not self._killed:
                self.ends.append(await self.service.exit_code())
            await asyncio.sleep(RESTART_S)
            await self._up.wait()
            self.service = self._start()

    async def serving(self) -> None:
        """Wait until a process of it serves that does not end."""
        while self.service.ended or "service.serving" not in self.service.log:
            await asyncio.sleep(0.1)

    async def stop(self) -> int:
        """Stop its process, which nobody keeps any more; returns its exit code."""
        return await self.service.stop()

    # -- troubles ------------------------------------------------------------------

    async def crash(self) -> None:
        """A process dies, and comes back at once."""
        self._kill()

    async def lose_power(self) -> None:
        """The machine comes back when others have declared its run dead."""
        self._up.clear()
        run_id = self._run_id()
        self._kill()
        await self._gone(run_id)
        self.host.boot()
        self._up.set()

    async def reboot(self) -> None:
        """The machine is back so soon that its own start watches the dead run."""
        self._kill()
        self.host.boot()

    async def pause(self) -> None:
        """All stands still for a while, and goes on."""
        stopped = self.service
        self._signal(stopped, signal.SIGSTOP)
        await self._some_time(0.5, 5.0)
        self._signal(stopped, signal.SIGCONT)

    async def freeze(self) -> None:
        """A process stands still until the kernel ends it. At the worst it wakes up when others do
        its work.
        """
        stopped, run_id = self.service, self._run_id()
        self._signal(stopped, signal.SIGSTOP)
        if run_id is not None:  # otherwise nothing acts yet, and no timer is armed
            await self._until(lambda: stopped.ended or self._is_gone(run_id))
        if not stopped.ended:
            await self._some_time(3.0, 5.0)
        # It lives on if it had lost its store before, and nothing acted any more.
        self._signal(stopped, signal.SIGCONT)

    async def lose_store(self) -> None:
        """Nothing reaches the store until others have declared the run dead; then it learns so."""
        run_id, cut = self._run_id(), self.service
        if self._dice.random() < 0.5:
            self.host.store.swallow()
        else:
            self.host.cut_off()
        if await self._gone(run_id):
            self.host.store.heal()
            await self._until(lambda: cut.ended)
        self.host.store.heal()

    async def miss_store(self) -> None:
        """Nothing reaches the store for a while."""
        self._dice.choice([self.host.cut_off, self.host.store.swallow, self.host.store.stall])()
        await self._some_time(0.5, 8.0)
        self.host.store.heal()

    async def miss_broker(self) -> None:
        """Nothing reaches the broker for a while."""
        wire = self.host.broker
        self._dice.choice([wire.refuse, wire.swallow, wire.stall])()
        wire.cut()
        await self._some_time(0.5, 8.0)
        wire.heal()

    async def miss_both(self) -> None:
        """It is cut off from everything for a while."""
        self.host.cut_off()
        await self.miss_broker()
        self.host.store.heal()

    # -- what they are made of -----------------------------------------------------

    def _kill(self) -> None:
        self._killed = self.service
        self.service.kill()

    def _signal(self, service: ServiceProcess, number: signal.Signals) -> None:
        if not service.ended:
            service.signal(number)

    async def _some_time(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._dice.uniform(least_s, most_s))

    def _run_id(self) -> str | None:
        with contextlib.suppress(psycopg.Error, ValueError):  # no server, or not joined yet
            return str(self.service.run["run_id"])
        return None

    def _is_gone(self, run_id: str | None) -> bool:
        with contextlib.suppress(psycopg.Error):
            return run_id in {row["run_id"] for row in self._fleet.declared()}
        return False

    async def _gone(self, run_id: str | None) -> bool:
        return run_id is not None and await self._until(lambda: self._is_gone(run_id))

    async def _until(self, condition: Callable[[], bool]) -> bool:
        since = now()
        while not (found := condition()) and now() - since < PATIENCE_S:
            await asyncio.sleep(0.25)
        return found


Trouble = Callable[[Machine], Awaitable[None]]
FIRST: Final[tuple[Trouble, ...]] = (Machine.lose_power, Machine.freeze, Machine.lose_store)
"""What happens in each run, one each, before anything can come between."""
ALL: Final[tuple[Trouble, ...]] = (
    *FIRST,
    Machine.crash,
    Machine.reboot,
    Machine.pause,
    Machine.miss_store,
    Machine.miss_broker,
    Machine.miss_both,
)


class Chaos:
    """All machines of a fleet, and their server.

    Args:
        standby: Takes the server's place, once, when trouble of the server comes first.
        dice: Says what happens, where, and how long.

    Attributes:
        history: What happened.
    """

    def __init__(
        self, fleet: Fleet, standby: Postgres, names: Iterable[str], dice: random.Random
    ) -> None:
        self._fleet = fleet
        self._standby: Postgres | None = standby
        self._server_trouble = asyncio.Lock()
        self._dice = dice
        self.machines = [Machine(fleet, fleet.host(name), dice) for name in names]
        self._free = list(self.machines)
        self._deck: list[Trouble | None] = []
        self.history: list[str] = []
        self._keepers = [asyncio.ensure_future(one.keep()) for one in self.machines]

    async def serving(self) -> None:
        """Wait until all serve."""
        for machine in self.machines:
            await machine.serving()

    async def rage(self, duration_s: float) -> None:
        """Do everything of `FIRST`, then anything for so long; returns when all is well again."""
        await asyncio.gather(*map(self._befall, FIRST))
        end = now() + duration_s
        await asyncio.gather(*(self._go_on(end) for _ in range(AT_ONCE)))

    async def stop(self) -> list[int]:
        """Stop all; returns their exit codes."""
        await self.serving()
        for keeper in self._keepers:
            keeper.cancel()
        return [await machine.stop() for machine in self.machines]

    async def _go_on(self, end: float) -> None:
        while now() < end:
            await self._befall(self._draw())
            await asyncio.sleep(self._dice.uniform(0.1, 1.5))

    def _draw(self) -> Trouble | None:
        """The next trouble; None for one of the server. All come before one comes again."""
        if not self._deck:
            self._deck = [None, *ALL]
            self._dice.shuffle(self._deck)
        return self._deck.pop()

    async def _befall(self, trouble: Trouble | None) -> None:
        if trouble is None:
            async with self._server_trouble:
                await self._kill_server()
            return
        machine = self._free.pop(self._dice.randrange(len(self._free)))
        what = f"{machine.host.name} {trouble.__name__} {machine.service.pid}"  # type: ignore[attr-defined]
        self.history.append(f"{now():.3f} {what}")
        await trouble(machine)
        self.history.append(f"{now():.3f} {what}: over")
        self._free.append(machine)

    async def _kill_server(self) -> None:
        """It comes back at once or later; the first time its standby is promoted instead."""
        server, standby = self._fleet.server, self._standby
        self.history.append(f"{now():.3f} the server is killed")
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(self._dice.choice([0.0, self._dice.uniform(0.0, 15.0)]))
        if standby is None:
            await asyncio.to_thread(server.start)
            return
        with standby.connect() as connection:
            connection.execute("SELECT pg_promote()")
        self._fleet.move_to(standby)
        self._standby = None
        self.history.append(f"{now():.3f} the standby is promoted")


# -- judgement ---------------------------------------------------------------------


def check_order(effects: Iterable[Effect]) -> None:
    """Each resource has one owner at a time: its token rises, and who has an older one is still.

    Args:
        effects: In the order in which they came to pass.
    """
    newest: dict[int, int] = {}
    owners: dict[tuple[int, int], tuple[int, str]] = {}
    tokens: dict[tuple[int, str], int] = {}
    for effect in effects:
        if effect.word not in {"start", "done"} or "-retried-" not in effect.key:
            continue
        vm, who = int(effect.key.rpartition("-")[2]) % VMS, (effect.pid, effect.key)
        if effect.word == "start":
            tokens[who] = int(effect.more[1])
            assert tokens[who] > newest.get(vm, 0), f"{effect}: the token has not risen"
        token = tokens[who]
        assert token >= newest.get(vm, 0), f"{effect}: token {token} after {newest[vm]}"
        newest[vm] = token
        assert owners.setdefault((vm, token), who) == who, f"{effect}: two owners"


def check_nothing_lost(fleet: Fleet, casts: Iterable[str]) -> None:
    """Each cast has ended; what may be repeated has taken effect, the rest was begun once."""
    done = Counter(effect.key for effect in fleet.seen("done"))
    started = Counter(effect.key for effect in fleet.seen("start"))
    rows = {row["request_id"]: row["state"] for row in fleet.rows("SELECT * FROM task")}
    assert set(casts) == rows.keys()
    assert set(rows.values()) <= {"succeeded", "errored"}, Counter(rows.values())
    repeatable = {key for key in rows if "-slow-" not in key}
    assert {rows[key] for key in repeatable} == {"succeeded"}
    assert repeatable <= done.keys()
    assert {n for key, n in started.items() if "-slow-" in key} == {1}
    unsure = {key for key in rows if rows[key] == "errored"}
    assert {key for key in rows if "-slow-" in key} - unsure <= done.keys()
