"""What anybody may ask of a service: whether it takes new requests, and oslo's ping."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from gracekit import (
    Context,
    Draining,
    InvalidArgumentsError,
    NoSuchMethodError,
    RpcClient,
    Service,
    Undeliverable,
    UnsupportedVersionError,
)
from gracekit.phase import ServiceState
from gracekit.rpc.client import ClientView
from gracekit.rpc.transport import shared_queue
from tests.service.kit import Doors, Life, World

pytestmark = pytest.mark.looptime


@pytest.fixture
def doors() -> Doors:
    return Doors()


@pytest.fixture
def svc(doors: Doors) -> Service:
    """One long method, so that a drain lasts, and one that answers."""
    made = Service("compute")

    @made.rpc(on_interrupt="retry", anywhere=True)
    async def long(ctx: Context) -> None:
        await doors.pass_("long")

    @made.rpc
    async def work(ctx: Context) -> str:
        return "done"

    @made.ops
    async def ping(ctx: Context) -> str:
        return "pong"

    return made


@contextlib.asynccontextmanager
async def draining(
    world: World, svc: Service, doors: Doors, **settings: object
) -> AsyncIterator[Life]:
    """A process whose drain waits for a task."""
    life = await world.start(svc, drain_timeout_s=500, **settings)
    client = await world.client(svc)
    await client.prepare(host=life.runtime.settings.host).cast("long")
    await life.hears("task.started")
    life.ask_to_stop()
    await life.hears("intake.closed")
    try:
        yield life
    finally:
        doors.open("long")
        await life.wait_end()


def now() -> float:
    return asyncio.get_running_loop().time()


# -- fail_fast -----------------------------------------------------------------------------


async def test_a_service_that_serves_is_asked_and_then_called(world: World, svc: Service):
    """One short question before the request, which leaves no row."""
    await world.start(svc)
    client = await world.client(svc)
    view = client.prepare(fail_fast=True)

    assert await view.call("work") == "done"
    assert await view.prepare(host="node-1").call("work") == "done"
    await view.cast("work")
    await world.until(lambda: world.tally().get("accepted") == 3)

    assert [row["method"] for row in world.rows("SELECT method FROM task")] == ["work"] * 3
    assert client._replies.ignored == 0


async def test_a_draining_service_is_told_to_the_caller(world: World, svc: Service, doors: Doors):
    """At once instead of after the total time-out; nothing was sent, to its host or to any."""
    async with draining(world, svc, doors):
        client = await world.client(svc)
        began = now()
        for view in (client.prepare(fail_fast=True), client.prepare(fail_fast=True, host="node-1")):
            for send in (view.call, view.cast):
                with pytest.raises(
                    Draining, match=r"by node-1-0 \(draining\), and nothing was sent"
                ):
                    await send("work")

        assert now() - began < 4 * 0.6
        assert world.broker.waiting("compute") == 0
        assert world.broker.waiting("compute.node-1") == 0


async def test_without_fail_fast_a_request_waits(world: World, svc: Service, doors: Doors):
    """It is run by whoever reads the queue next."""
    async with draining(world, svc, doors):
        await (await world.client(svc)).cast("work")
        await world.settle()

        assert world.broker.waiting("compute") == 1


async def test_a_quiet_service_is_closed_too(world: World, svc: Service):
    """Its intake may be resumed; until then a request would wait."""
    life = await world.start(svc)
    await world.verb(life, "quiet")
    view = (await world.client(svc)).prepare(fail_fast=True)

    with pytest.raises(Draining, match=r"node-1-0 \(quiet\)"):
        await view.call("work")
    await world.verb(life, "resume")

    assert await view.call("work") == "done"


async def test_one_draining_host_of_two_closes_no_shared_topic(
    world: World, svc: Service, doors: Doors
):
    """In a rolling restart the other one reads the same queue: whoever answers first, it is
    asked.
    """
    async with draining(world, svc, doors):
        await world.start(svc, host="node-2")
        view = (await world.client(svc)).prepare(fail_fast=True)

        assert [await view.call("work") for _ in range(4)] == ["done"] * 4
        assert await view.prepare(host="node-2").call("work") == "done"
        with pytest.raises(Draining, match="node-1-0"):
            await view.prepare(host="node-1").call("work")


async def test_one_draining_instance_of_two_closes_no_host(
    world: World, svc: Service, doors: Doors
):
    """Two processes of one host read its directed queue."""
    async with draining(world, svc, doors):
        await world.start(svc)
        view = (await world.client(svc)).prepare(fail_fast=True, host="node-1")

        assert [await view.call("work") for _ in range(4)] == ["done"] * 4


async def test_all_that_are_closed_are_named(world: World, svc: Service, doors: Doors):
    """An operator sees how far the restart is."""
    async with draining(world, svc, doors), draining(world, svc, doors, host="node-2"):
        view = (await world.client(svc)).prepare(fail_fast=True)

        with pytest.raises(Draining, match=r"node-1-0 \(draining\), node-2-0 \(draining\)"):
            await view.call("work")


async def test_where_nobody_answers_the_request_is_sent(world: World, svc: Service):
    """Silence is no refusal: after two seconds at most it waits in the queue for the next start."""
    await (await world.start(svc)).drain()
    client = await world.client(svc)
    began = now()

    await client.prepare(fail_fast=True).cast("work")

    assert now() - began == pytest.approx(2, abs=0.2)
    assert world.broker.waiting("compute") == 1
    assert world.broker.waiting("compute-ops") == 0  # the question has expired


async def test_the_question_leaves_the_call_its_time(world: World, svc: Service):
    """It takes half of a short time-out at most, and the call ends when it said."""
    await (await world.start(svc)).drain()
    client = await world.client(svc)
    began = now()
    calling = asyncio.create_task(client.prepare(fail_fast=True, timeout=1).call("work"))
    await asyncio.sleep(0.6)
    assert world.broker.waiting("compute") == 1

    with pytest.raises(TimeoutError):
        await calling

    assert now() - began == pytest.approx(1, abs=0.1)
    await asyncio.sleep(0.1)
    assert world.broker.waiting("compute") == 0  # it expired with its caller


async def test_a_peer_without_an_ops_server_is_sent_to(world: World, svc: Service):
    """Unroutable, or said so by the cap: there is nobody to ask."""
    client = await world.client(svc)
    transport = client._transport
    await transport.declare([shared_queue("compute")])
    began = now()

    await client.prepare(fail_fast=True).cast("work")
    await transport.declare([shared_queue("compute-ops")])
    await client.prepare(fail_fast=True, version_cap="1.4", ops_since="2.0", version="1.0").cast(
        "work"
    )

    assert now() == began
    assert world.broker.waiting("compute") == 2
    with pytest.raises(Undeliverable):
        await client.prepare(fail_fast=True, host="node-9").cast("work")


async def test_an_ops_request_asks_nobody(world: World, svc: Service, doors: Doors):
    """Its topic is open to the end of a drain."""
    async with draining(world, svc, doors):
        view = (await world.client(svc)).prepare(fail_fast=True, ops=True)

        assert await view.call("ping") == "pong"


async def test_a_fanout_cannot_fail_fast(world: World, svc: Service):
    """It goes to every instance: there is no one to ask."""
    await world.start(svc)
    view = (await world.client(svc)).prepare(fail_fast=True)

    with pytest.raises(InvalidArgumentsError, match="leave fail_fast out"):
        await view.fanout("work")


# -- the question itself -------------------------------------------------------------------


def asking(client: RpcClient) -> ClientView:
    return client.prepare(ops=True, namespace="gracekit", timeout=5)


async def test_the_state_is_told_to_anybody(world: World, svc: Service, doors: Doors):
    """It names no run, changes nothing, and shows neither tasks nor arguments."""
    life = await world.start(svc)
    client = await world.client(svc)

    assert await asking(client).call("state", junk=1) == {
        "instance": "node-1-0",
        "host": "node-1",
        "state": "serving",
        "open": True,
        "ready": True,
        "features": ["delay"],
    }
    assert world.rows("SELECT * FROM task") == []
    assert len(life.runtime.wired.tracker) == 0


@pytest.mark.parametrize("verb", ["drain", "quiet", "status", "dump"])
async def test_no_control_verb_comes_by_the_ops_topic(world: World, svc: Service, verb: str):
    """Else whoever may write to a queue could drain the service."""
    life = await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(UnsupportedVersionError, match="'gracekit' is not served"):
        await asking(client).call(verb, run_id=life.runtime.run_id)
    assert life.runtime.state is ServiceState.SERVING


async def test_the_state_is_asked_on_the_ops_topic_only(world: World, svc: Service):
    """Elsewhere the namespace is one that nobody serves."""
    await world.start(svc)
    client = await world.client(svc)

    with pytest.raises(UnsupportedVersionError, match="'gracekit' is not served"):
        await client.prepare(namespace="gracekit", timeout=5).call("state")


async def test_a_state_that_is_cast_harms_nobody(world: World, svc: Service):
    """Nobody waits for the answer."""
    life = await world.start(svc)
    client = await world.client(svc)

    await asking(client).cast("state")
    await world.settle()

    assert await client.call("work") == "done"
    assert life.told("dispatch.failed") == []


# -- oslo's ping ---------------------------------------------------------------------------


async def test_oslos_ping_is_answered_where_it_is_switched_on(world: World, svc: Service):
    """On both topics, without a row."""
    await world.start(svc, rpc_ping_enabled=True)
    client = await world.client(svc)

    assert await client.call("oslo_rpc_server_ping") == "pong"
    assert await client.prepare(ops=True).call("oslo_rpc_server_ping") == "pong"
    await client.cast("oslo_rpc_server_ping")
    await world.settle()
    assert world.rows("SELECT * FROM task") == []


async def test_oslos_ping_is_an_unknown_method_by_default(world: World, svc: Service):
    """As with oslo's own `rpc_ping_enabled`."""
    await world.start(svc)

    with pytest.raises(NoSuchMethodError):
        await (await world.client(svc)).call("oslo_rpc_server_ping")


async def test_a_ping_of_another_namespace_is_another_method(world: World, svc: Service):
    """And other unknown methods stay unknown where the ping is on."""
    await world.start(svc, rpc_ping_enabled=True)
    client = await world.client(svc)

    with pytest.raises(UnsupportedVersionError, match="'other' is not served"):
        await client.prepare(namespace="other").call("oslo_rpc_server_ping")
    with pytest.raises(NoSuchMethodError):
        await client.call("_oslo_rpc_server_ping")


async def test_a_service_may_have_a_ping_of_its_own(world: World, svc: Service):
    """What is declared is served."""

    @svc.rpc
    async def oslo_rpc_server_ping(ctx: Context) -> str:
        return "mine"

    await world.start(svc, rpc_ping_enabled=True)

    assert await (await world.client(svc)).call("oslo_rpc_server_ping") == "mine"
