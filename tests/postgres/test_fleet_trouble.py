"""Trouble of hosts that share a store: what acts stops in time, and what works is left alone."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gracekit import RpcClient
from gracekit.end_timer import END_SIGNAL
from gracekit.errors import TaskInterruptedError
from gracekit.store.postgres.postgres_group import lock_of
from tests.postgres.fleet import DEAD_S, HARD_S, Fleet, now, passed
from tests.postgres.test_postgres_hosts import check_accounts
from tests.process.helpers import until
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]

PATIENT = {"fail_after": "60s", "hard_after": "70s", "dead_after": "80s"}
"""Times of a host that outlasts the trouble of a test, on a slow machine too."""


async def test_a_process_stuck_in_c_is_gone_before_others_may_act(fleet: Fleet) -> None:
    """No Python runs in it, neither its beats nor its handlers: the kernel ends it."""
    first = await fleet.host("one").start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        call = asyncio.create_task(view.call("hold_interpreter", disk="d"))
        await fleet.effect("start", "d")
        second = await fleet.host("two").start().serving()
        run_id, since = str(first.run["run_id"]), now()
        fleet.go()
        code = await first.exit_code(within_s=60)
        ended_at, declared_before = now(), fleet.declared()
        with pytest.raises(TaskInterruptedError):
            await call
        was_alive = await view.call("take_over", disk="d", pid=first.pid)

    assert code == -signal.SIGKILL
    assert ended_at - since >= HARD_S - 2.0
    assert declared_before == []
    await fleet.gone(run_id)
    (start,), (taken,) = fleet.seen("start", "d"), fleet.seen("taken", "d")
    assert was_alive is False
    assert taken.pid == second.pid
    assert int(taken.more[1]) > int(start.more[1])
    assert await second.stop() == 0
    check_accounts(fleet)


async def test_as_pid_1_a_process_that_cannot_be_cancelled_ends_at_hard(fleet: Fleet) -> None:
    """The kernel drops SIGKILL to PID 1, which has a handler for another signal."""
    host = fleet.host("one")
    first = await (await host.start_as_pid_1()).serving()
    async with RpcClient(fleet.url, "shop") as client:
        call = asyncio.create_task(client.prepare(timeout="120s").call("swallow", disk="d"))
        await fleet.effect("beat", "d")
        second = await fleet.host("two").start().serving()
        since = now()
        host.store.swallow()
        code = await first.exit_code(within_s=60)
        ended_at, declared_before = now(), fleet.declared()
        with pytest.raises(TaskInterruptedError):
            await call

    assert code == END_SIGNAL
    assert ended_at - since >= HARD_S - 2.0
    assert fleet.seen("swallowed", "d")
    assert declared_before == []
    assert len(fleet.declared()) == 1
    assert await second.stop() == 0
    check_accounts(fleet)


@pytest.mark.parametrize("_", range(scale(1, 10)))
async def test_a_process_that_is_woken_in_time_goes_on(fleet: Fleet, _: int) -> None:
    """Its next beat comes before others may declare it dead."""
    first = await fleet.host("one").start(**PATIENT).serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        call = asyncio.create_task(view.call("held", key="a", vm="v"))
        await fleet.effect("start", "a")
        second = await fleet.host("two").start().serving()
        since = now()
        first.signal(signal.SIGSTOP)
        await passed(since, DEAD_S + 2.0)
        first.signal(signal.SIGCONT)
        await fleet.beaten(first.run["instance"], 2)
        fleet.go()
        answer = await call

    assert answer == "a"
    assert [effect.pid for effect in fleet.seen("start", "a")] == [first.pid]
    assert fleet.declared() == []
    assert await first.stop() == await second.stop() == 0
    check_accounts(fleet)


async def test_an_observer_that_was_stopped_declares_nobody_dead(fleet: Fleet) -> None:
    """It has read no beat for long, and that says nothing about the others."""
    first = await fleet.host("one").start().serving()
    observer = await fleet.host("two").start(**PATIENT).serving()
    await fleet.beaten(observer.run["instance"], 2)
    observer.signal(signal.SIGSTOP)
    await fleet.beaten(first.run["instance"], int(DEAD_S) + 2)
    observer.signal(signal.SIGCONT)
    await fleet.beaten(observer.run["instance"], 3)

    assert fleet.declared() == []
    assert await first.stop() == await observer.stop() == 0


async def test_a_beat_before_the_declaration_keeps_a_run(fleet: Fleet) -> None:
    """Who has seen it silent declares it dead by its number, which has changed meanwhile."""
    host = fleet.host("one")
    first = await host.start().serving()
    second = await fleet.host("two").start(**PATIENT).serving()
    instance, since = first.run["instance"], now()
    host.cut_off()
    await first.wait_log("beats.missed")
    number = fleet.beats()[instance]
    with fleet.connect() as lock, lock.transaction():
        lock.execute("SELECT pg_advisory_xact_lock(%s)", (lock_of(fleet.schema),))
        # The statements keep the connection from being taken for a frozen one.
        await until(
            lambda: lock.execute("SELECT 1") and now() - since > DEAD_S + 3.0, "a declaration", 60
        )
        host.store.heal()
        await until(
            lambda: lock.execute("SELECT 1") and fleet.beats()[instance] != number, "a beat", 60
        )
    await fleet.beaten(instance, 3)

    assert fleet.declared() == []
    assert await first.stop() == await second.stop() == 0


async def test_a_host_cut_off_from_the_broker_alone_keeps_its_tasks(fleet: Fleet) -> None:
    """It beats on, so nobody declares it dead; the answer leaves when the broker is back."""
    host = fleet.host("one")
    first = await host.start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        call = asyncio.create_task(view.call("held", key="a", vm="v"))
        await fleet.effect("start", "a")
        second = await fleet.host("two").start().serving()
        host.broker.refuse()
        host.broker.cut()
        await first.wait_log("broker.lost")
        await fleet.beaten(first.run["instance"], int(DEAD_S) + 2)
        fleet.go()
        await fleet.effect("done", "a")
        host.broker.heal()
        answer = await call

    assert answer == "a"
    assert [effect.pid for effect in fleet.seen("start", "a")] == [first.pid]
    assert fleet.declared() == []
    assert await first.stop() == await second.stop() == 0
    check_accounts(fleet)


async def test_a_short_outage_of_the_store_cancels_nothing(fleet: Fleet) -> None:
    """For all hosts, and shorter than `fail_after`."""
    hosts = [fleet.host(name) for name in ("one", "two")]
    services = [await host.start(**PATIENT).serving() for host in hosts]
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        calls = [asyncio.create_task(view.call("held", key=k, vm=k)) for k in "abcd"]
        await fleet.effect("start", times=4)
        for host in hosts:
            host.cut_off()
        for service in services:
            await service.wait_log("store.unreachable")
        for host in hosts:
            host.store.heal()
        for service in services:
            await service.wait_log("store.reachable")
        fleet.go()
        answers = await asyncio.gather(*calls)

    assert answers == list("abcd")
    assert len(fleet.seen("start")) == 4
    assert fleet.declared() == []
    assert [await service.stop() for service in services] == [0, 0]
    check_accounts(fleet)


async def test_a_long_outage_of_the_store_ends_handlers_and_no_host(fleet: Fleet) -> None:
    """All are cut off, so nobody has seen that another one has stopped, also not who comes back
    first; work begins again after.
    """
    hosts = [fleet.host(name) for name in ("one", "two")]
    dead_s = DEAD_S + 6.0  # the second to come back may be late
    services = [await host.start(dead_after=f"{dead_s}s").serving() for host in hosts]
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        calls = [asyncio.create_task(view.call("held", key=k, vm=k)) for k in "abcd"]
        await fleet.effect("start", times=4)
        since = now()
        for host in hosts:
            host.cut_off()
        for service in services:
            await service.wait_log("beats.missed")
        await passed(since, dead_s + 2.0)
        for host, service in zip(hosts, services, strict=True):
            host.store.heal()
            await service.wait_log("store.reachable")
            await fleet.beaten(service.run["instance"], 3)
        await fleet.effect("start", times=8)
        fleet.go()
        answers = await asyncio.gather(*calls)

    starts = fleet.seen("start")
    assert answers == list("abcd")
    assert {effect.pid for effect in starts} <= {service.pid for service in services}
    assert sorted(effect.more[0] for effect in starts) == ["1"] * 4 + ["2"] * 4
    assert sorted(effect.key for effect in fleet.seen("done")) == list("abcd")
    assert fleet.declared() == []
    assert [await service.stop() for service in services] == [0, 0]
    check_accounts(fleet)


async def test_what_a_deposed_owner_commits_late_is_refused(fleet: Fleet) -> None:
    """Its handler ends while it is declared dead: the outcome is dropped, and it ends with 70."""
    first = await fleet.host("one").start(**PATIENT).serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        call = asyncio.create_task(view.call("held", key="a", vm="v"))
        await fleet.effect("start", "a")
        second = await fleet.host("two").start(**PATIENT).serving()
        run_id = first.run["run_id"]
        with fleet.connect() as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (lock_of(fleet.schema),))
            fleet.go()
            # The statements keep the connection from being taken for a frozen one.
            await until(lambda: connection.execute("SELECT 1") and fleet.seen("done"), "its end")
            connection.execute("DELETE FROM beat WHERE run_id = %s", (run_id,))
            connection.execute(
                "UPDATE run SET gone_at = 1, gone_by = 'a test', gone_reason = 'so it says'"
                " WHERE run_id = %s",
                (run_id,),
            )
        code = await first.exit_code()
        answer = await call

    assert code == 70
    assert "store.fenced" in first.log
    assert answer == "a"
    assert [effect.pid for effect in fleet.seen("done", "a")] == [first.pid, second.pid]
    old, new = (int(effect.more[0]) for effect in fleet.seen("start", "a"))
    assert (old, new) == (1, 2)
    assert fleet.rows("SELECT * FROM task")[0]["state"] == "succeeded"
    assert await second.stop() == 0
    check_accounts(fleet)


async def test_a_delivery_that_came_to_two_hosts_is_begun_once(fleet: Fleet) -> None:
    """The first one has accepted it, and its acknowledgement is lost with its connection."""
    host = fleet.host("one")
    first = await host.start(**PATIENT).serving()
    second = await fleet.host("two").start(**PATIENT).serving()
    keys = [f"key-{n}" for n in range(20)]
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s")
        host.store.stall()
        calls = [asyncio.create_task(view.call("slow", key=key, s=0.1)) for key in keys]
        await until(
            lambda: 0 < fleet.queued() == len(keys) - len(fleet.seen("done")),
            lambda: f"ended, or with the first host: {fleet.queued()}",
        )
        host.broker.stall()
        host.store.heal()
        await fleet.effect("done", times=len(keys))
        unacknowledged = fleet.queued()
        host.broker.cut()
        host.broker.heal()
        answers = await asyncio.gather(*calls)
        await until(lambda: fleet.queued() == 0, "an empty queue")

    assert answers == keys
    assert unacknowledged == len([e for e in fleet.seen("done") if e.pid == first.pid]) > 0
    assert sorted(effect.key for effect in fleet.seen("start")) == sorted(keys)
    assert {effect.pid for effect in fleet.seen("start")} == {first.pid, second.pid}
    assert await first.stop() == await second.stop() == 0
    check_accounts(fleet)
