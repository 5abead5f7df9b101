"""What a worker costs on RabbitMQ: casts and calls, against aiormq used by hand.

One private broker; a worker of each kind in a process of its own, whose processor
time (all threads, user and system) is read from outside; this process casts and
calls. Casts lie in the queue before the worker may read: it is stopped until all of
them are confirmed, so the time is that of draining them and nothing else.

All read the same kind of queue (durable, classic) with the same prefetch, in the
oslo envelope, persistent, 200 bytes of arguments. The bare worker acks each delivery
and does not wait for confirms of its replies; gracekit's are confirmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import aiormq
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from benchmarks.brokered import (
    KINDS,
    SETTLE_S,
    URL_FILE,
    by_stage,
    declare,
    opened,
    properties,
)
from benchmarks.child import Child
from benchmarks.measure import Figure, Plan, against, latencies, numbered, quantile
from benchmarks.stages import STAGES
from benchmarks.workload import ARGS
from gracekit.config import EXCHANGE
from gracekit.rpc.message import ReplyAddress, Request
from gracekit.rpc.oslo_wire import encode_request
from gracekit.rpc.transport import reply_queue

# Found at run time: mypy checks no tests.
brokers: Any = import_module("tests.rabbit.broker")
erlang: Any = import_module("tests.rabbit.erlang")

NAME: Final = "rabbitmq"
BARE: Final = "aiormq"
PREFETCH: Final = 256
CASTS: Final = 5000
CALLS: Final = {1: 400, 32: 2048, 256: 2048}
"""Waiting at one time, and calls of a round in all."""
WIDTH: Final = 32
"""With so many waiting, processor time is told."""
BY_STAGE: Final = 20_000
"""Casts, and calls, whose processor time is told by stage."""
AT_ONCE: Final = 250
"""Casts whose confirms are waited for together."""

Found = Mapping[str, tuple[float, str]]
"""Case to value and unit."""


def run(plan: Plan) -> Iterator[Figure]:
    """Each kind of worker against the bare one; nothing where no RabbitMQ is installed."""
    directory = plan.directory / NAME
    try:
        broker = brokers.Broker(directory / "broker")
    except erlang.NoRabbitError as error:
        print(f"{NAME}: left out: {error}")
        return
    with contextlib.closing(broker):
        broker.start()
        version = broker.eval("rabbit_misc:version()").strip('"')
        print(f"{NAME}: RabbitMQ {version}", flush=True)
        (directory / URL_FILE).touch(0o600)
        (directory / URL_FILE).write_text(broker.url)
        bench = _Bench(plan, directory, broker.url)
        rounds = asyncio.run(bench.rounds())
        for kind in KINDS:
            if kind != BARE:
                yield from _figures(kind, [(one[kind], one[BARE]) for one in rounds])
        print("\n".join(_table(asyncio.run(bench.stages()))), flush=True)


def _figures(kind: str, rounds: list[tuple[Found, Found]]) -> Iterator[Figure]:
    for case, (_, unit) in rounds[0][0].items():
        pairs = [(ours[case][0], bare[case][0]) for ours, bare in rounds]
        yield against(NAME, f"{kind}, {case}", pairs, unit)


def _table(columns: Mapping[str, list[float]]) -> Iterator[str]:
    """The stages as Markdown, microseconds a message."""
    yield f"\n| us of the worker | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for number, stage in enumerate(STAGES):
        yield f"| {stage} | {' | '.join(f'{one[number]:.1f}' for one in columns.values())} |"
    yield f"| all | {' | '.join(f'{sum(one):.1f}' for one in columns.values())} |\n"


class _Bench:
    """The workers on one broker."""

    def __init__(self, plan: Plan, directory: Path, url: str) -> None:
        self._plan = plan
        self._directory = directory
        self._url = url

    async def rounds(self) -> list[dict[str, Found]]:
        """In each round every worker has its turn, and another is first."""
        async with contextlib.AsyncExitStack() as stack:
            caller = await stack.enter_async_context(_calling(self._url))
            workers = [stack.enter_context(self._worker(kind, caller)) for kind in KINDS]
            for worker in workers:
                await worker.warm_up()
            found = []
            for number in range(self._plan.rounds):
                first = number % len(workers)
                order = workers[first:] + workers[:first]
                found.append({worker.topic: await self._turn(worker) for worker in order})
            return found

    async def _turn(self, worker: _Worker) -> Found:
        """Casts, then calls at each width."""
        gc.collect()
        took = await worker.casts(self._plan.size(CASTS, 8))
        found = {"processor time of a cast": (took.cpu_us, "us"), "casts": (took.rate, "casts/s")}
        for at_once, number in CALLS.items():
            took = await worker.calls(at_once, self._plan.size(number, at_once))
            if at_once == WIDTH:
                found[f"processor time of a call, {at_once}"] = (took.cpu_us, "us")
            found[f"calls, {at_once} waiting"] = (took.rate, "calls/s")
            if at_once == 1:
                found["p50 of a call, 1"] = (1e3 * quantile(took.latencies, 0.5), "ms")
                found["p99 of a call, 1"] = (1e3 * quantile(took.latencies, 0.99), "ms")
        return found

    async def stages(self) -> dict[str, list[float]]:
        """What is done to which worker, and the microseconds of each stage."""
        found: dict[str, list[float]] = {}
        number = self._plan.size(BY_STAGE, WIDTH)
        async with _calling(self._url) as caller:
            for kind in KINDS:
                with self._worker(kind, caller, by_stage(kind)) as worker:
                    await worker.warm_up()
                    found[f"{kind}, cast"] = (await worker.casts(number)).stages_us
                    found[f"{kind}, call"] = (await worker.calls(WIDTH, number)).stages_us
        return found

    @contextlib.contextmanager
    def _worker(self, kind: str, caller: _Caller, called: str = "") -> Iterator[_Worker]:
        with Child("brokered", called or kind, PREFETCH, self._directory) as child:
            yield _Worker(kind, child.ready(), caller, self._plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Took:
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


class _Worker:
    """One worker, and what is asked of it."""

    def __init__(self, topic: str, child: Child, caller: _Caller, plan: Plan) -> None:
        self.topic = topic
        self._child = child
        self._caller = caller
        self._plan = plan

    async def warm_up(self) -> None:
        """Connections, caches and the first pages of the store are there afterwards."""
        await self.casts(self._plan.size(500, 4))
        await self.calls(WIDTH, self._plan.size(500, WIDTH))

    async def casts(self, number: int) -> _Took:
        """Let it drain so many casts."""
        before = _cpu_s(self._child.pid)
        os.kill(self._child.pid, signal.SIGSTOP)
        try:
            await self._caller.cast(self.topic, number)
            self._child.ask(number)
        finally:
            begun = time.perf_counter()
            os.kill(self._child.pid, signal.SIGCONT)
        ended, *stages = await self._answer()
        return _Took(
            cpu_us=1e6 * (_cpu_s(self._child.pid) - before) / number,
            rate=number / (ended - begun),
            stages_us=[1e6 * one / number for one in stages],
        )

    async def calls(self, at_once: int, number: int) -> _Took:
        """Call it, *at_once* at a time, about *number* times in all."""
        repeats = number // at_once
        number = repeats * at_once
        step = self._caller.calls(self.topic, number)
        before = _cpu_s(self._child.pid)
        self._child.ask(number)
        taken, all_s = await latencies(at_once, repeats, step)
        _, *stages = await self._answer()
        return _Took(
            cpu_us=1e6 * (_cpu_s(self._child.pid) - before) / number,
            rate=number / all_s,
            stages_us=[1e6 * one / number for one in stages],
            latencies=taken,
        )

    async def _answer(self) -> list[float]:
        answer = await asyncio.to_thread(self._child.answer)
        await asyncio.sleep(SETTLE_S)
        return answer


def _cpu_s(pid: int) -> float:
    """Processor time of a process, by the clock that clock_getcpuclockid(3) tells."""
    return time.clock_gettime(~pid << 3 | 2)


# -- casts and calls ----------------------------------------------------------------


class _Caller:
    """Sends to every worker in the same way; as lean as aiormq allows."""

    def __init__(self, casting: Channel, calling: Channel) -> None:
        self._casting = casting  # with confirms
        self._calling = calling
        self._ids = numbered(f"{time.time_ns():x}")  # no journal has seen them
        self._queue = reply_queue(f"reply_{'b' * 32}")
        self._waiting: dict[str, asyncio.Future[None]] = {}

    async def listen(self) -> None:
        """Take replies."""
        await declare(self._calling, self._queue)
        await self._calling.basic_consume(self._queue.name, self._take, no_ack=True)

    async def _take(self, message: DeliveredMessage) -> None:
        self._waiting.pop(opened(message.body)["_msg_id"]).set_result(None)

    async def cast(self, topic: str, number: int) -> None:
        """Put *number* casts into the queue; they are there when it returns."""
        bodies = [self._encoded(next(self._ids)) for _ in range(number)]
        while bodies:
            some, bodies = bodies[:AT_ONCE], bodies[AT_ONCE:]
            await asyncio.gather(*(_publish(self._casting, topic, body) for body in some))

    def calls(self, topic: str, number: int) -> Callable[[], Awaitable[None]]:
        """What makes a call each time, *number* of them, written before they are timed."""
        ids = [next(self._ids) for _ in range(number)]
        rest = iter([(one, self._encoded(one, self._queue.name)) for one in ids])

        async def call() -> None:
            call_id, body = next(rest)
            answered = self._waiting[call_id] = asyncio.get_running_loop().create_future()
            await _publish(self._calling, topic, body)
            await answered

        return call

    def _encoded(self, request_id: str, reply_to: str | None = None) -> bytes:
        reply = ReplyAddress(queue=reply_to, msg_id=request_id) if reply_to else None
        return encode_request(
            Request(method="work", args=dict(ARGS), request_id=request_id, reply=reply)
        )


async def _publish(channel: Channel, topic: str, body: bytes) -> None:
    await channel.basic_publish(
        body, exchange=EXCHANGE, routing_key=topic, properties=properties(), wait=False
    )


@contextlib.asynccontextmanager
async def _calling(url: str) -> AsyncIterator[_Caller]:
    async with aiormq.connect(url) as connection:
        casting = await connection.channel(publisher_confirms=True)
        calling = await connection.channel(publisher_confirms=False)
        assert isinstance(casting, Channel)
        assert isinstance(calling, Channel)
        caller = _Caller(casting, calling)
        await caller.listen()
        yield caller
