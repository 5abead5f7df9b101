"""`python -m benchmarks`: measure, print the table, draw the picture.

make bench                                  all of them, about 35 minutes
make bench ARGS="durable service"           some of them
make bench ARGS="--quick"                   tiny sizes: shows that they run, measures nothing

Workers on RabbitMQ have a program of their own, `benchmarks.rabbitmq`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks import (
    calls,
    drain,
    durable,
    footprint,
    growth,
    memory,
    operators,
    pending,
    resources,
    service,
    start,
    tracking,
)
from benchmarks.machine import describe
from benchmarks.measure import Figure, Plan, command_line
from benchmarks.picture import draw
from benchmarks.plain import be_quiet
from benchmarks.table import lines

Bench = Callable[[Plan], Iterator[Figure]]

_MODULES: Final = (
    tracking,
    durable,
    service,
    calls,
    drain,
    start,
    resources,
    pending,
    growth,
    memory,
    operators,
    footprint,
)
BENCHES: Final[Mapping[str, Bench]] = MappingProxyType({one.NAME: one.run for one in _MODULES})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 also when a goal is missed, which the table shows."""
    parser = command_line("python -m benchmarks", __doc__, "NAME", BENCHES)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHES]:
        parser.error(f"there is no bench {unknown[0]!r}: there are {', '.join(BENCHES)}")
    machine = describe(options.dir)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.dir) as directory:
        plan = Plan(rounds=options.rounds, quick=options.quick, directory=Path(directory))
        for name in options.names or BENCHES:
            figures += _told(BENCHES[name](plan))
    print("\n" + "\n".join(lines(figures)))
    if options.json is not None:
        told = {"machine": machine, "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.svg is not None:
        options.svg.write_text(draw(figures, machine))
    return 0


def _told(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Show each as it comes: the whole takes long."""
    for figure in figures:
        print(lines([figure])[-1], flush=True)
        yield figure


if __name__ == "__main__":
    be_quiet()
    sys.exit(main())
