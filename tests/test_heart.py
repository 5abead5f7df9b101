"""Beats: from when a run is trusted, when the kernel ends it, and whose beats count."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from typing import Any, Final

import pytest

from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.errors import StoreUnreachableError
from gracekit.process import Process
from gracekit.runs.heart import Heart
from gracekit.runs.runs_sql import JOIN_BEAT
from gracekit.store.batch import Row
from gracekit.store.files import open_memory
from gracekit.store.migrate import MIGRATIONS, load_migrations, migrate
from gracekit.store.sqlite.sqlite_engine import MemoryEngine
from gracekit.store.state import StoreState

RUN: Final = "one"
TIMES: Final = Settings(transport_url="memory://", store_url="memory://").timings


class Machine(Clock, Process):
    """The clock and the process of a test; `ends_at` is when the kernel ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.ends_at: float | None = None

    def boot(self) -> float:
        return self.now

    def end_at(self, at: float | None) -> None:
        self.ends_at = at


class Server:
    """The store, as the connection of a heart reaches it."""

    def __init__(self) -> None:
        self.disk = open_memory()
        migrate(self.disk, load_migrations(MIGRATIONS), path="memory")
        self.disk.execute(JOIN_BEAT, (RUN, "compute", "a", TIMES.fail_s, TIMES.dead_s))
        self.named = "first"

    @property
    def number(self) -> int | None:
        return next((row[0] for row in self.disk.execute("SELECT number FROM beat")), None)

    @number.setter
    def number(self, number: int) -> None:
        self.disk.execute("UPDATE beat SET number = ?", (number,))


class Wire:
    """Of one heart: each statement takes `took_s` seconds, and some are lost."""

    def __init__(self, server: Server, machine: Machine) -> None:
        self.server = server
        self.machine = machine
        self.took_s = 0.0
        self.lose: deque[str] = deque()

    def origin(self) -> str:
        return self.server.named

    def ask(self, sql: str, *params: Any) -> list[Row]:
        self.machine.now += self.took_s
        lost = self.lose.popleft() if self.lose else ""
        rows = [] if lost == "question" else self.server.disk.execute(sql, params).fetchall()
        if lost:
            raise StoreUnreachableError(f"the {lost} is lost")
        return rows


class Beating:
    """One run, or a copy of it."""

    def __init__(self, server: Server) -> None:
        self.machine = Machine()
        self.wire = Wire(server, self.machine)
        self.engine = MemoryEngine((), process=self.machine)
        self.heart = Heart(self.engine, self.machine, self.machine, TIMES)
        self.heart._tell_looked = lambda: None  # type: ignore[method-assign] # nobody waits

    def join(self) -> None:
        self.heart.join(RUN, self.heart.arm())

    def beat(self, times: int = 1, *, lose: str = "") -> None:
        """Let its next beats be due; *lose* is what is lost of each."""
        for _ in range(times):
            self.machine.now += TIMES.beat_s * 1.2
            self.wire.lose.extend([lose] if lose else [])
            self.heart.work(self.wire)
            self.wire.lose.clear()

    @property
    def is_fenced(self) -> bool:
        return self.engine.status.state is StoreState.FENCED

    def copied(self) -> Beating:
        """Itself, as a snapshot of its memory has it."""
        other = Beating(self.wire.server)
        other.machine.now = self.machine.now
        own = {"_engine", "_process", "_clock", "_lock"}
        state = {name: value for name, value in vars(self.heart).items() if name not in own}
        vars(other.heart).update({name: copy.copy(value) for name, value in state.items()})
        return other


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def run(server: Server) -> Beating:
    one = Beating(server)
    one.join()
    return one


def test_the_kernel_ends_a_run_hard_after_the_start_of_its_last_beat(run: Beating):
    """Not after its answer: others count from when they have seen it."""
    assert run.machine.ends_at == run.machine.now + TIMES.hard_s
    run.wire.took_s = 1.5

    begun = run.machine.now + TIMES.beat_s * 1.2
    run.beat()

    assert run.machine.now > begun
    assert run.machine.ends_at == begun + TIMES.hard_s


@pytest.mark.parametrize("lose", ["question", "answer"])
def test_a_beat_without_an_answer_moves_nothing(run: Beating, lose: str):
    """The store may have it, but who does not know that must not rely on it."""
    run.beat()
    ends_at = run.machine.ends_at

    run.beat(3, lose=lose)

    assert run.machine.ends_at == ends_at
    assert run.heart.trust_s > 3 * TIMES.beat_s


@pytest.mark.parametrize("lost", list(itertools.product(["question", "answer"], repeat=3)))
def test_a_run_goes_on_after_beats_of_which_nothing_is_known(run: Beating, lost: tuple[str, ...]):
    """Whatever was lost of them, the next one succeeds."""
    run.beat()
    for what in lost:
        run.beat(lose=what)

    run.beat()

    assert not run.is_fenced
    assert run.heart.trust_s == 0.0


def test_a_run_goes_on_if_a_server_takes_over_that_lacks_its_last_beats(
    run: Beating, server: Server
):
    """An asynchronous standby may; and it is not taken for a copy's beat."""
    run.beat(3)
    kept = server.number
    assert kept is not None
    run.beat(3)

    server.number, server.named = kept, "second"
    run.beat()

    assert not run.is_fenced
    assert server.number != kept


def test_a_run_that_was_declared_dead_is_fenced_by_its_next_beat(run: Beating, server: Server):
    """And the kernel ends it in time, whatever it does then."""
    run.beat()
    ends_at = run.machine.ends_at
    server.disk.execute("DELETE FROM beat")

    run.beat()

    assert run.is_fenced
    assert run.machine.ends_at == ends_at


@pytest.mark.parametrize("lost", ["", "question", "answer"])
def test_a_copy_of_a_process_is_fenced_by_its_first_beat(run: Beating, lost: str):
    """Also after beats of which it knows nothing, as many as the other one has made meanwhile."""
    run.beat(2)
    other = run.copied()

    for _ in range(5):
        run.beat()
        if lost and not other.is_fenced:
            other.beat(lose=lost)
    other.beat()
    run.beat()

    assert other.is_fenced
    assert not run.is_fenced
