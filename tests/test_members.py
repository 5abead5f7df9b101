"""When a run asks its store whether it may still act."""

from __future__ import annotations

from typing import Any

from gracekit.clock import Clock
from gracekit.process import Point, Process
from gracekit.runs.members import BEAT_WRITTEN_S, Members
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
