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
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks import starts
from benchmarks.judged import NAME, figures_of
from benchmarks.machine import describe
from benchmarks.measure import Figure, Goal, Plan, against, command_line
from benchmarks.plain import be_quiet
from benchmarks.rounds import Bench, Seen
from benchmarks.stages import STAGES
from benchmarks.standings import IDLE, KEPT, Standing, draw, side_by_side
from benchmarks.table import lines
from benchmarks.workers import BARE, KINDS, OURS, Kind

# Found at run time: mypy checks no tests.
brokers: Any = import_module("tests.rabbit.broker")
erlang: Any = import_module("tests.rabbit.erlang")

SCHEDULERS: Final = 2
"""Of the broker, as on a machine of two processors by itself."""
CASTS: Final = Goal(0.6, beyond=0.4)
"""Of our client's processor time of a cast."""


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
            seen = asyncio.run(Bench(plan, broker, kinds).all())
    notes["load after"] = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"- load after: {notes['load after']}\n")
    standings = {kind.name: _standing(kind, seen) for kind in kinds}
    figures = [*figures_of(standings), *_of_programs(seen)]
    for table in (side_by_side([*standings.values()]), lines(figures), _stages(seen.stages)):
        print("\n".join(table) + "\n")
    if options.json is not None:
        told = {
            "machine": notes,
            "figures": [asdict(figure) for figure in figures],
            "workers": {name: asdict(one) for name, one in standings.items()},
            "stages": seen.stages,
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(draw([*standings.values()], notes))
    return 0


def _standing(kind: Kind, seen: Seen) -> Standing:
    mine = [one[kind.name] for one in seen.rounds]
    values = {case: [one[case] for one in mine] for case in mine[0]}
    values[IDLE] = [one[kind.name] for one in seen.idle]
    if kind.parks:
        values[KEPT] = [one[kind.name] for one in seen.held]
    return Standing(kind.label, kind.name in OURS, values)


def _of_programs(seen: Seen) -> Iterator[Figure]:
    """What casts cost their client, and how long programs take to begin."""
    case = "client's processor time of a cast / an unconfirmed publish"
    yield against(NAME, case, seen.casters, "us", CASTS)
    yield from starts.figures(NAME, seen.starts)


def _stages(columns: Mapping[str, list[float]]) -> Iterator[str]:
    """The stages as Markdown, microseconds a message."""
    yield f"| us of the worker | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for number, stage in enumerate(STAGES):
        yield f"| {stage} | {' | '.join(f'{one[number]:.1f}' for one in columns.values())} |"
    yield f"| all | {' | '.join(f'{sum(one):.1f}' for one in columns.values())} |"


if __name__ == "__main__":
    be_quiet()
    sys.exit(main())
