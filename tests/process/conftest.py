"""What the process tests share: a site of their own, and no process left behind."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import HERE, Site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.process)


@pytest.fixture(autouse=True, scope="session")
def _hear_hangups() -> None:
    """Under nohup they are ignored, in all that is started from here too."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def client(site: Site) -> AsyncIterator[RpcClient]:
    """A caller in this process."""
    async with served.svc.client(site.url) as made:
        yield made
