"""Hosts that share a queue share a store: what one has accepted, the others can run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gracekit import RpcClient, TaskCancelledError, UnknownTaskError
from gracekit.errors import TaskInterruptedError
from tests.loops import without_settings
from tests.postgres.site import PostgresSite
from tests.process.helpers import ROOT, ServiceProcess, until
from tests.rabbit.broker import Broker
from tests.scale import scale
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]

SHORT = {
    "drain_timeout": "0.3s",
    "handover_grace": "0.3s",
    "handover_flush": "3s",
    "exit_margin": "3s",
}
OUTAGES_S: Final = scale([0.0] * 3, [20.0] * 10 + [120.0])
"""How long the server stays away, each time; with 0 until the survivor has noticed it."""
CASTS_PER_S: Final = scale(25, 10)
MAY_RUN_OFTEN: Final = {"max_attempts": 30, "max_running": 8}


@pytest.fixture
def site(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, postgres: Postgres, schema: str
) -> Iterator[PostgresSite]:
    made = PostgresSite(tmp_path, shared_broker, rabbit_vhost, postgres, schema)
    yield made
    made.close()


def check_accounts(site: PostgresSite) -> None:
    """Accepted = terminal + transient + removed, and nobody owns anything who may not act."""
    (tally,) = site.rows("SELECT n FROM tally WHERE what = 'accepted'")
    (rows,) = site.rows("SELECT count(*) AS n FROM task")
    assert tally == rows
    assert site.transient() == []
    assert site.rows("SELECT 1 FROM lease WHERE owner IS NOT NULL") == []


async def test_what_a_drained_host_has_accepted_goes_on_at_its_sibling(site: PostgresSite) -> None:
    """It strands nothing: each call is answered, by whoever ran it in the end."""
    first = await site.start_on("one", max_running=4, **SHORT).serving()
    second = await site.start_on("two", max_running=4).serving()
    async with RpcClient(site.url, "shop") as client:
        view = client.prepare(timeout="120s")
        calls = [
            asyncio.create_task(view.call("retried", key=f"key-{n}", vm=f"vm-{n}", s=0.5))
            for n in range(24)
        ]
        await until(lambda: {e.pid for e in site.seen("start")} >= {first.pid, second.pid}, "both")
        code = await first.stop()
        answers = await asyncio.gather(*calls)

    assert code in {0, 75}
    assert answers == [f"key-{n}" for n in range(24)]
    assert first.pid in {effect.pid for effect in site.seen("start")}
    assert await second.stop() == 0
    check_accounts(site)


async def test_two_hosts_never_act_on_one_resource_at_a_time(site: PostgresSite) -> None:
    """One lease row decides for both; its token rises with each grant."""
    hosts = [await site.start_on(name).serving() for name in ("one", "two")]
    async with RpcClient(site.url, "shop") as client:
        view = client.prepare(timeout="120s")
        calls = [view.call("retried", key=f"key-{n}", vm="vm", s=0.05) for n in range(20)]
        await asyncio.gather(*calls)

    words = [effect.word for effect in site.effects if effect.word in {"start", "done"}]
    tokens = [int(effect.more[1]) for effect in site.seen("start")]
    assert words == ["start", "done"] * 20
    assert tokens == sorted(set(tokens))
    assert {effect.pid for effect in site.seen("done")} == {host.pid for host in hosts}


@pytest.mark.parametrize("liveness", scale(["normal"], ["normal", "slow"]))
async def test_a_server_that_is_killed_and_started_again_loses_nothing(
    liveness: str, tmp_path: Path, shared_broker: Broker, rabbit_vhost: str
) -> None:
    """Under load, beside services that are killed: what may be repeated is done, nothing else is
    begun twice, and the accounts are right.
    """
    with Postgres(fsync="on").running() as server:
        site = PostgresSite(tmp_path, shared_broker, rabbit_vhost, server, "gracekit")
        site.settings["liveness"] = liveness
        try:
            await _outages(site, server)
            check_accounts(site)
            _check_effects(site)
        finally:
            site.close()


async def _outages(site: PostgresSite, server: Postgres) -> None:
    hosts = ("one", "two")
    services = {host: await site.start_on(host, **MAY_RUN_OFTEN).serving() for host in hosts}
    enough = site.root / "enough"
    caster = site.caster("a", 0, per_second=CASTS_PER_S, enough=enough)
    for n, away_s in enumerate(OUTAGES_S):
        await site.effect("done", times=len(site.seen("done")) + 15)
        await asyncio.to_thread(server.kill)
        back = time.monotonic() + away_s
        victim = "one" if n % 2 else "two"
        services[victim].kill()
        for host, service in services.items():
            if host != victim:
                await service.wait_log("store.unreachable")
        while time.monotonic() < back:  # as a service manager does
            assert await site.start_on(victim, **MAY_RUN_OFTEN).exit_code() == 69
            await asyncio.sleep(1)
        await asyncio.to_thread(server.start)
        services[victim] = await site.start_on(victim, **MAY_RUN_OFTEN).serving()
    enough.touch()
    assert await asyncio.to_thread(caster.wait, 240) == 0
    casts = len(site.confirmed("a"))
    await until(lambda: len(site.rows("SELECT 1 FROM task")) == casts, "all on record", 600)
    await until(lambda: not site.transient(), "the end", 600)
    for service in services.values():
        assert await service.stop() == 0


def _check_effects(site: PostgresSite) -> None:
    done = Counter(effect.key for effect in site.seen("done"))
    started = Counter(effect.key for effect in site.seen("start"))
    repeatable = [key for key in site.confirmed("a") if "-slow-" not in key]
    assert set(repeatable) <= done.keys()
    assert max(n for key, n in started.items() if "-slow-" in key) == 1


async def test_a_start_without_a_server_ends_with_69_and_a_sentence(
    site: PostgresSite, postgres: Postgres
) -> None:
    """A service manager tries again; nothing is tried for longer than `connect_timeout`."""
    away = site.settings["store_url"].replace(str(postgres.port), "1")  # type: ignore[attr-defined]
    service = site.start_on("one", store_url=away)

    assert await service.exit_code() == 69
    assert "cannot be reached" in service.log


async def test_an_operator_who_knows_that_a_host_is_dead_need_not_wait(site: PostgresSite) -> None:
    """Its `error` task ends at once, and its caller hears so from another host."""
    first = await site.start_on("one", instance="one").serving()
    async with RpcClient(site.url, "shop") as client:
        call = asyncio.create_task(client.prepare(timeout="120s").call("slow", key="a", s=60))
        await site.effect("start", "a")
        first.kill()
        with site.connect() as connection:  # as if it were another machine
            connection.execute("UPDATE run SET boot_id = 'another'")
        second = await site.start_on("two").serving()
        await second.wait_log("run.not_proven")
        assert site.transient() != []
        assert await asyncio.to_thread(gone, site, str(first.run["run_id"])) == 0
        with pytest.raises(TaskInterruptedError):
            await call

    assert "run.declared_dead" not in second.log
    assert await second.stop() == 0
    check_accounts(site)


def gone(site: PostgresSite, run_id: str) -> int:
    """The command of an operator, on the second host."""
    words = ("runs", "gone", run_id, "--reason", "its power supply burns")
    ours = {
        "GRACEKIT_STORE_URL": str(site.settings["store_url"]),
        "GRACEKIT_RUN_DIRECTORY": str(site.root / "runs-two"),
    }
    command = (sys.executable, "-m", "gracekit", *words)
    return subprocess.run(command, cwd=ROOT, env=without_settings() | ours, check=False).returncode


# -- what callers ask --------------------------------------------------------------------------


def start_copier(site: PostgresSite, host: str) -> ServiceProcess:
    directory = site.root / f"runs-{host}"
    return site.start_program("copier", host=host, run_directory=directory)


async def test_a_host_answers_for_what_another_one_runs_and_cancels_it(site: PostgresSite) -> None:
    """A wait at one host ends when the other has ended the task; a cancel reaches its handler."""
    hosts = [await start_copier(site, name).serving() for name in ("one", "two")]
    async with RpcClient(site.url, "copies") as client:
        ada = client.prepare(context={"user_id": "ada"})
        here, there = ada.prepare(host="one"), ada.prepare(host="two")
        kept = await there.cast("copy", key="kept")
        cut = await there.cast("copy", key="cut")
        for key in ("kept", "cut"):
            await site.effect("start", key)
        assert (await here.state(kept)).state == "running"
        waiting = asyncio.create_task(here.result(kept, wait="60s"))
        with pytest.raises(UnknownTaskError):
            await here.prepare(context={"user_id": "eve"}).cancel(cut)
        await here.cancel(cut, reason="a mistake")
        with pytest.raises(TaskCancelledError, match="user ada: a mistake"):
            await here.result(cut, wait="60s")
        assert not waiting.done()
        (site.root / "kept").touch()

        assert await waiting == "kept on two"
        assert (await here.cancel(kept)).state == "succeeded"

    assert [effect.key for effect in site.seen("done")] == ["kept"]
    assert len(site.seen("start")) == 2
    assert [await host.stop() for host in hosts] == [0, 0]


async def test_a_cancel_outlives_the_host_that_was_to_carry_it_out(site: PostgresSite) -> None:
    """It is on record for a handler of a host that has died: who takes the task over ends it."""
    hosts = {name: await start_copier(site, name).serving() for name in ("one", "two")}
    async with RpcClient(site.url, "copies") as client:
        ada = client.prepare(context={"user_id": "ada"})
        task = await ada.prepare(host="two").cast("copy", key="cut")
        await site.effect("start", "cut")
        hosts["two"].kill()
        await ada.prepare(host="one").cancel(task)
        with pytest.raises(TaskCancelledError):
            await ada.prepare(host="one").result(task, wait="120s")

    assert await hosts["one"].stop() == 0
    await until(lambda: site.state(task) == "cancelled", "the end on record")
    assert len(site.seen("start")) == 1
    assert not site.seen("done")
