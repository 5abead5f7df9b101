"""From exec to the first message on RabbitMQ: `gracekit run`, aiormq by hand, and FastStream.

A message lies in the queue of a program when it is started, and its handler notes the moment at
which it begins. Each program was started once before, so that its files and queues exist.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.brokered import properties
from benchmarks.caller import Caller, Envelope, Replayed, Sent, Wire
from benchmarks.first import NOTE, svc
from benchmarks.measure import Figure, Goal, alone
from benchmarks.plain import ARGS, URL_FILE, url_of
from benchmarks.processes import Process, service
from gracekit.config.values import EXCHANGE
from tools import dev

GOAL: Final = Goal(0.3, beyond=0.2)
OURS: Final = "gracekit run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One that is started.

    Attributes:
        queue: What it reads.
        wire: How messages to it look.
        start: Starts it, with its directory and the file for the moment.
        as_ours: Whether its queue is declared as gracekit declares it.
    """

    queue: str
    wire: Wire
    start: Callable[[Path, Path], Process]
    as_ours: bool = False

    async def first_message_s(self, caller: Caller, directory: Path) -> float:
        """Seconds from exec to the first message."""
        await caller.put(self.queue, self.wire, as_ours=self.as_ours)
        return await asyncio.to_thread(first_message_s, self.start, directory)


def first_message_s(start: Callable[[Path, Path], Process], directory: Path) -> float:
    """Seconds from exec until a process has begun the message that lies in its queue."""
    note = directory / f"first-{time.monotonic_ns()}"
    began = time.monotonic_ns()
    with start(directory, note) as process:
        taken = (process.noted(note) - began) / 1e9
        process.terminate()
    return taken


def gracekit_run(directory: Path, note: Path) -> Process:
    """The service, on the broker whose URL stands in the directory, or on a file there."""
    given: dict[str, object] = {NOTE.removeprefix("GRACEKIT_"): note}
    if (directory / URL_FILE).exists():
        given["transport_url"] = url_of(directory)
    return service(directory, "benchmarks.first:svc", **given)


def _by_hand(name: str, python: Callable[[], Path | None]) -> Program:
    """A program of `benchmarks/peers/`."""

    def start(directory: Path, note: Path) -> Process:
        command = (f"benchmarks.peers.{name}_first", str(directory), str(note))
        return Process(directory, *command, settings={}, python=python())

    queue = f"first-{name}"
    sent = Sent("", queue, msgspec.json.encode(dict(ARGS)), properties())
    return Program(queue=queue, wire=Replayed(sent, None), start=start)


PROGRAMS: Final[Mapping[str, Program]] = {
    OURS: Program(
        queue=svc.topic, wire=Envelope(EXCHANGE, svc.topic), start=gracekit_run, as_ours=True
    ),
    "aiormq": _by_hand("aiormq", lambda: None),
    "faststream": _by_hand("faststream", lambda: dev.python(dev.PEERS_LOCK)),
}
"""By the name of the worker beside which each stands, but ours."""


async def first_messages(
    names: Sequence[str], caller: Caller, directory: Path, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round, of each program of *names*, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names if turn % 2 else reversed(names):
            taken = await PROGRAMS[name].first_message_s(caller, directory)
            if turn:
                found[name].append(taken)
    return found


def figures(bench: str, found: Mapping[str, Sequence[float]]) -> list[Figure]:
    """A line for each program."""
    return [
        alone(
            bench, f"{name}, exec to the first message", taken, "s", GOAL if name == OURS else None
        )
        for name, taken in found.items()
    ]
