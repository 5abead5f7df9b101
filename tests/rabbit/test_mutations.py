"""A broker that breaks the protocol, or a line that changes a bit: one frame at a time.

The frames go through a proxy to a service that lives through all of it. What is sent is confirmed
to its sender on a line of its own, so the broker has each of them.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gracekit.rpc.client import RpcClient
from tests.process import served
from tests.process.helpers import ServiceProcess, until
from tests.rabbit.broker import Broker
from tests.rabbit.mutations import Frame, Mutator
from tests.rabbit.proxy import Proxy
from tests.rabbit.site import RabbitSite
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(300, 3600))]

PARTS = scale(1, 5)
MUTATIONS = scale(30, 200)  # for each part
SEED = "frames"
CASTS = 4
BOUND_S = 60.0  # of one mutation; a connection that brings nothing is cut after nine
HEARTBEAT_S = 2
ALTERED_S = 1.0  # where one may never be done; it is asked for again then
BIG = 140_000  # bytes: more than one frame
MOST_MEMORY = 200 << 20


class Line:
    """The proxy's hand: one mutator at a time, and nothing between."""

    def __init__(self) -> None:
        self.mutator: Mutator | None = None

    def change(self, connection: object, frame: Frame) -> bytes:
        mutator = self.mutator
        return frame.data if mutator is None else mutator.change(connection, frame)


@pytest.fixture
def proxy(shared_broker: Broker) -> Iterator[Proxy]:
    with Proxy(shared_broker.port) as made:
        yield made


@pytest.fixture
def site(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, proxy: Proxy
) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost, port=proxy.port)
    made.url += f"?heartbeat={HEARTBEAT_S}s"
    yield made
    made.close()


@pytest.fixture
async def client(site: RabbitSite) -> AsyncIterator[RpcClient]:
    async with served.svc.client(site.broker.url_of(site.vhost)) as made:
        yield made


@pytest.mark.parametrize("part", range(PARTS))
async def test_no_single_frame_costs_a_confirmed_cast(
    site: RabbitSite, proxy: Proxy, client: RpcClient, part: int
) -> None:
    """Whichever frame of the broker is changed, dropped, doubled, swapped or cut: each confirmed
    cast is done once, or, if its own words were changed, kept as a dead letter or refused on
    record; and memory stays bounded.
    """
    line = Line()
    proxy.change_frames(line.change)
    service = await site.start().serving()
    fuzz = Fuzz(site, proxy, client, line, service)

    for number in range(part * MUTATIONS, (part + 1) * MUTATIONS):
        await fuzz.mutate(number)
    line.mutator = None
    await until(lambda: not site.transient(), "the end of all tasks")
    await until(lambda: held(site) == 0, "the queue empty")
    print(fuzz.report())  # noqa: T201 - for `pytest -s`

    assert not fuzz.faults, "\n".join(fuzz.faults)
    assert site.broker.queues(site.vhost)["shop_dead"].ready == fuzz.found["kept as a dead letter"]
    started = Counter(effect.key for effect in site.seen("start"))
    assert max(started.values()) == 1
    assert fuzz.memory() < MOST_MEMORY
    assert await service.stop() == 0, service.log[-3000:]


def held(site: RabbitSite) -> int:
    queue = site.broker.queues(site.vhost)["shop"]
    return queue.ready + queue.unacked


class Fuzz:
    """One service, and one mutation after the other.

    Attributes:
        found: How many mutations ended how.
        faults: Those that must not end so.
    """

    def __init__(
        self,
        site: RabbitSite,
        proxy: Proxy,
        client: RpcClient,
        line: Line,
        service: ServiceProcess,
    ) -> None:
        self.found: Counter[str] = Counter()
        self.faults: list[str] = []
        self._site = site
        self._proxy = proxy
        self._client = client
        self._line = line
        self._service = service
        self._kinds: Counter[str] = Counter()
        self._ids: set[str] = set()
        self._refused = 0  # on record before this mutation

    async def mutate(self, number: int) -> None:
        """Change one frame while some casts pass, and see what becomes of these."""
        seed = f"{SEED}-{number}"
        self._refused = self._refusals()
        self._line.mutator = mutator = Mutator(seed)
        if mutator.target == "answer":
            self._proxy.cut()  # upon which a client asks the broker for this and that
        ids: list[str] = []
        while not (mutator.done and ids):
            ids += await self._cast(seed, len(ids))
            await self._settle(mutator, ids)
        self._line.mutator = None
        missing = self._missing(ids)
        outcome = await self._judge(mutator, missing) if missing else "done"
        self.found[outcome] += 1
        self._kinds[f"{mutator.done}: {outcome}"] += 1
        if outcome in {"lost", "late"}:
            told = f"{seed}: {mutator.done}: {outcome}: {missing}"
            self.faults.append(f"{told}\n{self._service.log[-5000:]}")

    async def _cast(self, seed: str, before: int) -> list[str]:
        dice = random.Random(f"{seed}-{before}")
        ids = [f"{seed}-{n}" for n in range(before, before + CASTS)]
        self._ids |= {*ids}
        for request_id in ids:
            context = {"blob": "x" * BIG} if dice.random() < 0.25 else {}
            view = self._client.prepare(request_id=request_id, context=context)
            method = dice.choice(["slow", "probed", "retried"])
            if method == "retried":
                await view.cast(method, key=request_id, s=0, vm=f"vm-{dice.randrange(3)}")
            else:
                await view.cast(method, key=request_id, s=0)
        return ids

    async def _settle(self, mutator: Mutator, ids: list[str]) -> None:
        """Wait until all are done, as far as they can be."""
        most_s = ALTERED_S if mutator.alters else BOUND_S
        with contextlib.suppress(AssertionError):
            await until(lambda: not self._missing(ids), "the casts", most_s)

    def _missing(self, ids: list[str]) -> list[str]:
        marks = ", ".join("?" * len(ids))
        sql = f"SELECT request_id FROM task WHERE state = 'succeeded' AND request_id IN ({marks})"
        done = {row["request_id"] for row in self._site.rows(sql, *ids)}
        return [request_id for request_id in ids if request_id not in done]

    async def _judge(self, mutator: Mutator, missing: list[str]) -> str:
        if mutator.alters:
            with contextlib.suppress(AssertionError):
                await until(lambda: len(self._missing(missing)) <= 1, "all others", BOUND_S)
                what = "what became of it"
                return await until(lambda: self._altered(self._missing(missing)), what, BOUND_S)
        self._proxy.cut()
        try:
            await until(lambda: not self._missing(missing), "the casts, late", BOUND_S)
        except AssertionError:
            return "lost"
        return "late"

    def _altered(self, missing: list[str]) -> str:
        """What became of the one request whose words were changed."""
        if not missing:
            return "done"
        if held(self._site) != 0:
            return ""  # a refusal is on record before its dead letter is sent
        queues = self._site.broker.queues(self._site.vhost)
        if queues["shop_dead"].ready > self.found["kept as a dead letter"]:
            return "kept as a dead letter"
        if self._refusals() > self._refused:
            return "refused or failed, on record"  # an argument of another name, an id of another
        done = {
            row["request_id"]
            for row in self._site.rows("SELECT request_id FROM task WHERE state = 'succeeded'")
        }
        others = len(done - self._ids)
        return "done under another id" if others > self.found["done under another id"] else ""

    def _refusals(self) -> int:
        """A request under the id of another is counted and has no row."""
        (row,) = self._site.rows("SELECT sum(n) AS n FROM tally WHERE what = 'rejected'")
        return int(row["n"] or 0) + self._count("state = 'failed'")

    def _count(self, where: str) -> int:
        (row,) = self._site.rows(f"SELECT count(*) AS n FROM task WHERE {where}")
        return int(row["n"])

    def memory(self) -> int:
        """Bytes that the service has had at its most."""
        status = Path(f"/proc/{self._service.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) << 10

    def report(self) -> str:
        kinds = "\n".join(f"{n:>5} {kind}" for kind, n in sorted(self._kinds.items()))
        return f"\n{kinds}\n{dict(self.found)}; {self.memory() >> 20} MiB at most"
