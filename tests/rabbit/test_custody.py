"""What tests/process/test_custody.py claims holds on RabbitMQ: nothing lost, nothing run twice."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.helpers import until
from tests.process.test_custody import check_custody, in_each_way
from tests.rabbit.broker import Broker
from tests.rabbit.erlang import binary
from tests.rabbit.site import RabbitSite
from tests.scale import scale

pytestmark = pytest.mark.process


@pytest.fixture
def site(tmp_path: Path, shared_broker: Broker, rabbit_vhost: str) -> Iterator[RabbitSite]:
    made = RabbitSite(tmp_path, shared_broker, rabbit_vhost)
    yield made
    made.close()


@pytest.mark.timeout(scale(180, 1800))
@in_each_way(on_uvloop=(signal.SIGTERM, 3))
async def test_every_cast_through_a_broker_takes_effect_or_is_errored(
    site: RabbitSite, how: signal.Signals, siblings: int, loop: str
) -> None:
    """Of 300 casts or more by two clients while the service is stopped or killed five times, each
    `retry` and `probe` one takes effect, no `error` one is started twice, and the journal counts
    them all.
    """
    site.settings["loop"] = loop
    await check_custody(site, how, siblings)


async def test_a_killed_run_leaves_no_fanout_queues_for_long(site: RabbitSite) -> None:
    """Nobody reads them again, and each keeps a copy of every fanout for half an hour."""

    def fanouts() -> set[str]:
        names = site.broker.eval(  # no more: one that goes meanwhile could not be asked
            f"[amqqueue:get_name(Q) || Q <- rabbit_amqqueue:list({binary(site.vhost)})]"
        )
        return set(re.findall(r"[a-z-]+_fanout_[0-9a-f]{32}", names))

    first = await site.start().serving()
    left = fanouts()
    first.kill()
    second = await site.start().serving()
    await until(lambda: not left & fanouts(), "the queues of the killed run removed")
    kept = fanouts()
    await second.stop()

    assert len(left) == len(kept) == 2
    assert fanouts() == set()
