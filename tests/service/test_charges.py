"""Who pays for a crash or a fault: what caused it is given up, and nothing is tried for ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest

from gracekit import (
    Context,
    Done,
    Fail,
    GracekitError,
    RemoteError,
    Retry,
    Service,
    TaskCancelledError,
    Wait,
)
from gracekit.journal.tasks import Journal
from gracekit.process import Point
from gracekit.request.suspects import ALONE_S, Suspects
from gracekit.testing.loop import owner
from tests.service.kit import Life, World

pytestmark = pytest.mark.looptime

UNFORESEEN: Final = RuntimeError("unforeseen")

# -- faults of gracekit's own steps around a handler -----------------------------------------


class OddArgsError(Exception):
    """Its `args` cannot be read, and so not its text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    @property
    def args(self) -> Any:  # type: ignore[override]  # that is the point
        raise RuntimeError("no args")


class OddTextError(Exception):
    """Its text ends the interpreter."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class OddKind(type):
    """A class whose name cannot be read."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]  # that is the point
        raise RuntimeError("no name")


class OddNameError(Exception, metaclass=OddKind):
    """Its class has no name."""


class OddMapping(Mapping[str, Any]):
    """A result that cannot be walked."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, key: str) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        raise self.error

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise self.error


@pytest.mark.parametrize("odd", [OddArgsError, OddTextError, OddNameError], ids=lambda kind: "odd")
async def test_an_exception_that_cannot_be_written_down_fails_its_task(
    world: World, svc: Service, odd: type[Exception]
):
    """The task is FAILED and its caller hears, whatever the exception object does; it runs once."""
    starts = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context) -> None:
        starts.append(ctx.attempt)
        raise odd

    await world.start(svc)
    client = await world.client(svc)
    with pytest.raises(Exception, match="cannot be"):
        await client.prepare(request_id="w", timeout=30).call(work)

    assert world.state("w") == "failed"
    assert starts == [1]


async def test_a_result_that_cannot_be_written_down_is_left_out(world: World, svc: Service):
    """Whatever its encoding raises: the work is done, and the caller is told why nothing came."""

    @svc.rpc(on_interrupt="retry", settle=0)
    async def work(ctx: Context, n: int) -> Any:
        return OddMapping([RuntimeError("no"), SystemExit(3), KeyboardInterrupt()][n])

    await world.start(svc)
    client = await world.client(svc)
    for n in range(3):
        with pytest.raises((RemoteError, GracekitError)):
            await client.prepare(request_id=f"w{n}", timeout=30).call(work, n=n)

    assert set(world.states().values()) == {"succeeded"}


class Refusing(logging.Filter):
    """A filter of the application's that raises at one event."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "event", None) == "task.started":
            raise RuntimeError("no log")
        return True


@pytest.fixture
def refusing() -> Iterator[None]:
    """An application's logging that raises when a task is started."""
    logger = logging.getLogger("gracekit")
    level, refusing = logger.level, Refusing()
    logger.setLevel(logging.DEBUG)
    logger.addFilter(refusing)
    yield
    logger.removeFilter(refusing)
    logger.setLevel(level)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("policy", ["retry", "requeue", "error"])
async def test_a_fault_around_the_handler_is_counted(world: World, svc: Service, policy: Any):
    """Its process lives on, so no crash counts it; yet it ends, and its lease is free."""

    @svc.rpc(on_interrupt=policy, settle=0, resource=None if policy == "requeue" else "vm")
    async def work(ctx: Context, vm: str) -> None: ...

    world.expects_faults = True
    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work, vm="v")
    await world.until(lambda: world.state("w") == "errored")

    reason = "interrupted" if policy == "error" else "attempts"
    assert world.task("w")["reason"] == reason
    assert len(life.told("dispatch.failed")) == {"retry": 3, "requeue": 4, "error": 1}[policy]
    assert world.rows("SELECT 1 FROM lease WHERE owner IS NOT NULL") == []


@pytest.mark.usefixtures("refusing")
async def test_an_order_in_the_pause_before_a_request_goes_back_ends_it(world: World, svc: Service):
    """The operator was told that it will end, so it must not come again and run."""

    @svc.rpc(on_interrupt="requeue")
    async def work(ctx: Context) -> None: ...

    world.expects_faults = True
    life = await world.start(svc)
    call = asyncio.create_task((await world.client(svc)).prepare(request_id="w").call(work))
    await life.hears("dispatch.failed")
    asked = await world.verb(life, "cancel", task_id="w", by="ann@desk", reason="wrong host")
    with pytest.raises(TaskCancelledError):
        await call

    assert asked["asked"]
    assert len(life.told("dispatch.failed")) == 1
    assert not life.told("task.given_back")
    assert world.broker.waiting("compute") == 0


@pytest.mark.parametrize("answer", ["done", "fail", "odd", "raises"])
async def test_a_probe_with_an_odd_answer_ends_its_task(world: World, svc: Service, answer: str):
    """What the answer's or the error's own code raises is no reason to ask for ever."""
    asked = []

    @svc.rpc(on_interrupt="probe", settle=0, max_wait="1m")
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    @work.probe
    async def _(ctx: Context) -> Any:
        asked.append(1)
        odd = OddMapping(RuntimeError("no"))
        match answer:
            case "done":
                return Done(odd)
            case "fail":
                return Fail(odd)  # type: ignore[arg-type]  # that is the point
            case "odd":
                return odd
            case _:
                raise OddTextError

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await life.hears("task.started")
    await life.crash()
    await world.start(svc)
    await world.until(lambda: world.state("w") in {"succeeded", "failed", "errored"})

    ends = {"done": ("succeeded", None), "fail": ("failed", None)}
    end = ends.get(answer, ("errored", "gave_up"))
    assert (world.state("w"), world.task("w")["reason"]) == end


async def test_an_errored_hook_with_an_odd_error_is_called_once(world: World, svc: Service):
    """What it raised cannot be shown; that it was called is on record all the same."""
    told = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    @work.errored
    async def _(ctx: Context, reason: str) -> None:
        told.append(reason)
        raise OddTextError

    life = await world.start(svc)
    client = await world.client(svc)
    await client.prepare(request_id="w").cast(work)
    await life.hears("task.started")
    await life.crash()
    await world.start(svc)
    await world.until(lambda: bool(told))
    await asyncio.sleep(200)

    assert told == ["interrupted"]
    assert world.task("w")["errored_due"] == 0


# -- crashes ----------------------------------------------------------------------------------


class Site:
    """A service of which one request kills its process, `delay_s` after it has begun."""

    def __init__(self, world: World, svc: Service, *, delay_s: float = 0.5, **options: Any) -> None:
        self.world = world
        self.svc = svc
        self.starts: list[tuple[int, str]] = []
        self.at_work: list[set[str]] = []  # of each life
        self.beside: list[set[str]] = []  # of each start, what was at work in its life
        self.lives: list[Life] = []
        self.lasting_s = 3.0
        self.poison = {"p"}

        @svc.rpc(**{"on_interrupt": "retry", "settle": 0} | options)
        async def work(ctx: Context) -> None:
            life = owner.get()
            assert isinstance(life, Life)
            number = self.lives.index(life)
            self.starts.append((number, ctx.request_id))
            self.beside.append(set(self.at_work[number]))
            with self.working(number, ctx.request_id):
                if ctx.request_id in self.poison:
                    await asyncio.sleep(delay_s)
                    await life.crash()
                await asyncio.sleep(self.lasting_s)

        self.work = work

    @contextlib.contextmanager
    def working(self, number: int, request_id: str) -> Iterator[None]:
        self.at_work[number].add(request_id)
        try:
            yield
        finally:
            self.at_work[number].remove(request_id)

    async def live(self, **settings: Any) -> Life:
        life = self.world.life(self.svc, **settings)
        self.lives.append(life)
        self.at_work.append(set())
        await life.start()
        return life

    async def live_on(self, *, until: Callable[[], bool], within: int = 40, **settings: Any) -> int:
        """Start again after each crash until that holds; how many processes it took."""
        for number in range(1, within + 1):
            life = await self.live(**settings)
            await self.world.until(
                lambda life=life: until() or not life.process.lives, within_s=7200
            )
            if until():
                return number
        raise AssertionError(f"not in {within} lives: {self.world.states()}")

    async def cut_power_twice(self) -> None:
        """Two seconds after each start, and start again."""
        for _ in range(2):
            await asyncio.sleep(2)
            await self.lives[-1].crash()
            await self.live()

    async def send(self, *ids: str, **options: Any) -> None:
        client = await self.world.client(self.svc)
        for one in ids:
            await client.prepare(request_id=one, **options).cast(self.work)

    def are_ended(self) -> bool:
        return bool(self.world.states()) and not self.world.rows(
            "SELECT 1 FROM task WHERE finished_at IS NULL"
        )

    def given_up(self) -> list[str]:
        rows = self.world.rows("SELECT request_id FROM task WHERE reason = 'attempts'")
        return [row["request_id"] for row in rows]


INNOCENT: Final = [f"i{n}" for n in range(9)]


@pytest.mark.parametrize("attempts", [2, 3, 5])
async def test_only_the_request_that_kills_its_process_is_given_up(
    world: World, svc: Service, attempts: int
):
    """Nine innocent requests run beside it at each crash, and all of them succeed; it is given up
    after as many crashes as its attempts allow, as if it had been by itself.
    """
    site = Site(world, svc, max_attempts=attempts)
    await site.live()
    await site.send(*INNOCENT[:5], "p", *INNOCENT[5:])
    lives = 1 + await site.live_on(until=site.are_ended)

    assert site.given_up() == ["p"]
    assert [world.state(one) for one in INNOCENT] == ["succeeded"] * 9
    assert lives == attempts + 1


async def test_suspects_run_one_at_a_time_and_others_between_them(world: World, svc: Service):
    """In the third life each of the ten is alone; what comes meanwhile is run between them."""
    site = Site(world, svc)
    await site.live()
    await site.send(*INNOCENT, "p")
    await world.until(lambda: not site.lives[-1].process.lives)
    await site.live()
    await world.until(lambda: not site.lives[-1].process.lives)
    await site.live()
    await asyncio.sleep(1)
    await site.send("late")
    await world.until(lambda: not site.lives[-1].process.lives)
    third = [number for number, (life, _) in enumerate(site.starts) if life == 2]
    order = [site.starts[number][1] for number in third]
    beside = [site.beside[number] for number in third]
    await site.live_on(until=site.are_ended)

    assert sorted(order) == sorted([*INNOCENT, "late", "p"])
    assert beside == [set()] * 11
    assert 0 < order.index("late") < 10
    assert site.given_up() == ["p"]
    assert world.state("late") == "succeeded"


@pytest.mark.parametrize("step", ["_by_rank", "_wait_alone", "_rest", "_admit_alone", "_admit"])
async def test_an_exception_that_nobody_foresaw_does_not_shut_the_doors(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch, step: str
):
    """Whatever step of the admission fails: it is logged, the suspects begin, and then others."""
    site = Site(world, svc)
    site.poison = set()
    world.expects_faults = True
    raise_once(monkeypatch, Suspects, step)
    await site.live()
    await site.send("s", "t")
    await site.cut_power_twice()
    await site.send("late")
    await world.until(site.are_ended, within_s=10 * ALONE_S)

    assert set(world.states().values()) == {"succeeded"}
    (failed,) = site.lives[-1].told("background.failed")
    assert failed["error"] == repr(UNFORESEEN)


async def test_an_exception_at_the_end_of_being_alone_does_not_shut_the_doors(
    world: World, svc: Service, monkeypatch: pytest.MonkeyPatch
):
    """It is logged, and the row of the suspect says a moment later that it is alone no more."""
    site = Site(world, svc)
    site.poison = set()
    world.expects_faults = True
    site.lasting_s = 10 * ALONE_S
    raise_once(monkeypatch, Journal, "parole")
    await site.live()
    await site.send("s")
    await site.cut_power_twice()
    await world.until(lambda: len(site.starts) == 3)
    await site.send("late")
    await world.until(lambda: len(site.starts) == 4, within_s=2 * ALONE_S)

    assert (world.state("s"), world.task("s")["alone"]) == ("running", 0)
    (failed,) = site.lives[-1].told("background.failed")
    assert failed["error"] == repr(UNFORESEEN)


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: type, step: str) -> None:
    """Let the next call of that method raise what nobody foresaw."""
    real, calls = getattr(owner, step), itertools.count()

    def raising(self: Any, *given: Any, **named: Any) -> Any:
        if next(calls) == 0:
            raise UNFORESEEN
        return real(self, *given, **named)

    monkeypatch.setattr(owner, step, raising)


async def test_a_stream_of_killers_convicts_no_innocent(world: World, svc: Service):
    """Each new one meets suspects of the crashes before it; yet only killers are given up."""
    site = Site(world, svc)
    killers = [f"p{n}" for n in range(4)]
    site.poison = set(killers)
    await site.live()
    await site.send(*INNOCENT)
    for killer in killers:
        await site.send(killer)
        await world.until(lambda: not site.lives[-1].process.lives)
        await site.live()
    await site.live_on(until=site.are_ended)

    assert sorted(site.given_up()) == killers


async def test_a_slow_killer_is_met_alone_in_the_end(world: World, svc: Service):
    """It runs longer than a suspect is kept alone, beside others that run longer still."""
    site = Site(world, svc, delay_s=150)
    site.lasting_s = 400
    await site.live()
    await site.send(*INNOCENT[:3], "p")
    await site.live_on(until=site.are_ended)

    assert site.given_up() == ["p"]


@pytest.mark.parametrize(("phase", "end"), [("before", "errored"), ("after", "succeeded")])
async def test_a_crash_at_the_end_of_being_alone_goes_by_the_record(
    world: World, svc: Service, phase: Any, end: str
):
    """Nothing has begun beside it before its row says so."""
    site = Site(world, svc)
    site.poison = set()
    site.lasting_s = 2 * ALONE_S
    await site.live()
    await site.send("s")
    for _ in range(2):
        await asyncio.sleep(2)
        await site.lives[-1].crash()
        life = await site.live()
    life.crash_at(Point.PAROLE, phase)
    await life.over.wait()
    await site.live_on(until=site.are_ended)

    assert world.state("s") == end


async def test_two_processes_of_one_store_judge_apart(world: World, svc: Service):
    """What runs in the sibling is not charged, and goes on beside the suspects of the other."""
    site = Site(world, svc)
    site.lasting_s = 600
    sibling = await site.live(instance="b", max_accepted=4)  # has room for no more
    await site.send(*INNOCENT[:4])
    await world.until(lambda: len(site.starts) == 4)
    site.lasting_s = 3
    await site.live(instance="a")
    await site.send(*INNOCENT[4:], "p")
    await world.until(lambda: not site.lives[-1].process.lives)
    await site.live_on(until=lambda: site.given_up() != [], instance="a")

    assert site.given_up() == ["p"]
    assert (sibling.process.lives, site.at_work[0]) == (True, set(INNOCENT[:4]))
    assert [world.task(one)["crashes"] for one in INNOCENT[:4]] == [0] * 4
    assert all(one in INNOCENT[:4] for life, one in site.starts if life == 0)
    await world.until(site.are_ended, within_s=1200)
    assert [one for _, one in site.starts if one in INNOCENT[:4]] == INNOCENT[:4]
    assert [world.state(one) for one in INNOCENT] == ["succeeded"] * 9


async def test_a_requeue_killer_convicts_nobody_beside_it(world: World, svc: Service):
    """Its first crash leaves no row of it; redelivered it is journaled, and counted like others."""
    site = Site(world, svc)

    @svc.rpc(on_interrupt="requeue", settle=0)
    async def kill(ctx: Context) -> None:
        life = owner.get()
        assert isinstance(life, Life)
        await asyncio.sleep(0.5)
        await life.crash()

    await site.live()
    await site.send(*INNOCENT)
    client = await world.client(svc)
    await client.prepare(request_id="k").cast(kill)
    await world.until(lambda: not site.lives[-1].process.lives)
    await site.live_on(until=site.are_ended)

    assert site.given_up() == ["k"]


async def test_a_drain_between_crashes_changes_nothing(world: World, svc: Service):
    """Suspects that a drain has cut are suspects in the next life."""
    site = Site(world, svc, delay_s=20)
    site.lasting_s = 60
    await site.live()
    await site.send(*INNOCENT[:2], "p")
    for _ in range(2):
        await world.until(lambda: not site.lives[-1].process.lives)
        life = await site.live(drain_timeout_s=2, kill_after_s=None)
        await asyncio.sleep(5)
        await life.drain()
        await site.live()
    await site.live_on(until=site.are_ended)

    assert site.given_up() == ["p"]


async def test_a_stop_that_was_cut_short_is_nobodys_crash(world: World, svc: Service):
    """An impatient supervisor kills the process in its drain: no task has caused that."""
    site = Site(world, svc)
    site.poison = set()
    site.lasting_s = 3600
    await site.live()
    await site.send("s")
    for number in range(4):
        await world.until(lambda number=number: len(site.starts) == number + 1)
        drain = asyncio.create_task(site.lives[-1].drain())
        await world.until(lambda: world.rows("SELECT 1 FROM run WHERE stop_at IS NOT NULL") != [])
        await asyncio.sleep(1)
        await site.lives[-1].crash()
        await asyncio.gather(drain, return_exceptions=True)
        await site.live()
    site.lasting_s = 1
    await world.until(lambda: world.state("s") == "running")

    runs = world.rows("SELECT verdict FROM run ORDER BY started_at")
    assert [run["verdict"] for run in runs] == [*["stop_timeout"] * 4, None]
    assert world.task("s")["crashes"] == 0


async def test_progress_clears_a_suspect(world: World, svc: Service):
    """Whoever got on since its last crash has not caused it."""
    site = Site(world, svc)
    done = []

    @svc.rpc(on_interrupt="retry", settle=0)
    async def steps(ctx: Context) -> None:
        async for item in ctx.steps(range(10)):
            done.append(item)
            await asyncio.sleep(2)

    life = await site.live()
    client = await world.client(svc)
    await client.prepare(request_id="s").cast(steps)
    for _ in range(4):
        await asyncio.sleep(4)
        await life.crash()
        life = await site.live()
    await world.until(lambda: world.state("s") == "succeeded")

    assert world.task("s")["crashes"] == 0


async def test_an_operators_retry_lets_a_killer_go_on_and_hurts_nobody_else(
    world: World, svc: Service
):
    """Its crashes are forgotten; it has to earn each of them again, and only it is given up."""
    site = Site(world, svc, settle=5)
    await site.live()
    await site.send(*INNOCENT, "p")
    await world.until(lambda: not site.lives[-1].process.lives)
    await site.live()
    await world.until(lambda: not site.lives[-1].process.lives)
    life = await site.live()
    await world.verb(life, "retry", task_id="p", recipient="")
    await site.live_on(until=site.are_ended)

    assert site.given_up() == ["p"]


async def test_an_ops_request_is_answered_beside_a_suspect(world: World, svc: Service):
    """Whoever is alone may need it; and what dies beside one is not given up for that."""
    site = Site(world, svc)
    site.poison = set()
    site.lasting_s = 30

    @svc.ops
    async def ask(ctx: Context, seconds: int) -> str:
        await asyncio.sleep(seconds)
        return "here"

    await site.live()
    await site.send("s")
    await site.cut_power_twice()
    await world.until(lambda: world.rows("SELECT 1 FROM task WHERE alone = 1") != [])
    client = await world.client(svc)

    assert await client.prepare(timeout=5).call(ask, seconds=1) == "here"
    await client.cast(ask, seconds=10)
    await asyncio.sleep(1)
    await site.lives[-1].crash()
    await site.live()
    await world.until(lambda: world.state("s") == "succeeded")
    assert site.starts == [(n, "s") for n in range(4)]


async def test_what_comes_beside_many_suspects_is_run_within_a_bound(world: World, svc: Service):
    """Long suspects close the doors for half of the time at most."""
    site = Site(world, svc)
    site.poison = set()
    site.lasting_s = 3600
    await site.live()
    await site.send(*INNOCENT)
    await site.cut_power_twice()
    await asyncio.sleep(5)
    await site.send("late")
    begun = asyncio.get_running_loop().time()
    await world.until(lambda: (len(site.lives) - 1, "late") in site.starts)

    assert asyncio.get_running_loop().time() - begun < 4 * ALONE_S


MANY: Final = [f"m{n}" for n in range(60)]


async def test_after_two_power_cuts_all_begin_again_within_two_minutes(world: World, svc: Service):
    """All are suspects, innocent and long: each would wait in vain for those before it to end."""
    site = Site(world, svc)
    site.poison = set()
    site.lasting_s = 3600
    await site.live()
    await site.send(*MANY)
    await site.cut_power_twice()
    begun = asyncio.get_running_loop().time()
    await world.until(lambda: sum(life == 2 for life, _ in site.starts) == len(MANY))

    assert asyncio.get_running_loop().time() - begun < 120
    assert site.given_up() == []


@pytest.mark.parametrize("place", [0, 5, 11, 40, 60])
async def test_a_killer_among_many_long_requests_is_found(world: World, svc: Service, place: int):
    """None of the others is given up, and it takes far fewer crashes than there are requests."""
    site = Site(world, svc, delay_s=2)
    site.lasting_s = 3600
    others = MANY if place >= 40 else MANY[:12]
    await site.live()
    await site.send(*others[:place], "p", *others[place:])
    lives = 1 + await site.live_on(until=lambda: site.given_up() != [])

    assert site.given_up() == ["p"]
    assert lives <= 10
    assert asyncio.get_running_loop().time() < 600


@pytest.mark.parametrize("settle", [10, 90])
@pytest.mark.parametrize("delay_s", [0.5, 8])
async def test_a_killer_is_found_though_it_settles_and_others_need_not(
    world: World, svc: Service, delay_s: float, settle: float
):
    """Rows that had not begun at the crash are claimable at once: they would be the first to begin,
    and alone, and the killer would begin beside them each time.
    """
    site = Site(world, svc, delay_s=delay_s, settle=settle)
    site.lasting_s = 1e6
    await site.live()
    await site.send(*MANY[:15], "p", *MANY[15:30])
    lives = 1 + await site.live_on(until=lambda: site.given_up() != [])

    assert site.given_up() == ["p"]
    assert lives <= 14


# -- hooks ------------------------------------------------------------------------------------


async def test_an_errored_hook_that_kills_its_process_is_given_up(world: World, svc: Service):
    """After `max_attempts` calls, counted and listed; other hooks, and tasks beside, are called."""
    called: list[str] = []

    @svc.rpc
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    @work.errored
    async def _(ctx: Context, reason: str) -> None:
        life = owner.get()
        assert isinstance(life, Life)
        called.append(ctx.request_id)
        if ctx.request_id == "p":
            await life.crash()
            await asyncio.sleep(1)

    life = await world.start(svc)
    client = await world.client(svc)
    for one in ("a", "p", "z"):
        await client.prepare(request_id=one).cast(work)
    await life.hears("task.started", 3)
    await life.crash()
    for _ in range(8):
        life = await world.start(svc)
        await asyncio.sleep(100)
        await life.crash()

    assert called == ["a", "p", "p", "p", "z"]
    assert [row["request_id"] for row in world.incidents("hook_given_up")] == ["p"]
    assert world.rows("SELECT 1 FROM task WHERE errored_due = 1") == []


@pytest.mark.parametrize("what", ["probe", "errored"])
async def test_a_holds_hook_that_kills_its_process_is_given_up(
    world: World, svc: Service, what: str
):
    """A probe is counted as an attempt is, and its hold is ended; its errored hook has its own
    count.
    """
    called: list[str] = []

    @svc.rpc(settle=0)
    async def work(ctx: Context) -> None:
        await ctx.hold("migration", "v", at_most="10h")

    async def act(name: str) -> None:
        life = owner.get()
        assert isinstance(life, Life)
        called.append(name)
        if name == what:
            await life.crash()
            await asyncio.sleep(1)

    @work.probe
    async def _(ctx: Context) -> Fail:
        await act("probe")
        return Fail("no")

    @work.errored
    async def _(ctx: Context, reason: str) -> None:
        await act("errored")

    life = await world.start(svc)
    client = await world.client(svc)
    await client.call(work)
    await life.crash()
    for _ in range(8):
        life = await world.start(svc)
        await asyncio.sleep(100)
        await life.crash()

    assert called.count(what) == 3
    assert called.count("errored" if what == "probe" else "probe") == 1
    assert len(world.incidents("hook_given_up")) == 1
    assert world.rows("SELECT 1 FROM hold WHERE ended_at IS NULL OR errored_due = 1") == []


async def test_a_probe_that_kills_its_process_takes_no_other_with_it(world: World, svc: Service):
    """Nine other probes were being asked at each crash; they answer in the end."""

    @svc.rpc(on_interrupt="probe", settle=0)
    async def work(ctx: Context) -> None:
        await asyncio.sleep(100_000)

    @work.probe
    async def _(ctx: Context) -> Done:
        life = owner.get()
        assert isinstance(life, Life)
        await asyncio.sleep(1)
        if ctx.request_id == "p":
            await life.crash()
        await asyncio.sleep(1)
        return Done()

    life = await world.start(svc)
    client = await world.client(svc)
    for one in (*INNOCENT, "p"):
        await client.prepare(request_id=one).cast(work)
    await life.hears("task.started", 10)
    await life.crash()
    for _ in range(8):
        life = await world.start(svc)
        await asyncio.sleep(100)
        await life.crash()

    states = world.states()
    assert states.pop("p") == "errored"
    assert set(states.values()) == {"succeeded"}


async def test_a_probe_that_answers_alone_is_no_evidence_against_its_task(
    world: World, svc: Service
):
    """Crashes met it in company; that its probe was asked alone since then says nothing of them."""
    asked = []
    seconds = 100_000

    @svc.rpc(on_interrupt="probe", settle=0, max_attempts=2)
    async def work(ctx: Context) -> str:
        await asyncio.sleep(seconds)
        return "done"

    @work.probe
    async def _(ctx: Context) -> Retry | Wait:
        asked.append(ctx.request_id)
        return Wait(20) if asked.count(ctx.request_id) == 2 else Retry()

    client = await world.client(svc)
    life = await world.start(svc)
    for one in ("a", "b"):
        await client.prepare(request_id=one).cast(work)
    for _ in range(2):
        await asyncio.sleep(4 * ALONE_S)
        await life.crash()
        life = await world.start(svc)
    seconds = 3
    await world.until(lambda: set(world.states().values()) == {"succeeded"})


@pytest.mark.parametrize("policy", ["retry", "requeue"])
async def test_nothing_begins_beside_a_suspect_until_its_time_alone_is_up(
    world: World, svc: Service, policy: Any
):
    """Then others begin, though it goes on; its row says by then that it is not alone."""
    site = Site(world, svc)
    site.poison = set()
    site.lasting_s = 10 * ALONE_S
    begun: list[tuple[float, int]] = []

    @svc.rpc(on_interrupt=policy)
    async def late(ctx: Context) -> None:
        (row,) = world.rows("SELECT alone FROM task WHERE request_id = 's'")
        begun.append((asyncio.get_running_loop().time(), row["alone"]))

    await site.live()
    await site.send("s")
    await site.cut_power_twice()
    await world.until(lambda: len(site.starts) == 3)
    since = asyncio.get_running_loop().time()
    client = await world.client(svc)
    await client.cast(late)
    await world.until(lambda: bool(begun))

    ((at, alone),) = begun
    assert at - since == pytest.approx(ALONE_S, abs=2)
    assert (alone, world.state("s")) == (0, "running")
