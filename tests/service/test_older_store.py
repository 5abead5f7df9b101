"""A store that an older gracekit has written."""

from __future__ import annotations

import pytest

from gracekit import (
    Context,
    Done,
    Service,
)
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.tracker.task import TERMINAL, TaskState
from tests.service.kit import World

pytestmark = pytest.mark.looptime


OLD_RUN = "a" * 32
_RUN_OF_OLD = f"""
INSERT INTO run (run_id, service, host, instance, generation, version, boot_id, pid_ns, pid,
    start_ticks, lock_path, phase, topic, ops_topic, transport, started_at, beat_at)
VALUES ('{OLD_RUN}', 'compute', 'node-1', 'node-1-0', 1, '0.1', 'boot', 1, 7, 7, '', 'serving',
    'compute', 'compute.ops', 'memory://', ?1, ?1)"""
_TASK_OF_OLD = """
INSERT INTO task (request_id, recipient, service, lane, queue, route, target, method, version, args,
    context, content_hash, on_interrupt, settle_s, resource_kind, resource_id, state, owner, cut,
    attempts, token, accepted_at, finished_at)
VALUES (?1, '', 'compute', 'requests', 'compute', 'shared', '', 'work', '1.0', '{"vm":"v"}', '{}',
    '', 'retry', 0, 'vm', 'v', ?1, ?2, ?3, ?4, ?5, ?6, ?7)"""
_REST_OF_OLD = f"""
INSERT INTO tally VALUES ('accepted', 8), ('rejected', 1), ('holds', 1);
INSERT INTO lease (kind, id, lver, owner, request_id, acquired_at)
    VALUES ('vm', 'v', 7, '{OLD_RUN}', 'running', 0);
INSERT INTO hold (service, name, key, owner, target, method, version, args, opened_at, lapses_at)
    VALUES ('compute', 'migration', 'v', '{OLD_RUN}', 'node-1', 'work', '1.0', '{{"vm":"v"}}', 0,
        9e9);
INSERT INTO incident (at, run_id, what) VALUES (0, '{OLD_RUN}', 'rejected');"""


def write_old_store(world: World) -> None:
    """What a run of the first schema left when it was killed: a task in each state."""
    first, *_ = load_migrations(MIGRATIONS)
    world.disk.execute(first)
    world.disk.execute("PRAGMA user_version = 1")
    wall = world.clock.wall()
    world.disk.execute(_RUN_OF_OLD, (wall,))
    for state in TaskState:
        begun = state not in {TaskState.PENDING, TaskState.ACCEPTED, TaskState.REJECTED}
        world.disk.execute(
            _TASK_OF_OLD,
            (
                state.value,
                OLD_RUN if state in {TaskState.ACCEPTED, TaskState.RUNNING} else None,
                "cancelled" if state is TaskState.HANDED_OVER else None,
                int(begun),
                7 if begun else None,
                wall,
                wall if state in TERMINAL else None,
            ),
        )
    world.disk.execute(_REST_OF_OLD)


@pytest.mark.parametrize("vm", ['"' + "v" * 1000 + '"', '{"id":1}'], ids=["long", "an object"])
async def test_a_row_runs_whose_resource_would_be_refused_today(
    world: World, svc: Service, vm: str
):
    """
    It was accepted by a version that took any value, and keeps the resource that it named then.
    """
    ran: list[str] = []

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: object) -> None:
        ran.append(ctx.request_id)

    write_old_store(world)
    world.disk.execute("UPDATE task SET args = json_object('vm', json(?))", (vm,))
    await world.start(svc)
    await world.until(lambda: world.state("accepted") == "succeeded")

    assert "accepted" in ran


async def test_a_store_of_the_first_schema_is_taken_over_whole(world: World, svc: Service):
    """
    An upgrade meets unfinished work: nothing on record is lost, and what was open is found by
    the new indexes as it was by the old.
    """
    ran: list[tuple[str, int, int | None]] = []

    @svc.rpc(resource="vm", on_interrupt="retry", settle=0)
    async def work(ctx: Context, vm: str) -> None:
        ran.append((ctx.request_id, ctx.attempt, ctx.fence))

    @work.probe
    async def _(ctx: Context, vm: str) -> Done:
        return Done()

    write_old_store(world)
    names = [row["name"] for row in world.rows("PRAGMA table_info(task)")]
    ended = "SELECT {} FROM task{} WHERE request_id IN ({}) ORDER BY id".format(
        ", ".join(names),
        "{}",
        ", ".join(f"'{state.value}'" for state in (TERMINAL | {TaskState.PENDING})),
    )
    before = world.rows(ended.format("")), world.rows("SELECT * FROM incident")
    await world.start(svc)
    opened = {"accepted", "running", "handed_over"}
    await world.until(lambda: {world.state(one) for one in opened} == {"succeeded"})
    await world.until(lambda: world.rows("SELECT end_reason FROM hold") == [{"end_reason": "done"}])

    schema = "SELECT name, sql FROM sqlite_schema ORDER BY name"
    fresh = World()
    engine = fresh.life(svc).engine
    await engine.start()
    assert world.rows("PRAGMA user_version") == fresh.rows("PRAGMA user_version")
    assert world.rows("PRAGMA user_version") != [{"user_version": 1}]
    assert world.rows(schema) == fresh.rows(schema)
    await engine.stop()
    assert world.rows(ended.format(" JOIN content ON task_id = id")) == before[0]
    assert world.rows("SELECT * FROM incident WHERE what = 'rejected'") == before[1]
    assert {name: attempt for name, attempt, _ in ran} == {
        "accepted": 1,
        "running": 2,
        "handed_over": 2,
    }
    assert sorted(fence or 0 for _, _, fence in ran) == [8, 9, 10]
    assert world.rows("SELECT verdict FROM run WHERE run_id = ?", OLD_RUN) == [
        {"verdict": "killed"}
    ]
    assert world.tally() == {"accepted": 8, "rejected": 1, "holds": 1, "adopted_runs": 1}
