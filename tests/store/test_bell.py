"""A ring is heard at once, is never waited for, and says when nobody hears it."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import gracekit.process as process_module
from gracekit.store.bell import Bell, bells_directory, nudge, ring

OWNER = """
import asyncio, sys
from pathlib import Path
from gracekit.store.bell import Bell

async def main():
    heard = asyncio.Event()
    Bell(Path(sys.argv[1])).start(heard.set)
    print("hung", flush=True)
    await heard.wait()
    print("heard", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return bells_directory(tmp_path / "queue.db") / "one"


@pytest.fixture
async def bell(path):
    bell = Bell(path)
    yield bell
    bell.stop()


async def test_ring_wakes_the_owner(bell, path):
    """
    A ring calls the owner back on its loop.
    """
    heard = asyncio.Event()
    bell.start(heard.set)

    assert ring(path)

    await asyncio.wait_for(heard.wait(), 20)


async def test_a_nudge_is_not_a_ring(bell, path):
    """
    Each calls back what it is for; where nobody asked for nudges they are not heard.
    """
    rung, nudged = asyncio.Event(), asyncio.Event()
    bell.start(rung.set, on_nudge=nudged.set)

    assert nudge(path)
    await asyncio.wait_for(nudged.wait(), 20)
    assert not rung.is_set()
    assert ring(path)
    await asyncio.wait_for(rung.wait(), 20)


async def test_every_ring_after_the_last_call_is_heard_again(bell, path):
    """
    Ringing inside the callback is a new ring, not a part of the old one.
    """
    heard: list[bool] = []
    done = asyncio.Event()

    def on_ring() -> None:
        heard.append(True)
        if len(heard) < 5:
            ring(path)
        else:
            done.set()

    bell.start(on_ring)
    ring(path)

    await asyncio.wait_for(done.wait(), 20)
    assert len(heard) == 5


async def test_many_rings_are_heard_as_one(bell, path):
    """
    Rings that the loop had no time to hear are one call, and silence follows.
    """
    calls: list[bool] = []
    heard = asyncio.Event()

    def on_ring() -> None:
        calls.append(True)
        heard.set()

    bell.start(on_ring)
    assert all(ring(path) for _ in range(1000))
    await asyncio.wait_for(heard.wait(), 20)
    for _ in range(5):
        await asyncio.sleep(0)

    assert calls == [True]


async def test_full_pipe_neither_blocks_nor_fails(bell, path):
    """
    An owner that hears nothing for long costs its ringers nothing: it is rung already.
    """
    bell.start(lambda: None)

    assert all(ring(path) for _ in range(70_000))


async def test_missing_bell_is_not_heard(path):
    """
    No bell, no directory, and no exception.
    """
    assert ring(path) is False


async def test_stopped_bell_is_gone(bell, path):
    """
    `stop` takes the pipe away, and may come twice.
    """
    bell.start(lambda: None)
    bell.start(lambda: None)
    bell.stop()
    bell.stop()

    assert not path.exists()
    assert ring(path) is False


async def test_other_files_are_not_rung(tmp_path):
    """
    A ring never writes into anything but a pipe.
    """
    file = tmp_path / "precious"
    file.write_bytes(b"bytes")

    assert ring(file) is False
    assert ring(tmp_path) is False
    assert file.read_bytes() == b"bytes"


async def test_bells_are_private(bell, path):
    """
    Only this user can wake this user's processes.
    """
    bell.start(lambda: None)

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    info = path.lstat()
    assert stat.S_ISFIFO(info.st_mode)
    assert stat.S_IMODE(info.st_mode) == 0o600


async def test_an_open_directory_is_closed(bell, path):
    """
    A directory of ours that others can enter is closed to them, before a bell hangs in it.
    """
    path.parent.mkdir()
    path.parent.chmod(0o755)

    bell.start(lambda: None)

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.process
async def test_bell_of_a_killed_owner_is_dead_until_its_successor_comes(bell, path):
    """
    A pipe left by kill -9 is not heard; the next owner of the name hangs a new one.
    """
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            OWNER,
            path,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(process_module.__file__).parents[1])},
    )
    assert owner.stdout.readline() == "hung\n"
    assert ring(path)
    assert owner.stdout.readline() == "heard\n"
    owner.kill()
    owner.communicate()

    assert path.exists()
    assert ring(path) is False

    heard = asyncio.Event()
    bell.start(heard.set)
    assert ring(path)
    await asyncio.wait_for(heard.wait(), 20)
