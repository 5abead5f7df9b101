"""A wake-up is heard at once, is never waited for, and says when nobody hears it."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import gracekit.process as process_module
from gracekit.store.wakeup import Wakeup, nudge, wake, wakeups_directory

OWNER = """
import asyncio, sys
from pathlib import Path
from gracekit.store.wakeup import Wakeup

async def main():
    heard = asyncio.Event()
    Wakeup(Path(sys.argv[1])).start(heard.set)
    print("hung", flush=True)
    await heard.wait()
    print("heard", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return wakeups_directory(tmp_path / "queue.db") / "one"


@pytest.fixture
async def wakeup(path):
    wakeup = Wakeup(path)
    yield wakeup
    wakeup.stop()


async def test_a_wake_up_wakes_the_owner(wakeup, path):
    """A wake-up calls the owner back on its loop."""
    heard = asyncio.Event()
    wakeup.start(heard.set)

    assert wake(path)

    await asyncio.wait_for(heard.wait(), 20)


async def test_a_nudge_is_not_a_wake_up(wakeup, path):
    """Each calls back what it is for; where nobody asked for nudges they are not heard."""
    rung, nudged = asyncio.Event(), asyncio.Event()
    wakeup.start(rung.set, on_nudge=nudged.set)

    assert nudge(path)
    await asyncio.wait_for(nudged.wait(), 20)
    assert not rung.is_set()
    assert wake(path)
    await asyncio.wait_for(rung.wait(), 20)


async def test_every_wake_up_after_the_last_call_is_heard_again(wakeup, path):
    """Waking inside the callback is a new wake-up, not a part of the old one."""
    heard: list[bool] = []
    done = asyncio.Event()

    def on_wake() -> None:
        heard.append(True)
        if len(heard) < 5:
            wake(path)
        else:
            done.set()

    wakeup.start(on_wake)
    wake(path)

    await asyncio.wait_for(done.wait(), 20)
    assert len(heard) == 5


async def test_many_wake_ups_are_heard_as_one(wakeup, path):
    """Rings that the loop had no time to hear are one call, and silence follows."""
    calls: list[bool] = []
    heard = asyncio.Event()

    def on_wake() -> None:
        calls.append(True)
        heard.set()

    wakeup.start(on_wake)
    assert all(wake(path) for _ in range(1000))
    await asyncio.wait_for(heard.wait(), 20)
    for _ in range(5):
        await asyncio.sleep(0)

    assert calls == [True]


async def test_full_pipe_neither_blocks_nor_fails(wakeup, path):
    """An owner that hears nothing for long costs its ringers nothing: it is rung already."""
    wakeup.start(lambda: None)

    assert all(wake(path) for _ in range(70_000))


async def test_missing_pipe_wakes_nobody(path):
    """No pipe, no directory, and no exception."""
    assert wake(path) is False


async def test_stopped_pipe_is_gone(wakeup, path):
    """`stop` takes the pipe away, and may come twice."""
    wakeup.start(lambda: None)
    wakeup.start(lambda: None)
    wakeup.stop()
    wakeup.stop()

    assert not path.exists()
    assert wake(path) is False


async def test_other_files_are_not_rung(tmp_path):
    """A wake-up never writes into anything but a pipe."""
    file = tmp_path / "precious"
    file.write_bytes(b"bytes")

    assert wake(file) is False
    assert wake(tmp_path) is False
    assert file.read_bytes() == b"bytes"


async def test_pipes_are_private(wakeup, path):
    """Only this user can wake this user's processes."""
    wakeup.start(lambda: None)

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    info = path.lstat()
    assert stat.S_ISFIFO(info.st_mode)
    assert stat.S_IMODE(info.st_mode) == 0o600


async def test_an_open_directory_is_closed(wakeup, path):
    """Our directory, if others can enter it, is closed to them, before a pipe is made in it."""
    path.parent.mkdir()
    path.parent.chmod(0o755)

    wakeup.start(lambda: None)

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.process
async def test_the_pipe_of_a_killed_owner_is_dead_until_its_successor_comes(wakeup, path):
    """A pipe left by kill -9 is not heard; the next owner of the name makes a new one."""
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
    assert wake(path)
    assert owner.stdout.readline() == "heard\n"
    owner.kill()
    owner.communicate()

    assert path.exists()
    assert wake(path) is False

    heard = asyncio.Event()
    wakeup.start(heard.set)
    assert wake(path)
    await asyncio.wait_for(heard.wait(), 20)
