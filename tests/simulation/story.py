"""One seed: several processes, clients, drains and crashes, then a quiet phase and the reckoning.

`play(seed)` returns what happened; a broken promise raises Violation.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from gracekit.errors import GracekitError
from gracekit.phase import ServiceState
from gracekit.process import Point
from gracekit.testing.loop import VirtualLoop
from gracekit.testing.machine import Life
from gracekit.testing.ports import Died
from tests.simulation.apart import HostsApart
from tests.simulation.app import App
from tests.simulation.beats import Beats
from tests.simulation.callers import BUSY_S, CALLERS, Callers, Sent
from tests.simulation.capacity import Capacity
from tests.simulation.histories import SCHEMA as HISTORIES
from tests.simulation.inquirers import ASKERS, Inquirers
from tests.simulation.ledger import Ledger
from tests.simulation.operators import Operator
from tests.simulation.parked import OVERDUE_S, SCHEMA, ParkedTasks
from tests.simulation.ports import SimLife, SimMachine
from tests.simulation.reckoning import Reckoning
from tests.simulation.records import Records
from tests.simulation.resolvers import Resolver
from tests.simulation.swarm import JUMPS_S, Swarm
from tests.simulation.truth import Truth, Violation
from tests.simulation.watch import Watch

ORDERS: Final = 4
PARKED_ORDERS: Final = 6
KILLERS: Final = 0.25
"""Share of the seeds in which a request kills its process."""
QUIET_S: Final = 900.0
LATE_LEASES: Final = 0.1
"""Share of the seeds in which the last drains begin while a lease is being taken."""
BUSY_OPS: Final = 0.2
"""Share of the seeds in which the last drains, if they may last, begin with a busy ops lane."""
IDLE_S: Final = 6.0
"""Within which an idle process ends."""
ENOUGH_S: Final = 22.0
"""Within which one ends whose ops lane is busy, also with what a sibling has left to it."""
LEASE_WITHIN_S: Final = 60.0  # a job runs every 17 s, and a pass at least as often as this
SLOTS: Final = (["node-1"], ["node-1"], ["node-1", "node-1"], ["node-1", "node-2"])
MAX_ITERATIONS: Final = 60_000  # most seeds need two thousand


@dataclass(kw_only=True)
class Played:
    """What came of a seed."""

    seed: int
    trace: list[str]
    edges: Counter[tuple[str, str]]
    faults: Counter[tuple[str, str, str]]
    runs: int
    iterations: int
    ends: Counter[str]

    @property
    def digest(self) -> str:
        """Of the trace: the same seed gives the same."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


class Story:
    """A seed, as it unfolds."""

    def __init__(self, seed: int, app: App) -> None:
        self.seed = seed
        self.rng = random.Random(f"story {seed}")
        self.swarm = Swarm(random.Random(f"faults {seed}"))
        self.trace: list[str] = []
        self.violations: list[BaseException] = []
        self.app = app
        self.callers = Callers(self)
        self.watch = Watch(self)
        self.reckoning = Reckoning(self)
        self.ends: Counter[str] = Counter()
        self.capacity = Capacity(self)
        self.parked = ParkedTasks(self)
        self.inquirers = Inquirers(self)
        self.apart = HostsApart(self)
        self.beats = Beats(self)
        self.truth = app.truth = Truth(
            tell=self.tell,
            on_start=self.watch.check_start,
            on_cancel=self.watch.check_cancel,
            judged=self.judged,
            jumps=self.swarm.jumps,
            take_room=self.capacity.take,
            on_hook=self.parked.check_hook,
            on_effect=self.inquirers.histories.check_acts,
            hook_s=(0.0, 0.5, 2.0) if self.capacity.is_on else (0.0,),
            has_left=lambda life: life.runtime.run_id in self.ledger.left,
            is_fenced=self.is_fenced,
            is_declared=lambda life: life.runtime.run_id in self.ledger.declared,
        )
        if self.capacity.is_on:
            self.truth.take_along = self.callers.take_along
        app.svc.answers_callers = self.inquirers.is_on
        self.records = app.records = Records(self)
        self.sent: dict[str, Sent] = {}
        self._killer_from = self._draw_killer()
        self.served_at: dict[SimLife, float] = {}
        self.machine_is_closed = False
        self.is_over = False
        self._has_one_ops_slot = False
        self._awaits_lease: tuple[SimLife, asyncio.Event] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    def _draw_killer(self) -> int | None:
        """From which request of a caller on one kills its process; None in most seeds."""
        rng = random.Random(f"{self.seed} killer")  # of its own: the rest of the story stays
        return rng.randrange(3, 12) if rng.random() < KILLERS else None

    def wants_killer(self, policy: str, method: str, number: int) -> bool:
        """Whether the request that is being drawn is the one that kills its process."""
        fits = policy in {"retry", "probe", "requeue"} and method.startswith(policy)
        if self._killer_from is None or number < self._killer_from or not fits:
            return False
        if "thread" in method:  # a thread of a dead process stands still, and so would its death
            return False
        self._killer_from = None
        return True

    def tell(self, line: str) -> None:
        self.trace.append(f"{self.loop.time():.6f} {line}")

    def judged(self, check: Any, *args: Any) -> None:
        """Run a check; a broken promise ends the story, wherever it was found."""
        try:
            check(*args)
        except Violation as violation:
            self.tell(f"VIOLATION {violation}")
            self.violations.append(violation)

    # -- the whole ------------------------------------------------------------------------

    async def play(self) -> Played:
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, StoryLoop)
        self.loop.lag = self.swarm.lag
        self.loop.set_exception_handler(self._hear_loop)
        self.machine = SimMachine(seed=self.seed, faults=self.swarm)
        self.machine.story = self
        self.ledger = Ledger(self.machine, self.truth, self.tell)
        if self.capacity.is_on:
            self.ledger.add(SCHEMA, self.parked.read)
        if self.inquirers.is_on:
            self.ledger.add(HISTORIES, self.inquirers.histories.read)
        self.ledger.reads_failed = self._may_reads_have_failed
        self.ledger.check_declared = self.beats.check_declared
        self.ledger.note_joined = self.beats.note_landed
        try:
            await self._unfold()
            await self._be_quiet()
            self.raise_first()
            self.reckoning.reckon()
        finally:
            self.is_over = True
            for task in self._tasks:
                task.cancel()
            self.machine_is_closed = True
            await self.machine.close()
        self.raise_first()
        return Played(
            seed=self.seed,
            trace=self.trace,
            edges=self.ledger.edges,
            faults=self.swarm.met,
            runs=len(self.machine.lives),
            iterations=self.loop.iterations,
            ends=self.ends + self.records.acted + self._ends_of_fenced(),
        )

    def _may_reads_have_failed(self) -> bool:
        return bool(self.swarm.met["store", "query", "REFUSED"]) or self.apart.was_any_cut

    def is_fenced(self, life: Life) -> bool:
        """Whether an operator has declared a process gone while it lived."""
        return life.runtime.run_id in self.ledger.fenced

    def _ends_of_fenced(self) -> Counter[str]:
        ledger = self.ledger
        return Counter(
            {
                "fenced": len(ledger.fenced),
                "old token refused": self.truth.refused,
                "declared dead": ledger.declared_dead,
                "declared dead, idle": len(ledger.declared),
            }
        )

    def raise_first(self) -> None:
        if self.violations:
            raise self.violations[0]

    def _hear_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Died | asyncio.CancelledError):
            return
        if self.machine_is_closed or "was destroyed" in context["message"]:
            return
        self.tell(f"loop: {context['message']} {error!r}")
        if "never retrieved" not in context["message"]:
            self.violations.append(error or Violation(context["message"]))

    def spawn(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(step)
        self._tasks.append(task)
        return task

    async def _unfold(self) -> None:
        """Processes and clients, until the clients have sent all and all fates are told."""
        slots = self.rng.choice(SLOTS)
        self.hosts = sorted(set(slots))
        self.apart.draw(self.hosts)
        self.records.fill(self.hosts)
        self.spawn(self.records.drift())
        if self.apart.is_on:
            self.apart.begin()
        self.settings = settings = self._settings()
        fates = [
            self.spawn(self._slot(host, n, settings, random.Random(f"{self.seed} {host} {n}")))
            for n, host in enumerate(slots)
        ]
        self._fates_left = len(fates)
        if self.apart.is_on:  # one more, which nothing befalls by itself: somebody watches
            rng = random.Random(f"{self.seed} watcher")
            self.spawn(self._slot(slots[-1], len(slots), settings, rng, fates=0))
        self._fates_told = asyncio.Event()
        operator = Operator(self, random.Random(f"{self.seed} operator"))
        clients = [self.spawn(self.callers.send_all(n)) for n in range(CALLERS)]
        clients.append(self.spawn(operator.work(orders=ORDERS, within_s=BUSY_S)))
        if self.capacity.parks:
            second = Operator(self, random.Random(f"{self.seed} operator of parked tasks"))
            work = second.work_on_parked(orders=PARKED_ORDERS, within_s=BUSY_S)
            clients.append(self.spawn(work))
        for n in range(self.capacity.resolvers):
            self.spawn(Resolver(self, n).live())
        for n in range(ASKERS if self.inquirers.is_on else 0):
            self.spawn(self.inquirers.work(n))
        await asyncio.wait(clients)
        for client in clients:
            client.result()
        await self._fates_told.wait()
        await self.apart.wait_blows()

    def _settings(self) -> dict[str, Any]:
        pick = self.rng.choice
        drain = pick([1.0, 5.0, 12.0, 30.0])
        late = random.Random(f"{self.seed} last drain").random() > 1 - BUSY_OPS
        self._has_one_ops_slot = late and drain > ENOUGH_S
        return {
            "drain_timeout_s": drain,
            "kill_after_s": None,
            "max_accepted": pick([2, 6, 40]),
            "max_running": pick([1, 3, 20]),
            "prefetch": pick([2, 8, 64]),
            "accept_wait_s": pick([3.0, 30.0]),
            "max_attempts": pick([2, 3, 5]),
            "threads": pick([1, 4]),
            "look_every_s": 30.0,
            "progress_every_s": 5.0,
            "retention_after_s": 600.0,
            **self._settings_of_rules(),
            **self.capacity.settings(),
            **self.inquirers.settings(),
            **({"ops_max_running": 1} if self._has_one_ops_slot else {}),
        }

    def _settings_of_rules(self) -> dict[str, Any]:
        pick = random.Random(f"{self.seed} rules").choice  # of its own: the rest stays
        return {
            "startup_reconciliation_wait_seconds": pick([1.0, 3.0, 10.0]),
            "reconciliation_interval_s": pick([10.0, 30.0, 60.0]),
            "reconcile_at_once": pick([1, 2, 16]),
        }

    # -- processes ------------------------------------------------------------------------

    async def _slot(
        self,
        host: str,
        number: int,
        settings: dict[str, Any],
        rng: random.Random,
        *,
        fates: int = 1,
    ) -> None:
        """One process slot: lives one after the other, each with its fate but the last."""
        await asyncio.sleep(rng.random() * 2 * number)
        while not self.is_over:
            life = self.machine.life(
                self.app.svc, host=host, instance=f"{host}-{number}", **settings
            )
            assert isinstance(life, SimLife)
            try:
                self.apart.note_start(life)
                await life.start()
            except (GracekitError, Died, asyncio.CancelledError) as error:
                self.tell(f"{life.name} did not start: {type(error).__name__}")
                self.ends["did not start"] += 1
                await asyncio.sleep(3 + rng.random() * 3)
                continue
            self.note_serves(life)
            self.capacity.arm(life)
            fate = None
            if fates > 0:
                fates -= 1
                fate = self.spawn(self._fate(life, rng))
            await self._wait_end(life)
            self.apart.note_end(life)
            if fate is not None:
                fate.cancel()
            if fates == 0 and fate is not None:
                self._tell_fate()
            await asyncio.sleep(rng.choice([0.1, 2.0, 8.0]))

    def note_serves(self, life: SimLife) -> None:
        """A process has started."""
        self.tell(f"{life.name} serves on {life.runtime.settings.host}")
        self.judged(self.beats.check_alone, life)
        self.served_at[life] = self.loop.time()

    def _tell_fate(self) -> None:
        self._fates_left -= 1
        if self._fates_left == 0:
            self._fates_told.set()

    async def _wait_end(self, life: SimLife) -> None:
        assert life._serving is not None
        over = asyncio.ensure_future(life.over.wait())
        await asyncio.wait({life._serving, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if life.process.lives and life._serving.done() and not life._serving.cancelled():
            life.report = life._serving.result()
            self.judged(self.watch.check_end, life)
            self.ends[f"exit {int(life.report.exit_code)}"] += 1
            life.end()
        else:
            self.ends["killed"] += 1

    async def _fate(self, life: SimLife, rng: random.Random) -> None:
        """What is done to a process from outside."""
        await asyncio.sleep(rng.random() * 30)
        what = rng.choice(["term", "term", "operator", "kill", "kill", "pause", "quiet"])
        self.tell(f"{life.name} fate: {what}")
        self.ends[what] += 1
        match what:
            case "kill":
                await life.crash()
            case "term":
                self._stop(life)
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 5)
                    life.forced = True
                    life.runtime.wired.coordinator.force()
            case "operator":
                life.asked_at = self.loop.time()
                life.ask_to_stop(source="operator", final=False)
                await asyncio.sleep(rng.random() * 6)
                await self._try(life, life.runtime.wired.coordinator.resume())
                await asyncio.sleep(10)
                self._stop(life)
            case "quiet":
                await self._try(life, life.runtime.wired.coordinator.quiet())
                await asyncio.sleep(rng.random() * 20)
                await self._try(life, life.runtime.wired.coordinator.resume())
                await asyncio.sleep(10)
                self._stop(life)
            case "pause":
                with self.apart.standing_still(life):
                    await asyncio.sleep(self.apart.pause_s(rng))
                await asyncio.sleep(5)
                await life.crash() if rng.random() < 0.5 else self._stop(life)

    def _stop(self, life: SimLife) -> None:
        if life.process.lives:
            life.asked_at = self.loop.time()
            life.ask_to_stop()

    async def _try(self, life: SimLife, step: Coroutine[Any, Any, None]) -> None:
        if not life.process.lives:
            step.close()
            return
        with contextlib.suppress(GracekitError, Died, asyncio.CancelledError):
            await self.machine.run_as(life, step)

    # -- the quiet phase ------------------------------------------------------------------

    async def _be_quiet(self) -> None:
        """Faults are over: everything comes to its end within a bound."""
        self.tell("quiet")
        self.swarm.is_off = True
        self.truth.is_quiet = True
        self.apart.end()
        self._quiet_at = self.loop.time()
        self.capacity.disarm()
        # A wall clock that was set back puts every stored moment off by as much.
        back = abs(min(JUMPS_S)) * self.swarm.met["clock", "wall", "JUMP"]
        limit = self.loop.time() + QUIET_S + back
        await asyncio.sleep(5.0)  # what was on its way still lands, an operator's order too
        while not self.reckoning.is_settled():
            self.raise_first()
            self._look_at_parked()
            if self.loop.time() > limit:
                raise Violation(f"I13: not settled after {QUIET_S} s: {self.reckoning.unsettled()}")
            await asyncio.sleep(5.0)
        await self.inquirers.rest()
        await self._last_drains()

    def _look_at_parked(self) -> None:
        """What waits for room is answered at once, and ends in time, while a run serves."""
        self.callers.ask_again()
        since = max(self._quiet_at, min((self.served_at[one] for one in self.serving()), default=0))
        if self.serving() and self.loop.time() > since + OVERDUE_S and not self.swarm.jumps:
            self.judged(self.parked.check_overdue)

    def serving(self) -> set[SimLife]:
        """Processes that live and take requests."""
        return {
            life
            for life in self.served_at
            if life.process.lives and life.runtime.state is ServiceState.SERVING
        }

    async def _last_drains(self) -> None:
        self.is_over = True
        for life in self.machine.lives:
            if not life.process.lives or life.runtime.state is not ServiceState.SERVING:
                continue
            longest_s = await self._ask_at_the_end(life)
            asked = self.loop.time()
            await asyncio.wait_for(life.over.wait(), 120)
            if life.report is None or life.report.exit_code != 0:
                raise Violation(f"P4: an idle {life.name} ended with {life.report}")
            if self.loop.time() - asked > longest_s:
                raise Violation(f"P4: an idle {life.name} took {self.loop.time() - asked} s")

    async def _ask_at_the_end(self, life: SimLife) -> float:
        """Ask for a drain; return how long it may take, in seconds.

        In some seeds it begins while a job or a pass takes a lease of a slow store. In others an
        ops request runs, and work that holds the drain waits for its slot.
        """
        if random.Random(f"{self.seed} last drain").random() < LATE_LEASES:
            self.swarm.late_step = Point.TAKE_LEASE.value
            self._awaits_lease = life, asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._awaits_lease[1].wait(), LEASE_WITHIN_S)
            self._awaits_lease = None
        elif self._has_one_ops_slot:
            await self.callers.busy_the_ops_lane(life.runtime.settings.host)
        life.ask_to_stop()
        return ENOUGH_S if self._has_one_ops_slot else IDLE_S

    def note_commit(self, life: Any, point: Point) -> None:
        """A process has given its store something to write."""
        if self._awaits_lease and (life, point) == (self._awaits_lease[0], Point.TAKE_LEASE):
            self._awaits_lease[1].set()


class StoryLoop(VirtualLoop):
    """A virtual loop that may be late, and whose story must come to an end."""

    iterations = 0
    lag: Callable[[], float] = staticmethod(lambda: 0.0)

    def _run_once(self) -> None:
        self.iterations += 1
        if self.iterations > MAX_ITERATIONS:
            raise Violation(f"I15: still not done after {MAX_ITERATIONS} iterations of the loop")
        self._now += self.lag()
        super()._run_once()


def play(seed: int, app: App) -> Played:
    """Play one seed to its end.

    Raises:
        Violation: a promise was broken.
    """
    story = Story(seed, app)
    loop = StoryLoop(seed if seed % 4 else None)
    gc_was_on = gc.isenabled()
    gc.disable()  # a collection in the middle would end coroutines at a place no seed knows
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(story.play())
    finally:
        app.last_trace = story.trace
        asyncio.set_event_loop(None)
        loop.close()
        if gc_was_on:
            gc.enable()
