"""Programs of the documentation and of examples/ keep their store in PostgreSQL by one variable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.docs.test_quickstart import check_drain_and_second_start, check_first_service
from tests.examples.test_nova import Cloud, ComputeHost, check_cell, killed
from tests.postgres.site import InPostgres
from tests.process.helpers import Site
from tests.scale import scale
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(180)]

STEPS = ("placed", "page-1", "paused", "handed-over", "told", "arrived")


@pytest.mark.parametrize("check", [check_first_service, check_drain_and_second_start])
def test_the_quickstart_goes_as_its_page_says(
    tmp_path: Path, postgres: Postgres, schema: str, check: Callable[..., None]
):
    """Services, a drain, a second start and all commands that look at them."""
    url = f"{postgres.url()}&schema={schema}"
    check(tmp_path, GRACEKIT_STORE_URL=url, GRACEKIT_RUN_DIRECTORY="runs")

    with postgres.connect() as store:
        states = store.execute(f"SELECT DISTINCT state FROM {schema}.task").fetchall()
    assert states == [("succeeded",)]
    assert [path.name for path in tmp_path.glob("*store*")] == []


class HostInPostgres(InPostgres, ComputeHost):
    """A compute host whose store is that of all hosts."""

    def __init__(self, server: Postgres, schema: str, cloud: Cloud, name: str) -> None:
        super().__init__(cloud, name)
        self.keep_in(server, schema)
        self.settings["run_directory"] = self.root / "runs"


@pytest.mark.parametrize("side", scale(["src"], ["src", "dst"]))
async def test_a_killed_compute_host_neither_doubles_nor_loses_a_vm(
    tmp_path: Path, postgres: Postgres, schema: str, side: str
):
    """The service of examples/nova on two hosts with one store; either is killed during
    migrations, and started again.
    """
    cloud = Cloud(Site(tmp_path), hold="15m", host=partial(HostInPostgres, postgres, schema))
    try:
        await check_cell(cloud, side, killed, STEPS)
    finally:
        cloud.close()
