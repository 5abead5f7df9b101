"""Each commit ends as it was answered, whatever is cut and however long a standby takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from gracekit.errors import (
    StoreError,
    StoreFencedError,
    StoreUnreachableError,
    UnknownCommitError,
)
from gracekit.process import Point, Process, Side
from gracekit.store.batch import Batch
from gracekit.store.postgres import postgres_group, postgres_link
from gracekit.store.state import StoreState
from tests.postgres.kit import Site, until
from tests.rabbit.proxy import Counts, Way
from tests.scale import scale
from tests.store.engine_suite import Heard, keys, put
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]

CUTS: Final = scale(50, 500)
LAST: Final = 60
"""Bytes at the end of a commit, of which COMMIT and its answer are a part."""
WAITS_FOR_STANDBY: Final = """
SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'gracekit'"""
WAITS_FOR_LOCK: Final = """
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Postgres, Postgres]]:
    """A server whose commits wait until its standby has applied them, and that standby."""
    settings = {"synchronous_standby_names": "*", "synchronous_commit": "remote_apply"}
    primary, standby = Postgres(**settings), Postgres(recovery_min_apply_delay="50ms")
    with primary.running(), standby.copy_of(primary):
        yield primary, standby


@pytest.fixture
def far(pair: tuple[Postgres, Postgres], schema: str) -> Iterator[Site]:
    """A schema of the primary."""
    with Site(pair[0], schema) as site:
        yield site


@pytest.fixture
def paused(pair: tuple[Postgres, Postgres]) -> Iterator[Callable[[bool], None]]:
    """Has the standby apply nothing, and all again."""

    def pause(on: bool) -> None:
        with pair[1].connect() as standby:
            standby.execute(f"SELECT pg_wal_replay_{'pause' if on else 'resume'}()")

    yield pause
    pause(False)


class Hook(Process):
    """Does something once, when the first commit is about to begin."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def reach(self, point: Point, phase: Side) -> None:
        if phase == "before":
            act, self._act = self._act, lambda: None
            act()


async def test_a_connection_lost_before_commit_is_replaced_and_the_group_done_again(site: Site):
    """Nothing was done on the lost one, so nobody need know: not even the status changes."""
    async with site.opened() as engine:
        heard = Heard(engine)
        await engine.commit(put(1))
        await asyncio.to_thread(site.proxy.cut)
        await engine.commit(put(2))

        assert await keys(engine) == [1, 2]
        assert heard.states == []


async def test_a_commit_whose_connection_is_cut_is_unknown(site: Site):
    """Whether COMMIT has arrived is not known; then the rows say it."""
    async with site.opened(Hook(site.proxy.cut)) as engine:
        heard = Heard(engine)
        with pytest.raises(UnknownCommitError):
            await engine.commit(put(1))

        assert await keys(engine) == []
        assert heard.states == [StoreState.UNREACHABLE, StoreState.REACHABLE]


async def test_an_unknown_commit_is_answered_when_it_has_ended(
    far: Site, paused: Callable[[bool], None]
):
    """While a standby holds it up nobody sees it; whoever read then would think that it failed."""
    async with far.opened() as engine:
        paused(True)
        commit = engine.submit(put(1))
        await far.until(WAITS_FOR_STANDBY)
        await asyncio.to_thread(far.proxy.cut)
        await far.until(WAITS_FOR_LOCK)
        with pytest.raises(StoreUnreachableError):
            await engine.query("SELECT key FROM kv")
        assert not commit.done()
        assert far.keys() == set()
        paused(False)
        with pytest.raises(UnknownCommitError):
            await commit

        assert await keys(engine) == [1]


async def test_a_commit_that_waits_for_a_standby_for_too_long_is_given_up(
    far: Site, paused: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
):
    """The store is unreachable until that commit has ended, and nobody ends it for that."""
    monkeypatch.setattr(postgres_group, "COMMIT_S", 0.5)
    monkeypatch.setattr(postgres_group, "FROZEN_S", 0.0)
    monkeypatch.setattr(postgres_link, "LOCK_TIMEOUT_S", 1)
    async with far.opened() as engine:
        heard = Heard(engine)
        paused(True)
        with pytest.raises(UnknownCommitError, match="does not answer in time"):
            await engine.commit(put(1))
        with pytest.raises(StoreUnreachableError):
            await engine.commit(put(2))
        assert await far.until(WAITS_FOR_STANDBY)
        paused(False)
        await heard.wait(StoreState.REACHABLE)

        assert await keys(engine) == [1]


async def test_a_commit_whose_wait_was_cancelled_is_unknown(
    far: Site, paused: Callable[[bool], None]
):
    """The server reports success with a warning, although no standby has the commit."""
    async with far.opened() as engine:
        paused(True)
        commit = engine.submit(put(1))
        ((pid,),) = await far.until(WAITS_FOR_STANDBY)
        far.ask("SELECT pg_cancel_backend(%s)", pid)
        with pytest.raises(UnknownCommitError, match="synchronous replication"):
            await commit
        paused(False)

        assert await keys(engine) == [1]


async def test_a_run_that_may_not_act_any_more_when_it_gets_the_lock_is_fenced(site: Site):
    """The lock is a statement of its own: the guard behind it sees what was committed meanwhile."""
    async with site.opened() as engine:
        await engine.commit(put(1))
        engine.guard("SELECT 1 FROM kv WHERE key = ?", 1)
        with site.server.connect() as other, other.transaction():
            other.execute(f"SELECT pg_advisory_xact_lock({site.lock})")
            commit = engine.submit(put(2))
            await site.until(WAITS_FOR_LOCK)
            other.execute(f"DELETE FROM {site.schema}.kv")
        with pytest.raises(StoreFencedError):
            await commit

        assert site.keys() == set()


async def test_what_is_cut_at_any_byte_ends_as_it_was_answered(far: Site):
    """A row is there after a success, absent after a refusal, and as it reads after an unknown."""
    dice = random.Random(1)
    ended: dict[str, int] = {}
    async with far.opened() as engine:
        await asyncio.to_thread(far.proxy.cut)
        far.proxy.counts = Counts()
        await engine.commit(put(CUTS, "x" * 100))
        needed = dict(far.proxy.counts.passed)  # by a commit on a new connection
        for key in range(CUTS):
            way = dice.choice(list(Way))
            least = 1 if key % 2 else needed[way] - LAST  # every second one at its COMMIT
            far.proxy.cut_after(dice.randint(least, needed[way] + LAST // 3), way)
            await asyncio.to_thread(far.proxy.cut)
            batch = put(key, "x" * 100)
            try:
                await engine.commit(batch)
                end = "done"
            except UnknownCommitError:
                end = "unknown"
            except StoreError:
                end = "refused"
            await asyncio.to_thread(far.proxy.heal)
            await asyncio.to_thread(far.proxy.cut)  # also what has bytes left
            await until(lambda: engine.status.state is StoreState.REACHABLE, "reachable")
            seen = key in await keys(engine)
            ended[end] = ended.get(end, 0) + 1

            assert end == "unknown" or seen == (end == "done")
            assert seen == ({key} <= far.keys())
            if seen:
                continue
            again: Batch = put(key)
            await engine.commit(again)  # what was refused or lost is not done later
    assert far.keys() == set(range(CUTS + 1))
    assert {"unknown", "refused"} <= set(ended), ended
