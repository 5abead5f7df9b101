"""The workers that take turns on one broker: which there are, and each as seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.brokered import SETTLE_S
from benchmarks.caller import Caller, Envelope, Replayed, Wire
from benchmarks.child import Child
from benchmarks.measure import latencies
from benchmarks.plain import SAMPLE, called_by
from benchmarks.watched import port_file, scraped
from gracekit.config.values import EXCHANGE
from tools import dev

BARE: Final = "aiormq"
OURS: Final = (
    "requeue",
    "requeue-uvloop",
    "requeue-defaults",
    "retry",
    "retry-defaults",
    "retry-watched",
    "retry-normal",
)
CHILD: Final = "benchmarks.child"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of worker.

    Attributes:
        name: Its queue's too.
        label: For people.
        module: In which it is prepared.
        packages: Whose versions are told.
        lock: What its environment has; None for this one.
        program: What runs it.
        exchange: Of the envelope that it reads; None if it reads messages of its own.
        calls: Whether it answers calls on RabbitMQ.
        parks: Whether it can hold tens of thousands of requests.
        client: Module in which its own client is prepared; None if that is not measured.
    """

    name: str
    label: str
    module: str = "brokered"
    packages: tuple[str, ...] = ()
    lock: Path | None = None
    program: str = CHILD
    exchange: str | None = EXCHANGE
    calls: bool = True
    parks: bool = True
    client: str | None = None

    @property
    def python(self) -> Path | None:
        """Of its environment, which is made on first use; None for this one."""
        return None if self.lock is None else dev.python(self.lock)

    def child(self, called: str, size: int, directory: Path) -> Child:
        """A process of it, or of what else its module prepares under the name *called*."""
        program = self.program if called == self.name else CHILD
        return Child(self.module, called, size, directory, python=self.python, program=program)

    def own_client(self, directory: Path) -> Child:
        """A process of the client by which its users call it."""
        assert self.client is not None, "it is not measured"
        return Child(self.client, called_by(self.name), 0, directory, python=self.python)

    def versions(self) -> dict[str, str]:
        """Of its packages."""
        if self.python is None:
            return {}
        python = str(self.python)
        script = (
            "import sys, json; from importlib.metadata import version;"
            " print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
        )
        command = [python, "-c", script, *self.packages]
        told = subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - ours
        versions: dict[str, str] = json.loads(told.stdout)
        return versions


_ALL: Final = (
    Kind(name="requeue", label="gracekit requeue", client="clients"),
    Kind(name="requeue-uvloop", label="gracekit requeue, uvloop", parks=False),
    Kind(
        name="requeue-defaults",
        label="gracekit requeue, defaults",
        parks=False,
        client="clients",
    ),
    Kind(name="retry", label="gracekit retry, FULL", client="clients"),
    Kind(
        name="retry-defaults",
        label="gracekit retry, FULL, defaults",
        parks=False,
        client="clients",
    ),
    Kind(name="retry-watched", label="gracekit retry, watched", parks=False),
    Kind(name="retry-normal", label="gracekit retry, NORMAL"),
    Kind(name="aiormq", label="aiormq", client="clients"),
    Kind(name="aio-pika", label="aio-pika"),
    Kind(
        name="faststream",
        label="FastStream",
        module="peers.faststream_worker",
        packages=("faststream", "pydantic"),
        lock=dev.PEERS_LOCK,
        exchange=None,
        client="peers.faststream_worker",
    ),
    Kind(
        name="taskiq",
        label="taskiq",
        module="peers.taskiq_worker",
        packages=("taskiq", "taskiq-aio-pika"),
        lock=dev.PEERS_LOCK,
        exchange=None,
        calls=False,
    ),
    Kind(
        name="celery",
        label="Celery",
        module="peers.celery_worker",
        packages=("celery", "kombu", "amqp"),
        lock=dev.PEERS_LOCK,
        program="benchmarks.peers.celery_worker",
        exchange=None,
        parks=False,
    ),
    Kind(
        name="dramatiq",
        label="dramatiq",
        module="peers.dramatiq_worker",
        packages=("dramatiq", "pika"),
        lock=dev.PEERS_LOCK,
        exchange=None,
        calls=False,
        parks=False,
    ),
    Kind(
        name="oslo.messaging",
        label="oslo.messaging",
        module="peers.oslo_worker",
        packages=("oslo.messaging", "oslo.service"),
        lock=dev.OSLO_LOCK,
        exchange="openstack",
        parks=False,
        client="peers.oslo_worker",
    ),
)
KINDS: Final[Mapping[str, Kind]] = MappingProxyType({kind.name: kind for kind in _ALL})


async def wire_of(kind: Kind, caller: Caller, directory: Path) -> Wire:
    """How messages to it look; nobody reads its queue yet."""
    if kind.exchange is not None:
        return Envelope(kind.exchange, kind.name)
    with kind.child(SAMPLE, 0, directory) as child:
        child.ready()
    of_cast = await caller.sample(kind.name)
    return Replayed(of_cast, await caller.sample(kind.name) if kind.calls else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What some messages took.

    Attributes:
        cpu_us: Of the worker's processor time, a message.
        rate: Messages a second.
        stages_us: As `cpu_us`, by stage, if the worker tells it.
        latencies: Seconds that each call took, sorted.
    """

    cpu_us: float
    rate: float
    stages_us: list[float]
    latencies: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCalls:
    """What some calls by a library's own client took.

    Attributes:
        cpu_us: Of the client's processor time, a call.
        p50_ms: Milliseconds that half of the calls took at most.
        p99_ms: Milliseconds that nearly all took at most.
        rate: Calls a second.
    """

    cpu_us: float
    p50_ms: float
    p99_ms: float
    rate: float


class Worker:
    """One worker, and what is asked of it."""

    def __init__(self, kind: Kind, child: Child, caller: Caller, wire: Wire) -> None:
        self.kind = kind
        self._child = child
        self._caller = caller
        self._wire = wire

    async def casts(self, number: int) -> Took:
        """Let it drain so many casts, which lie in the queue before it may begin."""
        before = cpu_s(self._child.pid)
        os.kill(self._child.pid, signal.SIGSTOP)
        try:
            await self._caller.cast(self._wire, number)
            self._child.ask(number)
        finally:
            begun = time.perf_counter()
            os.kill(self._child.pid, signal.SIGCONT)
        ended, *stages = await self._answer()
        return Took(
            cpu_us=1e6 * (cpu_s(self._child.pid) - before) / number,
            rate=number / (ended - begun),
            stages_us=[1e6 * one / number for one in stages],
        )

    async def calls(self, at_once: int, number: int) -> Took:
        """Call it, *at_once* at a time, about *number* times in all."""
        repeats = number // at_once
        number = repeats * at_once
        step = self._caller.calls(self._wire, number)
        before = cpu_s(self._child.pid)
        self._child.ask(number)
        surplus = self._caller.surplus
        taken, all_s = await latencies(at_once, repeats, step)
        _, *stages = await self._answer()
        if surplus := self._caller.surplus - surplus:
            print(f"{self.kind.name}: {surplus} replies too many", file=sys.stderr)
        return Took(
            cpu_us=1e6 * (cpu_s(self._child.pid) - before) / number,
            rate=number / all_s,
            stages_us=[1e6 * one / number for one in stages],
            latencies=taken,
        )

    async def own_calls(self, client: Child, at_once: int, number: int) -> OwnCalls:
        """As `calls`, by its own library's *client*."""
        number = number // at_once * at_once
        before = cpu_s(client.pid)
        self._child.ask(number)
        client.ask(at_once, number)
        p50_ms, p99_ms, rate = await asyncio.to_thread(client.answer)
        await self._answer()
        cpu_us = 1e6 * (cpu_s(client.pid) - before) / number
        return OwnCalls(cpu_us=cpu_us, p50_ms=p50_ms, p99_ms=p99_ms, rate=rate)

    def cpu_s(self) -> float:
        """Seconds of processor time so far."""
        return cpu_s(self._child.pid)

    async def hold(self, number: int) -> float:
        """Have it hold so many casts more; KiB that are resident then."""
        self._child.ask(number)
        await self._caller.cast(self._wire, number)
        await self._answer()
        return _resident_kib(self._child.pid)

    def kill(self) -> None:
        """End it with all that it holds."""
        self._child.kill()

    async def _answer(self) -> list[float]:
        answer = await asyncio.to_thread(self._child.answer)
        await asyncio.sleep(SETTLE_S)
        return answer


@contextlib.contextmanager
def working(
    kind: Kind, caller: Caller, wire: Wire, *, prefetch: int, directory: Path, called: str = ""
) -> Iterator[Worker]:
    """A worker of *kind*, ready; *called* is a variant of it."""
    with kind.child(called or kind.name, prefetch, directory) as child:
        child.ready()
        with scraped(port_file(directory, kind.name)):
            yield Worker(kind, child, caller, wire)


# -- from outside -----------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """Processor time of a process and of those that it started, of all their threads.

    By the clock that clock_getcpuclockid(3) tells.
    """
    mine = time.clock_gettime(~pid << 3 | 2)
    return mine + sum(cpu_s(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    """Processes that it started and that live."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _resident_kib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024
