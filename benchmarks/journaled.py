"""Journaled tasks of one worker, beside procrastinate and DBOS on the same PostgreSQL server.

Each library has a database of its own, and a worker in a process of its own that runs at most
`AT_ONCE` tasks at one time. A task does nothing, and its row stays. Each worker lives for one turn
only, because an idle worker also asks the server for work. It is stopped (SIGSTOP) while another
process of its library fills the queue; then we measure how long it takes to run all these tasks.
Processor time is read from outside, of the worker and of all processes of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.brokered import QUEUES_OF_A_LANE, SETTLE_S
from benchmarks.child import Child, Measure, Prepare
from benchmarks.measure import Figure, Goal, Plan, against
from benchmarks.plain import ARGS, SENDER, URL_FILE, Count, url_of
from benchmarks.workers import Kind, cpu_s
from gracekit import Context, Service, Settings
from gracekit.clock import Clock
from gracekit.process import Process
from gracekit.rpc.message import Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import Message, shared_queue
from gracekit.runtime.face import Runtime
from gracekit.runtime.process_life import calm_collector
from tools import dev

OURS: Final = "gracekit"
AT_ONCE: Final = 100
TASKS: Final = 2000

RATE: Final = "journaled tasks"
SERVER: Final = "server's processor time"
WORKER: Final = "worker's processor time"
UNITS: Final = {RATE: "tasks/s", SERVER: "us a task", WORKER: "us a task"}
LESS: Final = Goal(0.7, beyond=0.4)
"""Of the server's processor time."""
GOALS: Final = {
    (RATE, "procrastinate"): Goal(5, at_least=True, beyond=12),
    (RATE, "DBOS"): Goal(3, at_least=True, beyond=6),
    (SERVER, "procrastinate"): LESS,
    (SERVER, "DBOS"): LESS,
}

_ENVIRONMENT: Final = dev.POSTGRES_PEERS_LOCK
KINDS: Final = (
    Kind(name=OURS, label=OURS, module="journaled"),
    Kind(
        name="procrastinate",
        label="procrastinate",
        module="peers.procrastinate_worker",
        packages=("procrastinate", "psycopg"),
        lock=_ENVIRONMENT,
    ),
    Kind(
        name="dbos",
        label="DBOS",
        module="peers.dbos_worker",
        packages=("dbos", "sqlalchemy"),
        lock=_ENVIRONMENT,
    ),
)


# -- gracekit -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _worker(at_once: int, directory: Path) -> AsyncIterator[Measure]:
    count, service = Count(), Service(OURS)

    @service.rpc(on_interrupt="retry")
    async def work(ctx: Context, vm: str, note: str) -> None:  # noqa: ARG001 - as declared
        count.one()

    settings = Settings(
        transport_url=f"sqlite:///{_queue(directory)}",
        store_url=url_of(directory),
        run_directory=str(directory / "runs"),
        host="bench",
        max_running=at_once,
        max_accepted=at_once * QUEUES_OF_A_LANE,
        prefetch=at_once * QUEUES_OF_A_LANE,
    )
    calm_collector()  # as `run_service` does
    async with Runtime(service, settings):
        yield count.more


@contextlib.asynccontextmanager
async def _sender(_size: int, directory: Path) -> AsyncIterator[Measure]:
    clock = Clock()
    transport = SqliteTransport(_queue(directory), process=Process(), clock=clock)

    def message() -> Message:
        request = Request(method="work", args=dict(ARGS), request_id=clock.new_request_id())
        return Message(body=encode_request(request))

    async def send(number: int) -> list[float]:
        sent = (transport.publish(shared_queue(OURS), message()) for _ in range(number))
        await asyncio.gather(*sent)
        return []

    await transport.start()
    yield send
    await transport.stop()


def _queue(directory: Path) -> Path:
    return directory / "queue.db"


PREPARE: Final[dict[str, Prepare]] = {OURS: _worker, SENDER: _sender}


# -- side by side -------------------------------------------------------------------


def figures(plan: Plan, server: Any) -> Iterator[Figure]:
    """Ours over each of the others; in each round all have a turn, and another is first."""
    for kind in KINDS:
        _prepare(kind, plan, server)
    rounds = []
    for number in range(plan.rounds):
        first = number % len(KINDS)
        order = (*KINDS[first:], *KINDS[:first])
        rounds.append({kind.name: _turn(kind, plan, server) for kind in order})
    for case, unit in UNITS.items():
        for other in KINDS[1:]:
            pairs = [(one[OURS][case], one[other.name][case]) for one in rounds]
            goal = GOALS.get((case, other.label))
            yield against("postgres", f"{case} / {other.label}", pairs, unit, goal)


def _prepare(kind: Kind, plan: Plan, server: Any) -> None:
    """Its directory and its database."""
    directory = plan.directory / kind.name
    directory.mkdir()
    (directory / URL_FILE).write_text(server.url(database=kind.name))
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {kind.name}")


def _turn(kind: Kind, plan: Plan, server: Any) -> Mapping[str, float]:
    directory, number = plan.directory / kind.name, plan.size(TASKS, 40)
    with kind.child(kind.name, AT_ONCE, directory) as worker:
        worker.ready()
        with kind.child(SENDER, 0, directory) as sender:
            sender.ready().measure(number // 10)
            worker.measure(number // 10)
            time.sleep(SETTLE_S)
            os.kill(worker.pid, signal.SIGSTOP)
            sender.measure(number)
        with psycopg.connect(url_of(directory), autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")  # otherwise autovacuum does it at a random moment
        return _drained(worker, _pid_of(server), number)


def _drained(worker: Child, server: int, number: int) -> Mapping[str, float]:
    """Continue *worker*, which is stopped, and measure it until it has run all its tasks."""
    worker.ask(number)
    before = (_server_cpu_s(server), cpu_s(worker.pid))
    begun = time.perf_counter()
    os.kill(worker.pid, signal.SIGCONT)
    (ended,) = worker.answer()
    time.sleep(SETTLE_S)
    after = (_server_cpu_s(server), cpu_s(worker.pid))
    return {
        RATE: number / (ended - begun),
        SERVER: 1e6 * (after[0] - before[0]) / number,
        WORKER: 1e6 * (after[1] - before[1]) / number,
    }


def _pid_of(server: Any) -> int:
    """Of its main process."""
    return int((server.data / "postmaster.pid").read_text().split()[0])


def _server_cpu_s(server: int) -> float:
    """Seconds of processor time of its main process and of all processes that this started."""
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    ended = sum(map(int, fields[13:15]))  # cutime and cstime: of those that have ended
    return cpu_s(server) + ended / os.sysconf("SC_CLK_TCK")
