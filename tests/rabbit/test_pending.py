"""What tests/process/test_pending.py claims holds on RabbitMQ."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit.rpc.notifications import decode_notification
from tests.process import roomy
from tests.process.helpers import until
from tests.process.roomy import RECORDS, make_room
from tests.process.test_pending import SETTINGS, play
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite
from tests.scale import scale

UNHURRIED = SETTINGS | {"pending_timeout": "1h"}

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(180, 3600))]


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    yield made
    made.close()


async def test_through_a_broker_builds_end_once_while_services_and_resolver_are_killed(
    site: RabbitSite,
) -> None:
    """The same burst, with what a broker delivers again, and notifications that it keeps."""
    await play(site)


@pytest.fixture
def own_site(tmp_path: Path, own_broker: Broker, own_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, own_broker, own_vhost)
    yield made
    made.close()


def news(site: RabbitSite) -> Counter[tuple[str, str]]:
    """How many notifications the broker holds about which task, by event; each message once."""
    held = site.broker.bodies(site.vhost)
    bodies = [
        body for name in held if name.startswith("rooms-notifications.") for body in held[name]
    ]
    by_id = {one.message_id: one for one in map(decode_notification, bodies)}
    return Counter((one.event_type, one.payload["task_id"]) for one in by_id.values())


async def park(site: RabbitSite, *names: str) -> None:
    """Casts that find no room."""
    async with roomy.svc.client(site.url) as client:
        for name in names:
            await client.prepare(request_id=name).cast(roomy.build, vm=name)
    for name in names:
        await site.in_state(name, "pending")


async def test_a_task_is_parked_while_the_broker_is_down_and_told_of_when_it_is_back(
    own_site: RabbitSite,
) -> None:
    """Its notifications wait in the store, and leave without a restart of the service."""
    site = own_site
    make_room(0, site.root / RECORDS)
    service = await site.start_program("roomy", **UNHURRIED, test_until_go=1).serving()
    async with roomy.svc.client(site.url) as client:
        await client.prepare(request_id="t").cast(roomy.build, vm="t")
    await site.effect("start", "t")
    await asyncio.to_thread(site.broker.kill)
    site.go()
    await site.in_state("t", "pending")
    await asyncio.sleep(3)  # longer than the first tries
    assert len(site.rows("SELECT * FROM outbox")) == 2
    await asyncio.to_thread(site.broker.start)

    await until(lambda: not site.rows("SELECT * FROM outbox"), "an empty outbox", 90)

    found = await asyncio.to_thread(news, site)
    assert await service.stop() == 0
    assert found == {("task.update", "t"): 1, ("task.no_capacity", "t"): 1}


async def test_a_notification_queue_that_was_deleted_is_made_again(site: RabbitSite) -> None:
    """Who deletes it loses what stood in it, and nothing that comes later."""
    make_room(0, site.root / RECORDS)
    service = await site.start_program("roomy", **UNHURRIED).serving()
    await park(site, "a")
    await until(lambda: not site.rows("SELECT * FROM outbox"), "an empty outbox")
    for priority in ("info", "error"):
        name = f"rooms-notifications.{priority}"
        await asyncio.to_thread(site.broker.delete_queue, name, site.vhost)

    await park(site, "b")
    await until(lambda: not site.rows("SELECT * FROM outbox"), "an empty outbox", 90)

    found = await asyncio.to_thread(news, site)
    assert await service.stop() == 0
    assert found == {("task.update", "b"): 1, ("task.no_capacity", "b"): 1}
