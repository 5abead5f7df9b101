"""What tests/process/test_pending.py claims holds on RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.test_pending import play
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(180, 3600))]


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    yield made
    made.close()


async def test_through_a_broker_builds_end_once_while_services_and_resolver_are_killed(
    site: RabbitSite,
) -> None:
    """
    The same burst, with what a broker delivers again, and notifications that it keeps.
    """
    await play(site)
