"""A pass by hand in the test kit: what it returns, what it refuses, and what cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gracekit import Absent, Context, Found, GracekitError, Service, Settled, Wait
from gracekit.testing import InMemoryService, Point, ResourceOutcome, ServiceFaultError
from tests.testing.virtual import virtual


class Shares:
    """A kind with one rule, over records in memory.

    Attributes:
        records: Status by id.
        since: Wall time of the last change of status; None for all.
        is_broken: `find` raises.
        asks: Ids that the probe was asked about.
    """

    def __init__(self, svc: Service) -> None:
        self.kind = svc.kind("share")
        self.records: dict[str, str] = {}
        self.since: float | None = None
        self.is_broken = False
        self.asks: list[str] = []
        self.kind.find(self.find)
        self.kind.write(self.write)
        self.kind.probe("creating", failed="error")(self.probe)

    async def find(self, ctx: Context, *, after: str | None, limit: int) -> list[Found]:
        if self.is_broken:
            raise OSError("the database is away")
        ids = [one for one in sorted(self.records) if one > (after or "")]
        found = [one for one in ids if self.records[one] == "creating"]
        return [Found(one, "creating", since=self.since) for one in found[:limit]]

    async def write(
        self, ctx: Context, found: Found, status: str, facts: Mapping[str, object]
    ) -> bool:
        self.records[found.id] = status
        return True

    async def probe(self, ctx: Context, found: Found) -> Settled | Absent | Wait:
        self.asks.append(found.id)
        await asyncio.sleep(1)
        return Settled("available")


@pytest.fixture
def svc() -> Service:
    return Service("share-manager")


@pytest.fixture
def shares(svc: Service) -> Shares:
    return Shares(svc)


@virtual
async def test_a_pass_by_hand_returns_what_was_done_to_what(svc: Service, shares: Shares):
    """Each resource that was found has a result, with its status before and after."""
    shares.records = {"a": "creating", "b": "in use"}
    async with InMemoryService(svc) as one:
        (result,) = await one.reconcile()

    assert (result.resource, result.status, result.written) == (
        ("share", "a"),
        "creating",
        "available",
    )
    assert (result.outcome, result.rule, result.reason) == (ResourceOutcome.SETTLED, "probe", "")
    assert result.token == 1
    assert shares.records == {"a": "available", "b": "in use"}


@virtual
async def test_a_dry_run_changes_nothing(svc: Service, shares: Shares):
    """It says what would be done: no rule is called, nothing is written or counted."""
    shares.records = {"a": "creating"}
    async with InMemoryService(svc) as one:
        (result,) = await one.reconcile(dry_run=True)

        assert (result.written, result.reason) == (None, "ask probe, else error")
        assert (shares.records, shares.asks) == ({"a": "creating"}, [])
        assert one.machine.rows("SELECT * FROM finding") == []
        assert one.told("resource.reconciled") == []


@virtual
async def test_one_kind_or_resource_can_be_chosen(svc: Service, shares: Shares):
    """The others stay as they are, and are in no result."""
    shares.records = {"a": "creating", "b": "creating"}
    async with InMemoryService(svc) as one:
        results = await one.reconcile(resource=shares.kind.of("b"))
        assert [result.resource for result in results] == [("share", "b")]
        assert shares.records == {"a": "creating", "b": "available"}

        results = await one.reconcile(kind=shares.kind)
        assert [result.resource for result in results] == [("share", "a")]


@virtual
async def test_a_rule_that_raises_ends_the_test(svc: Service, shares: Shares):
    """As every other function of the application: a bug in it would be taken for a backend that is
    away. Unless the test expects it.
    """
    shares.records = {"a": "creating"}

    async def probe(ctx: Context, found: Found) -> Settled:
        raise KeyError(found.id)

    shares.kind.rules["creating"].hook.bind(probe)  # type: ignore[union-attr]  # a probe has one

    async def reconcile() -> None:
        async with InMemoryService(svc) as one:
            (result,) = await one.reconcile()
            assert result.outcome is ResourceOutcome.WAITING

    with pytest.raises(ServiceFaultError, match=r"hook\.failed: .*share\.probe.*KeyError\('a'\)"):
        await reconcile()
    async with InMemoryService(svc) as one:
        one.expect("hook.failed")
        await one.reconcile()


@virtual
async def test_what_is_young_is_left(svc: Service, shares: Shares):
    """A pass by hand, as the first one, touches what has had its status for
    `startup_reconciliation_wait_seconds`.
    """
    shares.records = {"a": "creating"}
    async with InMemoryService(svc) as one:
        shares.since = one.clock.wall() - 4
        (result,) = await one.reconcile()
        assert result.outcome is ResourceOutcome.LEFT
        assert result.reason == "has been creating for less than 10s"

        shares.since = one.clock.wall() + 7200
        (result,) = await one.reconcile()
        assert result.outcome is ResourceOutcome.LEFT
        assert result.reason.startswith("its since= lies 1h59m in the future: it is compared with")

        shares.since = one.clock.wall() - 11
        (result,) = await one.reconcile()
        assert result.outcome is ResourceOutcome.SETTLED


@virtual
async def test_what_cannot_be_settled_by_hand_is_said(svc: Service, shares: Shares):
    """An unknown kind, a resource without its kind, both at once, records that cannot be read, and
    a service without a process.
    """
    async with InMemoryService(svc) as one:
        with pytest.raises(
            GracekitError, match=r"no kind 'shrae' is declared; did you mean share\?"
        ):
            await one.reconcile(kind="shrae")

        for wrong in ("a", "share:a", ("share",), ("share", 7), ["share", "a"], 7):
            with pytest.raises(GracekitError, match=r"write resource=share\.of\('sh-12'\), or"):
                await one.reconcile(resource=wrong)  # type: ignore[arg-type]  # what is refused
        with pytest.raises(GracekitError, match="give kind= or resource=, not both"):
            await one.reconcile(kind="share", resource=("share", "a"))

        shares.is_broken = True
        with pytest.raises(GracekitError, match=r"share: .*the database is away"):
            await one.reconcile()
        one.expect("hook.failed")

        await one.drain()
        with pytest.raises(GracekitError, match="no process of"):
            await one.reconcile()


@virtual
async def test_a_process_that_is_killed_in_a_pass_ends_it(svc: Service, shares: Shares):
    """What was done before is returned; the next process asks about the rest again."""
    shares.records = {"a": "creating", "b": "creating"}
    async with InMemoryService(svc, reconcile_at_once=1) as one:
        one.crash_at(Point.RESOURCE_SETTLED, "after")
        assert await one.reconcile() == []
        assert not one.lives

        await one.start()
        results = await one.reconcile()

    assert [result.resource[1] for result in results] == ["b"]
    assert shares.records == {"a": "available", "b": "available"}


@virtual
async def test_a_drain_ends_a_pass_by_hand(svc: Service, shares: Shares):
    """What acts is waited for, and what was done is returned."""
    shares.records = {"a": "creating", "b": "creating"}
    async with InMemoryService(svc, reconcile_at_once=1) as one:
        passing = asyncio.ensure_future(one.reconcile())
        await one.until(lambda: bool(shares.asks))
        await one.drain()

        assert [result.written for result in await passing] == ["available"]
    assert shares.records == {"a": "available", "b": "creating"}
