"""Objects as arguments: clients of oslo.messaging, and a service of unchanged endpoints."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oslo.kit import OsloClient, OsloError, oslo_client, oslo_python
from tests.process.helpers import ServiceProcess, until
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite, gracekit

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


class ComputeSite(RabbitSite):
    """Processes of the service in `objects.py`."""

    def start(self, **settings: object) -> ServiceProcess:
        command = [str(oslo_python()), "-m", "gracekit", "run", "tests.oslo.objects:svc"]
        return self._start(command, settings)


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[ComputeSite]:
    made = ComputeSite(tmp_path, shared_broker, rabbit_vhost)
    yield made
    made.close()


@pytest.fixture
async def client(site: ComputeSite) -> AsyncIterator[OsloClient]:
    async with oslo_client(
        site.url, "compute", exchange="gracekit", profile="durable", serializer="objects"
    ) as made:
        yield made.prepare(timeout=20)


def instance(uuid: str, **more: str) -> dict[str, Any]:
    return {"an_instance": {"uuid": uuid, **more}}


async def test_requests_for_one_instance_never_overlap(site: ComputeSite, client: OsloClient):
    """Casts and calls of two methods, one with a path and one with a function; another instance is
    not waited for, and the command line finds them by the id of the instance.
    """
    service = await site.start().serving()
    view = client.prepare(timeout=None)
    await view.cast({}, "build", instance=instance("i-1"), key="a")
    await site.effect("start", "a")
    await view.cast({}, "build", instance=instance("i-1"), key="b")
    call = asyncio.ensure_future(client.call({}, "reboot", instance=instance("i-1"), key="c"))
    assert await client.call({}, "reboot", instance=instance("i-2"), key="other") == "i-2"
    await until(lambda: len(site.transient()) == 3, "three on record")
    listed = await asyncio.to_thread(gracekit, site, "tasks", "--resource", "instance:i-1")
    assert [one.key for one in site.seen("start")] == ["a", "other"]
    site.go()
    assert await call == "i-1"
    await site.effect("done", "b")
    assert await service.stop() == 0

    table = [line.split()[1:3] for line in listed.stdout.splitlines()[1:]]
    assert sorted(table) == [["build", "instance:i-1"]] * 2 + [["reboot", "instance:i-1"]]
    on_one = [one for one in site.effects if one.key != "other"]
    order = [one.key for one in on_one if one.word == "start"]
    assert [(one.word, one.key) for one in on_one] == [
        (word, key) for key in order for word in ("start", "done")
    ]
    fences = [int(one.more[0]) for one in on_one if one.word == "start"]
    assert fences == sorted(set(fences))


async def test_a_killed_task_keeps_its_instance(site: ComputeSite, client: OsloClient):
    """The next start runs it under a new lease, and before a younger request for the instance."""
    killed = await site.start().serving()
    await client.cast({}, "build", instance=instance("i-1"), key="a")
    await site.effect("start", "a")
    await client.cast({}, "reboot", instance=instance("i-1"), key="b")
    await until(lambda: len(site.transient()) == 2, "two on record")
    killed.signal(signal.SIGKILL)
    await killed.exit_code()
    service = await site.start().serving()
    await site.effect("start", "a", times=2)
    site.go()
    await site.effect("done", "b")
    assert await service.stop() == 0

    started = site.seen("start")
    fences = [int(one.more[0]) for one in started]
    assert [one.key for one in started] == ["a", "a", "b"]
    assert fences == sorted(set(fences))
    rows = site.rows("SELECT resource_kind, resource_id, state FROM task")
    assert {tuple(row.values()) for row in rows} == {("instance", "i-1", "succeeded")}


async def test_what_the_serializer_cannot_read_is_refused(site: ComputeSite, client: OsloClient):
    """Its caller gets an error with the reason; so does one whose object has no id."""
    service = await site.start().serving()

    with pytest.raises(OsloError) as newer:
        await client.call({}, "build", instance=instance("i-1", version="2.0"), key="a")
    with pytest.raises(OsloError) as empty:
        await client.call({}, "build", instance=instance(""), key="b")
    with pytest.raises(OsloError) as other:
        await client.call({}, "reboot", instance=7, key="c")
    assert await service.stop() == 0

    assert (newer.value.kind, empty.value.kind, other.value.kind) == ("TypeError",) * 3
    assert "the serializer raised ValueError('<instance> version 2.0 is not" in newer.value.message
    assert "needs a value for 'instance.uuid': it names the instance" in empty.value.message
    assert "resource function, and reading it raised AttributeError" in other.value.message
    assert site.effects == []
    rows = site.rows("SELECT state, reason FROM task")
    assert [tuple(row.values()) for row in rows] == [("rejected", "arguments")] * 3
