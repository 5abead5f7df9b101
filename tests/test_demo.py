"""The demonstration: it runs, it judges by the files, and it leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest

from gracekit import Runtime, Settings
from gracekit.demo.app import (
    CONFIRMED,
    DONE,
    EFFECTS,
    PROCESSES,
    START,
    append,
    cast,
    entries,
    svc,
)
from gracekit.demo.judge import judge, read_rows, reader_of

ROOT = Path(__file__).resolve().parent.parent
COPY = {"label": "copy d", "method": "copy", "items": [0, 1, 2]}
CHARGE = {"label": "charge a", "method": "charge", "items": [START, DONE]}

# -- the real thing ---------------------------------------------------------------


def gracekit(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "gracekit", *arguments)
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.process
def test_demo_loses_nothing_and_runs_nothing_twice():
    """The real demonstration ends with 0 and says so in its last line; its files can be judged
    again.
    """
    played = gracekit("demo", "--keep")
    *_, last = played.stdout.splitlines()
    kept = re.search(r"^kept in (\S+)$", played.stdout, re.MULTILINE)
    assert kept is not None, played.stdout + played.stderr
    try:
        judged = gracekit("demo", "--check", kept[1])
    finally:
        shutil.rmtree(kept[1])

    assert (played.returncode, played.stderr) == (0, "")
    found = re.fullmatch(
        r"accepted (\d+), finished in A: (\d+), finished in B: (\d+), 0 lost, 0 run twice", last
    )
    assert found is not None, played.stdout
    accepted, in_a, in_b = map(int, found.groups())
    assert (accepted, accepted - in_a - in_b) == (11, 0)
    assert in_a >= 1
    assert in_b >= 4  # what outlived the drain, and what was sent while A drained or nobody served
    assert "exit codes: A 75, B 0;" in played.stdout
    assert "answers an ops ping" in played.stdout
    assert (judged.returncode, judged.stdout.splitlines()) == (0, [kept[0], last])


@pytest.mark.process
def test_demo_plays_on_a_broker_and_leaves_no_queue(shared_broker, rabbit_vhost):
    """With the URL alone changed the story ends alike; what expires by itself may stay a while."""
    url = shared_broker.url_of(rabbit_vhost)

    played = gracekit("demo", GRACEKIT_TRANSPORT_URL=url)

    assert (played.returncode, played.stderr) == (0, "")
    assert played.stdout.splitlines()[-1].endswith("0 lost, 0 run twice")
    assert "queues are on amqp://***@127.0.0.1" in played.stdout
    assert shared_broker.password not in played.stdout
    left = shared_broker.queues(rabbit_vhost)
    assert [name for name in left if "x-expires" not in left[name].arguments] == []


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_demo_that_is_interrupted_leaves_no_process_and_no_file(number):
    """Ctrl-C and SIGTERM end the demonstration, its processes and its directory."""
    demo = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gracekit", "demo", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert demo.stdout is not None
        directory, lines = "", ""
        while "confirmed" not in lines and "running" not in lines:
            line = (await asyncio.wait_for(demo.stdout.readline(), 60)).decode()
            assert line, lines
            lines += line
            if found := re.search(r"files and logs are in (\S+)", line):
                directory = found[1]
        children = working_in(directory)
        demo.send_signal(number)
        code = await asyncio.wait_for(demo.wait(), 30)
    finally:
        if demo.returncode is None:
            demo.kill()
            await demo.wait()

    assert len(children) >= 2
    assert (working_in(directory), Path(directory).exists()) == ([], False)
    assert code != 0


def working_in(directory: str) -> list[int]:
    """Processes whose working directory that is, or was."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str((entry / "cwd").readlink()).startswith(directory):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


# -- the judgement ----------------------------------------------------------------


@asynccontextmanager
async def process_a() -> AsyncIterator[Callable]:
    """A short life of the demonstration's service in this process, named A."""
    settings = Settings(host="demo", instance="demo")
    async with Runtime(svc, settings), svc.client(settings.transport_url) as client:

        async def send(request: dict[str, object], **args: object) -> str:
            return await cast(client, request | {"args": args})

        yield send


@pytest.fixture
async def files(tmp_path, monkeypatch):
    """What a demonstration with one copy and one charge leaves: all is well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEMO_PROCESS", "A")
    async with process_a() as send:
        ids = {
            await send(COPY, disk="d", blocks=3, seconds=0.03),
            await send(CHARGE, account="a", seconds=0.01),
        }
        reader = reader_of(tmp_path)
        reader.open()
        async with asyncio.timeout(30):
            while not await ended(reader, ids):
                await asyncio.sleep(0.01)
        reader.close()
    append(tmp_path / PROCESSES, end_of("A"))
    return tmp_path


async def ended(reader, ids):
    rows = await read_rows(reader, {})
    return {row["id"] for row in rows.values() if row["state"] == "succeeded"} == ids


def end_of(name: str, *, exit_code: int = 0, cursors: dict[str, int] | None = None):
    pid = os.getpid() if name == "A" else 1
    return {"name": name, "pid": pid, "exit_code": exit_code, "cursors": cursors or {}}


def id_of(files: Path, request: dict[str, object]) -> str:
    return next(e["id"] for e in entries(files / CONFIRMED) if e["label"] == request["label"])


def plant_effect(files: Path, request: dict[str, object], item: str | int, process: str) -> None:
    entry = {"id": id_of(files, request), "item": item, "process": process, "pid": 1, "at": 0.0}
    append(files / EFFECTS, entry)


def in_store(files: Path, sql: str, *params: str) -> None:
    connection = apsw.Connection(str(files / "gracekit-store.db"))
    connection.set_busy_timeout(30_000)
    connection.execute(sql, params)
    connection.close()


async def test_judgement_of_an_orderly_life_is_good(files):
    """Without a planted fault nothing is lost and nothing was run twice."""
    judgement = await judge(files)

    assert judgement.sentence() == "accepted 2, finished in A: 2, 0 lost, 0 run twice"
    assert judgement.good


@pytest.mark.process
async def test_command_fails_for_a_planted_loss_and_a_planted_repetition(files):
    """`gracekit demo --check` ends with 1 and names both ids."""
    append(files / CONFIRMED, {"id": "f00d", "label": "charge b", "items": []})
    plant_effect(files, CHARGE, START, "B")

    judged = await asyncio.to_thread(gracekit, "demo", "--check", str(files))

    assert (judged.returncode, judged.stderr) == (1, "")
    assert judged.stdout.splitlines() == [
        "lost: f00d: charge b has no row",
        f"run twice: {id_of(files, CHARGE)}: start in A, B",
        f"kept in {files}",
        "accepted 2, finished in A: 2, 1 lost, 1 run twice",
    ]


async def test_id_that_was_confirmed_and_has_no_row_is_lost(files):
    """A row that vanished from the store is found by the senders' list."""
    lost = id_of(files, COPY)
    in_store(files, "DELETE FROM task WHERE request_id = ?", lost)

    assert set((await judge(files)).lost) == {lost}


async def test_row_that_has_not_ended_is_lost(files):
    """A request that nobody finished counts as lost, whatever its state is called."""
    lost = id_of(files, COPY)
    in_store(files, "UPDATE task SET state = 'handed_over' WHERE request_id = ?", lost)

    assert (await judge(files)).lost == {lost: "copy d is still handed_over"}


async def test_success_without_its_effects_is_lost(files):
    """A row may not say SUCCEEDED of blocks that nobody copied."""
    lost = id_of(files, COPY)
    lines = [e for e in entries(files / EFFECTS) if not (e["id"] == lost and e["item"] == 1)]
    (files / EFFECTS).unlink()
    for line in lines:
        append(files / EFFECTS, line)

    assert (await judge(files)).lost == {lost: "copy d succeeded without [1]"}


@pytest.mark.parametrize(
    ("request_", "item", "exit_code", "cursor"),
    [
        pytest.param(CHARGE, START, -9, None, id="an error task begun again, even after a crash"),
        pytest.param(CHARGE, DONE, 75, None, id="an error task's effect done again"),
        pytest.param(COPY, 0, 75, 1, id="a block behind the cursor after a hand-over"),
        pytest.param(COPY, 1, 75, 0, id="a block that the hand-over's cursor should have covered"),
        pytest.param(COPY, 1, -9, 1, id="a block at the cursor after a crash"),
    ],
)
async def test_what_must_not_be_done_again_is_run_twice(files, request_, item, exit_code, cursor):
    """A planted repetition is found."""
    (files / PROCESSES).unlink()
    cursors = {} if cursor is None else {id_of(files, request_): cursor}
    append(files / PROCESSES, end_of("A", exit_code=exit_code, cursors=cursors))
    append(files / PROCESSES, end_of("B"))
    plant_effect(files, request_, item, "B")

    assert set((await judge(files)).run_twice) == {id_of(files, request_)}


async def test_block_in_front_of_the_cursor_may_be_done_again_after_a_crash(files):
    """What a crash may repeat by promise is no fault."""
    (files / PROCESSES).unlink()
    append(files / PROCESSES, end_of("A", exit_code=-9, cursors={id_of(files, COPY): 0}))
    append(files / PROCESSES, end_of("B"))
    plant_effect(files, COPY, 1, "B")

    assert (await judge(files)).run_twice == {}


async def test_same_process_may_not_repeat(files):
    """Two starts of a handler in one process are a double run under every policy."""
    plant_effect(files, COPY, 2, "A")

    assert set((await judge(files)).run_twice) == {id_of(files, COPY)}
