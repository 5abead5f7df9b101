"""When a run asks its store whether it may still act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracekit.clock import Clock
from gracekit.errors import DependencyError
from gracekit.process import Point, Process
from gracekit.runs.members import BEAT_WRITTEN_S, Members
from gracekit.runs.seat import Seat, take_seat
from gracekit.store.batch import Batch, Row
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import MemoryEngine


class CountingEngine(MemoryEngine):
    """Counts its queries."""

    queries = 0

    async def query(self, sql: str, *params: Any) -> list[Row]:
        self.queries += 1
        return await super().query(sql, *params)


async def test_a_run_asks_whether_it_may_act_only_when_the_store_was_written():
    """By any process, itself included: it sees that there is something new, not what."""
    engine = CountingEngine(load_migrations(MIGRATIONS), process=Process())
    await engine.start()
    names = {"run_id": "run", "service": "s", "lock_directory": None}
    members = Members(engine, Clock(), Process(), **names)

    def is_due() -> bool:
        return members.is_beat_due("serving", engine.look_at_files(), written_s=BEAT_WRITTEN_S)

    await members.beat("serving", engine.look_at_files())
    await members.beat("serving", engine.look_at_files())
    asked = engine.queries
    rested = not is_due()
    await members.beat("serving", engine.look_at_files())

    assert rested
    assert engine.queries == asked

    written = Batch(Point.JOIN)
    written.add("UPDATE epoch SET age = age + 1")
    await engine.commit(written)

    assert is_due()
    await members.beat("serving", engine.look_at_files())
    assert engine.queries == asked + 1
    await engine.stop()


async def test_a_run_of_another_boot_keeps_its_instance_where_hosts_share_a_store(tmp_path: Path):
    """Nothing proves from here that it is dead, and two runs of one instance would both act."""
    engine = MemoryEngine(load_migrations(MIGRATIONS), process=Process())
    await engine.start()
    process, names = Process(), {"service": "s", "host": "node-1"}

    async def take(run_id: str, *, is_shared: bool = True, instance: str | None = "a") -> Seat:
        return await take_seat(
            engine,
            process,
            tmp_path,
            run_id=run_id,
            instance=instance,
            is_shared=is_shared,
            **names,
        )

    members = Members(engine, Clock(), process, run_id="1", service="s", lock_directory=tmp_path)
    first = await take("1")
    wires = {"topic": "s", "ops_topic": "s-ops", "transport": "memory://"}
    await members.join(host="node-1", seat=first, version="0", schema=1, **wires)
    first.leave(is_recorded=False)
    elsewhere = Batch(Point.JOIN)
    elsewhere.add("UPDATE run SET boot_id = 'another'")
    await engine.commit(elsewhere)

    with pytest.raises(DependencyError, match=r"'node-1' is dead .*: gracekit runs gone 1 --"):
        await take("2")
    assert (await take("3", instance=None)).instance == "node-1-0"
    assert (await take("4", is_shared=False)).instance == "a"
    await engine.stop()
