"""Live migrations between two hosts; either is stopped at each step.

The example of examples/nova, started as a reader starts it. A vm waits at the step that it is named
after, one host is stopped there, and started again; what became of the vm is told by files.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.nova.compute import ComputeManager
from examples.nova.hypervisor import Hypervisor
from gracekit import RpcClient
from tests.process.helpers import ServiceProcess, Site, until
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(180, 3600))]

PAGES = 3
LOST_PAGE = 1  # of a vm that cannot be migrated
AT_A_TIME = 3

LEAVING = ("begun", "prepared", "page-1", "copied", "paused", "handed-over", "started", "told")
COMING = ("asked", "held", "placed", "arriving", "arrived", "released")
FAILING = ("failed", "abandoned", "leaving", "left", "let-go")
STEPS = (*LEAVING, "cleared", *COMING, *FAILING)

UNPLACED = ("begun", "asked", "held")
"""Before there is a place for the vm: a destination that drains takes it no more."""
UNCOPIED = (*UNPLACED, "placed", "prepared", "page-1")
"""Before the last safe point: a source that drains leaves the vm to its next life."""


# -- two hosts --------------------------------------------------------------------------


class ComputeHost(Site):
    """One host's processes, and a store of its own."""

    def __init__(self, cloud: Cloud, name: str) -> None:
        super().__init__(cloud.files.parent / f"host-{name}")
        self.root.mkdir()
        self.url = cloud.queues.url
        self.name = name
        self.hypervisor = Hypervisor(cloud.files, name)
        hold = f"NOVA_HOLD={cloud.hold}"
        topic = "GRACEKIT_OPS_TOPIC=compute-alt"
        self._variables = (f"NOVA_CLOUD={cloud.files}", hold, topic, "NOVA_RESIZE_S=1")
        self._lives: list[ServiceProcess] = []

    def start(self, **settings: object) -> ServiceProcess:
        """Start its next life."""
        ours = {"host": self.name, "log_format": "text"}
        life = self._gracekit("run", "examples.nova.compute:svc", **(ours | settings))
        self._lives.append(life)
        return life

    def order(self, *arguments: str) -> ServiceProcess:
        """As an operator at this host."""
        return self._gracekit(*arguments)

    def _gracekit(self, *arguments: str, **settings: object) -> ServiceProcess:
        command = ("env", *self._variables, sys.executable, "-m", "gracekit", *arguments)
        return self._start([*command], settings)

    @property
    def life(self) -> ServiceProcess:
        """The present one, or the last."""
        return self._lives[-1]

    def steps(self, vm: str) -> list[str]:
        """What it did for a vm, in all its lives."""
        return [step for life in self._lives for step in self.steps_in(life, vm)]

    def steps_in(self, life: ServiceProcess, vm: str) -> list[str]:
        return re.findall(rf"^{self.name}: {vm} (\S+)$", life.log, re.MULTILINE)

    def pages(self, vm: str) -> list[int]:
        """Those that it has copied, in order."""
        return [int(step[5:]) for step in self.steps(vm) if step.startswith("page-")]

    def open_holds(self) -> list[dict[str, Any]]:
        return self.rows("SELECT * FROM hold WHERE ended_at IS NULL")


class Cloud:
    """Two hosts, and what both see."""

    def __init__(
        self, queues: Site, *, hold: str, host: Callable[[Cloud, str], ComputeHost] = ComputeHost
    ) -> None:
        self.queues = queues
        self.hold = hold
        self.files = queues.root / "cloud"
        self.halt = self.files / "halt"
        self.halt.mkdir(parents=True)
        self.src = host(self, "src")
        self.dst = host(self, "dst")
        self.hosts = (self.src, self.dst)

    # -- acting ----------------------------------------------------------------------

    async def start(self, **settings: object) -> None:
        for host in self.hosts:
            host.start(**settings)
        for host in self.hosts:
            await host.life.serving()

    def boot(self, vm: str, *, stop_at: str | None = None) -> None:
        self.src.hypervisor.boot(vm, PAGES)
        if vm in FAILING:
            (self.files / "src" / "memory" / vm / str(LOST_PAGE)).unlink()
        if stop_at is not None:
            (self.halt / f"{vm}.{stop_at}").touch()

    def go_on(self) -> None:
        for halt in self.halt.iterdir():
            halt.unlink()

    async def migrate(
        self, vm: str, *, source: str = "src", dest: str = "dst", request_id: str | None = None
    ) -> None:
        """Cast, as a conductor; the vm is the request's id by default."""
        async with RpcClient(self.queues.url, "compute", ops_topic="compute-alt") as client:
            view = client.prepare(host=source, request_id=request_id or vm)
            await view.cast(ComputeManager.live_migration, vm=vm, dest=dest)

    async def migrate_to(self, vm: str, step: str) -> None:
        """A new vm, on its way as far as that step."""
        self.boot(vm, stop_at=step)
        await self.migrate(vm)
        await self.at(vm, step)

    async def at(self, vm: str, step: str) -> None:
        def reached() -> bool:
            return any(step in host.steps(vm) for host in self.hosts)

        await until(reached, lambda: f"{vm} {step}:\n{self.told()}")

    async def settled(self) -> None:
        """Wait until nothing is under way on either host, nor between them."""

        def is_settled() -> bool:
            return not (self.under_way() or self.queues.queued())

        await until(is_settled, lambda: f"the end of\n{self.under_way()}\n{self.told()}", 60)

    async def end(self) -> None:
        """Nothing keeps a host that has nothing to do."""
        for host in self.hosts:
            assert await host.life.stop() == 0, host.life.log[-3000:]

    def close(self) -> None:
        for host in self.hosts:
            host.close()

    # -- looking ---------------------------------------------------------------------

    def under_way(self) -> list[dict[str, Any]]:
        return [row for host in self.hosts for row in host.transient() + host.open_holds()]

    def told(self) -> str:
        return "\n".join(host.life.log[-3000:] for host in self.hosts)


@contextlib.asynccontextmanager
async def on_broker(broker: Broker, directory: Path) -> AsyncIterator[Cloud]:
    """On a virtual host, and in a directory, of its own."""
    vhost = broker.fresh_vhost()
    root = directory / vhost
    root.mkdir()
    cloud = Cloud(RabbitSite(root, broker, vhost), hold="15m")
    try:
        yield cloud
    finally:
        cloud.close()
        broker.delete_vhost(vhost)


@contextlib.contextmanager
def on_file(directory: Path, *, hold: str = "15m") -> Iterator[Cloud]:
    """On queues in a file."""
    cloud = Cloud(Site(directory), hold=hold)
    try:
        yield cloud
    finally:
        cloud.close()


# -- the judgement ----------------------------------------------------------------------


class Moment(NamedTuple):
    at: int
    vm: str
    host: str
    state: str


def history(cloud: Cloud) -> list[Moment]:
    """All that happened to all vms, in order."""
    moments = [
        Moment(host=path.parent.name, **json.loads(line))
        for path in cloud.files.glob("*/domains.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(moments, key=lambda moment: moment.at)


def judge(cloud: Cloud) -> None:
    """Never two copies of a vm, one in the end, and nothing left over."""
    by_vm = sorted(history(cloud), key=lambda moment: moment.vm)  # stable: in order still
    for vm, moments in groupby(by_vm, key=lambda moment: moment.vm):
        check_one_copy(cloud, vm, moments)
        check_memory(cloud, vm)
    for host in cloud.hosts:
        assert not host.transient()
        assert not host.open_holds()
        assert not host.rows("SELECT * FROM lease WHERE owner IS NOT NULL")
    assert cloud.queues.queued() == 0


def check_one_copy(cloud: Cloud, vm: str, moments: Iterable[Moment]) -> None:
    states: dict[str, str] = {}
    for moment in moments:
        states[moment.host] = moment.state
        assert list(states.values()).count("running") <= 1, f"{vm} ran twice at {moment}"
    record = cloud.src.hypervisor.record(vm)
    assert record.dest is None, f"{vm} is on its way still"
    assert states.pop(record.host) == "running", vm
    assert set(states.values()) <= {"gone"}, vm


def check_memory(cloud: Cloud, vm: str) -> None:
    """All of it is where the vm is, and nothing elsewhere."""
    record = cloud.src.hypervisor.record(vm)
    (memory,) = cloud.files.glob(f"*/memory/{vm}")
    assert memory.parent.parent.name == record.host
    wanted = set(range(PAGES)) - ({LOST_PAGE} if vm in FAILING else set())
    pages = {int(page.name): page.read_text() for page in memory.iterdir()}
    assert pages == {page: f"page {page} of {vm}" for page in wanted}


def check_outcome(cloud: Cloud, vm: str, *states: str) -> None:
    """The migration has ended as one of these, and the vm is where that says."""
    state = cloud.src.state(vm)
    assert state in states, cloud.src.task(vm)
    assert cloud.src.hypervisor.owns(vm) == (state != "succeeded")


# -- the matrix -------------------------------------------------------------------------

Stop = Callable[[Cloud, ComputeHost], Awaitable[int]]


async def drained(cloud: Cloud, host: ComputeHost) -> int:
    """A drain with time enough; the vms move on meanwhile."""
    host.life.terminate()
    await host.life.wait_log("drain.started")
    cloud.go_on()
    return await host.life.exit_code(60)


async def cut_short(cloud: Cloud, host: ComputeHost) -> int:
    """A drain that ends before anything else does."""
    host.life.terminate()
    code = await host.life.exit_code()
    cloud.go_on()
    return code


async def killed(cloud: Cloud, host: ComputeHost) -> int:
    host.life.kill()
    cloud.go_on()
    return await host.life.exit_code()


STOPS = {
    drained: {"drain_timeout": "60s"},
    cut_short: {"drain_timeout": "0.3s", "handover_grace": "0.3s"},
    killed: {},
}


async def check_cell(cloud: Cloud, side: str, how: Stop, steps: Sequence[str]) -> None:
    """Stop *side* while a vm stands at each of *steps*, start it again, and judge."""
    await cloud.start(**STOPS[how])
    for vm in steps:
        cloud.boot(vm, stop_at=vm)
        await cloud.migrate(vm)
    for vm in steps:
        await cloud.at(vm, vm)

    host = cloud.src if side == "src" else cloud.dst
    first = host.life
    code = await how(cloud, host)
    await host.start().serving()
    await cloud.settled()
    await cloud.end()

    judge(cloud)
    refused = {*UNPLACED} if host is cloud.dst and how is drained else set()
    for vm in steps:
        may_fail = ("failed",) * (vm in FAILING or vm in refused)
        check_outcome(cloud, vm, *may_fail, *("succeeded",) * (vm not in FAILING))
    if host is cloud.src and how is not drained and "paused" in steps:
        seen = [moment.state for moment in history(cloud) if moment[1:3] == ("paused", "src")]
        assert seen == ["running", "paused", "running", "paused", "gone"], "it runs meanwhile"
    if how is drained:
        left = [vm for vm in steps if vm in UNCOPIED] if host is cloud.src else []
        assert code == (75 if left else 0), first.log[-3000:]
        check_drain(cloud, host, [vm for vm in steps if vm not in refused])


def check_drain(cloud: Cloud, host: ComputeHost, vms: Sequence[str]) -> None:
    """A source's next life begins no vm anew; a destination's has nothing to do with these."""
    for vm in vms:
        if host is cloud.dst:
            assert not host.steps_in(host.life, vm), f"{vm} was left to the next life"
        elif vm not in FAILING:
            assert host.pages(vm) == [*range(PAGES)], f"{vm}: none twice, none left out"


@pytest.mark.parametrize("how", STOPS, ids=lambda how: how.__name__)
async def test_a_vm_is_moved_once_or_not_at_all_whichever_host_is_stopped_at_whichever_step(
    shared_broker: Broker, tmp_path: Path, how: Stop
) -> None:
    """Twenty migrations, each at another step, when one host is drained, cut short or killed, and
    started again: no vm ever runs twice, each is in one place in the end, and nothing is left.
    """
    alone: list[Sequence[str]] = [[step] for step in STEPS]
    places = asyncio.Semaphore(AT_A_TIME)

    async def play(side: str, steps: Sequence[str]) -> None:
        async with places, on_broker(shared_broker, tmp_path) as cloud:
            await check_cell(cloud, side, how, steps)

    async with asyncio.TaskGroup() as group:
        for steps in [STEPS, *scale([], alone)]:
            for side in ("src", "dst"):
                group.create_task(play(side, steps))


@pytest.mark.parametrize("seed", range(scale(1, 20)))
async def test_vms_that_go_to_and_fro_while_hosts_come_and_go_are_never_doubled_nor_lost(
    shared_broker: Broker, tmp_path: Path, seed: int
) -> None:
    """Hosts are drained and killed at any moment; when that ends, so does every migration."""
    rng = random.Random(seed)
    vms = [f"vm-{n}" for n in range(6)]
    over = asyncio.Event()

    async def send(cloud: Cloud) -> None:
        for number in itertools.count():
            vm = rng.choice(vms)
            owner = cloud.src.hypervisor.record(vm).host
            source, dest = ("src", "dst") if owner == "src" else ("dst", "src")
            await cloud.migrate(vm, source=source, dest=dest, request_id=str(number))
            await asyncio.sleep(rng.uniform(0.05, 0.4))
            if over.is_set():
                return

    async def disturb(cloud: Cloud) -> None:
        for _ in range(scale(3, 25)):
            await asyncio.sleep(rng.uniform(0.1, 2.0))
            host = rng.choice(cloud.hosts)
            if rng.random() < 0.5:
                host.life.kill()
            else:
                assert await host.life.stop() in {0, 75}, host.life.log[-3000:]
            await host.start(drain_timeout=f"{rng.uniform(0.1, 3.0):.1f}s").serving()

    async with on_broker(shared_broker, tmp_path) as cloud:
        for vm in vms:
            cloud.boot(vm)
        await cloud.start(drain_timeout="1s")
        sending = asyncio.create_task(send(cloud))
        await disturb(cloud)
        over.set()
        await sending
        await cloud.settled()
        await cloud.end()

        judge(cloud)
        runs = [moment for moment in history(cloud) if moment.state == "running"]
        assert len(runs) > 2 * len(vms), "it was worth it"


# -- one thing at a time ----------------------------------------------------------------


async def test_a_destination_stays_for_a_vm_also_if_an_earlier_life_has_promised_it(
    tmp_path: Path,
) -> None:
    """The hold that a killed destination left keeps its next life in a drain, until the vm is
    there; a vm that is only about to come is refused.
    """
    with on_file(tmp_path) as cloud:
        await cloud.start(progress_every="0.1s", drain_timeout="60s")
        await cloud.migrate_to("vm-1", "page-1")
        cloud.dst.life.kill()
        again = await cloud.dst.start(progress_every="0.1s", drain_timeout="60s").serving()
        run_id = again.run["run_id"]
        await until(lambda: cloud.dst.open_holds()[0]["owner"] == run_id, "its hold")

        again.terminate()
        await again.wait_log("open_holds=1", times=2)
        cloud.boot("vm-2")
        await cloud.migrate("vm-2")
        await cloud.src.in_state("vm-2", "failed")
        cloud.go_on()
        code = await again.exit_code()

        assert code == 0
        assert "Draining" in cloud.src.task("vm-2")["failure"]
        await cloud.dst.start().serving()
        await cloud.settled()
        await cloud.end()
        judge(cloud)
        check_outcome(cloud, "vm-1", "succeeded")
        check_outcome(cloud, "vm-2", "failed")


@pytest.mark.parametrize("lost", [False, True], ids=["pages kept", "pages lost"])
async def test_a_source_that_comes_back_after_the_hold_has_lapsed_goes_on(
    tmp_path: Path, *, lost: bool
) -> None:
    """A destination does not wait for ever. What it still has is not copied again; if it has
    nothing, the vm is copied from the first page on.
    """
    with on_file(tmp_path, hold="1s") as cloud:
        await cloud.start(drain_timeout="60s")
        await cloud.migrate_to("vm-1", "page-1")
        assert await drained(cloud, cloud.src) == 75
        assert await cloud.dst.life.stop() == 0
        (hold,) = cloud.dst.rows("SELECT * FROM hold")
        assert hold["lapses_at"] < cloud.dst.life.run["ended_at"]
        if lost:
            shutil.rmtree(cloud.files / "dst" / "memory" / "vm-1")

        await cloud.start()
        await cloud.settled()
        await cloud.end()

        judge(cloud)
        check_outcome(cloud, "vm-1", "succeeded")
        assert cloud.src.pages("vm-1") == ([0, 1, 0, 1, 2] if lost else [0, 1, 2])


async def test_a_migration_that_an_operator_cancels_is_rolled_back(tmp_path: Path) -> None:
    """Cancelled before the vm was handed over it stays, and a destination that is slow to make a
    place makes none; cancelled afterwards it goes to the end all the same.
    """
    steps = {"vm-1": "page-1", "vm-2": "paused", "vm-3": "asked", "vm-4": "handed-over"}
    with on_file(tmp_path) as cloud:
        await cloud.start()
        for vm, step in steps.items():
            await cloud.migrate_to(vm, step)
        *orders, late = [cloud.src.order("tasks", "cancel", vm, "--reason", "no") for vm in steps]
        for order in orders:
            assert await order.exit_code() == 0, order.log
        await cloud.at("vm-3", "let-go")
        noted = "SELECT * FROM incident WHERE what = 'operator_cancel' AND request_id = 'vm-4'"
        await until(lambda: cloud.src.rows(noted), "the last order")
        cloud.go_on()
        await late.exit_code()
        await cloud.settled()
        await cloud.end()

        judge(cloud)
        assert [cloud.src.state(vm) for vm in steps] == ["cancelled"] * 3 + ["succeeded"]
        assert [cloud.src.hypervisor.owns(vm) for vm in steps] == [True] * 3 + [False]


async def test_a_migration_that_is_given_up_leaves_nothing_half_done(tmp_path: Path) -> None:
    """Its errored hook undoes what can be undone, and ends what cannot."""
    vms = ("vm-1", "vm-2", "vm-3")
    with on_file(tmp_path) as cloud:
        await cloud.start()
        for vm, step in zip(vms, ("page-1", "paused", "handed-over"), strict=True):
            await cloud.migrate_to(vm, step)
        await killed(cloud, cloud.src)
        for vm in vms:
            order = cloud.src.order("tasks", "fail", vm, "--reason", "the host is broken")
            assert await order.exit_code() == 0, order.log
        await cloud.src.start().serving()
        await cloud.settled()
        await cloud.end()

        judge(cloud)
        assert [cloud.src.state(vm) for vm in vms] == ["errored"] * 3
        assert [cloud.src.hypervisor.owns(vm) for vm in vms] == [True, True, False]


async def test_a_resize_on_the_ops_topic_ends_in_a_drain(tmp_path: Path) -> None:
    """It takes longer than the time that ops requests have to come; it ends, and its caller
    knows.
    """
    with on_file(tmp_path) as cloud:
        await cloud.start(ops_quiet_timeout="100ms")
        cloud.boot("vm-1", stop_at="resizing")
        async with RpcClient(cloud.queues.url, "compute", ops_topic="compute-alt") as client:
            view = client.prepare(host="src", ops=True, timeout=60)
            growing = asyncio.create_task(view.call("resize_instance", vm="vm-1", pages=PAGES + 2))
            await cloud.at("vm-1", "resizing")
            cloud.src.life.terminate()
            await cloud.src.life.wait_log("intake.closed")
            cloud.go_on()
            assert await growing == PAGES + 2
        assert await cloud.src.life.exit_code() == 0
        assert cloud.src.hypervisor.record("vm-1").pages == PAGES + 2
        assert await cloud.dst.life.stop() == 0
