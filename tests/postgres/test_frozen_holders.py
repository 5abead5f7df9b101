"""A process that stops within a transaction does not hold up the others for long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from gracekit.errors import StoreLockedError
from gracekit.store.postgres import postgres_engine, postgres_group, postgres_link
from tests.postgres.kit import Site, until
from tests.store.engine_suite import keys, put

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]

ROOT: Final = Path(__file__).resolve().parents[2]
HOLDER: Final = """
SELECT pid FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND wait_event = '{event}'"""
WRITES: Final = {"unread"}
"""Where the server waits until its results are read; else it waits for more."""


@contextlib.asynccontextmanager
async def frozen(site: Site, how: str) -> AsyncIterator[int]:
    """Another process that has the lock, and does nothing more; yields the pid of its backend."""
    words = (site.server.url(), site.schema, how)
    with subprocess.Popen([sys.executable, "-m", "tests.postgres.frozen", *words], cwd=ROOT) as one:
        try:
            await until(lambda: Path(f"/proc/{one.pid}/stat").read_text().split()[2] == "T", how)
            event = "ClientWrite" if how in WRITES else "ClientRead"
            ((pid,),) = await site.until(HOLDER.format(event=event))
            yield pid
        finally:
            one.kill()


def alive(site: Site, pid: int) -> bool:
    return bool(site.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid))


@pytest.mark.parametrize("how", ["locked", "idle", "large"])
async def test_a_process_that_stops_behind_a_sync_is_ended_by_the_server(
    site: Site, monkeypatch: pytest.MonkeyPatch, how: str
):
    """It is idle in its transaction, also amid a large group: no other process need do anything."""
    monkeypatch.setattr(postgres_group, "FROZEN_S", 1e6)
    async with site.opened() as engine, frozen(site, how) as pid:
        await engine.commit(put(1))

        assert not alive(site, pid)


async def test_without_a_sync_only_a_waiter_ends_a_process_that_stops_amid_a_large_group(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    """The server takes it for active, and its time-out for idle transactions does not count."""
    monkeypatch.setattr(postgres_engine, "PATIENCE_S", 0.0)
    monkeypatch.setattr(postgres_link, "LOCK_TIMEOUT_S", 2 * postgres_link.IDLE_TIMEOUT_S)
    monkeypatch.setattr(postgres_group, "FROZEN_S", 1e6)
    async with site.opened() as engine, frozen(site, "unsynced") as pid:
        with pytest.raises(StoreLockedError):
            await engine.commit(put(1))
        assert alive(site, pid)
        monkeypatch.setattr(postgres_group, "FROZEN_S", 0.0)
        with pytest.raises(StoreLockedError):
            await engine.commit(put(1))
        await engine.commit(put(1))

        assert not alive(site, pid)


@pytest.mark.parametrize("how", ["sending", "unread"])
async def test_a_process_that_stops_where_the_server_waits_for_it_is_ended_by_a_waiter(
    site: Site, how: str
):
    """The server does not count it as idle, and would wait without end."""
    async with site.opened() as engine, frozen(site, how) as pid:
        await engine.commit(put(1))

        assert not alive(site, pid)
        assert await keys(engine) == [1]


async def test_a_process_that_only_just_took_the_lock_is_not_ended(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    """Each waiter's time begins with its own wait, the holder's with its last message."""
    monkeypatch.setattr(postgres_engine, "PATIENCE_S", 0.0)
    monkeypatch.setattr(postgres_link, "LOCK_TIMEOUT_S", 1)
    monkeypatch.setattr(postgres_group, "FROZEN_S", 1e6)
    async with site.opened() as engine, frozen(site, "sending") as pid:
        with pytest.raises(StoreLockedError):
            await engine.commit(put(1))

        assert alive(site, pid)


async def test_a_child_that_was_forked_does_not_use_the_connection(site: Site):
    """It would be a second writer on its parent's socket."""
    async with site.opened() as engine:
        await engine.commit(put(1))
        if (child := os.fork()) == 0:
            try:
                engine.commit_from_thread(put(2), timeout_s=5)
            except BaseException:  # noqa: BLE001 - the expected end
                os._exit(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        await engine.commit(put(3))

        assert os.waitstatus_to_exitcode(status) == 7
        assert await keys(engine) == [1, 3]
