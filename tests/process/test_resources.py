"""Resource rules in real processes: killed, frozen, drained, side by side, behind full queues.

The backend's log, lines in the effects file, is the judge of what was done to a resource.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import AsyncIterator

import apsw
import pytest

from gracekit import RpcClient
from tests.process import resourced
from tests.process.helpers import SLACK_S, ServiceProcess, Site, until
from tests.process.volume_sites import build, make_records, start, statuses, times_asked
from tests.process.volumes import RECORDS, VolumeRecords
from tests.scale import scale

AT_ONCE = 16  # resources that are settled at one time
OFTEN = {"reconciliation_interval": "0.5s", "test_stuck_after": "0.1s"}
SHORT = {
    "drain_timeout": "1s",
    "handover_grace": "0.5s",
    "handover_flush": "0.5s",
    "exit_margin": "0.5s",
}


@pytest.fixture
async def client(site: Site) -> AsyncIterator[RpcClient]:
    async with resourced.svc.client(site.url) as made:
        yield made


@pytest.fixture
def records(site: Site) -> VolumeRecords:
    return make_records(site)


# -- after a kill -----------------------------------------------------------------


async def test_request_for_a_resource_whose_rule_was_killed_begins_when_it_has_settled(
    site: Site, client: RpcClient, records: VolumeRecords
) -> None:
    """What the killed rule sent to the backend may be under way for `settle`: the request waits so
    long, and no longer.
    """
    settle_s = 2.0
    long = {"startup_reconciliation_wait_seconds": f"{settle_s}s", "reconcile_every": "60s"}
    records.add(["gated-1"], "creating")
    first = await start(site, **long).serving()
    await site.effect("ask", "gated-1")
    second = await start(site, **long).serving()
    first.kill()
    killed_at = time.monotonic()

    await client.cast(resourced.use, volume="gated-1")

    (used,) = await site.effect("used", "gated-1")
    waited_s = used.at - killed_at
    print(f"\nbegan {waited_s:.2f} s after the kill, settle {settle_s} s")  # noqa: T201 - for `pytest -s`
    assert used.pid == second.pid
    assert settle_s <= waited_s <= settle_s + 1 + SLACK_S
    site.go()
    assert await second.stop() == 0


@pytest.mark.parametrize("status", ["creating", "deleting"])
async def test_rule_whose_process_was_killed_is_done_again_by_the_next_start(
    site: Site, records: VolumeRecords, status: str
) -> None:
    """The backend is asked again, or deletes again, with a higher token; the record has one end."""
    word, end = {"creating": ("ask", "available"), "deleting": ("delete", "deleted")}[status]
    build(site, "gated-1")
    records.add(["gated-1"], status)
    first = await start(site).serving()
    await site.effect(word, "gated-1")
    first.kill()
    site.go()

    again = await start(site).serving()
    await site.effect("wrote", "gated-1")

    assert statuses(records) == {end: 1}
    tokens = [int(effect.more[0]) for effect in site.seen(word, "gated-1")]
    assert len(tokens) == 2
    assert tokens[0] < tokens[1]
    assert await again.stop() == 0
    assert len(site.seen("wrote")) == 1


async def test_rule_that_ends_its_process_each_time_is_given_up(
    site: Site, records: VolumeRecords
) -> None:
    """After `max_attempts` crashes, the last of them with nothing else at work, the failed status
    is written, and the backend is asked no more; other resources are settled.
    """
    attempts = 3
    records.add(["kills-1", "v"], "creating")
    build(site, "v")
    for _ in range(attempts):
        assert await start(site, max_attempts=attempts).exit_code() == -signal.SIGKILL

    again = await start(site, max_attempts=attempts).serving()
    await until(lambda: not statuses(records)["creating"], "their end")

    assert records.by_name() == {"kills-1": "error", "v": "available"}
    assert times_asked(site)["kills-1"] == attempts
    await again.wait_log(f"attempts: {attempts} processes ended while it ran")
    assert await again.stop() == 0


# -- side by side -----------------------------------------------------------------


async def crowd(site: Site, records: VolumeRecords) -> tuple[list[str], list[ServiceProcess]]:
    """Many resources, and two processes of one host that start together."""
    names = [f"v-{n:05}" for n in range(scale(500, 5000))]
    records.add(names, "creating")
    build(site, *names)
    return names, [start(site, reconcile_at_once=AT_ONCE) for _ in range(2)]


@pytest.mark.timeout(scale(120, 900))
async def test_two_that_start_together_act_on_each_resource_once(
    site: Site, records: VolumeRecords
) -> None:
    """One of them makes the pass; the other sees that it is done, and asks the backend nothing."""
    names, both = await crowd(site, records)

    await site.effect("wrote", times=len(names))
    await until(lambda: site.rows("SELECT 1 FROM resource_pass"), "the end of the pass")
    for process in both:
        await process.serving()
        assert await process.stop() == 0

    assert times_asked(site) == dict.fromkeys(names, 1)
    assert len({effect.pid for effect in site.seen("ask")}) == 1
    assert statuses(records) == {"available": len(names)}


@pytest.mark.timeout(scale(120, 900))
@pytest.mark.parametrize("heir", ["the other", "the next start"])
async def test_when_the_one_that_settles_is_killed_another_settles_the_rest_once(
    site: Site, records: VolumeRecords, heir: str
) -> None:
    """Only what was in its rule at the kill may be asked about once more: no more than act at
    once.
    """
    names, both = await crowd(site, records)
    for process in both:
        await process.serving()
    leading = (await site.effect("ask", times=len(names) // 3))[0].pid
    victims = both if heir == "the next start" else [p for p in both if p.pid == leading]
    for process in victims:
        process.kill()
    in_rule = {effect.key for effect in site.seen("ask")}
    in_rule -= {effect.key for effect in site.seen("wrote")}
    assert len(site.seen("ask")) < len(names)
    rest = [p for p in both if not p.ended] or [await start(site).serving()]

    all_done = {"available": len(names)}
    await until(lambda: statuses(records) == all_done, "their end", within_s=scale(30, 300))
    assert [await process.stop() for process in rest] == [0]

    asked = times_asked(site)
    twice = {name for name in names if asked[name] > 1}
    print(f"\n{len(twice)} of {len(in_rule)} in a rule asked again")  # noqa: T201 - for `pytest -s`
    assert asked.keys() == set(names)
    assert max(asked.values()) <= 2
    assert twice <= in_rule
    assert len(twice) <= AT_ONCE
    assert max(Counter(effect.key for effect in site.seen("wrote")).values()) == 1


# -- left alone -------------------------------------------------------------------


async def passes(process: ServiceProcess, number: int) -> None:
    """Wait until it has finished so many more passes over its resources."""
    seen = process.log.count("reconciliation.finished")
    await process.wait_log("reconciliation.finished", times=seen + number)


async def test_a_handler_at_work_and_one_of_a_draining_peer_are_left_alone_while_they_last(
    site: Site, client: RpcClient, records: VolumeRecords
) -> None:
    """Passes come and go, and no rule touches their resources; when they have ended, the next
    does.
    """
    build(site, "here", "there")
    peer = await start(site, **OFTEN, drain_timeout="60s").serving()
    await client.cast(resourced.use_until_go, volume="there")
    await site.effect("used", "there")
    records.add(["there"], "creating")
    peer.terminate()
    await peer.wait_log("drain.started")
    one = await start(site, **OFTEN).serving()
    await client.cast(resourced.use_until_go, volume="here")
    await site.effect("used", "here")
    records.add(["here"], "creating")

    await passes(one, 2)

    assert not peer.ended
    assert not site.seen("ask")
    assert statuses(records) == {"creating": 2}
    site.go()
    assert await peer.exit_code() == 0
    await until(lambda: statuses(records) == {"available": 2}, "a later pass")
    assert await one.stop() == 0


async def test_an_unclean_end_that_has_not_settled_is_left_alone(
    site: Site, client: RpcClient, records: VolumeRecords
) -> None:
    """The last request of a killed handler may be under way: no rule acts before its settle time is
    over and its task has ended.
    """
    records.add(["v"], "creating")
    build(site, "v")
    first = await start(site, startup_reconciliation_wait_seconds="60s").serving()
    request_id = await client.cast(resourced.use_until_go, volume="v")
    await site.effect("used", "v")
    first.kill()
    killed_at = time.monotonic()

    again = await start(site, **OFTEN).serving()
    await passes(again, 1)
    (asked,) = await site.effect("ask", "v")

    assert asked.at - killed_at >= 6
    assert site.state(request_id) == "errored"
    await until(lambda: statuses(records) == {"available": 1}, "its end")
    assert await again.stop() == 0


# -- a lease that was lost --------------------------------------------------------


async def declare_gone(site: Site, process: ServiceProcess) -> None:
    """As `gracekit runs gone` does, which refuses it as long as the lock proves that it lives."""
    with_writes = apsw.Connection(str(site.store))
    with_writes.set_busy_timeout(10_000)
    with_writes.execute(
        "UPDATE run SET gone_at = 1, gone_by = 'me@here', gone_reason = 'no light' WHERE pid = ?",
        (process.pid,),
    )
    with_writes.close()


async def test_a_write_after_the_lease_was_lost_is_refused_by_the_token(
    site: Site, client: RpcClient, records: VolumeRecords
) -> None:
    """A process frozen in its write wakes up when the resource is another's and has the status that
    it saw: the application's own comparison refuses its token.
    """
    records.add(["v"], "creating")
    build(site, "v")
    frozen = await start(site, test_late="yes", **SHORT).serving()
    (late,) = await site.effect("late", "v")
    frozen.signal(signal.SIGSTOP)
    await declare_gone(site, frozen)
    heir = await start(site).serving()
    await site.effect("wrote", "v")
    await client.cast(resourced.create_again, volume="v")
    (again,) = await site.effect("again", "v")
    assert statuses(records) == {"creating": 1}, "what the frozen one has seen"

    site.go()
    frozen.signal(signal.SIGCONT)

    (refused,) = await site.effect("refused", "v")
    assert refused.pid == frozen.pid
    assert int(refused.more[1]) == int(late.more[0]) < int(again.more[0])
    assert await frozen.exit_code() == 70
    assert "resource.settled" not in frozen.log
    assert {effect.pid for effect in site.seen("wrote")} == {heir.pid}
    assert await heir.stop() == 0


async def test_a_rule_whose_lease_was_lost_meanwhile_does_not_write(
    site: Site, records: VolumeRecords
) -> None:
    """A process frozen in its question wakes up when another has settled the resource: `write` is
    not called.
    """
    records.add(["gated-v"], "creating")
    build(site, "gated-v")
    frozen = await start(site, **SHORT).serving()
    await site.effect("ask", "gated-v")
    frozen.signal(signal.SIGSTOP)
    await declare_gone(site, frozen)
    site.go()
    heir = await start(site).serving()
    await site.effect("wrote", "gated-v")

    frozen.signal(signal.SIGCONT)

    assert await frozen.exit_code() == 70
    assert {effect.pid for effect in site.seen("wrote")} == {heir.pid}
    assert not site.seen("refused")
    assert "outcome=stale" in frozen.log
    assert await heir.stop() == 0


# -- drains -----------------------------------------------------------------------


async def test_drain_waits_for_a_rule_that_acts_and_begins_no_other(
    site: Site, records: VolumeRecords
) -> None:
    """A stop lets the rule under way write its status; the rest is for the next start."""
    names = [f"gated-{n:02}" for n in range(4)]
    records.add(names, "creating")
    build(site, *names)
    service = await start(site, drain_timeout="60s", reconcile_at_once=2).serving()
    await site.effect("ask", times=2)

    service.terminate()
    await service.wait_log("drain.started")
    assert not service.ended
    site.go()

    assert await service.exit_code() == 0
    assert {effect.key for effect in site.seen("ask")} == set(names[:2])
    assert statuses(records) == {"available": 2, "creating": 2}
    assert not site.rows("SELECT 1 FROM lease WHERE owner IS NOT NULL")
    again = await start(site).serving()
    await site.effect("wrote", times=len(names))
    assert await again.stop() == 0
    assert times_asked(site) == dict.fromkeys(names, 1)


async def test_second_signal_cuts_a_rule_and_the_next_start_asks_again(
    site: Site, records: VolumeRecords
) -> None:
    """A second INT goes to the deadline step: nothing is written for a rule that was cut."""
    records.add(["gated-1"], "creating")
    build(site, "gated-1")
    service = await start(site, drain_timeout="60s").serving()
    await site.effect("ask", "gated-1")
    service.signal(signal.SIGINT)
    await service.wait_log("drain.started")
    assert not service.ended
    asked_at = time.monotonic()
    service.signal(signal.SIGINT)

    code = await service.exit_code()

    assert code == 0, "no task is handed over"
    assert time.monotonic() - asked_at < 30
    assert statuses(records) == {"creating": 1}
    site.go()
    again = await start(site).serving()
    await site.effect("wrote", "gated-1")
    assert times_asked(site) == {"gated-1": 2}
    assert await again.stop() == 0


# -- the application's database ---------------------------------------------------


class Trouble:
    """What keeps the service from the application's database."""

    def __init__(self, site: Site, how: str) -> None:
        self._path = site.root / RECORDS
        self._away = self._path.with_suffix(".away")
        self._lock: apsw.Connection | None = None
        if how == "locked":
            self._lock = apsw.Connection(str(self._path))
            self._lock.execute("BEGIN EXCLUSIVE")
        else:
            self._path.rename(self._away)

    def end(self) -> None:
        if self._lock is not None:
            self._lock.close()
        else:
            self._away.rename(self._path)


@pytest.mark.parametrize("how", ["locked", "away"])
async def test_trouble_with_the_applications_database_is_reported_and_tried_again(
    site: Site, records: VolumeRecords, how: str
) -> None:
    """`find` raises: that is logged, requests are served, the next pass asks once, and settles all
    when the database is back.
    """
    records.add(["v"], "creating")
    build(site, "v")
    trouble = Trouble(site, how)
    service = await start(site, test_patience_s="0.1", **OFTEN).serving()
    await passes(service, 3)

    assert "reconciliation.broken kind=volume" in service.log
    found = len(site.seen("find"))
    assert found <= service.log.count("reconciliation.started"), "once a pass"
    assert not site.seen("ask")
    trouble.end()

    await site.effect("wrote", "v")
    assert statuses(records) == {"available": 1}
    assert await service.stop() == 0


async def test_a_write_that_the_database_refuses_is_tried_again(
    site: Site, records: VolumeRecords
) -> None:
    """A database that is locked when a rule has its answer: nothing is lost, the backend is asked
    again.
    """
    records.add(["gated-1"], "creating")
    build(site, "gated-1")
    service = await start(site, test_patience_s="0.1").serving()
    await site.effect("ask", "gated-1")
    trouble = Trouble(site, "locked")
    site.go()
    await service.wait_log("outcome=waiting")
    trouble.end()

    await site.effect("wrote", "gated-1")

    assert statuses(records) == {"available": 1}
    assert times_asked(site)["gated-1"] >= 2
    assert await service.stop() == 0
