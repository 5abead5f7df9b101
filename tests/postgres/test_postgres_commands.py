"""Commands on one host about runs of another one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit import RpcClient
from gracekit.errors import TaskCancelledError
from tests.loops import without_settings
from tests.postgres.site import PostgresSite
from tests.process.helpers import ROOT
from tests.rabbit.broker import Broker
from tests.store.postgres import Postgres

pytestmark = [pytest.mark.process, pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture
def site(
    tmp_path: Path, shared_broker: Broker, rabbit_vhost: str, postgres: Postgres, schema: str
) -> Iterator[PostgresSite]:
    made = PostgresSite(tmp_path, shared_broker, rabbit_vhost, postgres, schema)
    yield made
    made.close()


async def command(site: PostgresSite, *words: str) -> tuple[int, str]:
    """Exit status and output of a command on a host without services."""
    ours = {
        "GRACEKIT_STORE_URL": str(site.settings["store_url"]),
        "GRACEKIT_RUN_DIRECTORY": str(site.root / "runs-elsewhere"),
    }
    done = await asyncio.to_thread(
        subprocess.run,
        (sys.executable, "-m", "gracekit", *words),
        cwd=ROOT,
        env=without_settings() | ours,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("state", ["running", "accepted"])
async def test_a_task_of_another_host_is_cancelled_by_its_row(site: PostgresSite, state: str):
    """Its run looks there each second; the order and its sender are on record once."""
    service = await site.start_on("one", max_running=1).serving()
    async with RpcClient(site.url, "shop") as client:
        view = client.prepare(timeout="120s")
        first = asyncio.create_task(view.call("slow", key="a", s=600))
        await site.effect("start", "a")
        second = asyncio.create_task(view.call("slow", key="b", s=600))
        while len(site.rows("SELECT 1 FROM task WHERE state <> 'rejected'")) < 2:
            await asyncio.sleep(0.05)
        (row,) = site.rows("SELECT request_id FROM task WHERE state = ?", state)
        words = ("tasks", "cancel", str(row["request_id"]), "--reason", "wrong host", "--json")
        code, out = await command(site, *words)
        call, other = (first, second) if state == "running" else (second, first)
        with pytest.raises(TaskCancelledError):
            await call
        other.cancel()

    assert (code, json.loads(out)["words"]) == (0, "cancelled")
    incidents = site.rows("SELECT what, detail FROM incident WHERE request_id = ?", *row.values())
    assert [one["what"] for one in incidents] == ["operator_cancel"]
    assert "wrong host" in str(incidents[0]["detail"])
    service.kill()


async def test_after_a_backup_was_put_back_no_earlier_run_acts_and_tokens_rise(site: PostgresSite):
    """An operator says it by one command, while a service is connected."""
    service = await site.start_on("one").serving()
    async with RpcClient(site.url, "shop") as client:
        view = client.prepare(timeout="120s")
        await view.call("retried", key="a", vm="v", s=0)
        code, _ = await command(site, "store", "restored")
        ended = await service.exit_code()
        again = await site.start_on("one").serving()
        await view.call("retried", key="b", vm="v", s=0)

    (before, after) = (int(effect.more[1]) for effect in site.seen("start"))
    assert (code, ended) == (0, 70)
    assert "store.fenced" in service.log
    assert after > 2**40 > before
    assert await again.stop() == 0


async def test_a_store_is_retired_when_nobody_uses_it_and_its_tokens_rise_where_it_is_used_again(
    site: PostgresSite,
):
    """Refused while a service lives."""
    service = await site.start_on("one").serving()
    async with RpcClient(site.url, "shop") as client:
        view = client.prepare(timeout="120s")
        await view.call("retried", key="a", vm="v", s=0)
        beside_it, _ = await command(site, "store", "retire")
        await service.stop()
        alone, _ = await command(site, "store", "retire")
        again = await site.start_on("one").serving()
        await view.call("retried", key="b", vm="v", s=0)

    (before, after) = (int(effect.more[1]) for effect in site.seen("start"))
    assert (beside_it, alone) == (1, 0)
    assert after > 2**40 > before
    assert await again.stop() == 0


def test_the_demonstration_plays_in_a_schema_of_its_own(postgres: Postgres):
    """It leaves nothing in the user's database, and says where its store is meanwhile."""
    schemas = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'demo%'"
    played = subprocess.run(
        (sys.executable, "-m", "gracekit", "demo", "--crash", "--store", postgres.url()),
        cwd=ROOT,
        env=without_settings(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert played.returncode == 0, played.stdout + played.stderr
    assert "the store is schema demo_" in played.stdout
    assert played.stdout.splitlines()[-1].endswith("0 lost, 0 run twice")
    with postgres.connect() as server:
        assert server.execute(schemas).fetchall() == []


async def test_doctor_judges_the_server_and_what_the_store_knows(site: PostgresSite):
    """Before the first start, while a service of this host lives, and without the server."""
    directory = site.root / "runs-elsewhere"
    before = await doctor(site)
    service = await site.start(run_directory=directory).serving()
    living = await doctor(site)
    await service.stop()
    site.settings["store_url"] = "postgresql://127.0.0.1:1/nothing"
    away = await doctor(site)

    assert before["schema"] == ("ok", "no store yet")
    assert before["server"][1].startswith("PostgreSQL ")
    assert living["runs"][1].startswith("1 live")
    assert living["doors"][0] == living["suspects"][0] == living["history"][0] == "ok"
    assert "accepted 0 = 0 on record + 0 removed: balanced" in living["accounts"][1]
    assert [(check, level) for check, (level, _) in away.items()] == [("server", "fail")]


async def doctor(site: PostgresSite) -> dict[str, tuple[str, str]]:
    """The level and the observation of each check of the store."""
    _, out = await command(site, "doctor", "--json")
    found = json.loads(out)["findings"]
    return {one["check"]: (one["level"], one["seen"]) for one in found if one["area"] == "store"}
