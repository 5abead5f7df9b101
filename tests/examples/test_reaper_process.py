"""The scheduler and the resolver of examples/reaper as processes, on SQLite and on RabbitMQ.

The cloud's own log and the store are the judges.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.reaper import api
from examples.reaper.cloud import Cloud, Machine
from examples.reaper.scheduler import build, delete, svc
from gracekit import NoCapacity, Parked
from gracekit.process import Point
from gracekit.rpc.client import ClientView
from tests.loops import without_settings
from tests.process.helpers import ROOT, WAIT_S, ServiceProcess, Site, until
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite

pytestmark = pytest.mark.process

README = Path(api.__file__).with_name("README.md")
ROOM_MB = 8192
SIDES = ("before", "after")


class Reaper(Site):
    """A full host, and the processes around it.

    Attributes:
        cloud: Of preemptible machines p-0 to p-5 of 1024 MiB each, and n-0 of 2048 MiB.
    """

    def fill(self) -> None:
        self.cloud = Cloud(self.root / "cloud.db", ROOM_MB)
        self.cloud.create()
        for n in range(6):
            self.cloud.claim(Machine(vm=f"p-{n}", memory_mb=1024, preemptible=True))
        self.cloud.claim(Machine(vm="n-0", memory_mb=2048, preemptible=False))

    async def scheduler(self, **settings: object) -> ServiceProcess:
        """The next life of the scheduler, which serves."""
        run = ("-m", "gracekit", "run", "examples.reaper.scheduler:svc")
        return await self._start_module(*run, **settings).serving()

    async def resolver(self, *options: str) -> ServiceProcess:
        """A resolver that listens."""
        life = self._start_module("-m", "examples.reaper.resolver", *options)
        await life.wait_log("listening")
        return life

    def _start_module(self, *arguments: str, **settings: object) -> ServiceProcess:
        variables = (f"REAPER_CLOUD={self.cloud.path}", f"REAPER_ROOM_MB={ROOM_MB}")
        command = ["env", *variables, sys.executable, *arguments]
        return self._start(command, {"log_format": "text"} | settings)

    @property
    def done(self) -> list[tuple[str, str]]:
        """What was built and deleted since the host was full."""
        return self.cloud.log()[7:]

    def states(self) -> dict[str, tuple[str, str]]:
        """State and reason of each build on record."""
        rows = self.rows("SELECT resource_id, state, reason FROM task WHERE method = 'build'")
        return {row["resource_id"]: (row["state"], row["reason"]) for row in rows}

    async def reaches(self, vm: str, state: str, reason: str | None = None) -> None:
        await until(
            lambda: self.states().get(vm) == (state, reason),
            lambda: f"{vm} {state}: {self.states()}",
        )


class RabbitReaper(Reaper, RabbitSite):
    """The same, with requests and notifications through a broker."""


@pytest.fixture(params=["sqlite", "rabbitmq"])
def reaper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reaper]:
    """Without any process yet; none is left behind."""
    site: Reaper
    if request.param == "rabbitmq":
        broker: Broker = request.getfixturevalue("shared_broker")
        site = RabbitReaper(tmp_path, broker, request.getfixturevalue("rabbit_vhost"))
    else:
        site = Reaper(tmp_path)
    site.fill()
    yield site
    site.close()


async def parks(user: ClientView, vm: str, memory_mb: int = 1024) -> None:
    with pytest.raises(Parked):
        await user.call(build, vm=vm, memory_mb=memory_mb)


async def test_a_notification_wakes_the_resolver(reaper: Reaper):
    """It looks every hour only, and a request that is parked has its room soon."""
    await reaper.scheduler()
    resolver = await reaper.resolver("--every", "3600")
    async with svc.client(reaper.url) as client:
        user = client.prepare(pending=True)
        for n in (1, 2, 3):
            await parks(user, f"n-{n}")
            await reaper.reaches(f"n-{n}", "succeeded")

    assert reaper.done == [
        (what, f"{kind}-{n + (kind == 'n')}")
        for n in range(3)
        for what, kind in (("deleted", "p"), ("built", "n"))
    ]
    assert "nothing could be done" not in resolver.log


async def test_a_resolver_that_was_killed_after_it_made_room_is_replaced(reaper: Reaper):
    """The task waits, also while the scheduler is killed and started again; a second resolver finds
    it by `list_pending`, and deletes nothing more.
    """
    scheduler = await reaper.scheduler()
    first = await reaper.resolver("--pause", "3600")
    async with svc.client(reaper.url) as client:
        await parks(client.prepare(pending=True), "n-1")
    await first.wait_log("freed 1024 MiB of p-0")
    first.kill()
    scheduler.kill()
    assert reaper.states() == {"n-1": ("pending", "no_capacity")}

    scheduler = await reaper.scheduler()
    await reaper.resolver("--every", "3600")
    await reaper.reaches("n-1", "succeeded")

    assert reaper.done == [("deleted", "p-0"), ("built", "n-1")]
    assert await scheduler.stop() == 0, scheduler.log[-3000:]


async def test_a_scheduler_that_is_killed_at_a_step_builds_each_machine_once(reaper: Reaper):
    """Before and after the commit that parks, each send of a notification, and the commit of a
    retry.
    """
    resolver = None
    steps = [(point, side) for point in (Point.PARK, Point.NOTIFY, Point.UNPARK) for side in SIDES]
    for n, (point, side) in enumerate(steps):
        killed = await reaper.scheduler(failpoint=f"{point.value}.{side}")
        resolver = resolver or await reaper.resolver("--every", "0.5")
        async with svc.client(reaper.url) as client:
            await client.cast(build, vm=f"n-{n + 1}", memory_mb=1024)
        assert await killed.exit_code() == -signal.SIGKILL
        life = await reaper.scheduler()
        await reaper.reaches(f"n-{n + 1}", "succeeded")
        assert await life.stop() == 0, life.log[-3000:]

    done = [(("deleted", f"p-{n}"), ("built", f"n-{n + 1}")) for n in range(len(steps))]
    assert reaper.done == [one for both in done for one in both]


async def test_without_a_resolver_the_deadline_ends_the_wait(reaper: Reaper):
    """While the scheduler runs, and also if it was away when the deadline passed."""
    life = await reaper.scheduler(pending_timeout="0.5s")
    async with svc.client(reaper.url) as client:
        with pytest.raises(NoCapacity):  # a client that does not know PENDING
            await client.call(build, vm="n-1", memory_mb=1024)
        await reaper.reaches("n-1", "errored", "expired")
        await parks(client.prepare(pending=True), "n-2")
    life.kill()
    await asyncio.sleep(0.6)

    await reaper.scheduler()
    await reaper.reaches("n-2", "errored", "expired")
    await until(lambda: len(reaper.cloud.failures()) == 2, "both hooks")
    assert reaper.done == []


async def test_what_its_user_deletes_waits_no_more(reaper: Reaper):
    """And no room is made for it by the resolver that comes later."""
    await reaper.scheduler()
    async with svc.client(reaper.url) as client:
        await parks(client.prepare(pending=True), "n-1")
        await client.call(delete, vm="n-1")
        assert reaper.states() == {"n-1": ("cancelled", "handler")}

        await reaper.resolver()
        await parks(client.prepare(pending=True), "n-2")
        await reaper.reaches("n-2", "succeeded")

    assert reaper.done == [("deleted", "p-0"), ("built", "n-2")]


# -- by hand ------------------------------------------------------------------------------


async def test_what_the_readme_says_can_be_typed(tmp_path: Path):
    """The commands of its section "By hand": a host that is full, a request that waits, a
    resolver.
    """
    section = README.read_text().partition("\n## By hand\n")[2].partition("\n## ")[0]
    assert "/tmp/reaper" in section
    section = section.replace("/tmp/reaper", str(tmp_path))
    typed = re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)
    exports, serve, fill, resolve, show = (
        block.replace("python -m", f"{sys.executable} -m").replace(
            "gracekit ", f"{sys.executable} -m gracekit "
        )
        for block in typed
    )
    env = without_settings()

    def start(block: str, name: str) -> subprocess.Popen[bytes]:
        command = ("bash", "-ec", f"{exports}exec {block.strip()}")
        with (tmp_path / name).open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    def run(block: str) -> str:
        command = ("bash", "-ec", exports + block)
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_S, check=True
        ).stdout

    def said(name: str) -> str:
        return (tmp_path / name).read_text()

    processes = [start(serve, "scheduler")]
    try:
        await until(lambda: "service.serving" in said("scheduler"), lambda: said("scheduler"))
        told = run(fill)
        processes.append(start(resolve, "resolver"))
        await until(lambda: "retried vm:n-2" in said("resolver"), lambda: said("resolver"))
        await until(lambda: "n-2 1024 MiB normal" in run(show), "n-2 is built")
    finally:
        for process in processes:
            process.terminate()
            process.wait(WAIT_S)

    assert "n-2 waits for room" in told
    assert "memory_mb=1024" in told  # of `gracekit pending`
    assert "freed 4096 MiB of p-1 for vm:n-2" in said("resolver")
