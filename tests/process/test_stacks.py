"""SIGUSR1: tasks and stacks on standard error, whatever the event loop is doing."""

from __future__ import annotations

import signal

from gracekit import RpcClient
from tests.process import served
from tests.process.helpers import ServiceProcess, Site


def frames(block: str) -> list[str]:
    """The functions of one task's frames, outermost first."""
    own = block.partition("\nthread ")[0]
    lines = [line for line in own.splitlines() if line.startswith("  File ")]
    return [line.rpartition(", in ")[2] for line in lines]


async def dump_of(service: ServiceProcess, times: int = 1) -> str:
    """Ask for a dump and wait for it."""
    service.signal(signal.SIGUSR1)
    await service.wait_log("--- end ---", times=times)
    return service.log.rpartition("--- gracekit")[2].partition("--- end ---")[0]


async def test_usr1_tells_each_task_with_its_stack_and_disturbs_nothing(
    site: Site, client: RpcClient
) -> None:
    """A coroutine, a thread and a task in line are each shown where they are; then all goes on.

    Frames begin with the handler: what calls every handler says nothing.
    """
    service = await site.start(drain_timeout="60s").serving()
    await client.cast(served.held, key="a", vm="v")
    await client.cast(served.in_thread, key="t", s=0.1)
    counted = await client.cast(served.count, key="c")
    await site.effect("start", "a")
    await site.effect("start", "t")
    await site.effect("step", "c", times=3)
    waiting = await client.cast(served.held, key="b", vm="v")
    await site.in_state(waiting, "accepted")

    told = await dump_of(service)

    by_state = told.split("\ntask ")[1:]
    assert len(by_state) == 4
    assert "tasks 4," in told.splitlines()[0]
    held = next(b for b in by_state if "method=held" in b and "state=running" in b)
    assert "resource=vm:v" in held
    assert "lane=requests" in held
    assert "attempt=1" in held
    assert frames(held)[:2] == ["held", "until_go"]
    thread = next(b for b in by_state if "method=in_thread" in b)
    assert "time.sleep(0.01)" in thread
    assert frames(thread) == ["in_thread"]
    counting = next(b for b in by_state if "method=count " in b)
    assert "safe_point=" in counting
    assert "safe_point=-" not in counting
    line = next(b for b in by_state if "state=accepted" in b)
    assert "method=held" in line
    assert "(event loop)" in told
    assert await client.call(served.ping) == service.pid
    site.go()
    await site.in_state(waiting, "succeeded")
    await site.in_state(counted, "succeeded")
    assert await service.stop() == 0
    assert service.log.count("--- end ---") == 1


async def test_usr1_shows_where_a_blocked_loop_is(site: Site, client: RpcClient) -> None:
    """A handler that never gives the loop back is shown at the line where it is."""
    service = await site.start(drain_timeout="0", handover_grace="100ms").serving()
    await client.cast(served.block_loop, disk="d")
    await site.effect("beat", "d")

    told = await dump_of(service)

    (block,) = told.split("\ntask ")[1:]
    assert "method=block_loop" in block
    assert "(on the event loop now)" in block
    assert frames(block)[0] == "block_loop"
    service.terminate()
    assert await service.exit_code() == -signal.SIGALRM


async def test_usr1_comes_again_and_in_a_drain(site: Site, client: RpcClient) -> None:
    """A second one tells again, a drain changes nothing about it, and it is no stop."""
    service = await site.start(drain_timeout="60s").serving()
    assert "tasks 0," in await dump_of(service)
    await client.cast(served.through_drain, key="k", s=1.5)
    await site.effect("start", "k")
    assert "method=through_drain" in await dump_of(service, times=2)
    service.terminate()
    await site.effect("draining", "k")
    assert "tasks 1," in await dump_of(service, times=3)

    assert await service.exit_code() == 0
