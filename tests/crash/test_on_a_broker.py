"""What test_crash_matrix.py claims holds on RabbitMQ.

There a death settles nothing: acks that had not left are lost, and what was delivered comes again,
to a start that must know it by its id. So a quick run kills where broker and journal meet, and a
soak wherever there is a point.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from gracekit.process import Point
from tests.crash.cell import cell_in
from tests.crash.queues import BrokerQueues
from tests.crash.scenarios import (
    AT_THE_WIRE,
    NOT_ON_A_BROKER,
    PHASES,
    CellId,
    Pair,
    Scenario,
    cells,
    cells_on_a_broker,
    pairs,
    some_cells_on_a_broker,
    some_pairs,
)
from tests.crash.test_crash_matrix import check_kill, check_two_kills
from tests.rabbit.broker import Broker
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture
def queues(shared_broker: Broker, rabbit_vhost: str) -> BrokerQueues:
    return BrokerQueues(shared_broker, rabbit_vhost)


@pytest.mark.parametrize(
    "where", scale(list(some_cells_on_a_broker()), list(cells_on_a_broker())), ids=str
)
async def test_on_a_broker_a_kill_loses_nothing_and_starts_nothing_twice(
    where: CellId, tmp_path: Path, queues: BrokerQueues
):
    """Whatever the broker confirmed ends as its policy says, is accounted for and answered,
    although the broker delivers it again.
    """
    async with cell_in(tmp_path, queues) as cell:
        await check_kill(cell, where)


@pytest.mark.parametrize("where", scale(list(some_pairs())[:1], list(pairs())), ids=str)
async def test_on_a_broker_a_recovery_that_dies_twice_is_recovered(
    where: Pair, tmp_path: Path, queues: BrokerQueues
):
    """Killed in its work, then in the recovery of it, then in the recovery of that: nothing is
    lost.
    """
    async with cell_in(tmp_path, queues) as cell:
        await check_two_kills(cell, where)


def test_a_broker_lacks_no_cell_but_those_with_a_reason():
    """What a broker cannot be stopped at is written down, and nothing that there is not."""
    lacking = places(cells()) - places(cells_on_a_broker())
    points = {point for _, point in places(cells_on_a_broker())}

    assert lacking <= set(NOT_ON_A_BROKER) <= places(cells())
    without = {Point.CONNECT, Point.PUBLISH, Point.WITHDRAW_STOP}
    assert set(Point) - points == without


def test_a_quick_run_stops_at_both_sides_of_each_point_at_the_wire():
    """Under journaled policies and `requeue`, whose requests the broker keeps until their end."""
    some = list(some_cells_on_a_broker())

    assert [(cell.point, cell.phase) for cell in some] == [
        (point, phase) for _, point in AT_THE_WIRE for phase in PHASES
    ]
    assert {cell.policy for cell in some} == {"error", "retry", "probe", "requeue"}


def places(some: Iterable[CellId]) -> set[tuple[Scenario, Point]]:
    return {(cell.scenario, cell.point) for cell in some}
