"""When a run asks its store whether it may still act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracekit.clock import Clock
from gracekit.errors import AlreadyRunningError
from gracekit.process import Point, Process
from gracekit.runs.members import BEAT_WRITTEN_S, Members
from gracekit.runs.run import Run
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


async def test_a_start_asks_about_runs_of_its_host_of_which_nothing_is_proven(tmp_path: Path):
    """Two runs of one instance would both act, and two of one host read one directed queue."""
    engine = MemoryEngine(load_migrations(MIGRATIONS), process=Process())
    await engine.start()
    process, asked = Process(), list[list[str]]()

    async def settle_doubts(runs: list[Run]) -> None:
        asked.append([run.run_id for run in runs])

    async def take(
        run_id: str, *, host: str = "node-1", instance: str | None = "a", is_shared: bool = True
    ) -> Seat:
        return await take_seat(
            engine,
            process,
            tmp_path,
            run_id=run_id,
            service="s",
            host=host,
            instance=instance,
            settle_doubts=settle_doubts if is_shared else None,
        )

    members = Members(engine, Clock(), process, run_id="1", service="s", lock_directory=tmp_path)
    first = await take("1")
    wires = {"topic": "s", "ops_topic": "s-ops", "transport": "memory://"}
    await members.join(host="node-1", seat=first, version="0", schema=1, **wires)
    first.leave(is_recorded=False)
    engine.guarded = None  # the next ones commit for themselves
    elsewhere = Batch(Point.JOIN)
    elsewhere.add("UPDATE run SET boot_id = 'another'")
    await engine.commit(elsewhere)

    with pytest.raises(AlreadyRunningError, match="instance 'a' of service 's' is running"):
        await take("2", host="node-2")
    assert (await take("3", instance=None)).instance == "node-1-0"
    assert asked == [["1"], ["1"]]
    assert (await take("4", host="node-2", instance=None)).instance == "node-2-0"
    assert len(asked) == 2
    assert (await take("5", is_shared=False)).replaced == ["1"]
    await engine.stop()
