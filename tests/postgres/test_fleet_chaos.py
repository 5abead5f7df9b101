"""Six hosts under trouble at random: nothing is lost, and nothing is done twice at a time."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Final

import pytest

from gracekit import RpcClient
from tests.postgres.chaos import Chaos, check_nothing_lost, check_order
from tests.postgres.fleet import Fleet
from tests.postgres.test_postgres_hosts import check_accounts
from tests.process.caster import VMS, cast
from tests.process.helpers import Effect
from tests.rabbit.broker import Broker
from tests.scale import scale
from tests.store.postgres import Postgres

NAMES: Final = ("one", "two", "three", "four", "five", "six")
SEEDS: Final = scale([1], [2, 3])
DURATION_S: Final = scale(25.0, 300.0)
CASTS_PER_S: Final = 10
LONG_S: Final = 2.0
BETWEEN_LONG_S: Final = 0.4


@pytest.mark.process
@pytest.mark.server
@pytest.mark.timeout(scale(600, 3600))
@pytest.mark.parametrize("seed", SEEDS)
async def test_trouble_of_all_kinds_loses_nothing(
    seed: int, tmp_path: Path, shared_broker: Broker, rabbit_vhost: str
) -> None:
    """Machines and processes die, stand still, and are cut off; the server is killed, and its
    synchronous standby takes over.
    """
    settings = {"fsync": "on", "max_connections": "100"}
    with (
        Postgres(**settings, synchronous_standby_names="*").running() as server,
        Postgres(**settings).copy_of(server) as standby,
    ):
        fleet = Fleet(tmp_path, shared_broker, rabbit_vhost, server, "gracekit")
        chaos = Chaos(fleet, standby, NAMES, random.Random(seed))
        try:
            long_ones = await _under_load(fleet, chaos)
            check_order(fleet.effects)
            check_accounts(fleet)
            check_nothing_lost(fleet, [*fleet.confirmed("a"), *long_ones])
            _check_it_happened(fleet, chaos)
        finally:
            (tmp_path / "history").write_text("\n".join(chaos.history))
            fleet.close()


async def _under_load(fleet: Fleet, chaos: Chaos) -> list[str]:
    """Returns the keys of the long casts; the others are the caster's."""
    await chaos.serving()
    enough = fleet.root / "enough"
    caster = fleet.caster("a", 0, per_second=CASTS_PER_S, enough=enough)
    casting = asyncio.create_task(_cast_long_ones(fleet, enough))
    await fleet.effect("done", times=20)
    await chaos.rage(DURATION_S)
    enough.touch()
    assert await asyncio.to_thread(caster.wait, 240) == 0
    long_ones = await casting
    await fleet.ended(len(fleet.confirmed("a")) + len(long_ones), within_s=600.0)
    assert await chaos.stop() == [0] * len(NAMES)
    return long_ones


async def _cast_long_ones(fleet: Fleet, enough: Path) -> list[str]:
    """Most troubles come while some of these run, in threads, which end by themselves alone."""
    keys = list[str]()
    async with RpcClient(fleet.url, "shop") as client:
        while not enough.exists():
            n, key = len(keys), f"b-retried-{len(keys)}"
            args = {"key": key, "vm": f"vm-{n % VMS}", "s": LONG_S}
            await cast(client.prepare(request_id=key), "retried_in_thread", args)
            keys.append(key)
            await asyncio.sleep(BETWEEN_LONG_S)
    return keys


def _check_it_happened(fleet: Fleet, chaos: Chaos) -> None:
    ends = [code for machine in chaos.machines for code in machine.ends]
    back = fleet.rows(
        "SELECT 1 FROM run JOIN run AS later USING (service, instance)"
        " WHERE run.gone_at IS NOT NULL AND later.generation > run.generation"
        " AND later.exit_code = 0"
    )
    assert -signal.SIGKILL in ends, "no timer has ended a process"
    assert 70 in ends, "no run has found itself declared dead"
    assert len(fleet.declared()) >= 2
    assert back != [], "nobody who was declared dead has joined again"
    assert fleet.rows("SELECT * FROM beat") == []
    assert fleet.rows("SELECT 1 FROM epoch WHERE epoch > 0") != [], "no failover was noticed"


A: Final = [
    Effect(1, 1, "start", "a-retried-0", ("1", "5")),
    Effect(2, 1, "done", "a-retried-0", ()),
]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([Effect(3, 2, "start", "a-retried-12", ("1", "5"))], "not risen"),
        ([Effect(3, 2, "start", "a-retried-12", ("1", "6")), A[1]], "token 5 after 6"),
    ],
)
def test_a_fault_would_be_found(more: list[Effect], why: str) -> None:
    """A token that does not rise; an effect of an old one behind one of a newer."""
    check_order(A)
    with pytest.raises(AssertionError, match=why):
        check_order(A + more)
