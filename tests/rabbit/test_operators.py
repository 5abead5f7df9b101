"""An operator at a service whose requests come through a broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit import UnsupportedVersionError
from gracekit.cli.options import who
from tests.process import served
from tests.process.helpers import ServiceProcess
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite, gracekit

pytestmark = pytest.mark.process


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    yield made
    made.close()


def incidents(site: RabbitSite, what: str) -> list[str]:
    """What is on record of that kind."""
    rows = site.rows("SELECT detail FROM incident WHERE what = ?", what)
    return [row["detail"] for row in rows]


@pytest.fixture
async def service(site: RabbitSite) -> ServiceProcess:
    return await site.start().serving()


async def test_the_command_line_sees_and_asks_a_service_on_a_broker(site, service) -> None:
    """The store tells what is on record; a call goes by the broker; no output has the password."""
    asked = gracekit(site, "call", "shop", "ping", "--ops")
    cast = gracekit(site, "cast", "shop", "slow", "key=k", "s=0")
    await site.in_state(cast.stdout.strip(), "succeeded")
    status, tasks = gracekit(site, "status"), gracekit(site, "tasks")

    assert (asked.returncode, asked.stdout.strip()) == (0, str(service.pid)), asked.stderr
    assert status.returncode == 0
    assert "node-a-0" in status.stdout
    assert "serving" in status.stdout
    assert (tasks.returncode, tasks.stderr) == (0, "")
    everything = asked.stdout + asked.stderr + cast.stderr + status.stdout + status.stderr
    assert site.broker.password not in everything
    assert site.broker.password.encode() not in site.store.read_bytes()


async def test_every_verb_works_by_the_door_of_a_service_on_a_broker(site, service) -> None:
    """No verb goes through the broker: the door is in the store's directory."""
    cast = gracekit(site, "cast", "shop", "slow", "key=k", "s=60")
    task_id = cast.stdout.strip()
    await site.in_state(task_id, "running")
    status = gracekit(site, "status", "--json")
    dump = gracekit(site, "dump")
    quiet = gracekit(site, "quiet", "--reason", "a look")
    resumed = gracekit(site, "resume")
    drained = gracekit(site, "drain", "--timeout", "20s", "--no-wait")
    extended = gracekit(site, "extend", "--by", "1m", "--reason", "a backup")
    cancelled = gracekit(site, "tasks", "cancel", task_id, "--reason", "not needed", "--yes")

    (instance,) = json.loads(status.stdout)["runs"]
    assert instance["status"]["running"] == 1, instance
    assert f"task {task_id} method=slow" in dump.stdout, dump.stderr
    assert (quiet.returncode, quiet.stdout) == (0, "shop@node-a-0: quiet\n"), quiet.stderr
    assert (resumed.returncode, resumed.stdout) == (0, "shop@node-a-0: serving\n"), resumed.stderr
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert extended.stdout.startswith("shop@node-a-0: draining, 1m1"), extended.stderr
    assert cancelled.returncode == 0, cancelled.stderr
    assert await service.exit_code() == 0
    assert incidents(site, "operator_quiet") == [f"{who()}: a look"]
    assert incidents(site, "operator_drain") == [f"{who()}: no reason given"]
    assert incidents(site, "operator_extend") == [f"{who()}: a backup (1m more)"]


async def test_no_control_verb_comes_by_the_broker(site, service) -> None:
    """Whoever may publish could stop the service: verbs come by the door."""
    async with served.svc.client(site.url) as client:
        view = client.prepare(ops=True, host="node-a-0", namespace="gracekit", timeout=20)
        with pytest.raises(UnsupportedVersionError, match="'gracekit' is not served"):
            await view.call("drain", run_id=service.run["run_id"])
        pong = await client.call(served.ping)

    assert pong == service.pid
    assert service.run["stop_at"] is None


async def test_queues_of_a_host_that_is_gone_are_pruned(site, service, shared_broker) -> None:
    """None while it lives; then its three, also when only `--host` names it."""
    mine = {"shop.node-a", "shop-ops.node-a", "shop-ops.node-a-0"}
    living = gracekit(site, "prune", "--gone-for", "0")
    await service.stop()
    before = shared_broker.queues(site.vhost).keys()
    unknown = gracekit(site, "prune", "--host", "node-z")
    done = gracekit(site, "prune", "--gone-for", "0")
    after = shared_broker.queues(site.vhost).keys()

    assert (living.stdout, unknown.stdout) == ("nothing to remove\n",) * 2
    assert [line.split()[-1] for line in done.stdout.splitlines()] == sorted(mine)
    assert before - after == mine


async def test_prune_says_which_queue_it_keeps_and_why(site, service) -> None:
    """A request that nobody will read is named, instead of passing over its queue."""
    await service.stop()
    gracekit(site, "cast", "shop", "slow", "key=k", "s=0", "--host", "node-a")
    tried = gracekit(site, "prune", "--gone-for", "0", "--dry-run", "--json")
    done = gracekit(site, "prune", "--gone-for", "0")

    kept = "shop.node-a"
    assert json.loads(tried.stdout)["kept"] == [{"queue": kept, "messages": 1}]
    assert done.stdout.splitlines()[-1] == f"kept queue {kept}: 1 message waits"
    assert done.returncode == 0


async def test_quorum_queues_are_not_pruned(site) -> None:
    """RabbitMQ removes them only by its own command, which the message names."""
    site.url += "?profile=quorum"
    service = await site.start().serving()
    await service.stop()

    done = gracekit(site, "prune", "--gone-for", "0")

    assert done.stdout == ""
    assert f'rabbitmqctl delete_queue -p {site.vhost} "$q"; done' in done.stderr
    assert done.returncode == 78
