"""Members of a fleet: who may join, who takes over, and what stays with its owner."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gracekit import RpcClient
from tests.postgres.fleet import Fleet
from tests.postgres.test_postgres_hosts import check_accounts
from tests.process.helpers import ServiceProcess
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]

SIX = ("one", "two", "three", "four", "five", "six")


async def check_second_start(fleet: Fleet, first: ServiceProcess, second: ServiceProcess) -> None:
    """It is refused by a beat of the first one; that one is not disturbed."""
    instance = first.run["instance"]
    await second.wait_log("run.watched")
    code = await second.exit_code(within_s=60)

    assert code == 78
    assert f"instance '{instance}' of service 'shop' is running with host name" in second.log
    assert len(fleet.rows("SELECT * FROM run")) == 1
    assert fleet.declared() == []
    assert await first.stop() == 0


async def test_an_instance_name_is_refused_to_a_second_host(fleet: Fleet) -> None:
    """A beat shows that the first one lives."""
    first = await fleet.host("one").start(instance="a").serving()
    second = fleet.host("two").start(instance="a")
    await check_second_start(fleet, first, second)


async def test_a_host_name_is_refused_to_a_second_machine(fleet: Fleet) -> None:
    """Whatever its instance is called: both would read the queue of that host."""
    first = await fleet.host("one").start().serving()
    second = fleet.host("one", machine="another").start(instance="a")
    await check_second_start(fleet, first, second)


async def test_a_machine_that_was_booted_again_takes_over_by_itself(fleet: Fleet) -> None:
    """Nothing there proves the death of the earlier run: its beats are watched, and then it is
    declared dead.
    """
    host = fleet.host("one")
    first = await host.start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s", host="one")
        call = asyncio.create_task(view.call("retried", key="a", vm="v", s=60, again_s=0.1))
        await fleet.effect("start", "a")
        run = first.run
        first.kill()
        host.boot()
        second = host.start()
        await second.wait_log("run.watched")
        await second.serving()
        answer = await call

    dead = await fleet.gone(str(run["run_id"]))
    old, new = fleet.seen("start", "a")
    assert answer == "a"
    assert second.run["instance"] == run["instance"]
    assert second.run["generation"] == run["generation"] + 1
    assert dead["adopted_by"] == second.run["run_id"]
    assert "no beat for 11 s, seen by a start on host one" in dead["gone_reason"]
    assert new.pid == second.pid
    assert int(new.more[1]) > int(old.more[1])
    assert await second.stop() == 0
    check_accounts(fleet)


async def test_one_of_six_hosts_ends_the_work_of_all(fleet: Fleet) -> None:
    """The others are killed within a second; it ends each task once, and those of its own."""
    services = [fleet.host(name).start() for name in SIX]
    for service in services:
        await service.serving()
    keys = [f"key-{n}" for n in range(24)]
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        calls = [asyncio.create_task(view.call("held", key=key, vm=key)) for key in keys]
        await fleet.effect("start", times=len(keys))
        *others, last = services
        dead = {str(service.run["run_id"]) for service in others}
        for service in others:
            service.kill()
        fleet.go()
        answers = await asyncio.gather(*calls)

    assert answers == keys
    assert {row["run_id"] for row in fleet.declared()} == dead
    starts, ends = fleet.seen("start"), fleet.seen("done")
    assert {effect.pid for effect in starts} == {service.pid for service in services}
    by_last = [effect.key for effect in ends if effect.pid == last.pid]
    assert len(by_last) == len(set(by_last)) >= 20
    assert max(Counter(effect.key for effect in starts).values()) <= 2
    assert await last.stop() == 0
    check_accounts(fleet)


async def test_six_hosts_are_replaced_one_after_the_other(fleet: Fleet) -> None:
    """Each is drained under load, and its successor joins at once: nobody is declared dead, nothing
    is lost, nothing is begun twice.
    """
    hosts = [fleet.host(name) for name in SIX]
    services = [host.start(handover_flush="3s") for host in hosts]
    for service in services:
        await service.serving()
    enough = fleet.root / "enough"
    caster = fleet.caster("a", 0, per_second=15, enough=enough)
    await fleet.effect("done", times=20)
    codes = []
    for n, host in enumerate(hosts):
        codes.append(await services[n].stop())
        services[n] = await host.start(handover_flush="3s").serving()
    enough.touch()
    assert await asyncio.to_thread(caster.wait, 240) == 0
    casts = fleet.confirmed("a")
    await fleet.ended(len(casts))

    assert codes == [0] * len(hosts)
    assert fleet.declared() == []
    assert [row["n"] for row in fleet.rows("SELECT count(*) AS n FROM run GROUP BY host")] == [
        2
    ] * 6
    assert Counter(e.key for e in fleet.seen("done")) == dict.fromkeys(casts, 1)
    assert Counter(e.key for e in fleet.seen("start")) == dict.fromkeys(casts, 1)
    assert {await service.stop() for service in services} == {0}
    check_accounts(fleet)


async def test_a_draining_host_takes_nothing_over(fleet: Fleet) -> None:
    """It watched the dead one for longest, and leaves its task to a host that starts later."""
    first = await fleet.host("one").start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        lost = asyncio.create_task(view.call("held", key="a", vm="a"))
        await fleet.effect("start", "a")
        draining = await fleet.host("two").start(drain_timeout="120s").serving()
        own = asyncio.create_task(view.prepare(host="two").call("held", key="b", vm="b"))
        await fleet.effect("start", "b")
        draining.terminate()
        await draining.wait_log("drain.started")
        dead = str(first.run["run_id"])
        first.kill()
        third = await fleet.host("three").start().serving()
        row = await fleet.gone(dead)
        await fleet.effect("start", "a", times=2)
        fleet.go()
        answers = await asyncio.gather(lost, own)

    assert answers == ["a", "b"]
    assert row["gone_by"] == f"run {third.run['run_id']}"
    assert [effect.pid for effect in fleet.seen("start", "a")] == [first.pid, third.pid]
    assert [effect.pid for effect in fleet.seen("start", "b")] == [draining.pid]
    assert await draining.exit_code() == 0
    assert await third.stop() == 0
    check_accounts(fleet)
