"""A store that is older than what was there before: it is said, and no token is given twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import ROOT, Site


async def fence(site: Site, client: RpcClient, key: str) -> int:
    """The token that one request for the resource v1 gets."""
    await client.prepare(timeout=30).call(served.retried, key=key, vm="v1", s=0.0)
    (start,) = await site.effect("start", key)
    return int(start.more[1])


def backup(site: Site, target: Path) -> str:
    command = [sys.executable, "-m", "gracekit", "store", "backup", str(target)]
    store = f"sqlite:///{site.store}"
    found = subprocess.run(
        [*command, "--store", store], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def lose_store(site: Site) -> None:
    for path in site.root.glob(f"{site.store.name}*"):
        if path.is_file():
            path.unlink()


@pytest.mark.parametrize("lost", ["restored", "deleted", "deleted with its locks"])
async def test_an_older_store_is_said_to_be_one_and_its_tokens_rise(
    site: Site, client: RpcClient, lost: str
) -> None:
    """Known by the lock directory, by the queue where that is gone too, and by the copy itself."""
    copy = site.root / "copy.db"
    service = await site.start().serving()
    assert await fence(site, client, "a") == 1
    if lost == "restored":
        backup(site, copy)
    assert [await fence(site, client, key) for key in ("b", "c")] == [2, 3]
    assert await service.stop() == 0

    lose_store(site)
    if lost == "restored":
        shutil.copy(copy, site.store)
        site.store.chmod(0o600)
    elif lost == "deleted with its locks":
        shutil.rmtree(f"{site.store}-runs")

    is_empty = lost.startswith("deleted")
    await check_said_once_and_tokens_rise(site, client, above=3, is_empty=is_empty)


async def check_said_once_and_tokens_rise(
    site: Site, client: RpcClient, *, above: int, is_empty: bool
) -> None:
    """At the next start, and not at the one after it."""
    again = await site.start().serving()
    assert again.log.count("store.older") == 1
    assert ("it is new and empty" in again.log) == is_empty
    after = await fence(site, client, "d")
    assert after > above
    assert await again.stop() == 0
    third = await site.start().serving()
    assert "store.older" not in third.log
    assert await fence(site, client, "e") == after + 1
    assert await third.stop() == 0


@pytest.mark.parametrize("locks", ["with its locks", "locks left"])
@pytest.mark.parametrize("checkpointed", [True, False], ids=["older rows", "no rows"])
async def test_a_store_that_lost_its_wal_is_said_to_be_older_and_its_tokens_rise(
    site: Site, client: RpcClient, checkpointed: bool, locks: str
) -> None:
    """A killed process leaves its last commits in the `-wal`. Without that, the main file is an
    older store, or an empty one: known by the lock directory, and by the queue where that is gone
    too.
    """
    service = await site.start().serving()
    before = await fence(site, client, "a")
    if checkpointed:
        assert await service.stop() == 0
        service = await site.start().serving()
    for key in ("b", "c"):
        before = await fence(site, client, key)
    service.kill()
    wal = site.store.with_name(f"{site.store.name}-wal")
    assert wal.stat().st_size > 0

    wal.unlink()
    if locks == "with its locks":
        shutil.rmtree(f"{site.store}-runs")

    await check_said_once_and_tokens_rise(site, client, above=before, is_empty=not checkpointed)


@pytest.mark.parametrize("lost", ["restored", "deleted"])
async def test_two_that_start_at_once_on_an_older_store_both_raise_its_tokens(
    site: Site, client: RpcClient, lost: str
) -> None:
    """Neither fails, it is said, and whichever of them grants a token, it is above all before."""
    copy = site.root / "copy.db"
    service = await site.start().serving()
    before = [await fence(site, client, "a")]
    backup(site, copy)
    before += [await fence(site, client, key) for key in ("b", "c")]
    assert await service.stop() == 0

    lose_store(site)
    if lost == "restored":
        shutil.copy(copy, site.store)
        site.store.chmod(0o600)
    both = [site.start(), site.start()]
    for one in both:
        await one.serving()

    assert "store.older" in "".join(one.log for one in both)
    tokens = [await fence(site, client, f"d{n}") for n in range(4)]
    assert await both[0].stop() == 0
    tokens.append(await fence(site, client, "e"))
    assert await both[1].stop() == 0
    third = await site.start().serving()
    tokens.append(await fence(site, client, "f"))
    assert await third.stop() == 0
    assert before + tokens == sorted({*before, *tokens})
    assert "store.older" not in third.log


async def test_a_backup_that_nothing_beside_it_knows_is_one_by_its_own_word(
    site: Site, client: RpcClient
) -> None:
    """On another machine, with another queue, nothing but the copy says that it is one."""
    service = await site.start().serving()
    assert await fence(site, client, "a") == 1
    backup(site, site.root / "copy.db")
    assert await service.stop() == 0

    lose_store(site)
    shutil.rmtree(f"{site.store}-runs")
    for path in site.root.glob(f"{site.transport.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (site.root / "copy.db").rename(site.store)
    again = await site.start().serving()

    assert again.log.count("store.older") == 1
    assert await again.stop() == 0


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_a_store_that_is_the_last_one_is_not_said_to_be_older(
    site: Site, client: RpcClient, killed: bool
) -> None:
    """An ordinary start, also beside a sibling and after a crash, goes on with the tokens."""
    first = await site.start().serving()
    second = await site.start().serving()
    before = await fence(site, client, "a")
    if killed:
        first.kill()
    else:
        assert await first.stop() == 0
    third = await site.start().serving()

    assert await fence(site, client, "b") == before + 1
    for service in (second, third):
        assert "store.older" not in service.log
        assert await service.stop() == 0


def verdicts(site: Site) -> list[str]:
    """Of the runs that have ended, as `gracekit status` shows them."""
    command = [sys.executable, "-m", "gracekit", "status", "--json"]
    store = f"sqlite:///{site.store}"
    found = subprocess.run(
        [*command, "--store", store], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert found.returncode == 0, found.stderr
    return [one["verdict"] for one in json.loads(found.stdout)["last_exits"]]


async def test_a_run_whose_end_was_only_in_the_newer_store_is_not_called_killed(
    site: Site, client: RpcClient
) -> None:
    """It has drained after the copy was made, which is known neither before the next start nor
    later.
    """
    copy = site.root / "copy.db"
    service = await site.start().serving()
    backup(site, copy)
    assert await service.stop() == 0
    assert verdicts(site) == ["drained"]

    lose_store(site)
    shutil.copy(copy, site.store)
    site.store.chmod(0o600)
    before = verdicts(site)
    again = await site.start().serving()

    assert (before, verdicts(site)) == (["unknown"], ["unknown"])
    again.kill()
    third = await site.start().serving()
    assert sorted(verdicts(site)) == ["killed", "unknown"]
    assert await third.stop() == 0


async def test_what_was_accepted_in_a_restored_store_is_not_run_twice_unasked(
    site: Site, client: RpcClient
) -> None:
    """It may have begun, and ended, since the copy was made: `error` marks it, `retry` runs it
    again.
    """
    copy = site.root / "copy.db"
    service = await site.start(max_running=1).serving()
    first = await client.cast(served.held, key="first", vm="v")
    await site.effect("start", "first")
    once = await client.cast(served.slow, key="once", s=0)
    again = await client.cast(served.retried, key="again", vm="w", s=0)
    for one in (once, again):
        await site.in_state(one, "accepted")
    backup(site, copy)
    site.go()
    for one in (once, again):
        await site.in_state(one, "succeeded")
    assert await service.stop() == 0

    lose_store(site)
    shutil.copy(copy, site.store)
    site.store.chmod(0o600)
    restored = await site.start().serving()
    await site.in_state(once, "errored")
    for one in (first, again):
        await site.in_state(one, "succeeded")

    assert site.task(once)["reason"] == "interrupted"
    assert "it is not known whether it has begun since" in site.task(once)["detail"]
    assert (len(site.seen("done", "once")), len(site.seen("done", "again"))) == (1, 2)
    assert await restored.stop() == 0
