"""What tests/process/test_callers.py claims holds on RabbitMQ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.test_callers import play
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(180, 600))]


async def test_through_a_broker_results_come_although_a_process_is_killed(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str
) -> None:
    """The same play, with what a broker delivers again."""
    site = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    try:
        await play(site)
    finally:
        site.close()
