"""What a worker on RabbitMQ costs, beside other libraries.

make bench-rabbitmq                              all workers, seven rounds, then stages and memory
make bench-rabbitmq ARGS="requeue faststream"    some of them; aiormq by hand is always there
make bench-rabbitmq ARGS="--quick --rounds 1"    tiny sizes: shows that they run, measures nothing

One private broker; a worker of each kind in a process of its own, of the libraries in an
environment of their own, whose processor time (all threads, user and system) is read from outside;
this process casts and calls. Casts lie in the queue before the worker may read: it is stopped
until all of them are confirmed, so the time is that of draining them and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.brokered import KINDS as MINE
from benchmarks.brokered import by_stage
from benchmarks.caller import Caller, Wire, calling
from benchmarks.machine import describe
from benchmarks.measure import Figure, Goal, Plan, against, command_line, quantile
from benchmarks.plain import URL_FILE, be_quiet, parked
from benchmarks.stages import STAGES
from benchmarks.standings import (
    CPU_OF_A_CALL,
    CPU_OF_A_CAST,
    KEPT,
    RATE_OF_CASTS,
    Standing,
    draw,
    latency,
    rate_of_calls,
    side_by_side,
)
from benchmarks.table import lines
from benchmarks.workers import BARE, KINDS, OURS, Kind, Worker, wire_of, working

# Found at run time: mypy checks no tests.
brokers: Any = import_module("tests.rabbit.broker")
erlang: Any = import_module("tests.rabbit.erlang")

NAME: Final = "rabbitmq"
SCHEDULERS: Final = 2
"""Of the broker, as on a machine of two processors by itself."""
PREFETCH: Final = 256
CASTS: Final = 5000
CALLS: Final = {1: 400, 32: 2048, 256: 2048}
"""Waiting at one time, and calls of a round in all."""
WIDTH: Final = 32
"""With so many waiting, processor time is told."""
BY_STAGE: Final = 20_000
"""Casts, and calls, whose processor time is told by stage."""
IN_FLIGHT: Final = 50_000
"""Held at one time, when memory is measured."""
ROOM: Final = 60_000
"""Prefetch of who holds them; AMQP has 16 bits for it."""
HOLDS: Final = 3
"""Rounds of the memory, which take long."""

UNWATCHED: Final = "retry"
"""Of the worker that operators watch: the same without endpoint, scrapes and sampled traces."""

UNITS: Final = {
    CPU_OF_A_CAST: "us",
    RATE_OF_CASTS: "casts/s",
    rate_of_calls(1): "calls/s",
    latency("p50", 1): "ms",
    latency("p99", 1): "ms",
    CPU_OF_A_CALL: "us",
    rate_of_calls(32): "calls/s",
    rate_of_calls(256): "calls/s",
    KEPT: "KiB",
}
"""Cases that are set against another worker's."""

GOALS: Final = {
    ("requeue", CPU_OF_A_CAST, BARE): Goal(1.0, beyond=0.5),
    ("retry", CPU_OF_A_CAST, BARE): Goal(1.3),
    ("requeue", RATE_OF_CASTS, "faststream"): Goal(2.0, at_least=True, beyond=4.0),
    ("requeue", RATE_OF_CASTS, "oslo.messaging"): Goal(3.5, at_least=True, beyond=7.0),
    ("requeue", CPU_OF_A_CALL, BARE): Goal(0.7, beyond=0.4),
    ("requeue", rate_of_calls(WIDTH), BARE): Goal(1.2, at_least=True, beyond=2.0),
    ("requeue", rate_of_calls(WIDTH), "oslo.messaging"): Goal(6.0, at_least=True, beyond=10.0),
    ("requeue", latency("p50", 1), BARE): Goal(1.1),
    ("requeue", KEPT, BARE): Goal(1.1),
    ("retry-watched", CPU_OF_A_CAST, UNWATCHED): Goal(1.1),
    ("retry-watched", RATE_OF_CASTS, UNWATCHED): Goal(0.9, at_least=True),
    ("retry-watched", rate_of_calls(WIDTH), UNWATCHED): Goal(0.9, at_least=True),
}
"""Of a worker of ours, in a case, against whom."""

AGAINST_TOO: Final = ("faststream", "oslo.messaging")
CASES_TOO: Final = (RATE_OF_CASTS, rate_of_calls(WIDTH))

Found = Mapping[str, float]
"""Case to value; or worker to value."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and tell; 0 also when a goal is missed, which the table shows."""
    parser = command_line("python -m benchmarks.rabbitmq", __doc__, "WORKER", KINDS)
    parser.add_argument(
        "--schedulers", type=int, default=SCHEDULERS, help="of the broker; default %(default)s"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in KINDS]:
        parser.error(f"there is no worker {unknown[0]!r}: there are {', '.join(KINDS)}")
    wanted = {*(options.names or KINDS), BARE}
    kinds = [kind for kind in KINDS.values() if kind.name in wanted]
    notes = describe(options.dir)
    for kind in kinds:
        notes |= kind.versions()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.dir) as directory:
        plan = Plan(rounds=options.rounds, quick=options.quick, directory=Path(directory))
        try:
            broker = brokers.Broker(plan.directory / "broker", schedulers=options.schedulers)
        except erlang.NoRabbitError as error:
            sys.exit(str(error))
        with contextlib.closing(broker):
            broker.start()
            version = broker.eval("rabbit_misc:version()").strip('"')
            schedulers = broker.eval("erlang:system_info(schedulers_online)")
            notes["RabbitMQ"] = f"{version}, schedulers: {schedulers}"
            print("\n".join(f"- {name}: {value}" for name, value in notes.items()), flush=True)
            bench = _Bench(plan, broker, kinds)
            rounds, held, stages = asyncio.run(bench.all())
    notes["load after"] = load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    standings = {kind.name: _standing(kind, rounds, held) for kind in kinds}
    figures = [*_figures(standings)]
    print(f"- load after: {load}\n")
    for table in (side_by_side([*standings.values()]), lines(figures), _stages(stages)):
        print("\n".join(table) + "\n")
    if options.json is not None:
        told = {
            "machine": notes,
            "figures": [asdict(figure) for figure in figures],
            "workers": {name: asdict(one) for name, one in standings.items()},
            "stages": stages,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(draw([*standings.values()], notes))
    return 0


def _standing(kind: Kind, rounds: list[dict[str, Found]], held: list[Found]) -> Standing:
    mine = [one[kind.name] for one in rounds]
    values = {case: [one[case] for one in mine] for case in mine[0]}
    if kind.parks:
        values[KEPT] = [one[kind.name] for one in held]
    return Standing(kind.label, kind.name in OURS, values)


def _figures(standings: Mapping[str, Standing]) -> Iterator[Figure]:
    """Ours against the bare one in every case, and against others in some."""
    for ours in (name for name in OURS if name in standings):
        wanted = [(case, BARE) for case in UNITS]
        wanted += [(case, other) for other in AGAINST_TOO for case in CASES_TOO]
        if ours == "retry-watched":
            wanted += [(case, UNWATCHED) for case in UNITS]
        for case, other in wanted:
            if other in standings and case in standings[ours].values:
                yield _figure(standings, ours, case, other)


def _figure(standings: Mapping[str, Standing], ours: str, case: str, other: str) -> Figure:
    pairs = zip(standings[ours].values[case], standings[other].values[case], strict=True)
    told = f"{ours}, {case}" if other == BARE else f"{ours}, {case} / {other}"
    return against(NAME, told, list(pairs), UNITS[case], GOALS.get((ours, case, other)))


def _stages(columns: Mapping[str, list[float]]) -> Iterator[str]:
    """The stages as Markdown, microseconds a message."""
    yield f"| us of the worker | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for number, stage in enumerate(STAGES):
        yield f"| {stage} | {' | '.join(f'{one[number]:.1f}' for one in columns.values())} |"
    yield f"| all | {' | '.join(f'{sum(one):.1f}' for one in columns.values())} |"


class _Bench:
    """The workers on one broker."""

    def __init__(self, plan: Plan, broker: Any, kinds: Sequence[Kind]) -> None:
        self._plan = plan
        self._broker = broker
        self._kinds = kinds
        self._wires: dict[str, Wire] = {}

    async def all(self) -> tuple[list[dict[str, Found]], list[Found], dict[str, list[float]]]:
        """What the rounds, the memory and the stages told."""
        return await self.rounds(), await self.held(), await self.stages()

    async def rounds(self) -> list[dict[str, Found]]:
        """In each round every worker has its turn, and another is first."""
        async with self._site("rounds") as (directory, caller):
            for kind in self._kinds:
                self._wires[kind.name] = await wire_of(kind, caller, directory)
            with contextlib.ExitStack() as stack:
                workers = [
                    stack.enter_context(self._working(kind, caller, directory))
                    for kind in self._kinds
                ]
                for worker in workers:
                    await self._warm_up(worker)
                found = []
                for number in range(self._plan.rounds):
                    first = number % len(workers)
                    order = workers[first:] + workers[:first]
                    found.append({one.kind.name: await self._turn(one) for one in order})
                    print(f"round {number + 1} of {self._plan.rounds}", file=sys.stderr)
                return found

    async def _warm_up(self, worker: Worker) -> None:
        """Connections, caches and the first pages of the store are there afterwards."""
        await worker.casts(self._plan.size(500, 4))
        if worker.kind.calls:
            await worker.calls(WIDTH, self._plan.size(500, WIDTH))

    async def _turn(self, worker: Worker) -> Found:
        """Casts, then calls at each width."""
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
        return found

    async def held(self) -> list[Found]:
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

    async def stages(self) -> dict[str, list[float]]:
        """What is done to which worker, and the microseconds of each stage."""
        found: dict[str, list[float]] = {}
        number = self._plan.size(BY_STAGE, WIDTH)
        async with self._site("stages") as (directory, caller):
            for kind in self._kinds:
                if kind.name in MINE:
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


if __name__ == "__main__":
    be_quiet()
    sys.exit(main())
