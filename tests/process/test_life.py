"""Who is alive, asked by real processes: in other namespaces, after forks, over lost files.

In each of the first tests a living run has a task at work that may not be run twice, and a second
run starts that sees the first one badly. It must leave the task alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import ServiceProcess, Site, until

OWN_PIDS: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
OTHER_TIME: Final = ("unshare", "--time", "--fork", "--kill-child", "--boottime", "1000000")
EXEC: Final = 'exec "$0" "$@"'
OTHER_BOOT_ID: Final = (
    "unshare", "--mount", "sh", "-c",
    f"mount --bind boot_id /proc/sys/kernel/random/boot_id && {EXEC}",
)  # fmt: skip
# A new mount of /proc: a remount would change the one that the whole machine uses.
HIDING: Final = (
    "unshare", "--mount", "sh", "-c", f"mount -t proc -o hidepid=2 proc /proc && {EXEC}",
    "setpriv", "--bounding-set=-sys_ptrace", "--regid=1", "--clear-groups",
)  # fmt: skip

SHORT: Final = {
    "drain_timeout": "1s",
    "handover_grace": "0.5s",
    "handover_flush": "0.5s",
    "exit_margin": "0.5s",
}


def can(*command: str) -> bool:
    """Whether this user may set up such namespaces here."""
    try:
        return not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


def needs(*command: str) -> None:
    if not can(*command):
        pytest.skip(f"{' '.join(command[:3])} is not allowed here: it takes root")


@pytest.fixture
def directory(site: Site, monkeypatch: pytest.MonkeyPatch) -> Path:
    (site.root / "boot_id").write_text("00000000-0000-4000-8000-000000000000\n")
    monkeypatch.chdir(site.root)
    return site.store.with_name(f"{site.store.name}-runs")


def instance(site: Site, name: str) -> dict[str, object]:
    return site.rows("SELECT * FROM run WHERE instance = ?", name)[-1]


async def at_work(client: RpcClient, site: Site, **settings: object) -> tuple[ServiceProcess, str]:
    """A living run with a task that is never run twice."""
    run = await site.start(instance="first", **settings).serving()
    request_id = await client.cast(served.through_drain, key="mine", s=0.1)
    await site.effect("start", "mine")
    return run, request_id


async def left_alone(site: Site, first: ServiceProcess, request_id: str) -> None:
    """The second run has looked around, and the first one still has its task."""
    row = site.task(request_id)
    assert (row["state"], row["owner"]) == ("running", instance(site, "first")["run_id"])
    assert not first.ended
    assert await first.stop() == 0
    assert site.state(request_id) == "succeeded"


@pytest.mark.parametrize(
    "view",
    [OTHER_BOOT_ID, OTHER_TIME, OWN_PIDS, HIDING],
    ids=["boot id mounted over", "time namespace", "pid namespace", "hidepid"],
)
async def test_a_living_run_is_seen_to_live_from_any_namespace(
    site: Site, client: RpcClient, directory: Path, view: tuple[str, ...]
) -> None:
    """The kernel's lock is the same for all; what /proc shows is not, and proves nothing there."""
    needs(*view)
    first, request_id = await at_work(client, site)

    second = await site.start_inside(*view, instance="second", **SHORT).serving()
    assert "run.not_proven" not in second.log
    await left_alone(site, first, request_id)


@pytest.mark.parametrize("view", [OTHER_BOOT_ID, OWN_PIDS, HIDING], ids=["boot", "pid", "hidepid"])
async def test_a_removed_run_directory_proves_nothing_where_the_processes_cannot_be_seen(
    site: Site, client: RpcClient, directory: Path, view: tuple[str, ...]
) -> None:
    """A cleaner of old files has removed it: the run is reported as not proven, and left alone."""
    needs(*view)
    first, request_id = await at_work(client, site, look_every="1h")
    shutil.rmtree(directory)

    second = await site.start_inside(*view, instance="second", **SHORT).serving()

    await second.wait_log("run.not_proven")
    await left_alone(site, first, request_id)


async def test_a_removed_run_directory_hides_no_death_from_the_process_table(
    site: Site, client: RpcClient, directory: Path
) -> None:
    """In the same pid namespace a process that is gone is proven dead without its lock."""
    first, request_id = await at_work(client, site, look_every="1h")
    shutil.rmtree(directory)
    first.kill()

    await site.start(instance="second").serving()

    await site.in_state(request_id, "errored")


async def test_a_handler_that_opens_and_closes_the_lock_files_does_not_drop_the_locks(
    site: Site, client: RpcClient, directory: Path
) -> None:
    """A POSIX lock is dropped when any descriptor of its file is closed; ours is not."""
    needs(*OWN_PIDS)
    first, request_id = await at_work(client, site)
    await client.call(served.touches_locks, key="t", directory=str(directory))

    await site.start_inside(*OWN_PIDS, instance="second", **SHORT).serving()

    await left_alone(site, first, request_id)


@pytest.mark.parametrize("how", ["fork", "multiprocessing", "subprocess"])
async def test_an_orphaned_child_does_not_keep_its_dead_parent_alive(
    site: Site, client: RpcClient, how: str
) -> None:
    """A forked child shares the lock's descriptor, so it closes it at the fork; an exec closes
    it.
    """
    needs(*OWN_PIDS)
    first, request_id = await at_work(client, site)
    child = await client.call(served.leaves_a_child, key="c", how=how)
    first.kill()
    try:
        os.kill(child, 0)
        await site.start_inside(*OWN_PIDS, instance="second").serving()

        await site.in_state(request_id, "errored")
        assert instance(site, "first")["verdict"] == "killed"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_a_process_that_replaced_itself_is_proven_dead_to_its_successor(
    site: Site, client: RpcClient
) -> None:
    """Pid and start are the same after an exec; the former program's lock is gone, and its tasks
    are the next one's.
    """
    service = await site.start(instance="first").serving()
    request_id = await client.cast(served.replaces_process, key="r")
    await service.wait_log("service.serving", times=2)

    await site.in_state(request_id, "succeeded")
    assert {effect.pid for effect in site.seen("start")} == {service.pid}
    assert await service.stop() == 0


async def test_a_runtime_that_was_built_before_its_daemon_forked_is_seen_to_live(
    site: Site, client: RpcClient
) -> None:
    """Its identity is the child's, who opened it, not that of the parent that is gone."""
    first = site.start_program("forked", test_forked="daemon", instance="first")
    assert await first.exit_code() == 0
    await until(lambda: "service.serving" in first.log, "the daemon serves")
    pid = int(str(instance(site, "first")["pid"]))
    try:
        request_id = await client.cast(served.through_drain, key="mine", s=0.1)
        await site.effect("start", "mine")

        await site.start(instance="second", **SHORT).serving()

        assert site.seen("start")[0].pid == pid
        assert site.task(request_id)["state"] == "running"
        os.kill(pid, signal.SIGTERM)
        await site.in_state(request_id, "succeeded")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_workers_forked_from_one_runtime_are_proven_dead_one_by_one(
    site: Site, client: RpcClient
) -> None:
    """Each has an identity of its own: what the killed one left is recovered while the other
    lives.
    """
    parent = site.start_program("forked", test_forked="workers", reconcile_every="0.3s")
    await parent.wait_log("service.serving", times=2)
    request_id = await client.cast(served.through_drain, key="mine", s=0.1)
    (begun,) = await site.effect("start", "mine")

    os.kill(begun.pid, signal.SIGKILL)

    await site.in_state(request_id, "errored")
    (other,) = {int(str(r["pid"])) for r in site.rows("SELECT pid FROM run")} - {begun.pid}
    os.kill(other, signal.SIGTERM)
    assert await parent.exit_code() == 0


# -- what a run sees of itself ------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_run_whose_lock_file_is_lost_stops_and_says_so(
    site: Site, client: RpcClient, directory: Path, how: str
) -> None:
    """Others can no longer see that it lives: it takes no more work, drains, and ends with 70."""
    first, request_id = await at_work(client, site)
    for lock in directory.glob("*.lock"):
        lock.unlink()
        if how == "replaced":
            lock.touch(0o600)

    assert await first.exit_code() == 70

    assert f"{directory}" in first.log
    assert f"was {how}" in first.log
    assert site.state(request_id) == "succeeded", "an orderly drain: its task was waited for"
    assert first.run["exit_code"] == 70


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"], ids=["main", "wal", "shm"])
@pytest.mark.parametrize("which", ["store", "transport"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_store_or_queue_file_that_is_lost_ends_the_service(
    site: Site, client: RpcClient, which: str, how: str, suffix: str
) -> None:
    """What is written to the old file is nowhere any more: intake stops, and the exit is 70."""
    first = await site.start(**SHORT).serving()
    main: Path = getattr(site, which)
    path = main.with_name(f"{main.name}{suffix}")
    if how == "replaced":
        fresh = path.with_name("fresh")
        shutil.copy(path, fresh)
        fresh.replace(path)
    else:
        path.unlink()

    assert await first.exit_code() == 70

    assert f"{path} was {how}" in first.log


@pytest.mark.parametrize(
    ("then", "loop"),
    [
        ("exits", "asyncio"),
        ("raises", "asyncio"),
        ("awaits", "asyncio"),
        ("returns", "asyncio"),
        ("awaits", "uvloop"),
    ],
)
async def test_a_forked_child_that_comes_back_into_the_service_leaves_at_once(
    site: Site, client: RpcClient, then: str, loop: str
) -> None:
    """One service goes on, and ends in order; the child would have been a second one on its epoll.
    It runs nothing of the service, not even what was ready at the fork.
    """
    service = await site.start(loop=loop, **SHORT).serving()

    child = await client.call(served.forks, key="f", then=then)

    await until(lambda: not served.is_alive(child), "the child is gone", within_s=5)
    assert not site.seen("went_on")
    assert [ready.pid for ready in site.seen("ready")] == [service.pid]
    assert f"process {child} is a fork of {service.pid}" in service.log
    assert await client.call(served.slow, key="s", s=0) == "s"
    began = time.monotonic()
    assert await service.stop() == 0
    assert time.monotonic() - began < 3
    assert service.log.count("service.stopped") == 1


async def test_a_child_forked_by_a_thread_of_the_service_leaves_when_it_returns(
    site: Site, client: RpcClient
) -> None:
    """The child has that thread alone, which would wait for work for ever."""
    service = await site.start(**SHORT).serving()

    child = await client.call(served.forks_in_thread, key="f")

    await until(lambda: not served.is_alive(child), "the child is gone", within_s=5)
    assert await service.stop() == 0
