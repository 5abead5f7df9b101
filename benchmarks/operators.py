"""What the HTTP endpoint, metrics and traces cost a service: all on against all off.

The service with all on has the HTTP endpoint, a scrape of its metrics each second, and traces, of
which one in a hundred is sampled. The two services are measured in turns, each in its own process.
A third process sends the probes by HTTP and by the door.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.child import Child, Measure
from benchmarks.measure import Figure, Goal, Plan, against, alone
from benchmarks.watched import ADMIN, port_of, sample_traces
from benchmarks.workload import Site, serving
from gracekit.runtime.face import Runtime
from gracekit.runtime.process_life import calm_collector

NAME: Final = "operators"
AT_ONCE: Final = 32
RATE: Final = Goal(0.9, at_least=True)
COST: Final = Goal(1.1)
FAST: Final = Goal(5.0)
IDLE: Final = Goal(2.0)
MEMORY: Final = Goal(10.0)
_MIB: Final = 2**20


def run(plan: Plan) -> Iterator[Figure]:
    """Rate and processor time of requests; then latency of probes; then cost while idle."""
    sides = {}
    with contextlib.ExitStack() as stack:
        for kind in PREPARE:
            directory = plan.directory / kind
            directory.mkdir()
            sides[kind] = stack.enter_context(Child(NAME, kind, AT_ONCE, directory)).ready()
        number = plan.size(8000, 40)
        rounds = []
        for turn in range(plan.rounds):
            order = sorted(sides, reverse=bool(turn % 2))
            rounds.append({kind: sides[kind].measure(number) for kind in order})
        yield from _figures(rounds)


def _figures(rounds: list[dict[str, list[float]]]) -> Iterator[Figure]:
    def pairs(place: int) -> list[tuple[float, float]]:
        return [(one["on"][place], one["off"][place]) for one in rounds]

    yield against(
        NAME, "requests a second, 32 in flight", pairs(0), "tasks/s", Goal(0.9, at_least=True)
    )
    yield against(NAME, "processor time of that", pairs(1), "us a task", COST)
    yield alone(NAME, "p99 of /readyz beside them", [one["on"][2] for one in rounds], "ms", FAST)
    yield alone(NAME, "p99 of the door beside them", [one["on"][3] for one in rounds], "ms", FAST)
    idle = [one["on"][4] - one["off"][4] for one in rounds]
    yield alone(NAME, "idle, above off", idle, "ms/s", IDLE)
    resident = [one["on"][5] - one["off"][5] for one in rounds]
    yield alone(NAME, "resident, above off", resident, "MiB", MEMORY)


# -- in the child -----------------------------------------------------------------------

_ASK: Final = """
import http.client, socket, sys, threading, time

port, door, ask = int(sys.argv[1]), sys.argv[2], sys.argv[3].encode() + b"\\n"

def scrape():  # as Prometheus does: by one connection, again and again
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        time.sleep(1.0)

def ready():
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/readyz")
    assert connection.getresponse().status == 200
    connection.close()

def by_door():
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(door)
        asking.sendall(ask)
        assert asking.recv(65536)

threading.Thread(target=scrape, daemon=True).start()
for line in sys.stdin:
    took = []
    for step in (ready, by_door):
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
            time.sleep(0.002)
        took.append(1000 * sorted(times)[int(0.99 * len(times))])
    print(*took, flush=True)
"""


@contextlib.asynccontextmanager
async def _off(size: int, directory: Path) -> AsyncIterator[Measure]:
    calm_collector()  # as `run_service` does
    async with serving(Site(), directory, "operators") as (_, sender):

        async def measure(number: int) -> list[float]:
            taken = await sender.repeat("work", at_once=size, number=number)
            return [*taken.values(), 0.0, 0.0, await _idle_ms(number), _resident_mib()]

        yield measure


@contextlib.asynccontextmanager
async def _on(size: int, directory: Path) -> AsyncIterator[Measure]:
    calm_collector()
    sample_traces()
    async with (
        serving(Site(), directory, "operators", admin=ADMIN) as (runtime, sender),
        _asking(runtime) as ask,
    ):

        async def measure(number: int) -> list[float]:
            taken = await sender.repeat("work", at_once=size, number=number)
            asked = asyncio.create_task(ask(max(5, number // 40)))
            await sender.keep_busy("work", asked, at_once=size)
            return [*taken.values(), *await asked, await _idle_ms(number), _resident_mib()]

        yield measure


@contextlib.asynccontextmanager
async def _asking(runtime: Runtime) -> AsyncIterator[Any]:
    """A process that scrapes each second; it sends as many probes as a line on its stdin says."""
    assert runtime.wired is not None
    runs = runtime.ground.location.run_directory
    line = json.dumps({"run_id": runtime.run_id, "verb": "health", "args": {}})
    arguments = (str(port_of(runtime)), f"{runtime.run_id}.sock", line)
    asker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _ASK, *arguments),
        cwd=runs,  # the path of a socket must be short
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )

    async def ask(number: int) -> list[float]:
        assert asker.stdin is not None
        assert asker.stdout is not None
        asker.stdin.write(f"{number}\n".encode())
        await asker.stdin.drain()
        return [float(word) for word in (await asker.stdout.readline()).split()]

    yield ask
    asker.kill()
    await asker.wait()


async def _idle_ms(number: int) -> float:
    """Milliseconds of processor time in each second without requests; scrapes go on."""
    seconds = 5.0 if number >= AT_ONCE * 10 else 0.2
    await asyncio.sleep(seconds / 2)  # what the requests before have left to do is not idle
    began = time.process_time()
    await asyncio.sleep(seconds)
    return 1000 * (time.process_time() - began) / seconds


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


PREPARE: Final = {"off": _off, "on": _on}
