"""What docs/reconciliation.md says of a backend that deletes in the background."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from gracekit import Found
from gracekit.cli.reconcile import reconcile
from gracekit.testing import InMemoryService, run
from tests.docs.pages import Page
from tests.docs.tables import section, tables

PAGE = Page("reconciliation.md")


@pytest.fixture
def page() -> dict[str, Any]:
    """What the program of the page defines, and records of one snapshot to act on."""
    names: dict[str, Any] = {"records": {"s-1": "deleting"}}
    exec(PAGE.files["snapshots.py"], names)
    kind, records = names["snapshot"], names["records"]

    @kind.find
    async def find(ctx, *, after, limit):
        found = [Found(name, status) for name, status in records.items() if status == "deleting"]
        return [] if after else found

    @kind.write
    async def write(ctx, found, status, facts):
        records[found.id] = status
        return True

    return names


def test_the_rule_waits_until_the_resource_is_gone(page: dict[str, Any]):
    """Then `done` is written."""

    async def main() -> None:
        async with InMemoryService(page["svc"]) as one:
            settling = asyncio.create_task(one.reconcile())
            await one.until(lambda: page["in_deletion"])
            await one.pass_time(60)
            assert page["records"] == {"s-1": "deleting"}
            page["in_deletion"].clear()
            await settling

    run(main())
    assert page["records"] == {"s-1": "deleted"}


def test_a_rule_that_waits_for_longer_than_max_wait_has_failed(page: dict[str, Any]):
    """It is cancelled, and `failed` is written."""

    async def main() -> None:
        async with InMemoryService(page["svc"]) as one:
            one.expect("hook.failed")
            await one.reconcile()

    run(main())
    assert page["records"] == {"s-1": "error_deleting"}


def test_every_exit_status_of_the_command_is_explained():
    """Those that its help names, and no others."""
    (rows,) = tables(section(PAGE.text, "Exit status of `gracekit reconcile`"))
    _, _, said = (reconcile.help or "").partition("Exit status:")

    assert {row[0] for row in rows} == set(re.findall(r"\b\d+\b", said))
