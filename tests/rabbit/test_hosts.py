"""Two hosts with a store each share the new requests of one topic on RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit import RpcClient
from tests.process.helpers import ServiceProcess, until
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

REQUESTS = 24
AT_A_TIME = 2
KINDS = pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("waits", {"max_running": AT_A_TIME}),
        ("blocks", {"max_running": AT_A_TIME}),
        ("blocks", {"threads": AT_A_TIME}),
    ],
    ids=["async", "plain", "few threads"],
)


class Hosts:
    """Two hosts with a store each, and the requests that may end."""

    def __init__(self, root: Path, broker: Broker, vhost: str) -> None:
        self.go = root / "go"
        self.go.mkdir()
        self.sites = [RabbitSite(root / name, broker, vhost) for name in ("one", "two")]
        for site in self.sites:
            site.root.mkdir()

    async def start(self, number: int, method: str, **settings: object) -> ServiceProcess:
        site = self.sites[number]
        ours = {"accept_unshared_store": "true", "test_go": self.go, "drain_timeout": "60s"}
        return await site.start_program(
            "equal", method, host=f"host-{number}", **(ours | settings)
        ).serving()

    async def send(self, method: str) -> None:
        async with RpcClient(self.sites[0].url, "equal") as client:
            for number in range(REQUESTS):
                await client.cast(method, key=f"key-{number}")

    def held(self, number: int) -> set[str]:
        """The requests that have begun there, and may not end yet."""
        begun = {effect.key for effect in self.sites[number].seen("start")}
        return {key for key in begun if not (self.go / key).exists()}

    async def busy(self, number: int) -> set[str]:
        """Wait until as many are held there as may run."""
        await until(lambda: len(self.held(number)) == AT_A_TIME, f"host-{number} busy")
        return self.held(number)

    def end(self, keys: set[str]) -> None:
        for key in keys:
            (self.go / key).touch()

    def end_all(self) -> None:
        self.end({f"key-{number}" for number in range(REQUESTS)})

    def done(self) -> list[int]:
        return [len(site.seen("done")) for site in self.sites]


@pytest.fixture
def hosts(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[Hosts]:
    made = Hosts(tmp_path, shared_broker, rabbit_vhost)
    yield made
    for site in made.sites:
        site.close()


@KINDS
async def test_no_host_accepts_what_another_one_could_run(
    hosts: Hosts, method: str, settings: dict[str, object]
) -> None:
    """Of 24 equal requests that wait when the second host starts, each of the two runs 10 to 14.

    Both are full in each of five rounds, whatever the machine does meanwhile.
    """
    first = await hosts.start(0, method, **settings)
    await hosts.send(method)
    await hosts.busy(0)
    second = await hosts.start(1, method, **settings)
    for _ in range(5):
        hosts.end(await hosts.busy(0) | await hosts.busy(1))
    hosts.end_all()
    await until(lambda: sum(hosts.done()) == REQUESTS, lambda: f"all ends: {hosts.done()}")

    assert all(10 <= number <= 14 for number in hosts.done()), hosts.done()
    assert [await first.stop(), await second.stop()] == [0, 0]


@KINDS
async def test_a_host_that_drains_leaves_to_the_other_what_it_has_not_begun(
    hosts: Hosts, method: str, settings: dict[str, object]
) -> None:
    """Its drain ends with 0 when its two running requests have ended, and nothing waits in its
    store.
    """
    first = await hosts.start(0, method, **settings)
    await hosts.send(method)
    mine = await hosts.busy(0)
    await hosts.start(1, method, **settings)
    first.terminate()
    await first.wait_log("intake.closed")
    hosts.end(mine)
    code = await first.exit_code()
    hosts.end_all()
    await until(lambda: sum(hosts.done()) == REQUESTS, lambda: f"all ends: {hosts.done()}")

    assert (code, hosts.done()) == (0, [AT_A_TIME, REQUESTS - AT_A_TIME])
    assert not hosts.sites[0].transient()
