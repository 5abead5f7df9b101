"""Parked tasks with oslo.messaging's own client and its own listener, and a service that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracekit import NoCapacity, Parked, RpcClient
from tests.oslo.kit import OsloError, Peer, oslo_client, oslo_peer
from tests.process import roomy
from tests.process.helpers import ServiceProcess, until
from tests.process.roomy import RECORDS, make_room
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

TOPIC = "rooms-notifications"
KEYS_OF_UPDATE = {
    *("task_id", "service", "method", "resource", "old_state", "new_state", "reason"),
    *("version", "deadline", "at"),
}
KEYS_OF_WANT = {
    *("task_id", "service", "method", "resource", "reason", "requested", "attempt"),
    *("version", "deadline", "at", "context"),
}


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    make_room(0, made.root / RECORDS)
    yield made
    made.close()


def start(site: RabbitSite, **settings: object) -> ServiceProcess:
    """Beside oslo.messaging: its exchange, and its flags."""
    ours = f"{site.url}?profile=oslo-durable&exchange=openstack"
    given = {"transport_url": ours, "use_pending_state": "true"} | settings
    return site.start_program("roomy", **given)


def client_of(site: RabbitSite) -> RpcClient:
    return roomy.svc.client(f"{site.url}?profile=oslo-durable&exchange=openstack")


async def both(peer: Peer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first `task.update` and the first `task.no_capacity` that its listener has taken."""
    update = await peer.event("notified", priority="info")
    return update, await peer.event("notified", priority="error")


def check_both(update: dict[str, Any], want: dict[str, Any], task_id: str) -> None:
    assert (update["event_type"], want["event_type"]) == ("task.update", "task.no_capacity")
    assert update["payload"].keys() == KEYS_OF_UPDATE
    assert want["payload"].keys() == KEYS_OF_WANT
    steps = ("old_state", "new_state", "reason", "version", "resource")
    assert [update["payload"][key] for key in steps] == [
        *("running", "pending", "no_capacity", 1, "vm:v"),
    ]
    assert want["payload"]["requested"] == {"rooms": 1}
    assert want["payload"]["reason"] == "no room"
    assert {one["payload"]["task_id"] for one in (update, want)} == {task_id}
    assert {one["publisher_id"] for one in (update, want)} == {"rooms.node-a"}
    ids = [one["metadata"]["message_id"] for one in (update, want)]
    assert len({*ids, ""}) == 3


async def the_end(peer: Peer) -> dict[str, Any]:
    """The notification of the end of a task; those before it may come twice."""
    seen = 1
    while True:
        told = await peer.events_of("notified", number=seen, priority="info")
        if told[-1]["payload"]["new_state"] not in {"pending", "accepted"}:
            return told[-1]
        seen = len(told) + 1


@pytest.mark.parametrize("allowed", [(), ("gracekit.errors",)], ids=["not allowed", "allowed"])
async def test_an_oslo_client_gets_no_capacity_and_ours_may_be_told_that_it_is_parked(
    site: RabbitSite, allowed: tuple[str, ...]
):
    """Rebuilt where its module is allowed, else as a RemoteError; the task waits all the same, and
    a client of ours that knows the state gets `Parked`.
    """
    service = await start(site).serving()
    async with (
        oslo_client(site.url, "rooms", profile="durable", exception_modules=allowed) as theirs,
        client_of(site) as ours,
    ):
        with pytest.raises(OsloError) as told:
            await theirs.call({"user_id": "ann"}, "build", vm="v")
        with pytest.raises(NoCapacity, match="no room"):
            await ours.call(roomy.build, vm="w")
        with pytest.raises(Parked) as parked:
            await ours.prepare(pending=True, request_id="x").call(roomy.build, vm="x")
    assert await service.stop() == 0

    assert told.value.kind == ("NoCapacity_Remote" if allowed else "RemoteError")
    assert "NoCapacity" in told.value.message or allowed
    assert "no room" in told.value.message
    assert (parked.value.task_id, parked.value.version) == ("x", 1)
    assert [row["state"] for row in site.rows("SELECT state FROM task")] == ["pending"] * 3


async def test_an_oslo_listener_that_was_down_gets_both_notifications(site: RabbitSite):
    """The broker keeps them, although the service has gone meanwhile; what comes later comes
    too.
    """
    service = await start(site).serving()
    async with client_of(site) as ours:
        await ours.prepare(request_id="t").cast(roomy.build, vm="v")
        await site.in_state("t", "pending")
        assert await service.stop() == 0
        async with oslo_peer(site.url, profile="durable") as peer:
            await peer.ask("listen", topic=TOPIC)
            update, want = await both(peer)
            again = await start(site).serving()
            api = ours.prepare(ops=True, namespace="gracekit.tasks", version="1.1", timeout=30)
            await api.call("give_up", task_id="t", version=1, reason="too large")
            end = await the_end(peer)
            await until(lambda: not site.rows("SELECT 1 FROM task WHERE errored_due"), "the hook")
            assert await again.stop() == 0

    check_both(update, want, "t")
    assert (end["payload"]["new_state"], end["payload"]["reason"]) == ("errored", "gave_up")


async def test_an_oslo_listener_hears_how_a_retried_task_has_ended(site: RabbitSite):
    """The outcome of the build, and not only that it runs again."""
    service = await start(site).serving()
    async with oslo_peer(site.url, profile="durable") as peer, client_of(site) as ours:
        await peer.ask("listen", topic=TOPIC)
        await ours.prepare(request_id="t").cast(roomy.build, vm="v")
        await site.in_state("t", "pending")
        make_room(1, site.root / RECORDS)
        api = ours.prepare(ops=True, namespace="gracekit.tasks", version="1.1", timeout=30)
        await api.call("retry", task_id="t", version=1)
        end = await the_end(peer)
        assert await service.stop() == 0

    assert end["event_type"] == "task.update"
    assert end["payload"].keys() == KEYS_OF_UPDATE
    steps = ("old_state", "new_state", "reason", "version", "resource")
    assert [end["payload"][key] for key in steps] == ["running", "succeeded", "", 1, "vm:v"]


@pytest.mark.parametrize("point", ["park.after", "notify.before", "notify.after"])
async def test_an_oslo_listener_gets_both_after_a_kill_between_commit_and_send(
    site: RabbitSite, point: str
):
    """The next start sends what the killed run has not, under the same message id."""
    killed = await start(site, failpoint=point).serving()
    async with oslo_peer(site.url, profile="durable") as peer, client_of(site) as ours:
        await peer.ask("listen", topic=TOPIC)
        await ours.prepare(request_id="t").cast(roomy.build, vm="v")
        assert await killed.exit_code() == -9
        assert site.state("t") == "pending"
        due = {row["message_id"] for row in site.rows("SELECT message_id FROM outbox")}
        service = await start(site).serving()
        update, want = await both(peer)
        await until(lambda: not site.rows("SELECT * FROM outbox"), "an empty outbox")
        assert await service.stop() == 0

    check_both(update, want, "t")
    assert {one["metadata"]["message_id"] for one in (update, want)} == due
