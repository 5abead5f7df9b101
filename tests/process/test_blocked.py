"""An event loop that a handler blocks for a while."""

from __future__ import annotations

import re

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import Site


async def test_a_loop_that_turns_again_says_for_how_long_it_stood(
    site: Site, client: RpcClient
) -> None:
    """One line follows the block, with the seconds up to one beat; other iterations log nothing."""
    service = await site.start().serving()
    await client.prepare(timeout=30).call(served.block_for, key="short", s=0.2)
    await client.prepare(timeout=30).call(served.block_for, key="long", s=3.5)
    await service.wait_log("loop.blocked")

    assert await service.stop() == 0
    (told,) = re.findall(r"loop\.blocked blocked_s=([0-9.]+)", service.log)
    assert 2.3 <= float(told) < 3.5 + 2
