"""What tests/process/test_resource_queues.py claims holds on RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.test_resource_queues import check_creates
from tests.rabbit.broker import Broker
from tests.rabbit.site import RabbitSite
from tests.scale import scale

pytestmark = [pytest.mark.process, pytest.mark.timeout(scale(180, 900))]


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    yield made
    made.close()


@pytest.mark.parametrize("siblings", [1, 2])
@pytest.mark.parametrize("prefetch", [2, 256], ids=["in the queue", "in the prefetch"])
async def test_creates_sent_through_a_broker_to_a_stopped_service_are_built_and_not_judged(
    site: RabbitSite, prefetch: int, siblings: int
) -> None:
    """The pass waits for what the broker holds, and for what it has delivered and has no place."""
    # A pass waits so long for deliveries that a sibling may keep.
    await check_creates(site, prefetch=prefetch, siblings=siblings, accept_wait="5s")


@pytest.mark.parametrize("prefetch", [2, 256], ids=["in the queue", "in the prefetch"])
async def test_without_the_wait_for_the_brokers_queue_creates_are_judged(
    site: RabbitSite, prefetch: int
) -> None:
    """The claim above fails with that wait taken out: it is the wait that protects them."""
    with pytest.raises(AssertionError, match="were judged by a rule"):
        await check_creates(site, prefetch=prefetch, test_planted="no wait for the queue")
