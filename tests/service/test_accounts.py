"""How often the accounts of a store are counted, and for whom."""

from __future__ import annotations

import asyncio

import pytest

from gracekit.clock import Clock
from gracekit.control.accounts import METRIC, OPERATOR, AccountsCount
from gracekit.errors import StoreError
from gracekit.listings.store_view import Accounts, StoreView
from gracekit.process import Process
from gracekit.store.batch import Row, Value

pytestmark = pytest.mark.looptime

COUNT_S = 0.5


class LargeStore:
    """A store whose accounts take `COUNT_S` to count; a played port."""

    def __init__(self) -> None:
        self.counted = 0

    async def query(self, sql: str, *params: Value) -> list[Row]:
        await asyncio.sleep(COUNT_S)
        self.counted += 1
        return [("tally", "accepted", self.counted)]


@pytest.fixture
def store() -> LargeStore:
    return LargeStore()


@pytest.fixture
def accounts(store: LargeStore) -> AccountsCount:
    view = StoreView(store, Process(), None, Clock())
    return AccountsCount(view, None, Process().threads(1))


async def test_metrics_of_a_large_store_cost_a_thousandth_of_a_processor(
    store: LargeStore, accounts: AccountsCount
):
    """A scrape each second for an hour: a count that takes half a second is made each 500 s."""
    for _ in range(3600):
        await accounts.fresh(METRIC)
        await asyncio.sleep(1)

    assert store.counted == 8


async def test_an_operator_gets_newer_accounts_than_a_metric(
    store: LargeStore, accounts: AccountsCount
):
    """Somebody who asks again and again costs a hundredth of a processor at most."""
    for _ in range(600):
        await accounts.fresh(METRIC)
        await asyncio.sleep(1)
    assert store.counted == 2

    for _ in range(600):
        await accounts.fresh(OPERATOR)
        await asyncio.sleep(1)
    assert store.counted == 2 + 600 // 50


async def test_a_count_that_meets_a_fault_says_so_to_who_asked(accounts: AccountsCount):
    """Also if it is no fault of the store; the next count is made as usual."""

    def spoil(_: object) -> Accounts:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as spoiled:
        spoiled.setattr(Accounts, "of_rows", spoil)
        with pytest.raises(StoreError, match="could not be counted: ZeroDivisionError"):
            await accounts.first()
    await asyncio.sleep(100)

    assert (await accounts.first()).accepted == 2
