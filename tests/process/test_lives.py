"""Starts and ends of processes: stops that come early, exit codes, siblings."""

from __future__ import annotations

import asyncio
import resource
import signal
import urllib.request

import apsw
import pytest

from gracekit import RpcClient
from tests.admin.test_drains import free_port
from tests.cli.kit import gracekit
from tests.process import served, uprooted
from tests.process.helpers import Site, until

SHORT = {
    "drain_timeout": "1s",
    "handover_grace": "0.5s",
    "handover_flush": "0.5s",
    "exit_margin": "0.5s",
}

AT_ONCE = SHORT | {"startup_reconciliation_wait_seconds": "0.1s"}


async def test_term_before_the_start_has_finished_ends_in_one_clean_up(site: Site) -> None:
    """A stop that comes during `on_start` cancels it: no server was opened, the exit is 0."""
    service = site.start(test_start="slow")
    await site.effect("on_start")

    assert await service.stop() == 0

    assert "service.serving" not in service.log
    assert "Traceback" not in service.log
    assert len(site.seen("on_stop")) == 1
    assert (service.run["stop_by"], service.run["exit_code"]) == ("SIGTERM", 0)
    subscriptions = "SELECT count(*) AS n FROM subscription"
    assert site.transport_rows(subscriptions) == [{"n": 0}]


async def test_a_closed_terminal_drains(site: Site, client: RpcClient) -> None:
    """SIGHUP from the terminal that is standard input is a stop like SIGTERM: what runs ends."""
    service = await site.start_at_terminal().serving()
    await client.cast(served.through_drain, key="k", s=0.2)
    await site.effect("start", "k")

    site.close_terminal()

    assert await service.exit_code() == 0, service.log
    assert site.seen("done", "k")
    assert service.run["stop_by"] == "SIGHUP"


@pytest.mark.parametrize("nohup", [False, True], ids=["no terminal", "nohup"])
async def test_a_hangup_that_means_no_terminal_is_ignored(
    site: Site, client: RpcClient, nohup: bool
) -> None:
    """Where standard input is no terminal it is somebody's "reload"; under nohup it is not for
    us.
    """
    service = await (site.start_at_terminal(nohup=True) if nohup else site.start()).serving()

    service.signal(signal.SIGHUP)
    if nohup:
        site.close_terminal()
    else:
        await service.wait_log("SIGHUP is ignored")

    assert await client.prepare(timeout=30).call(served.slow, key="k", s=0.3) == "k"
    assert await service.stop() == 0
    assert service.run["stop_by"] == "SIGTERM"


@pytest.mark.parametrize("ignore", [True, False], ids=["ignored", "replaced"])
async def test_signals_that_a_handler_takes_are_taken_back_and_that_is_said(
    site: Site, client: RpcClient, ignore: bool
) -> None:
    """A handler that replaces the signal handlers, or ignores SIGTERM, does not keep the
    service.
    """
    service = await site.start().serving()
    await client.prepare(timeout=30).call(served.take_signals, ignore=ignore)

    await service.wait_log("signal.taken signal=SIGTERM")
    await service.wait_log("signal.taken signal=SIGINT")

    assert await service.stop() == 0
    assert service.run["stop_by"] == "SIGTERM"
    assert not site.seen("stolen")


async def test_a_blocked_term_is_unblocked_and_that_is_said_once(
    site: Site, client: RpcClient
) -> None:
    """A parent that has blocked SIGTERM does not keep the service, nor what its handlers start."""
    service = await site.start_inside("env", "--block-signal=TERM").serving()
    await service.wait_log("signal.taken signal=SIGTERM")
    told = service.log.count("signal.taken")

    died_of = await client.prepare(timeout=30).call(served.terminate_child)

    assert died_of == -signal.SIGTERM
    assert await service.stop() == 0
    assert service.run["stop_by"] == "SIGTERM"
    assert (told, service.log.count("signal.taken")) == (1, 1)


async def test_term_while_on_start_is_stuck_in_a_thread_leaves_at_once(site: Site) -> None:
    """An `on_start` whose thread nobody can stop does not keep the process until the alarm."""
    service = site.start(test_start="thread", drain_timeout="60s")
    await site.effect("in_thread")

    assert await service.stop() == 0
    assert service.run["exit_code"] == 0


async def test_term_during_recovery_leaves_every_row_settled_or_claimable(
    site: Site, client: RpcClient
) -> None:
    """A stop while a start is busy with slow probes ends on time; what was not settled is settled
    by the start after it.
    """
    first = await site.start().serving()
    ids = [await client.cast(served.probed, key=f"p{n}", s=300) for n in range(60)]
    await site.effect("start", times=len(ids))
    first.kill()

    second = site.start(test_probe_s="0.7", **SHORT)
    await site.effect("probe")
    code = await second.stop()

    assert code in {0, 75}
    assert "Traceback" not in second.log
    rows = site.transient()
    assert len(rows) == len(ids)
    assert {row["state"] for row in rows} <= {"handed_over", "accepted"}
    assert {row["owner"] for row in rows} <= {None, second.run["run_id"]}

    third = await site.start().serving()
    await site.effect("start", times=2 * len(ids))  # each probe says Retry: each runs again
    assert {row["crashes"] for row in site.transient()} == {1}
    third.kill()


@pytest.mark.parametrize("named", [True, False], ids=["named", "by default"])
async def test_second_run_of_the_same_instance_is_refused(site: Site, named: bool) -> None:
    """While an instance lives, a second run of it ends with 78 and says why; without a name it
    takes the next free slot.
    """
    instance = {"instance": "one"} if named else {}
    first = await site.start(**instance).serving()

    second = site.start(**instance)

    if named:
        assert await second.exit_code() == 78
        assert "instance 'one' of service 'shop' is running" in second.log
        assert "Traceback" not in second.log
        assert "GRACEKIT_INSTANCE" in second.log, "the remedy is named"
    else:
        await second.serving()
        assert {first.run["instance"], second.run["instance"]} == {"node-a-0", "node-a-1"}
        assert await second.stop() == 0
    assert await first.stop() == 0


async def test_instance_may_start_again_when_its_run_is_dead(site: Site) -> None:
    """A killed run frees its instance at once: the next run of it is its next generation."""
    first = await site.start(instance="one").serving()
    first.kill()

    again = await site.start(instance="one").serving()

    assert again.run["generation"] == 2
    assert first.run["verdict"] == "killed"
    assert await again.stop() == 0


async def test_wrong_setting_is_78_and_failed_start_is_70(site: Site) -> None:
    """A setting that cannot be ends with 78, an application that cannot start with 70; both say
    so.
    """
    wrong = site.start(drain_timeout="soon")
    failed = site.start(test_start="fail")

    assert await wrong.exit_code() == 78
    assert "'soon' is not a duration" in wrong.log
    assert await failed.exit_code() == 70
    assert "the device is not there" in failed.log
    assert failed.run["exit_code"] == 70


async def test_a_disk_that_takes_no_more_ends_the_service_in_order_and_loses_nothing(
    site: Site, client: RpcClient
) -> None:
    """Writes that fail while it serves stop intake and end in exit 70; the next start runs the
    rest.
    """
    service = await site.start(**SHORT).serving()
    before = [await client.cast(served.retried, key=f"b{n}", vm=f"v{n}", s=0) for n in range(5)]
    await site.effect("done", times=len(before))
    # From here on no file of the service grows beyond what its journal has reached.
    size = site.store.with_name(f"{site.store.name}-wal").stat().st_size
    resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (size, size))
    after = [await client.cast(served.retried, key=f"a{n}", vm=f"v{n}", s=0) for n in range(20)]

    assert await service.exit_code() == 70
    assert "store.broken" in service.log
    assert service.run["exit_code"] in {None, 70}  # the record itself may have found no room

    again = await site.start().serving()
    for request_id in before + after:
        await site.in_state(request_id, "succeeded")
    assert await again.stop() == 0
    assert site.queued() == 0


async def test_killed_sibling_is_settled_by_the_living_and_their_own_rows_are_not_touched(
    site: Site, client: RpcClient
) -> None:
    """Of three siblings one is killed: the others finish its work without a restart, and the long
    task of a living sibling stays that sibling's, started once.
    """
    names = ("node-a", "node-b", "node-c")
    a, b, c = [site.start(host=name, reconcile_every="0.3s") for name in names]
    for process in (a, b, c):
        await process.serving()
    living = await client.prepare(host="node-b").cast(served.through_drain, key="mine", s=0.1)
    await site.effect("start", "mine")
    ids = [await client.cast(served.held, key=f"r{n}", vm=f"v{n}") for n in range(30)]
    await site.effect("start", times=1 + len(ids))
    victim = await until(
        lambda: next((p for p in (a, c) if owned(site, p.run["run_id"])), None), "a victim"
    )
    run_id = victim.run["run_id"]
    victim.kill()
    lost = adopted(site, run_id) | owned(site, run_id)
    assert lost
    site.go()

    for one in ids:
        await site.in_state(one, "succeeded")
    rows = site.rows("SELECT * FROM task WHERE method = 'held'")
    twice = {row["request_id"] for row in rows if row["attempts"] == 2}
    assert twice == lost, "what the victim ran is run again, and nothing else"
    assert {row["attempts"] for row in rows} == {1, 2}
    mine = site.task(living)
    assert (mine["state"], mine["owner"], mine["attempts"]) == ("running", b.run["run_id"], 1)
    assert victim.run["verdict"] == "killed"
    rest = [p for p in (a, b, c) if p is not victim]
    assert [await p.stop() for p in rest] == [0, 0]
    assert site.state(living) == "succeeded"
    assert len(site.seen("start", "mine")) == 1


def owned(site: Site, run_id: str) -> set[str]:
    rows = site.rows("SELECT request_id FROM task WHERE owner = ? AND state = 'running'", run_id)
    return {row["request_id"] for row in rows}


def adopted(site: Site, run_id: str) -> set[str]:
    rows = site.rows(
        "SELECT request_id FROM incident WHERE what = 'adopted' AND detail LIKE ?",
        f"% (run {run_id})",
    )
    return {row["request_id"] for row in rows}


async def test_a_full_disk_is_no_tasks_crash(site: Site, client: RpcClient) -> None:
    """The store cannot take the record of the end; the code stands in the run's lock file."""
    first = await site.start(instance="api", **AT_ONCE).serving()
    request_id = await client.cast(served.retried, key="r", vm="v", s=60, again_s=0.1)
    await site.effect("start", "r")
    await client.cast(served.fills_disk, key="f")

    assert await first.exit_code() == 70
    assert first.run["exit_code"] is None
    second = await site.start(instance="api", **AT_ONCE).serving()
    await site.in_state(request_id, "succeeded")

    assert (first.run["verdict"], first.run["exit_code"]) == ("failed", 70)
    assert site.task(request_id)["crashes"] == 0
    assert await second.stop() == 0


@pytest.mark.parametrize("trouble", ["full disk", "locked store"])
async def test_a_stop_that_the_store_cannot_take_and_a_kill_are_no_tasks_crash(
    site: Site, client: RpcClient, trouble: str
) -> None:
    """The stop-intent stands in the run's lock file: a supervisor that lost patience is not charged
    to what was running.
    """
    first = await site.start(instance="api", **AT_ONCE).serving()
    request_id = await client.cast(served.retried, key="r", vm="v", s=60, again_s=0.1)
    await site.effect("start", "r")
    store = apsw.Connection(str(site.store))
    if trouble == "full disk":
        await client.cast(served.fills_disk, key="f")
        await first.wait_log("store.broken")
    else:
        store.execute("BEGIN IMMEDIATE")
        first.terminate()
    await first.wait_log("drain.started")
    first.kill()
    store.close()
    second = await site.start(instance="api", **AT_ONCE).serving()
    await site.in_state(request_id, "succeeded")

    assert first.run["verdict"] == "stop_timeout"
    assert site.task(request_id)["crashes"] == 0
    assert await second.stop() == 0


async def test_a_damaged_note_in_a_lock_file_says_nothing(site: Site, client: RpcClient) -> None:
    """The run is taken over as one that was killed."""
    first = await site.start(instance="api", **AT_ONCE).serving()
    request_id = await client.cast(served.retried, key="r", vm="v", s=60, again_s=0.1)
    await site.effect("start", "r")
    first.kill()
    lock = site.root / f"{site.store.name}-runs" / f"{first.run['run_id']}.lock"
    lock.write_text("ended with seventy\n")

    second = await site.start(instance="api", **AT_ONCE).serving()
    await site.in_state(request_id, "succeeded")

    assert first.run["verdict"] == "killed"
    assert await second.stop() == 0


async def test_a_service_goes_on_and_drains_when_its_environment_is_gone(site: Site) -> None:
    """An upgrade in place removes modules under a living service: a plain handler that comes later,
    `gracekit dump` and a plain hook at the end need threads, which had no use before, and the
    first scrape needs what writes metrics.
    """
    address = f"127.0.0.1:{free_port()}"
    service = await site.start_program("uprooted", admin=address).serving()
    async with uprooted.svc.client(site.url) as client:
        assert await client.call(uprooted.lose_environment) is True
        assert await client.call(uprooted.in_thread) is False
    store = f"sqlite:///{site.store}"
    dumped = await asyncio.to_thread(gracekit, site.root, "dump", GRACEKIT_STORE_URL=store)
    scraped = await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics")

    assert dumped.code == 0, dumped
    assert b"gracekit_" in scraped.read()
    assert await service.stop() == 0, service.log
    assert site.seen("on_stop")
    assert "Error" not in service.log
