"""Holds across lives: what a dead run left over is taken on, or settled, never both."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gracekit.clock import Clock
from gracekit.errors import GracekitError
from gracekit.journal.holds import Hold, Holds
from gracekit.journal.tasks import Journal
from gracekit.process import Point, Process
from gracekit.store.batch import Batch
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import MemoryEngine


@pytest.fixture
async def engine() -> AsyncIterator[MemoryEngine]:
    engine = MemoryEngine(load_migrations(MIGRATIONS), process=Process())
    await engine.start()
    yield engine
    await engine.stop()


def holds_of(engine: MemoryEngine, run_id: str) -> Holds:
    return Holds(Journal(engine, Clock(), run_id=run_id, service="compute"), host="node-1")


async def open_hold(holds: Holds, at_most_s: float = 900.0) -> None:
    await holds.open(
        "migration", "vm-1", at_most_s=at_most_s, method=(None, "prepare", "1.0"), args={}
    )


async def left_over(engine: MemoryEngine) -> Hold:
    """A hold of a run that was proven dead."""
    dead = holds_of(engine, "dead")
    await open_hold(dead)
    batch = Batch(Point.ADOPT)
    batch.add("UPDATE hold SET owner = NULL WHERE owner = 'dead'")
    await engine.commit(batch)
    (hold,) = await dead.due()
    return hold


async def test_a_hold_of_a_living_run_is_refused_to_others(engine: MemoryEngine):
    """Two runs that both think they carry one operation would each wait for the other's end."""
    await open_hold(holds_of(engine, "first"))

    with pytest.raises(GracekitError, match="open in another run"):
        await open_hold(holds_of(engine, "second"))


async def test_a_left_over_hold_is_taken_on_by_whoever_opens_it_again(engine: MemoryEngine):
    """A handler that is run again after a crash opens the hold that its last attempt left."""
    await left_over(engine)
    holds = holds_of(engine, "next")

    await open_hold(holds)

    assert [hold.key for hold in await holds.mine()] == ["vm-1"]
    assert await holds.due() == []


async def test_a_hold_that_was_taken_on_is_not_settled_any_more(engine: MemoryEngine):
    """Recovery that listed it as left over comes too late to end it."""
    hold = await left_over(engine)
    holds = holds_of(engine, "next")
    await open_hold(holds)

    assert not await holds.settle(hold, "no_probe", errored=True)
    assert len(await holds.mine()) == 1


async def test_a_hold_that_was_prolonged_does_not_lapse(engine: MemoryEngine):
    """Opened again between the look and the settling, it goes on."""
    holds = holds_of(engine, "only")
    await open_hold(holds, at_most_s=0)
    (lapsed,) = await holds.due()
    await open_hold(holds)

    assert not await holds.settle(lapsed, "lapsed", errored=False)
    assert len(await holds.mine()) == 1


async def test_a_left_over_hold_that_waits_is_its_asker_s(engine: MemoryEngine):
    """It keeps whoever asked, and is asked about again; whoever opens it has it alone."""
    hold = await left_over(engine)
    asker, sibling = holds_of(engine, "asker"), holds_of(engine, "sibling")

    await asker.wait(hold, next_check=0.0)
    (again,) = await asker.due()
    assert (again.owner, [hold.key for hold in await asker.mine()]) == ("asker", ["vm-1"])
    assert (await sibling.due(), await sibling.mine()) == ([], [])
    await open_hold(sibling)

    assert (await asker.due(), await asker.mine()) == ([], [])
    assert len(await sibling.mine()) == 1


async def test_an_answer_about_a_hold_that_was_opened_meanwhile_does_not_count(
    engine: MemoryEngine,
):
    """By the probe itself, or by a request while the probe was under way: it is as any other
    then.
    """
    holds = holds_of(engine, "next")
    hold = await left_over(engine)
    await open_hold(holds, at_most_s=1)
    await holds.wait(hold, next_check=0.0)
    assert await holds.due() == []

    await holds_of(engine, "next").end("migration", "vm-1")
    hold = await left_over(engine)
    await holds.wait(hold, next_check=0.0)
    (hold,) = await holds.due()
    await open_hold(holds, at_most_s=1)
    await holds.wait(hold, next_check=0.0)

    assert await holds.due() == []
    assert not await holds.settle(hold, "done", errored=False)
    assert len(await holds.mine()) == 1


async def test_what_is_due_comes_before_what_must_be_asked(engine: MemoryEngine):
    """A probe may take its time: meanwhile a sibling would call the same errored hook, and a hold
    that has lapsed would go on.
    """
    holds = holds_of(engine, "only")
    for key, lapses_in_s in (("left over", 900.0), ("lapsed", 0.0), ("to be told", 0.0)):
        await holds.open(
            "migration", key, at_most_s=lapses_in_s, method=(None, "prepare", "1.0"), args={}
        )
    batch = Batch(Point.ADOPT)
    batch.add("UPDATE hold SET owner = NULL WHERE key = 'left over'")
    await engine.commit(batch)
    (_, failed, _) = sorted(await holds.due(), key=lambda hold: hold.key == "left over")
    assert await holds.settle(failed, "failed", errored=True)

    assert [hold.key for hold in await holds.due()] == ["to be told", "lapsed", "left over"]
