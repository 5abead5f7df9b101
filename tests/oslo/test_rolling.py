"""A rolling move: workers of oslo.messaging on one topic, one replaced by gracekit after the other,
and back, while both kinds of clients call and cast.

    python -m pytest tests/oslo/test_rolling.py -s

`-s` shows the figures. What oslo.messaging itself drops when it stops is counted apart: between
`stop()` and its last connection's end it acknowledges what the broker still sends, and reads it no
more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import apsw
import pytest

from gracekit import RpcClient
from tests.oslo.kit import ROOT, oslo_peer, oslo_python
from tests.scale import scale

TIMEOUT_S: Final = scale(300, 3600)
pytestmark = [pytest.mark.process, pytest.mark.timeout(TIMEOUT_S)]

WORKERS: Final = scale(2, 3)
PER_SECOND: Final = scale(10, 50)
WORK_S: Final = scale(1.0, 4.0)
"""How long each request takes: `PER_SECOND * WORK_S` are in flight, 200 in a soak."""
CALL_S: Final = 40.0
SLACK_S: Final = 5.0
"""From the order to send until it is sent, on a busy machine."""
PATIENCE_S: Final = 300.0
TOPIC: Final = "rolling"
ENDS: Final = {"gracekit": {0}, "oslo": {0, -signal.SIGALRM}}
"""Exit codes; a stop of the library that takes over a minute is ended, as under oslo.service."""
READY: Final = {"oslo": "serving", "gracekit": "service.serving"}

ROOM: Final = scale(8, 200)
"""What one worker runs, and accepts. In a short run it is less than all traffic, so that requests
wait while the other worker is replaced: in the queue, and not in a store.
"""

# docs/oslo.md: how to keep the number small that oslo drops.
OSLO: Final = {
    "OS_OSLO_MESSAGING_RABBIT__RABBIT_QOS_PREFETCH_COUNT": "1",
    "OS_DEFAULT__EXECUTOR_THREAD_POOL_SIZE": "200",
}
GRACEKIT: Final = {
    "GRACEKIT_ACCEPT_UNSHARED_STORE": "true",  # each worker has a store of its own
    **dict.fromkeys(("GRACEKIT_THREADS", "GRACEKIT_MAX_RUNNING"), str(ROOM)),
    "GRACEKIT_OPS_QUIET_TIMEOUT": "0.2s",
}


@dataclass
class Worker:
    """A process of one kind, and when it was stopped."""

    kind: str
    name: str
    process: Process
    asked_at: float = 0.0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.said: list[str] = []
        self.news = asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.said.append(line.decode(errors="replace"))
            self.news.set()
        self.news.set()

    async def end(self) -> int:
        """Wait for its end; its exit code. One that hangs shows where it does."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                code = await self.process.wait()
        except TimeoutError:
            self.process.send_signal(signal.SIGABRT)
            await self.reader
            raise AssertionError(f"{self.name} did not end:\n" + "".join(self.said)) from None
        await self.reader
        return code


class Site:
    """Workers of one topic on one virtual host, each with a directory of its own."""

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        self.theirs = url.replace("amqp://", "rabbit://", 1)
        self.ours = f"{url}?profile=oslo-transient&exchange=openstack"
        self.workers: dict[str, Worker] = {}
        self.stopped: list[Worker] = []

    async def start(self, kind: str, name: str, **more: str) -> None:
        """Start a worker, which serves when this returns."""
        worker = self.workers[name] = await self.spawn(kind, name, **more)
        async with asyncio.timeout(PATIENCE_S):
            while not any(READY[kind] in line for line in worker.said):
                assert not worker.reader.done(), "".join(worker.said)
                worker.news.clear()
                await worker.news.wait()

    async def spawn(self, kind: str, name: str, **more: str) -> Worker:
        place = self.root / name
        place.mkdir(mode=0o700, exist_ok=True)
        ours = {key: value for key, value in os.environ.items() if key[:3] not in {"GRA", "PYT"}}
        own = {
            "GRACEKIT_TRANSPORT_URL": self.ours,
            "GRACEKIT_STORE_URL": f"sqlite:///{place}/gracekit-store.db",
            "GRACEKIT_HOST": name,
            "ROLLING_EFFECTS": str(self.root / "effects"),
            "ROLLING_KIND": kind,
        }
        command = (
            ("-m", "gracekit", "run", "tests.oslo.worker:svc")
            if kind == "gracekit"
            else ("-m", "tests.oslo.worker", self.theirs, TOPIC, name)
        )
        process = await asyncio.create_subprocess_exec(
            oslo_python(), *command,
            cwd=ROOT, env=ours | OSLO | GRACEKIT | own | more,
            stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
        )  # fmt: skip
        return Worker(kind, name, process)

    async def stop(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.stopped.append(worker)
        worker.asked_at = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        code = await worker.end()
        worker.ended_at = time.monotonic()
        assert code in ENDS[worker.kind], "".join(worker.said)

    async def close(self) -> None:
        for worker in self.workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            await worker.end()

    def effects(self, word: str) -> dict[str, list[str]]:
        """By key the kinds of workers that did it."""
        found: dict[str, list[str]] = {}
        path = self.root / "effects"
        for line in path.read_text().splitlines() if path.exists() else ():
            did, key, kind = line.split()
            if did == word:
                found.setdefault(key, []).append(kind)
        return found

    def rows(self) -> list[tuple[str, str]]:
        """State and reason of what our workers ever accepted."""
        found: list[tuple[str, str]] = []
        for path in self.root.glob("*/gracekit-store.db"):
            connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            found += connection.execute("SELECT state, coalesce(reason, '') FROM task")
            connection.close()
        return found


@dataclass
class Traffic:
    """Calls and casts of both kinds of clients, so many a second.

    Attributes:
        sent: By key when it was sent.
        failed: By key of a call what it raised.
    """

    ways: Mapping[str, Callable[[str], Awaitable[Any]]]
    sent: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        begin, n = loop.time(), 0
        while not self._ended.is_set():
            for way in self.ways:
                task = asyncio.create_task(self._one(way, f"{way}-{n}"))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                n += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(begin + n / PER_SECOND):
                    await self._ended.wait()

    async def end(self) -> None:
        """Send no more, and wait for all answers."""
        self._ended.set()
        await asyncio.gather(*self._tasks)

    async def _one(self, way: str, key: str) -> None:
        self.sent[key] = time.monotonic()
        try:
            await self.ways[way](key)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
            self.failed[key] = f"{type(error).__name__}: {error}"[:200]


@contextlib.asynccontextmanager
async def traffic(site: Site, url: str) -> AsyncIterator[Traffic]:
    """It, once there is a worker."""
    async with oslo_peer(url) as peer, RpcClient(site.ours, TOPIC) as us:
        target = {"topic": TOPIC, "exchange": None}
        view = us.prepare(timeout=CALL_S)

        def by_oslo(way: str) -> Callable[[str], Awaitable[Any]]:
            options = {"timeout": CALL_S} if way == "call" else {}
            return lambda key: peer.ask(
                way, target=target, options=options, ctxt={}, method="work",
                args={"key": key, "s": WORK_S},
            )  # fmt: skip

        ways: dict[str, Callable[[str], Awaitable[Any]]] = {
            "call-by-oslo": by_oslo("call"),
            "call-by-us": lambda key: view.call("work", key=key, s=WORK_S),
            "cast-by-oslo": by_oslo("cast"),
            "cast-by-us": lambda key: view.cast("work", key=key, s=WORK_S),
        }
        made = Traffic(MappingProxyType(ways))
        running = asyncio.create_task(made.run())
        yield made
        await made.end()
        await running


async def test_a_rolling_move_both_ways_loses_nothing(tmp_path: Path, rabbit_url: str):
    """Workers of oslo.messaging are replaced by gracekit and back, one at a time: no call that
    reached us fails, no cast is lost, and nothing runs twice; what oslo drops when it stops is its
    own.
    """
    site = Site(tmp_path, rabbit_url)
    names = [f"node-{n}" for n in range(1, WORKERS + 1)]
    in_flight: list[int] = []
    try:
        for name in names:
            await site.start("oslo", name)
        async with traffic(site, rabbit_url) as sent:
            for kind in ("gracekit", "oslo"):
                for name in names:
                    await asyncio.sleep(WORK_S)
                    in_flight.append(len(sent.sent) - len(site.effects("done")))
                    await site.stop(name)
                    await site.start(kind, name)
            await asyncio.sleep(WORK_S)
        await until_quiet(site, sent)
        for name in names:
            await site.stop(name)
        check(site, sent, in_flight)
    finally:
        await site.close()


async def until_quiet(site: Site, sent: Traffic) -> None:
    """Until all have been done, or nothing more is for a while."""
    done, since = -1, time.monotonic()
    while len(site.effects("done")) < len(sent.sent) and time.monotonic() < since + 4 * WORK_S + 5:
        if len(site.effects("done")) != done:
            done, since = len(site.effects("done")), time.monotonic()
        await asyncio.sleep(0.2)


def check(site: Site, sent: Traffic, in_flight: list[int]) -> None:
    started, done = site.effects("start"), site.effects("done")
    dropped = [key for key in sent.sent if key not in started]
    reached_us = [key for key, kinds in started.items() if "gracekit" in kinds]
    states = Counter(site.rows())
    stops = [worker for worker in site.stopped if worker.kind == "oslo"]
    print(  # noqa: T201 - for `pytest -s`
        f"\n{len(sent.sent)} requests, half of them casts, {in_flight} in flight when a worker was "
        f"asked to stop; {len(reached_us)} ran on gracekit: {dict(states)}; calls that failed: "
        f"{len(sent.failed)}; dropped by {len(stops)} stops of oslo: {len(dropped)}: {dropped}"
    )

    assert states == {("succeeded", ""): len(reached_us)}
    assert {key: kinds for key, kinds in started.items() if len(kinds) > 1} == {}
    assert set(started) == set(done)
    assert set(sent.failed) <= set(dropped), sent.failed
    for key in dropped:  # by nobody but an oslo worker that was stopping
        assert any(
            worker.asked_at - SLACK_S <= sent.sent[key] <= worker.ended_at for worker in stops
        ), key


async def test_a_start_beside_the_other_kind_says_what_to_set(tmp_path: Path, rabbit_url: str):
    """Without that setting a gracekit worker beside an oslo one ends with 78; with it it starts,
    also again, and also beside a gracekit worker with another store.
    """
    site = Site(tmp_path, rabbit_url)
    try:
        await site.start("oslo", "node-1")
        alone = await site.spawn("gracekit", "node-2", GRACEKIT_ACCEPT_UNSHARED_STORE="false")
        assert await alone.end() == 78
        assert "set GRACEKIT_ACCEPT_UNSHARED_STORE=true" in "".join(alone.said)
        for name in ("node-2", "node-3"):
            await site.start("gracekit", name)
        await site.stop("node-2")
        await site.start("gracekit", "node-2")
    finally:
        await site.close()
