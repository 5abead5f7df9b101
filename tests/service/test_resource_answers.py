"""What rules answer, and what is written for it: probes, deletes, marks, and `write` itself."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest

from gracekit import Absent, Broken, Done, Found, Service, Settled, Wait
from gracekit.recovery.resources.results import ResourceOutcome
from tests.service.kit import World, now
from tests.service.shares import Shares, first_pass, hang, results, settle

pytestmark = pytest.mark.looptime


async def test_settled_writes_its_status_and_facts(world: World, svc: Service):
    """Under the token of the lease; an incident says what was written, and nothing waits."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.answers = lambda _id, _n: Settled("available", exports=["x", "y"], size=3)
    life = await world.start(svc)

    result = results(await settle(life))["a"]

    row = shares.rows["a"]
    assert (row.status, row.token) == ("available", 1)
    assert row.facts == {"exports": ["x", "y"], "size": 3}
    assert result.facts == {"exports": "2", "size": "3"}
    assert (result.outcome, result.token) == (ResourceOutcome.SETTLED, 1)
    (incident,) = world.incidents("resource_settled")
    assert "creating -> available by was_it_created, token 1" in incident["detail"]
    assert shares.finding("a") is None
    assert world.rows("SELECT owner FROM lease WHERE kind = 'share'") == [{"owner": None}]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Absent("no such volume"), "no such volume"),
        (Absent(), "the backend does not know it"),
        (Broken("no space left"), "no space left"),
        (NotImplementedError(), "was_it_created is not implemented"),
    ],
)
async def test_what_is_not_there_or_in_error_or_cannot_be_asked_has_failed(
    world: World, svc: Service, answer: Any, reason: str
):
    """At once, with a warning that names resource, both statuses and the reason."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.answers = lambda _id, _n: answer
    life = await world.start(svc)

    await first_pass(life)

    assert shares.written == [("a", "creating", "error")]
    (told,) = life.told("resource.failed")
    assert told["resource"] == ("share", "a")
    assert (told["status"], told["written"], told["reason"]) == ("creating", "error", reason)
    (incident,) = world.incidents("resource_failed")
    assert reason in incident["detail"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: OSError("the backend is away"), "the backend is away"),
        (hang, "no answer within 30 s (probe_timeout)"),
        (lambda: "available", "it returns Settled, Absent, Broken or Wait"),
        (Done, "it returns Settled, Absent, Broken or Wait"),
        (lambda: None, "was_it_created answered None: it returns Settled, Absent, Broken or Wait"),
        (asyncio.CancelledError, "cancelled"),
        (lambda: Settled("deleting"), "'deleting', which is a status that has a rule"),
        (lambda: Settled("creating"), "has a rule: it returns Wait while the backend still works"),
    ],
)
async def test_an_unknown_truth_is_asked_again_and_fails_in_the_end(
    world: World, svc: Service, answer: Any, said: str
):
    """With pauses that grow, in all for `max_wait`; then its failed status is written."""
    shares = Shares(world, svc, max_wait="5m")
    shares.add("a")
    shares.answers = lambda _id, _n: answer()
    life = await world.start(svc, reconciliation_interval_s=30)

    result = results(await settle(life))["a"]

    assert (result.outcome, result.written) == (ResourceOutcome.WAITING, None)
    assert said in result.reason
    finding = shares.finding("a")
    assert finding is not None
    assert (finding["status"], finding["tries"], finding["owner"]) == ("creating", 1, None)
    assert said in finding["detail"]
    await world.until(lambda: bool(shares.written))
    moments = [asked.at for asked in shares.asked]
    pauses = [b - a for a, b in itertools.pairwise(moments)]
    assert pauses == sorted(pauses[:-1]) + pauses[-1:]
    assert 240 <= moments[-1] - moments[0] <= 340
    assert 5 < len(moments) < 15
    (told,) = life.told("resource.failed")
    assert told["reason"].startswith("gave up: ")
    assert said in told["reason"]
    assert shares.finding("a") is None


@pytest.mark.parametrize("answer", [Wait(3), False, True, Settled("deleted"), "gone"])
async def test_a_delete_that_returns_something_has_deleted_nothing(
    world: World, svc: Service, answer: Any
):
    """It may mean that the deletion goes on: the delete is done again, until it returns nothing."""
    shares = Shares(world, svc)
    shares.add("a", status="deleting")
    shares.deletes = lambda _id, n: answer if n < 4 else None
    life = await world.start(svc, reconciliation_interval_s=30)

    result = results(await settle(life))["a"]

    assert (result.outcome, result.written) == (ResourceOutcome.WAITING, None)
    assert result.reason == (
        f"delete_again returned {answer!r}: a delete returns nothing, when the resource is gone"
    )
    await world.until(lambda: bool(shares.written))
    assert shares.written == [("a", "deleting", "deleted")]
    assert len(shares.deleted) == 4


async def test_a_delete_that_returns_something_for_too_long_has_failed(world: World, svc: Service):
    """After `max_wait` in all, with what it has returned as the reason."""
    shares = Shares(world, svc, max_wait="5m")
    shares.add("a", status="deleting")
    shares.deletes = lambda _id, _n: False
    life = await world.start(svc)

    await world.until(lambda: bool(shares.written))

    assert shares.written == [("a", "deleting", "error_deleting")]
    (told,) = life.told("resource.failed")
    assert told["reason"].startswith("gave up: delete_again returned False: a delete returns")
    assert 290 <= shares.deleted[-1].at - shares.deleted[0].at <= 340


async def test_wait_says_when_it_is_asked_again(world: World, svc: Service):
    """Also for longer than the pause of a failure, and never beyond `max_wait`."""
    shares = Shares(world, svc, max_wait="10m")
    shares.add("a", "b")
    shares.answers = lambda name, _n: Wait("4m") if name == "a" else Wait("1d")
    await world.start(svc, reconciliation_interval_s=0)

    await world.until(lambda: len(shares.written) == 2, within_s=1200)

    moments = {name: [at for id_, at, _ in shares.asked if id_ == name] for name in "ab"}
    assert [round(b - a) for a, b in itertools.pairwise(moments["a"])] == [240, 240, 120]
    assert [round(b - a) for a, b in itertools.pairwise(moments["b"])] == [600]


@pytest.mark.parametrize("how", ["drain", "crash"])
async def test_waits_go_on_across_runs(world: World, svc: Service, how: str):
    """`max_wait` counts from the first question, whichever run has put it."""
    shares = Shares(world, svc, max_wait="5m")
    shares.add("a")
    shares.answers = lambda _id, _n: OSError("away")
    life = await world.start(svc)
    await first_pass(life)
    begun = shares.asked[0].at
    for _ in range(4):
        await asyncio.sleep(40)
        await (life.drain() if how == "drain" else life.crash())
        life = await world.start(svc)

    await world.until(lambda: bool(shares.written))

    assert shares.written == [("a", "creating", "error")]
    assert 300 <= now() - begun < 380


async def test_what_waits_and_has_moved_on_is_not_asked_again(world: World, svc: Service):
    """Its row goes, and a note says so; in another status it is a new case."""
    shares = Shares(world, svc, max_wait="1d")
    shares.add("gone", "other")
    shares.answers = lambda _id, _n: Wait("1m")
    life = await world.start(svc, reconciliation_interval_s=0)
    await settle(life)
    shares.rows["gone"].status = "available"
    shares.rows["other"].status = "restoring"
    asked = len(shares.asked)
    await asyncio.sleep(90)

    assert len(shares.asked) == asked
    assert shares.finding("gone") is None
    assert world.incidents("resource_moved_on")
    await settle(life)
    assert shares.written == [("other", "restoring", "error")]
    assert shares.finding("other") is None


async def test_a_pass_by_hand_asks_at_once_what_waits(world: World, svc: Service):
    """A periodic one does not: it says when it will be."""
    shares = Shares(world, svc, max_wait="1d")
    shares.add("a")
    shares.answers = lambda _id, n: Wait("1h") if n == 1 else Settled("available")
    life = await world.start(svc, reconciliation_interval_s=60)
    await life.hears("reconciliation.finished", 3)
    assert shares.asks() == ["a"]

    assert results(await settle(life))["a"].written == "available"


async def test_a_settled_record_is_not_asked_about_again(world: World, svc: Service):
    """It has moved on between the page and the lease: nothing was lost, and that is counted."""
    shares = Shares(world, svc)
    shares.add("a", "b")

    async def other_moves() -> Settled:
        shares.rows["b"].status = "available"
        return Settled("available")

    shares.answers = lambda _id, _n: other_moves()
    life = await world.start(svc, reconcile_at_once=1)

    found = results(await settle(life))

    assert shares.asks() == ["a"]
    assert found["b"].outcome is ResourceOutcome.MOVED_ON
    assert shares.finding("b") is None


# -- delete, mark -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "written", "reason"),
    [
        (None, "deleted", ""),
        (OSError("in use"), "error_deleting", "in use"),
        (NotImplementedError(), "error_deleting", "NotImplementedError"),
        (hang, "error_deleting", "no answer within 120 s (max_wait)"),
    ],
)
async def test_a_delete_has_its_end_at_once(
    world: World, svc: Service, end: Any, written: str, reason: str
):
    """It returns, raises, or takes longer than `max_wait`: delete again is an operator's word."""
    shares = Shares(world, svc, max_wait="2m")
    shares.add("a", status="deleting")
    shares.deletes = lambda _id, _n: end() if callable(end) else end
    life = await world.start(svc)

    result = results(await settle(life))["a"]

    assert shares.written == [("a", "deleting", written)]
    assert len(shares.deleted) == 1
    assert result.written == written
    assert reason in result.reason


async def test_a_mark_asks_nobody(world: World, svc: Service):
    """`find` has shown the status; it is written over at once."""
    shares = Shares(world, svc)
    shares.add("a", status="restoring")
    life = await world.start(svc)

    result = results(await settle(life))["a"]

    assert (shares.asked, shares.deleted) == ([], [])
    assert (result.outcome, result.written, result.rule) == (
        ResourceOutcome.SETTLED,
        "error",
        "mark",
    )


# -- write --------------------------------------------------------------------------------------


async def test_a_write_that_says_false_has_moved_on(world: World, svc: Service):
    """The record is the truth: nothing waits, and nothing was settled."""
    shares = Shares(world, svc)
    shares.add("a")

    def move(_found: Found, _status: str) -> bool:
        shares.rows["a"].status = "available"
        return False

    shares.writes = move
    life = await world.start(svc)

    result = results(await settle(life))["a"]

    assert (result.outcome, result.written, result.reason) == (ResourceOutcome.MOVED_ON, None, "")
    assert life.told("hook.failed") == []
    assert shares.finding("a") is None
    assert world.incidents("resource_settled") == []


async def test_a_write_that_says_false_is_believed_where_the_record_cannot_be_read(
    world: World, svc: Service
):
    """Nobody knows whether its status is unchanged, so the log does not say that it is."""
    shares = Shares(world, svc)
    shares.add("a")

    def refuse(_found: Found, _status: str) -> bool:
        shares.finds = lambda _n: OSError("away")
        return False

    shares.writes = refuse
    life = await world.start(svc)

    result = results(await settle(life))["a"]

    assert (result.outcome, result.written, result.reason) == (ResourceOutcome.MOVED_ON, None, "")
    assert "share.write" not in [one["hook"] for one in life.told("hook.failed")]
    assert shares.finding("a") is None


async def test_a_record_that_refuses_our_token_has_a_reason(world: World, svc: Service):
    """The store was lost, and tokens began at 1 again: nothing can be written, and each pass
    says so.
    """
    shares = Shares(world, svc)
    shares.add("a", token=7)
    life = await world.start(svc, reconciliation_interval_s=60)
    await first_pass(life)

    result = results(await settle(life))["a"]

    assert (result.outcome, result.written) == (ResourceOutcome.MOVED_ON, None)
    assert result.reason == (
        "write answered False though the status is unchanged: the record may hold a newer token; "
        "was the store lost?"
    )
    assert [one["reason"] for one in life.told("resource.left")] == [result.reason] * 2
    assert [one["hook"] for one in life.told("hook.failed")] == ["share.write"] * 2


async def test_write_gets_what_was_found(world: World, svc: Service):
    """With another status in the record by now, it says False."""
    shares = Shares(world, svc)
    shares.add("a")

    async def changed() -> Settled:
        shares.rows["a"].status = "extending"
        return Settled("available")

    shares.answers = lambda _id, _n: changed()
    life = await world.start(svc)

    assert results(await settle(life))["a"].outcome is ResourceOutcome.MOVED_ON
    assert shares.statuses() == {"a": "extending"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OSError("the database is away"), "write: .*the database is away"),
        (None, "write: answered None: it returns True if it has changed"),
        (1, "write: answered 1: it returns True"),
    ],
)
async def test_a_write_that_raises_or_says_nothing_is_done_again(
    world: World, svc: Service, answer: Any, said: str
):
    """Whether it has written is not known: the rule is asked again."""
    shares = Shares(world, svc)
    shares.add("a")
    shares.writes = lambda _found, _status: answer
    life = await world.start(svc)

    report = await settle(life)

    (result,) = report.results
    assert result.outcome is ResourceOutcome.WAITING
    assert re.search(said, result.reason)
    shares.writes = None
    await world.until(lambda: shares.statuses() == {"a": "available"}, within_s=60)
    assert shares.asks() == ["a", "a"]


async def test_a_write_that_never_succeeds_does_not_go_round_in_a_loop(world: World, svc: Service):
    """No status can be given up here: it is tried again at growing pauses, at most a minute."""
    shares = Shares(world, svc, max_wait="1m")
    shares.add("a")
    shares.writes = lambda _found, _status: OSError("read-only")
    await world.start(svc)
    await asyncio.sleep(1000)

    assert 15 < len(shares.asked) < 40


async def test_who_has_lost_the_lease_does_not_write(world: World, svc: Service):
    """Counted as stale; whoever has the lease now goes on."""
    shares = Shares(world, svc)
    shares.add("a")

    async def lost() -> Settled:
        world.disk.execute("UPDATE lease SET owner = 'other', lver = lver + 1 WHERE id = 'a'")
        world.disk.execute("UPDATE finding SET owner = 'other' WHERE name = 'a'")
        return Settled("available")

    shares.answers = lambda _id, _n: lost()
    life = await world.start(svc)

    result = results(await settle(life))["a"]

    assert (result.outcome, result.written) == (ResourceOutcome.STALE, None)
    assert shares.written == []
    assert {"kind": "share", "outcome": "stale"} in life.told("resource.reconciled")
    assert world.rows("SELECT owner FROM lease WHERE id = 'a'") == [{"owner": "other"}]
    world.disk.execute("DELETE FROM lease")
    world.disk.execute("DELETE FROM finding")


async def test_a_write_is_refused_by_a_newer_token(world: World, svc: Service):
    """The application compares: a rule that went on after losing its lease changes nothing."""
    shares = Shares(world, svc)
    shares.add("a", token=7)
    life = await world.start(svc)

    assert results(await settle(life))["a"].outcome is ResourceOutcome.MOVED_ON
    assert shares.statuses() == {"a": "creating"}
