"""The SQLite transport between processes: wake-ups, deaths and what they leave."""

from __future__ import annotations

import asyncio
import signal
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest

from gracekit.clock import Clock
from gracekit.errors import Undeliverable
from gracekit.process import Process
from gracekit.rpc.sqlite.sqlite_transport import SqliteTransport
from gracekit.rpc.transport import reply_queue
from gracekit.store.wakeup import wakeups_directory
from tests.rpc.kit import FOR_EVER_S, Inbox, message
from tests.rpc.peer import SHARED, peer
from tests.scale import scale

pytestmark = pytest.mark.process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queues.db"


@pytest.fixture
async def transport(path: Path) -> AsyncIterator[SqliteTransport]:
    """One that never polls: what it learns it was rung for, or looked up at its start."""
    transport = SqliteTransport(path, process=Process(), clock=Clock(), poll_s=FOR_EVER_S)
    await transport.start()
    yield transport
    await transport.stop()


async def test_a_waiting_consumer_is_woken_by_another_process(transport, path):
    """A message from another process arrives with the safety poll an hour away."""
    inbox = Inbox()
    await transport.consume([SHARED], inbox.put, prefetch=10)

    async with peer("send", path, "child", 1):
        delivery = await inbox.next()

    assert delivery.body == b"child 0"


async def test_a_consumer_in_another_process_is_woken_too(transport, path):
    """The other way round: the waiting child is rung."""
    async with peer("consume", path, "shared", "q", 10) as child:
        assert await child.line() == "ready"

        await transport.publish(SHARED, message("hello"))

        assert await child.line() == "hello False"


async def test_senders_may_enqueue_while_nobody_reads(path):
    """Several processes send while the service is down; it finds everything, in each sender's
    order.
    """
    number = scale(30, 1000)
    transport = SqliteTransport(path, process=Process(), clock=Clock())
    await transport.start()
    await transport.declare([SHARED])
    await transport.stop()
    async with peer("send", path, "a", number) as one, peer("send", path, "b", number) as other:
        assert [await one.wait(), await other.wait()] == [0, 0]

    inbox = Inbox()
    await transport.start()
    await transport.consume([SHARED], inbox.put, prefetch=10 * number)
    await inbox.take(2 * number)
    await transport.stop()

    for sender in ("a", "b"):
        assert [body for body in inbox.bodies if body[0] == sender] == [
            f"{sender} {n}" for n in range(number)
        ]


async def test_a_killed_consumer_gives_back_to_the_next_start(path, transport):
    """Who starts finds the dead by proof, and reads what they held in its old order."""
    async with peer("consume", path, "shared", "q", 2) as child:
        await child.line()
        for text in ("a", "b", "c"):
            await transport.publish(SHARED, message(text))
        assert [await child.line(), await child.line()] == ["a False", "b False"]
        await child.kill()

    inbox = Inbox()
    late = SqliteTransport(path, process=Process(), clock=Clock(), poll_s=FOR_EVER_S)
    await late.start()
    await late.consume([SHARED], inbox.put, prefetch=10)
    await inbox.take(3)
    await late.stop()

    assert [(d.body, d.redelivered) for d in inbox.all] == [
        (b"a", True),
        (b"b", True),
        (b"c", False),
    ]


async def test_a_killed_consumer_gives_back_to_who_runs(path, transport):
    """The safety poll of any live connection proves the death and wakes the readers."""
    inbox = Inbox()
    other = SqliteTransport(path, process=Process(), clock=Clock(), poll_s=0.05)
    async with peer("consume", path, "shared", "q", 1) as child:
        await child.line()
        await transport.publish(SHARED, message("a"))
        await child.line()
        await transport.consume([SHARED], inbox.put, prefetch=1)
        await child.kill()

    await other.start()
    delivery = await inbox.next()
    await other.stop()

    assert delivery.redelivered


async def test_a_living_consumer_keeps_what_it_holds(path, transport):
    """Nobody takes from a process that lives, however often it is looked at."""
    other = SqliteTransport(path, process=Process(), clock=Clock(), poll_s=0.01)
    async with peer("consume", path, "shared", "q", 1) as child:
        await child.line()
        await transport.publish(SHARED, message("held"))
        await child.line()
        inbox = Inbox()
        await other.start()
        await other.consume([SHARED], inbox.put, prefetch=10)
        for n in range(20):
            await transport.publish(SHARED, message(str(n)))
            await (await inbox.next()).ack()
        await other.stop()

        assert "held" not in inbox.bodies


async def test_a_reply_to_a_killed_client_is_undeliverable(path, transport):
    """A wake-up that nobody hears leads to the proof of death, at once."""
    async with peer("consume", path, "reply", "reply_x", 1) as child:
        await child.line()
        await transport.publish(reply_queue("reply_x"), message("heard"))
        await child.line()
        await child.kill()

        with pytest.raises(Undeliverable, match="or its owner is gone"):
            await transport.publish(reply_queue("reply_x"), message("unheard"))


async def test_the_dead_leave_no_files(path, transport):
    """Wake-up pipe and lock of a killed process are removed with its rows."""
    async with peer("consume", path, "fanout", "f", 1) as child:
        await child.line()
        assert len(list(wakeups_directory(path).iterdir())) == 4
        await child.kill()

    await transport.publish_fanout("f", message("rings nobody"))

    assert len(list(wakeups_directory(path).iterdir())) == 2
    await transport.stop()
    assert list(wakeups_directory(path).iterdir()) == []


async def test_only_the_owner_can_read_what_is_queued(path, transport):
    """Requests are secrets: files 0600, the directory of pipes 0700."""
    files = [path, *wakeups_directory(path).iterdir()]

    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(wakeups_directory(path).stat().st_mode) == 0o700


async def test_a_missed_ring_costs_one_safety_poll(path):
    """A consumer whose pipe was lost still finds its messages."""
    inbox = Inbox()
    deaf = SqliteTransport(path, process=Process(), clock=Clock(), poll_s=0.05)
    await deaf.start()
    await deaf.consume([SHARED], inbox.put, prefetch=1)
    await deaf.publish(SHARED, message("rung"))
    await (await inbox.next()).ack()
    for wakeup in wakeups_directory(path).glob("*.wakeup"):
        wakeup.unlink()

    await deaf.publish(SHARED, message("not rung"))

    assert (await inbox.next()).body == b"not rung"
    await deaf.stop()


# -- other views of the machine ----------------------------------------------------------

OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def view_of(volume: Path, elsewhere: Path) -> tuple[str, ...]:
    """A container in which *volume* is mounted at *elsewhere*, and its own path shows nothing."""
    mounts = f"mount --bind {volume} {elsewhere} && mount -t tmpfs none {volume}"
    return (*OWN_PIDS, "sh", "-c", f'{mounts} && exec "$0" "$@"')


async def publishes(transport: SqliteTransport, queue: str) -> bool:
    try:
        await transport.publish(reply_queue(queue), message("unheard"))
    except Undeliverable:
        return False
    return True


async def test_one_volume_at_two_paths_in_two_containers_is_one_volume(tmp_path):
    """Pipes and locks are found by name beside the file: both live, are woken, and are proven
    dead.
    """
    volume, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    for directory in (volume, elsewhere):
        directory.mkdir(mode=0o700)
    view = view_of(volume, elsewhere)
    if subprocess.run([*view, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts and pid namespaces of one's own take root")
    here = SqliteTransport(
        volume / "queues.db", process=Process(), clock=Clock(), poll_s=FOR_EVER_S
    )
    await here.start()
    names = "reply_a", "reply_b"
    async with (
        peer("consume", volume / "queues.db", "reply", "reply_a", 9, inside=OWN_PIDS) as one,
        peer("consume", elsewhere / "queues.db", "reply", "reply_b", 9, inside=view) as two,
        peer("consume", elsewhere / "queues.db", "reply", "reply_c", 9, inside=view) as late,
    ):
        for child in (one, two, late):
            assert await child.line() == "ready"

        for child, name in zip((one, two), names, strict=True):
            await here.publish(reply_queue(name), message("heard"))
            assert await child.line() == "heard False"
        await two.kill()
        async with asyncio.timeout(10):
            while await publishes(here, "reply_b"):
                pass  # the kernel kills the container a moment after its parent
        await here.publish(reply_queue("reply_a"), message("again"))
        assert await one.line() == "again False"
    await here.stop()


@pytest.mark.parametrize("view", ["boot id", "pid namespace"])
async def test_a_connection_of_which_nothing_is_proven_keeps_what_it_has(path, transport, view):
    """Its lock file is gone, and its process cannot be looked up: its queue stays."""
    async with peer("consume", path, "reply", "reply_x", 9) as child:
        assert await child.line() == "ready"
        for file in wakeups_directory(path).iterdir():
            if transport._connection.id not in file.name:
                file.unlink()
        column = {"boot id": "boot_id = 'another'", "pid namespace": "pid_ns = 1"}[view]
        change = apsw.Connection(str(path))
        change.set_busy_timeout(10_000)
        change.execute(f"UPDATE connection SET {column} WHERE pid = ?", (child.process.pid,))
        change.close()

        await transport.publish(
            reply_queue("reply_x"), message("kept")
        )  # a wake-up that is not heard
        await transport.publish(reply_queue("reply_x"), message("kept"))


# -- death at each point ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("failpoint", "left"),
    [
        ("deliver.before", [("ack", False)]),  # the claim was rolled back
        ("deliver.after", [("ack", True)]),
        ("ack.before", [("ack", True)]),
        ("ack.after", []),
    ],
)
async def test_a_consumer_killed_at_a_point_loses_nothing(path, transport, failpoint, left):
    """Wherever a consumer dies, its message is there again, unless its ack was committed."""
    await transport.declare([SHARED])
    await transport.publish(SHARED, message("ack"))
    async with peer("consume", path, "shared", "q", 1, failpoint=failpoint) as child:
        assert await child.wait() == -signal.SIGKILL

    inbox = Inbox()
    late = SqliteTransport(path, process=Process(), clock=Clock(), poll_s=FOR_EVER_S)
    await late.start()
    await late.consume([SHARED], inbox.put, prefetch=10)
    await late.publish(SHARED, message("end"))
    await inbox.take(len(left) + 1)
    await late.stop()

    assert [(d.body.decode(), d.redelivered) for d in inbox.all] == [*left, ("end", False)]


@pytest.mark.parametrize(
    ("failpoint", "arrived"), [("publish.before:3", 2), ("publish.after:3", 3)]
)
async def test_a_sender_killed_at_a_point_leaves_whole_messages(
    path, transport, failpoint, arrived
):
    """What was confirmed is there; what was not may be, whole."""
    await transport.declare([SHARED])
    async with peer("send", path, "x", 5, failpoint=failpoint) as child:
        assert await child.wait() == -signal.SIGKILL

    inbox = Inbox()
    await transport.consume([SHARED], inbox.put, prefetch=10)
    await transport.publish(SHARED, message("end"))
    await inbox.take(arrived + 1)

    assert inbox.bodies == [*(f"x {n}" for n in range(arrived)), "end"]


async def test_competing_processes_take_each_message_once(path, transport):
    """Under load no message is lost, doubled or left, whoever takes it."""
    number = scale(100, 5000)
    async with (
        peer("consume", path, "shared", "q", 10_000) as one,
        peer("consume", path, "shared", "q", 10_000) as other,
    ):
        children = (one, other)
        for child in children:
            await child.line()
        inbox = Inbox()
        await transport.consume([SHARED], inbox.put, prefetch=10_000)
        await asyncio.gather(*(transport.publish(SHARED, message(str(n))) for n in range(number)))
        for child in children:
            assert child.process.stdin is not None
            child.process.stdin.close()
        left = [await child.process.stdout.read() for child in children]

    # The children stopped and gave everything back: the parent has it all now.
    await inbox.take(number)
    assert sorted(map(int, inbox.bodies)) == list(range(number))
    # Each message had one first taker; later ones were told that it had been delivered before
    # (one child may get what the other gave back a moment earlier).
    first = [int(d.body) for d in inbox.all if not d.redelivered]
    for line in b"".join(left).decode().splitlines():
        body, redelivered = line.split()
        first += [int(body)] if redelivered == "False" else []
    assert sorted(first) == list(range(number))
