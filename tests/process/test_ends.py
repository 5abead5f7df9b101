"""What a boot of the host means for the tasks of a run."""

from __future__ import annotations

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import Site


async def test_a_boot_of_the_host_charges_no_task_with_a_crash(
    site: Site, client: RpcClient
) -> None:
    """Nobody's code has ended it; the next start finds another boot id."""
    crashes, whys = [], []
    service = await site.start(test_boot_id="one").serving()
    await client.prepare(request_id="k").cast(served.retried, key="k", vm="v", s=600)
    for starts, boot_id in enumerate(("two", "two", "three"), 1):
        await site.effect("start", "k", times=starts)
        service.kill()
        service = await site.start(test_boot_id=boot_id).serving()
        await service.wait_log("run.classified")
        crashes.append(site.task("k")["crashes"])
        whys += [word for word in service.log.split() if word.startswith("why=")]

    assert crashes == [0, 1, 1]
    assert whys == ["why=host_reboot", "why=died", "why=host_reboot"]
    rows = site.rows("SELECT rebooted FROM run ORDER BY started_at")
    assert [row["rebooted"] for row in rows] == [1, None, 1, None]  # a later boot says nothing
