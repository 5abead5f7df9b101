"""Recovery looks when something is due: at no time does it look again and again for nothing."""

from __future__ import annotations

import asyncio

import pytest

from gracekit import Service
from gracekit.recovery.reconciler import Reconciler
from tests.service.kit import World
from tests.service.shares import Shares, first_pass

pytestmark = pytest.mark.looptime

LOOKS = 60
"""In 500 seconds: one each 30 s, and some for what happens."""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Reconciler]:
    """One entry for each look of a reconciler."""
    looks: list[Reconciler] = []
    reconcile = Reconciler.reconcile

    async def counted(self: Reconciler) -> None:
        looks.append(self)
        await reconcile(self)

    monkeypatch.setattr(Reconciler, "reconcile", counted)
    return looks


@pytest.mark.parametrize("enabled", [True, False])
async def test_recovery_rests_while_nothing_is_due(
    world: World, svc: Service, looks: list[Reconciler], enabled: bool
):
    """Also where nothing is settled unasked."""
    shares = Shares(world, svc)
    shares.add("a")
    await world.start(svc, startup_reconciliation_enabled=enabled)
    await asyncio.sleep(500)

    assert len(looks) < LOOKS


@pytest.mark.parametrize("with_kinds", [True, False])
async def test_recovery_rests_in_a_quiet(
    world: World, svc: Service, looks: list[Reconciler], with_kinds: bool
):
    """It may last for hours, and nothing can be done in it."""
    if with_kinds:
        Shares(world, svc)
    life = await world.start(svc)
    await asyncio.sleep(60)
    await world.run_as(life, life.runtime.wired.coordinator.quiet())
    looks.clear()
    await asyncio.sleep(500)

    assert len(looks) < LOOKS


@pytest.mark.parametrize("lives", [1, 2])
async def test_recovery_rests_while_a_rule_acts(
    world: World, svc: Service, looks: list[Reconciler], lives: int
):
    """In its own run, and in a sibling that looks every five seconds whether the pass is over."""
    shares = Shares(world, svc)
    shares.add("a", status="deleting")
    shares.deletes = lambda _id, _n: asyncio.sleep(500)
    for n in range(lives):
        await world.start(svc, instance=f"i{n}")
    await asyncio.sleep(500)

    assert len(looks) < (LOOKS if lives == 1 else 3 * LOOKS + 500 / 5)


async def test_recovery_rests_while_a_resource_waits(
    world: World, svc: Service, looks: list[Reconciler]
):
    """It is asked again when its time has come."""
    shares = Shares(world, svc, max_wait="1d")
    shares.add("a")
    shares.answers = lambda _id, _n: OSError("away")
    await first_pass(await world.start(svc))
    await asyncio.sleep(500)

    assert 5 < len(shares.asked) < 20
    assert len(looks) < LOOKS
