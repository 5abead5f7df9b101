"""`gracekit hosts` and `gracekit hosts gone`, on a host without services, about a fleet."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from gracekit import RpcClient
from gracekit.errors import TaskInterruptedError
from tests.admin.kit import ask_now
from tests.loops import without_settings
from tests.postgres.fleet import DEAD_S, Fleet
from tests.postgres.test_postgres_hosts import check_accounts
from tests.process.helpers import ROOT, until
from tests.scale import scale

FAIL_S = 6.0
"""As in `fleet.QUICK`."""

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(scale(300, 3600))]


async def hosts(fleet: Fleet, *words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command."""
    ours = {
        "GRACEKIT_STORE_URL": str(fleet.settings["store_url"]),
        "GRACEKIT_TRANSPORT_URL": fleet.url,
        "GRACEKIT_RUN_DIRECTORY": str(fleet.root / "runs-elsewhere"),
    }
    done = await asyncio.to_thread(
        subprocess.run,
        (sys.executable, "-m", "gracekit", "hosts", *words),
        cwd=ROOT,
        env=without_settings() | ours,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


async def listed(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """The rows of the command, by host."""
    code, out, errors = await hosts(fleet, "--json")
    assert code == 0, errors
    return {row["host"]: row for row in json.loads(out)["hosts"]}


async def gone(fleet: Fleet, host: str, *words: str) -> dict[str, Any]:
    """What the command says of a host that it declared gone."""
    code, out, errors = await hosts(fleet, "gone", host, "--reason", "it burnt", "--json", *words)
    assert code == 0, errors
    told: dict[str, Any] = json.loads(out)
    return told


async def test_a_dead_host_is_unknown_then_dead_and_its_tasks_end_by_a_word(fleet: Fleet) -> None:
    """A host that beats is refused. The word lasts until a run begins there."""
    second = fleet.host("two")
    living = await fleet.host("one").start().serving()
    killed = await second.start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s", host="two")
        call = asyncio.create_task(view.call("slow", key="a", s=600))
        await fleet.effect("start", "a")
        both = await listed(fleet)
        beats = await hosts(fleet, "gone", "two", "--reason", "it burnt")
        run_id = str(killed.run["run_id"])
        killed.kill()
        after = await listed(fleet)
        await fleet.gone(run_id)
        await client.prepare(host="two").cast("slow", key="b", s=0)
        dead = await listed(fleet)
        told = await gone(fleet, "two")
        with pytest.raises(TaskInterruptedError, match="two has had no run"):
            await call
    emptied = await gone(fleet, "two", "--empty-queues")
    again = await second.start().serving()
    back = await listed(fleet)

    assert [both[host]["state"] for host in ("one", "two")] == ["LIVE", "LIVE"]
    assert (both["two"]["tasks"], both["two"]["generation"]) == (1, 1)
    assert 0 < both["two"]["trust_left_s"] <= DEAD_S
    assert beats[0] == 1
    assert "on host two is alive: it beats; on that host, `gracekit drain two-0`" in beats[2]
    assert (after["one"]["state"], after["two"]["state"]) == ("LIVE", "UNKNOWN")
    assert after["two"]["why"].startswith("no beat was seen in ")
    assert (after["two"]["trust_left_s"], dead["two"]["state"]) == (None, "DEAD")
    numbers = {"tasks": 1, "holds": 0, "findings": 0, "messages": 1, "emptied": False}
    assert told == {"host": "two", "reason": "it burnt", "runs": [], **numbers}
    assert (emptied["tasks"], emptied["messages"], emptied["emptied"]) == (0, 1, True)
    assert (back["two"]["state"], back["two"]["generation"]) == ("LIVE", 2)
    assert fleet.rows("SELECT 1 FROM gone_host") == []
    assert fleet.seen("start", "b") == []
    assert [await one.stop() for one in (living, again)] == [0, 0]
    check_accounts(fleet)


async def test_a_host_that_nobody_watched_is_watched_before_it_is_declared_gone(
    fleet: Fleet,
) -> None:
    """Then the next start of its service ends its task and its hold, and lists it as dead."""
    killed = await fleet.host("two").start().serving()
    async with RpcClient(fleet.url, "shop") as client:
        view = client.prepare(timeout="120s", host="two")
        await view.call("receive", key="h", at_most=600)
        call = asyncio.create_task(view.call("retried", key="a", vm="v", s=600))
        await fleet.effect("start", "a")
        killed.kill()
        unknown = await hosts(fleet, "gone", "tow", "--reason", "it burnt")
        told = await gone(fleet, "two")
        living = await fleet.host("one").start().serving()
        with pytest.raises(TaskInterruptedError, match="two has had no run"):
            await call
    ended = "SELECT end_reason FROM hold WHERE ended_at IS NOT NULL"
    (hold,) = await until(lambda: fleet.rows(ended), "the end of the hold")
    states = {host: row["state"] for host, row in (await listed(fleet)).items()}

    assert unknown[0] == 1
    assert "no host tow is on record; did you mean two?" in unknown[2]
    assert (len(told["runs"]), told["tasks"], told["holds"]) == (1, 1, 1)
    assert hold["end_reason"] == "host_gone"
    assert states == {"one": "LIVE", "two": "DEAD"}
    assert await living.stop() == 0
    check_accounts(fleet)


async def test_a_service_shows_who_fails_as_it_watches_all_the_time(fleet: Fleet) -> None:
    """From `fail_after` on, with the time that is left; dead is only who was declared so."""
    address = f"unix:{fleet.root / 'admin.sock'}"
    living = await fleet.host("one").start(admin=address).serving()
    stopped = await fleet.host("two").start().serving()

    async def shown(state: str) -> dict[str, Any]:
        """The row of host two, once it has that state."""
        async with asyncio.timeout(60):
            while True:
                answer = await asyncio.to_thread(ask_now, address, "/api/v1/hosts")
                (row,) = (row for row in answer.json["hosts"] if row["host"] == "two")
                if row["state"] == state:
                    return dict(row)
                await asyncio.sleep(0.1)

    live = await shown("LIVE")
    stopped.signal(signal.SIGSTOP)
    fail = await shown("FAIL")
    dead = await shown("DEAD")

    assert live["why"] == "it beats"
    assert fail["why"].startswith("no beat for ")
    assert 0 < fail["trust_left_s"] <= DEAD_S - FAIL_S < live["trust_left_s"] <= DEAD_S
    assert dead["trust_left_s"] is None
    assert await living.stop() == 0
