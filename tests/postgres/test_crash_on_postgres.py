"""What tests/crash/test_crash_matrix.py claims holds of a store in PostgreSQL.

A quick run kills where a request ends, a task is parked, a rule acts and a recovery begins; a soak
wherever there is a point.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gracekit.process import Point
from tests.crash.cell import cell_in
from tests.crash.queues import SqliteQueues
from tests.crash.scenarios import (
    CellId,
    Pair,
    call,
    cells,
    pairs,
    park,
    rules,
    some_cells,
    some_pairs,
)
from tests.crash.stores import PostgresStore
from tests.crash.test_crash_matrix import check_kill, check_two_kills
from tests.scale import scale
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(180)]

CHOSEN: Final = {
    (call, Point.FINISH, "before"),
    (park, Point.PARK, "after"),
    (rules, Point.RULE, "before"),
}
SOME: Final = [cell for cell in some_cells() if (cell.scenario, cell.point, cell.phase) in CHOSEN]


@pytest.fixture
def store(postgres: Postgres, schema: str) -> PostgresStore:
    return PostgresStore(postgres, schema)


@pytest.mark.parametrize("where", scale(SOME, list(cells())), ids=str)
async def test_on_postgresql_a_kill_loses_nothing_and_starts_nothing_twice(
    where: CellId, tmp_path: Path, store: PostgresStore
):
    """Whatever was confirmed ends as its policy says, is accounted for and answered, and the
    resource is free.
    """
    async with cell_in(tmp_path, SqliteQueues(tmp_path), store) as cell:
        await check_kill(cell, where)


@pytest.mark.parametrize("where", scale(list(some_pairs())[:1], list(pairs())), ids=str)
async def test_on_postgresql_a_recovery_that_dies_twice_is_recovered(
    where: Pair, tmp_path: Path, store: PostgresStore
):
    """Killed in its work, then in the recovery of it, then in the recovery of that: nothing is
    lost.
    """
    async with cell_in(tmp_path, SqliteQueues(tmp_path), store) as cell:
        await check_two_kills(cell, where)


def test_a_quick_run_stops_at_each_chosen_place():
    """Each has one cell; together they have all journaled policies."""
    assert {(cell.scenario, cell.point, cell.phase) for cell in SOME} == CHOSEN
    assert {cell.policy for cell in SOME} == {"error", "retry", "probe"}
