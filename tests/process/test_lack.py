"""A process that can start no thread: what it says at its start, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import Site, until

PIDS: Final = Path("/sys/fs/cgroup/pids")


async def test_a_stop_without_threads_ends_as_it_is_on_record(
    site: Site, client: RpcClient
) -> None:
    """Threads that the application has in the loop's executor are waited for by another thread, and
    streams are flushed in one: neither can be started.
    """
    service = await site.start_cli().serving()
    await client.call(served.starves, key="s")

    assert await service.stop() == 0
    assert (service.run["exit_code"], service.run["verdict"]) == (0, None)
    assert "Traceback" not in service.log
    assert "service.stopped" in service.log


async def test_a_start_without_threads_says_what_may_limit_them(site: Site) -> None:
    """It may succeed later, and needs no traceback."""
    service = site.start(test_start="starved")

    assert await service.exit_code() == 69
    assert "no thread can be started: look at pids.max" in service.log
    assert "Traceback" not in service.log


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A cgroup that limits processes and threads."""
    made = PIDS / f"gracekit-{tmp_path.name}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of one's own: {error}")
    yield made
    made.rmdir()


async def test_the_limit_of_a_cgroup_is_no_failure(
    group: Path, site: Site, client: RpcClient
) -> None:
    """With the real limit of a container: the task runs when the limit is lifted."""
    service = await site.start_inside(
        "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"'
    ).serving()
    (group / "pids.max").write_text((group / "pids.current").read_text())
    # The first one gets the thread in which a hook has run.
    ids = [await client.cast(served.in_thread, key=f"t{n}", s=0) for n in range(2)]
    await service.wait_log("task.interrupted", times=2)
    (group / "pids.max").write_text("max")
    await site.effect("start", times=2)

    assert "look at pids.max" in service.log
    assert await service.stop() == 0
    tasks = [site.task(request_id) for request_id in ids]
    assert [(task["state"], task["crashes"]) for task in tasks] == [("succeeded", 0)] * 2
    assert len(site.seen("start")) == 2
    await until(lambda: not (group / "cgroup.procs").read_text(), "an empty cgroup")
