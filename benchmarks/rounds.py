"""What is done to the workers on one broker: rounds, idle time, memory, starts and stages."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks import starts
from benchmarks.brokered import KINDS as MINE
from benchmarks.brokered import by_stage
from benchmarks.caller import Caller, Wire, calling
from benchmarks.child import Child
from benchmarks.clients import AT_ONCE, CASTERS
from benchmarks.measure import Pair, Plan, quantile
from benchmarks.plain import URL_FILE, parked
from benchmarks.standings import (
    CPU_OF_A_CALL,
    CPU_OF_A_CAST,
    OWN,
    OWN_CPU_OF_A_CALL,
    RATE_OF_CASTS,
    latency,
    rate_of_calls,
)
from benchmarks.workers import Kind, Worker, cpu_s, wire_of, working

PREFETCH: Final = 256
CASTS: Final = 5000
CALLS: Final = {1: 400, 32: 2048, 256: 2048}
"""Waiting at one time, and calls of a round in all."""
OWN_CALLS: Final = {1: 400, 32: 1024}
"""The same by each library's own client."""
WIDTH: Final = 32
"""With so many waiting, processor time is shown."""
BY_STAGE: Final = 20_000
"""Casts, and calls, whose processor time is shown by stage."""
NOT_BY_STAGE: Final = ("requeue-uvloop", "requeue-defaults", "retry-watched")
"""They do what `requeue` and `retry` do."""
IN_FLIGHT: Final = 50_000
"""Held at one time, when memory is measured."""
ROOM: Final = 60_000
"""Prefetch of who holds them; AMQP has 16 bits for it."""
HOLDS: Final = 2
"""Rounds of the memory, which take long and differ by a thousandth."""
PAUSES: Final = 3
"""Measurements of idle time."""
IDLE_S: Final = 30.0
"""Of gracekit the longest regular pause: then it looks for tasks of dead runs."""

Found = Mapping[str, float]
"""Case to value; or worker to value."""


@dataclass(slots=True)
class Seen:
    """What was measured.

    Attributes:
        rounds: Of each, by worker, the value of each case.
        idle: Milliseconds of processor time in each second without messages, by worker.
        casters: Microseconds of our client's cast and of a publish by hand, of each round.
        starts: Seconds from exec to the first message, by program.
        held: KiB of a request in flight, by worker.
        stages: What is done to which worker, and the microseconds of each stage.
    """

    rounds: list[dict[str, Found]] = field(default_factory=list)
    idle: list[Found] = field(default_factory=list)
    casters: list[Pair] = field(default_factory=list)
    starts: dict[str, list[float]] = field(default_factory=dict)
    held: list[Found] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)


class Bench:
    """The workers on one broker."""

    def __init__(self, plan: Plan, broker: Any, kinds: Sequence[Kind]) -> None:
        self._plan = plan
        self._broker = broker
        self._kinds = kinds
        self._wires: dict[str, Wire] = {}
        self._seen = Seen()

    async def all(self) -> Seen:
        """Everything, one after the other."""
        await self._rounds()
        self._seen.starts = await self._starts()
        self._seen.held = await self._held()
        self._seen.stages = await self._stages()
        return self._seen

    async def _rounds(self) -> None:
        """In each round every worker has its turn, and another is first; then all are idle."""
        async with self._site("rounds") as (directory, caller):
            for kind in self._kinds:
                self._wires[kind.name] = await wire_of(kind, caller, directory)
            with contextlib.ExitStack() as stack:
                workers = [
                    stack.enter_context(self._working(kind, caller, directory))
                    for kind in self._kinds
                ]
                clients = {
                    kind.name: stack.enter_context(kind.own_client(directory)).ready()
                    for kind in self._kinds
                    if kind.client is not None
                }
                casters = [
                    stack.enter_context(Child("clients", name, 0, directory)).ready()
                    for name in CASTERS
                ]
                for worker in workers:
                    await self._warm_up(worker, clients.get(worker.kind.name))
                for caster in casters:
                    caster.measure(self._plan.size(512, AT_ONCE))
                for number in range(self._plan.rounds):
                    first = number % len(workers)
                    order = workers[first:] + workers[:first]
                    self._seen.rounds.append(
                        {
                            one.kind.name: await self._turn(one, clients.get(one.kind.name))
                            for one in order
                        }
                    )
                    self._seen.casters.append(await self._casts(casters, number))
                    print(f"round {number + 1} of {self._plan.rounds}", file=sys.stderr)
                for _ in range(self._plan.few(PAUSES)):
                    self._seen.idle.append(await self._idle(workers))

    async def _warm_up(self, worker: Worker, client: Child | None = None) -> None:
        """Connections, caches and the first pages of the store are there afterwards."""
        await worker.casts(self._plan.size(500, 4))
        if worker.kind.calls:
            await worker.calls(WIDTH, self._plan.size(500, WIDTH))
        if client is not None:
            await worker.own_calls(client, WIDTH, self._plan.size(500, WIDTH))

    async def _turn(self, worker: Worker, client: Child | None) -> Found:
        """Casts, then calls at each width, then those by its own client."""
        gc.collect()
        took = await worker.casts(self._plan.size(CASTS, 8))
        found = {CPU_OF_A_CAST: took.cpu_us, RATE_OF_CASTS: took.rate}
        for at_once, number in CALLS.items() if worker.kind.calls else ():
            took = await worker.calls(at_once, self._plan.size(number, at_once))
            if at_once == WIDTH:
                found[CPU_OF_A_CALL] = took.cpu_us
            found[rate_of_calls(at_once)] = took.rate
            found[latency("p50", at_once)] = 1e3 * quantile(took.latencies, 0.5)
            found[latency("p99", at_once)] = 1e3 * quantile(took.latencies, 0.99)
        for at_once, number in OWN_CALLS.items():
            if client is None:
                break
            own = await worker.own_calls(client, at_once, self._plan.size(number, at_once))
            if at_once == WIDTH:
                found[OWN_CPU_OF_A_CALL] = own.cpu_us
            found[rate_of_calls(at_once) + OWN] = own.rate
            found[latency("p50", at_once) + OWN] = own.p50_ms
            found[latency("p99", at_once) + OWN] = own.p99_ms
        return found

    async def _casts(self, casters: list[Child], turn: int) -> Pair:
        """Microseconds of processor time that a cast costs our client, and a publish by hand."""
        number = self._plan.size(CASTS, AT_ONCE) // AT_ONCE * AT_ONCE
        found = {}
        for caster in casters if turn % 2 else reversed(casters):
            before = cpu_s(caster.pid)
            await asyncio.to_thread(caster.measure, number)
            found[caster.pid] = 1e6 * (cpu_s(caster.pid) - before) / number
        ours, bare = (found[caster.pid] for caster in casters)
        return ours, bare

    async def _idle(self, workers: list[Worker]) -> Found:
        """Of all at once: none has anything to do."""
        seconds = IDLE_S if not self._plan.quick else 0.2
        await asyncio.sleep(seconds / 10)  # what the last messages have left to do is not idle
        before = [worker.cpu_s() for worker in workers]
        await asyncio.sleep(seconds)
        return {
            worker.kind.name: 1e3 * (worker.cpu_s() - used) / seconds
            for worker, used in zip(workers, before, strict=True)
        }

    async def _starts(self) -> dict[str, list[float]]:
        """Seconds from exec to the first message; ours, and of who is here."""
        names = [name for name in starts.PROGRAMS if name in {starts.OURS, *self._wires}]
        async with self._site("starts") as (directory, caller):
            return await starts.first_messages(names, caller, directory, self._plan.rounds)

    async def _held(self) -> list[Found]:
        """KiB of a request that stays in flight, of each worker that can hold so many.

        A fresh process and a fresh virtual host each time; what it has after the first hundred
        is not counted.
        """
        few, number = self._plan.size(100, 10), self._plan.size(IN_FLIGHT, 1000)
        holding = [kind for kind in self._kinds if kind.parks]
        return [
            {kind.name: await self._hold(kind, turn, few, number) for kind in holding}
            for turn in range(self._plan.few(HOLDS))
        ]

    async def _hold(self, kind: Kind, turn: int, few: int, number: int) -> float:
        async with self._site(f"held-{turn}-{kind.name}") as (directory, caller):
            wire, called = self._wires[kind.name], parked(kind.name)
            with working(
                kind, caller, wire, prefetch=ROOM, directory=directory, called=called
            ) as worker:
                before = await worker.hold(few)
                after = await worker.hold(number - few)
                worker.kill()
            return (after - before) / (number - few)

    async def _stages(self) -> dict[str, list[float]]:
        """What is done to which worker, and the microseconds of each stage."""
        found: dict[str, list[float]] = {}
        number = self._plan.size(BY_STAGE, WIDTH)
        async with self._site("stages") as (directory, caller):
            for kind in self._kinds:
                if kind.name in MINE and kind.name not in NOT_BY_STAGE:
                    name = kind.name
                    with self._working(kind, caller, directory, by_stage(name)) as worker:
                        await self._warm_up(worker)
                        found[f"{name}, cast"] = (await worker.casts(number)).stages_us
                        found[f"{name}, call"] = (await worker.calls(WIDTH, number)).stages_us
        return found

    def _working(
        self, kind: Kind, caller: Caller, directory: Path, called: str = ""
    ) -> contextlib.AbstractContextManager[Worker]:
        wire = self._wires[kind.name]
        return working(kind, caller, wire, prefetch=PREFETCH, directory=directory, called=called)

    @contextlib.asynccontextmanager
    async def _site(self, name: str) -> AsyncIterator[tuple[Path, Caller]]:
        """A directory and a virtual host that nobody has used, and a caller there."""
        directory = self._plan.directory / name
        directory.mkdir()
        self._broker.add_vhost(name)
        url = self._broker.url_of(name)
        (directory / URL_FILE).touch(0o600)
        (directory / URL_FILE).write_text(url)
        async with calling(url) as caller:
            yield directory, caller
        self._broker.delete_vhost(name)
