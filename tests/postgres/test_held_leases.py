"""Leases that people declare and hold, in a file and in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gracekit import LeaseExists, LeaseHeld, Leases, NoSuchLease, backoff
from gracekit.clock import Clock
from gracekit.config.settings import Settings
from gracekit.leases.check import check_leases, mend_leases
from gracekit.leasing import HeldLease
from gracekit.process import Point
from gracekit.store.batch import Batch
from tests.postgres.fleet import QUICK
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

Join = Callable[..., Any]


@pytest.fixture(params=["file", "postgres"])
async def join(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: Postgres, schema: str
) -> AsyncIterator[Join]:
    """Makes a member on a host of that name."""
    in_file = request.param == "file"
    url = f"sqlite:///{tmp_path}/leases.db" if in_file else f"{postgres.url()}&schema={schema}"
    async with AsyncExitStack() as stack:

        async def make(host: str = "one") -> Leases:
            times = {f"{name}_s": float(text[:-1]) for name, text in QUICK.items()}
            directory = str(tmp_path / f"runs-{host}")
            settings = Settings(
                store_url=url, host=host, run_directory=None if in_file else directory, **times
            )
            return await stack.enter_async_context(Leases(settings=settings))

        yield make


async def test_a_lease_is_declared_once_and_keeps_its_token_when_it_is_made_again(join: Join):
    """Each refusal says what is there; nothing is changed by it."""
    leases = await join()
    await leases.create("vm", "vm-1", payload="on node 7")
    with pytest.raises(LeaseExists, match="vm:vm-1 is declared already"):
        await leases.create("vm", "vm-1")
    async with leases.hold("vm", "vm-1") as first:
        with pytest.raises(LeaseHeld, match="only a free one can be deleted"):
            await leases.delete("vm", "vm-1")
    await leases.delete("vm", "vm-1")
    with pytest.raises(NoSuchLease, match="gracekit lease create vm:vm-1"):
        await leases.delete("vm", "vm-1")
    await leases.create("vm", "vm-1")
    async with leases.hold("vm", "vm-1") as again:
        assert again.token > first.token


async def test_what_nobody_has_declared_is_not_held(join: Join):
    """A name that was mistyped would exclude nobody."""
    leases = await join()

    with pytest.raises(NoSuchLease):
        async with leases.hold("vm", "vm-1"):
            pass
    with pytest.raises(NoSuchLease):
        await leases.info("vm", "vm-1")
    status = await leases.status("vm", "vm-1")
    assert (status.state, status.token, status.declared) == ("FREE", 0, False)


async def test_a_held_lease_is_refused_to_others_who_see_who_has_it(join: Join):
    """Without taking it; with `wait` they get it when it is free, with a higher token."""
    one, two = await join("one"), await join("two")
    await one.create("vm", "vm-1", payload="on node 7")
    async with AsyncExitStack() as block:
        held = await block.enter_async_context(one.hold("vm", "vm-1"))
        with pytest.raises(LeaseHeld, match="vm:vm-1 is held by one-0 on host one"):
            async with two.hold("vm", "vm-1"):
                pass
        info = await two.info("vm", "vm-1")
        waiting = asyncio.create_task(held_once(two))
        await asyncio.sleep(0)
        assert not held.lost.is_set()
    token = await waiting

    assert (info.state, info.holder, info.host, info.token) == (
        "EXCLUSIVE",
        "one-0",
        "one",
        held.token,
    )
    assert info.payload == "on node 7"
    assert token > held.token
    free = await one.info("vm", "vm-1")
    assert (free.state, free.holder, free.last_end) == ("FREE", None, "clean")


async def held_once(leases: Leases, wait: str = "60s") -> int:
    async with leases.hold("vm", "vm-1", wait=wait) as lease:
        return lease.token


async def test_a_forced_hold_is_told_and_gives_the_lease_back_after_its_settle_time(join: Join):
    """`on_lost` is called once with the lease, and the next one waits until effects settle."""
    one, two = await join("one"), await join("two")
    told = list[HeldLease]()
    await one.create("vm", "vm-1")
    async with one.hold("vm", "vm-1", on_lost=told.append, settle="1s") as held:
        await two.force("vm", "vm-1", held.token, reason="it is to move")
        await asyncio.wait_for(held.lost.wait(), 30)
    info = await two.info("vm", "vm-1")

    assert told == [held]
    assert "it is to move" in held.why_lost
    assert (info.state, info.last_end) == ("FREE", "taken")
    assert await held_once(two) > held.token


async def test_an_order_to_end_names_the_token_that_was_seen(join: Join):
    """Whoever has taken the lease since is left alone."""
    one = await join("one")
    await one.create("vm", "vm-1")
    async with one.hold("vm", "vm-1") as held:
        with pytest.raises(LeaseHeld, match=f"has token {held.token} now"):
            await one.force("vm", "vm-1", held.token - 1, reason="late")
    with pytest.raises(NoSuchLease, match="is free"):
        await one.force("vm", "vm-1", held.token, reason="late")


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_hold_whose_lease_was_freed_at_once_is_lost_within_seconds(
    join: Join, is_taken: bool
):
    """Also if another one has taken it since; giving it back changes nothing then."""
    one, two = await join("one"), await join("two")
    await one.create("vm", "vm-1")
    async with one.hold("vm", "vm-1") as held, AsyncExitStack() as other:
        batch = Batch(Point.RELEASE_LEASE)
        order = {"by": "ann", "reason": "it burns", "batch": batch}
        await two._holds.rows.take_away_now(held.resource, held.token, **order)
        if is_taken:
            new = await other.enter_async_context(two.hold("vm", "vm-1"))
            assert new.token > held.token
        await asyncio.wait_for(held.lost.wait(), 30)
        info = await two.info("vm", "vm-1")

    assert ("it burns" in held.why_lost) is not is_taken
    assert info.holder == ("two-0" if is_taken else None)
    assert await held_once(one) > held.token


async def write(leases: Leases, sql: str, *params: object) -> None:
    """What no commit of gracekit does."""
    batch = Batch(Point.TAKE_LEASE)
    batch.add(sql, *params)
    await leases._engine.commit(batch)


async def test_a_lease_of_a_run_that_is_not_on_record_counts_as_held_until_it_is_mended(join: Join):
    """Nobody knows what its holder does. What is mended has a token above all earlier ones."""
    one = await join("one")
    await one.create("vm", "vm-1")
    async with one.hold("vm", "vm-1") as held:
        pass
    await write(one, "UPDATE lease SET owner = 'nobody'")

    assert (await one.info("vm", "vm-1")).state == "CORRUPT"
    with pytest.raises(LeaseHeld, match="a run that is not on record"):
        await held_once(one, wait="0s")
    (damage,) = await check_leases(one._engine)
    await mend_leases(one._engine, Clock())

    assert (damage.resource, damage.what) == ("vm:vm-1", "is held by a run that is not on record")
    assert await check_leases(one._engine) == []
    assert await held_once(one) > 2**40 > held.token


async def test_a_task_that_runs_gets_back_the_lease_that_its_row_has_lost(join: Join):
    """With the token that it has; a lower one in the row is told, too."""
    one = await join("one")
    columns = (
        "request_id, recipient, service, lane, queue, route, target, method, version, "
        "content_hash, on_interrupt, settle_s, resource_kind, resource_id, state, owner, token, "
        "accepted_at, started_at"
    )
    values = (
        "'t', '', 's', 'requests', 'q', 'shared', '', 'm', '1', 'h', 'retry', 1, 'vm', ?, "
        "'running', ?, 7, 1, 1"
    )
    run_id = one._members.run_id
    await write(one, f"INSERT INTO task ({columns}) VALUES ({values})", "vm-1", run_id)

    (missing,) = await check_leases(one._engine)
    await mend_leases(one._engine, Clock())

    assert missing.what == "has a task that runs, and nobody holds it"
    again = await one.status("vm", "vm-1")
    assert (again.state, again.token, again.task) == ("EXCLUSIVE", 7, "t")
    await write(one, "UPDATE lease SET lver = 3")
    assert [one.what for one in await check_leases(one._engine)] == [
        "has a lower token than the task that runs"
    ]
    await write(one, "DELETE FROM task")


async def test_pages_of_leases_are_in_order(join: Join):
    """Each page begins behind the last one."""
    one = await join("one")
    for n in range(5):
        await one.create("vm", f"vm-{n}")
    first = await one.list(limit=2)
    rest = await one.list(after=("vm", first[-1].id), limit=10)

    assert [info.id for info in (*first, *rest)] == [f"vm-{n}" for n in range(5)]


async def test_members_are_listed_as_hosts(join: Join):
    """They serve nothing, and hold leases."""
    one, two = await join("one"), await join("two")
    await one.create("vm", "vm-1")
    async with one.hold("vm", "vm-1"):
        hosts = {host.host: host for host in await two.hosts()}

    assert hosts.keys() == {"one", "two"}
    assert {host.service for host in hosts.values()} == {"gracekit-leases"}
    assert (hosts["one"].leases, hosts["two"].leases) == (1, 0)
    assert {host.state for host in hosts.values()} <= {"LIVE", "UNKNOWN"}


@pytest.mark.parametrize("steps", range(4))
async def test_a_hold_that_is_cancelled_again_and_again_leaves_nothing_held(join: Join, steps: int):
    """Wherever its entry was: what was taken meanwhile is given back."""
    one = await join("one")
    await one.create("vm", "vm-1")
    entering = asyncio.create_task(held_once(one, wait="0s"))
    for _ in range(steps):
        await asyncio.sleep(0)
    while not entering.done():
        entering.cancel()
        await asyncio.sleep(0)

    assert entering.cancelled()
    assert await held_once(one) > 0


async def test_a_lease_is_not_deleted_while_the_end_of_its_holder_settles(join: Join):
    """Made again, it would be granted beside late effects of that holder."""
    one = await join("one")
    await one.create("vm", "vm-1")
    async with one.hold("vm", "vm-1", settle="1h") as held:
        await one.force("vm", "vm-1", held.token, reason="it is to move")
        await asyncio.wait_for(held.lost.wait(), 30)

    with pytest.raises(LeaseHeld, match="late effects of its last holder may be under way"):
        await one.delete("vm", "vm-1")
    assert (await one.info("vm", "vm-1")).grantable_at is not None


async def test_a_hold_waits_on_while_the_server_is_away(tmp_path: Path):
    """Its time is not over, and nobody else would wait in its place."""
    with Postgres().running() as server:
        times = {f"{name}_s": float(text[:-1]) for name, text in QUICK.items()}
        url, directory = f"{server.url()}&schema=held", str(tmp_path / "runs")
        settings = Settings(store_url=url, run_directory=directory, host="one", **times)
        async with Leases(settings=settings) as one:
            await one.create("vm", "vm-1")
            async with one.hold("vm", "vm-1") as held:
                waiting = asyncio.create_task(held_once(one))
                await asyncio.to_thread(server.kill)
                while one._engine.status.error is None:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(2 * backoff.HOLD_S)  # it tries meanwhile
                await asyncio.to_thread(server.start)
            assert await waiting > held.token
