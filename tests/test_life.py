"""The rule of life as a table, and the evidence that is gathered for it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from msgspec import structs

import gracekit.life
import gracekit.process
from gracekit.errors import DependencyError
from gracekit.life import (
    Alive,
    Identity,
    LifeEvidence,
    LifeLock,
    Lock,
    LockFile,
    Pid,
    RecordedLife,
    judge,
    look,
    read_identity,
    read_note,
)
from gracekit.process import Process

ALIVE, DEAD, OPEN = Alive.ALIVE, Alive.DEAD, Alive.NOT_PROVEN

# Rows: the lock. Columns: there, gone, reused, replaced, hidden, unknown; each under an equal boot
# id and in the same pid namespace, where alone the process table can be asked. The last: it cannot.
TABLE = {
    Lock.HELD: (
        ALIVE,
        OPEN,
        OPEN,
        OPEN,
        ALIVE,
        ALIVE,
        ALIVE,
    ),  # a forked child may hold a dead one's
    Lock.FREE: (ALIVE, DEAD, DEAD, DEAD, DEAD, DEAD, DEAD),
    Lock.MISSING: (ALIVE, DEAD, DEAD, DEAD, OPEN, OPEN, OPEN),
    Lock.REPLACED: (ALIVE, DEAD, DEAD, DEAD, OPEN, OPEN, OPEN),
    Lock.UNKNOWN: (ALIVE, DEAD, DEAD, DEAD, OPEN, OPEN, OPEN),
    Lock.UNREADABLE: (ALIVE, OPEN, OPEN, OPEN, OPEN, OPEN, OPEN),
    Lock.ELSEWHERE: (ALIVE, OPEN, OPEN, OPEN, OPEN, OPEN, OPEN),
}
COLUMNS = (Pid.THERE, Pid.GONE, Pid.REUSED, Pid.EXECED, Pid.HIDDEN, Pid.UNKNOWN)


def combinations() -> Iterator[tuple[LifeEvidence, Alive]]:
    flags = (True, False)
    for lock, pid, boot, space in itertools.product(Lock, Pid, flags, flags):
        column = COLUMNS.index(pid) if boot and space else len(COLUMNS)
        evidence = LifeEvidence(lock=lock, same_boot=boot, same_namespace=space, pid=pid)
        yield evidence, TABLE[lock][column]


@pytest.mark.parametrize(("evidence", "answer"), list(combinations()))
def test_the_rule_gives_one_answer_to_every_combination(evidence: LifeEvidence, answer: Alive):
    """Each lock, each pid, equal and different boot ids, the same and another pid namespace."""
    assert judge(evidence).answer is answer


def test_death_is_proven_by_no_missing_sign():
    """Dead is only who left the very file unlocked, or whose process the right table does not
    have.
    """
    for evidence, _ in combinations():
        if judge(evidence).is_dead:
            is_asked = evidence.same_boot and evidence.same_namespace
            is_gone = is_asked and evidence.pid in {Pid.GONE, Pid.REUSED, Pid.EXECED}
            assert evidence.lock is Lock.FREE or is_gone
            assert evidence.lock is not Lock.HELD


# -- the evidence -----------------------------------------------------------------------------


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[LifeLock]:
    made = LifeLock(tmp_path / "one.lock")
    assert made.acquire()
    yield made
    made.release()


def life_of(lock: LifeLock, **changed: object) -> RecordedLife:
    return RecordedLife(
        identity=structs.replace(read_identity(), **changed),  # type: ignore[arg-type]
        lock_name=lock.path.name,
        lock_file=lock.file,
    )


def seen(lock: LifeLock, **changed: object) -> LifeEvidence:
    return look(life_of(lock, **changed), lock.path.parent)


def test_this_process_is_seen_with_its_lock(lock: LifeLock):
    """The lock is seen from the process that holds it too, and asking takes nothing."""
    for _ in range(3):
        assert seen(lock) == LifeEvidence(
            lock=Lock.HELD, same_boot=True, same_namespace=True, pid=Pid.THERE
        )


@pytest.mark.parametrize(
    ("changed", "sign"),
    [
        ({"pid": 2**22 + 1}, Pid.GONE),
        ({"pid": 2**80}, Pid.UNKNOWN),
        ({"start_ticks": 1}, Pid.REUSED),
        ({"start_ticks": 1, "time_ns": 1}, Pid.HIDDEN),
        ({"start_ticks": 1, "time_ns": None}, Pid.HIDDEN),
        ({"time_ns": 1}, Pid.THERE),
    ],
)
def test_the_process_table_is_believed_as_far_as_it_can_know(
    lock: LifeLock, changed: dict[str, object], sign: Pid
):
    """Other ticks mean another process only in the same time namespace."""
    assert seen(lock, **changed).pid is sign


def test_boot_and_namespace_are_compared(lock: LifeLock):
    """What another kernel or namespace wrote down is told apart."""
    assert not seen(lock, boot_id="another").same_boot
    assert not seen(lock, pid_ns=1).same_namespace


@pytest.mark.process
def test_a_zombie_is_gone():
    """It cannot act any more, though its pid is taken until its parent has asked for it."""
    child = subprocess.Popen(["true"])
    try:
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        zombie = RecordedLife(
            identity=structs.replace(read_identity(), pid=child.pid), lock_name="", lock_file=None
        )
        assert look(zombie, None).pid is Pid.GONE
    finally:
        child.wait()


FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.process
def test_a_process_whose_first_thread_has_ended_is_there_while_another_runs():
    """Each process looks like that for a moment as it ends: its locks are still held then."""
    child = subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS])
    stat = Path(f"/proc/{child.pid}/stat")
    try:
        while (fields := stat.read_text().rpartition(")")[2].split())[0] != "Z":
            time.sleep(0.01)
        ending = RecordedLife(
            identity=structs.replace(read_identity(), pid=child.pid, start_ticks=int(fields[19])),
            lock_name="",
            lock_file=None,
        )
        assert look(ending, None).pid is Pid.THERE
    finally:
        child.kill()
        child.wait()


def test_the_file_is_found_by_name_in_the_directory_of_who_asks(lock: LifeLock, tmp_path: Path):
    """One volume may be mounted at two paths."""
    (tmp_path / "elsewhere").symlink_to(tmp_path, target_is_directory=True)

    assert look(life_of(lock), tmp_path / "elsewhere").lock is Lock.HELD


def test_a_file_of_the_same_name_is_another_one(lock: LifeLock):
    """It is not locked, and proves nothing; a missing one neither."""
    lock.path.unlink()
    assert seen(lock).lock is Lock.MISSING
    assert lock.trouble() == f"the lock file {lock.path} was removed"

    lock.path.touch()
    assert seen(lock).lock is Lock.REPLACED
    assert lock.trouble() == f"the lock file {lock.path} was replaced"


def test_a_row_that_names_no_file_is_not_judged_by_a_file_of_its_name(lock: LifeLock):
    """A run beside a store in memory has no lock, so no file says anything about it."""
    nameless = structs.replace(life_of(lock), lock_file=None)

    assert look(nameless, lock.path.parent).lock is Lock.UNKNOWN
    assert look(life_of(lock), None).lock is Lock.UNKNOWN


def test_device_numbers_are_compared_within_one_boot(lock: LifeLock):
    """A disk may have another number after a reboot; the inode's stays."""
    moved = structs.replace(
        life_of(lock), lock_file=LockFile(lock.file.device + 1, lock.file.inode)
    )
    assert look(moved, lock.path.parent).lock is Lock.REPLACED

    rebooted = structs.replace(moved, identity=structs.replace(moved.identity, boot_id="before"))
    assert look(rebooted, lock.path.parent).lock is Lock.HELD


def test_a_free_lock_of_another_boot_proves_nothing_where_hosts_share_a_store(lock: LifeLock):
    """The file may be another host's of the same name, or on a network that keeps locks local."""
    mine = life_of(lock)
    theirs = structs.replace(mine, identity=structs.replace(mine.identity, boot_id="another"))
    lock.release(remove=False)
    place = lock.path.parent

    assert judge(look(theirs, place)).is_dead
    assert judge(look(theirs, place, is_shared=True)).answer is Alive.NOT_PROVEN
    assert Process().judge(theirs, place, is_shared=True).answer is Alive.NOT_PROVEN
    assert look(mine, place, is_shared=True).lock is Lock.FREE


def test_a_lock_whose_descriptor_somebody_closed_is_gone(lock: LifeLock):
    """A program that closes descriptors by number is noticed."""
    assert lock.trouble() is None
    assert lock._fd is not None
    os.close(lock._fd)

    assert lock.trouble() == f"the lock on {lock.path} is gone: something has closed its descriptor"


def test_what_cannot_be_read_proves_nothing(lock: LifeLock, tmp_path: Path):
    """A link in place of the file is not followed."""
    lock.path.rename(tmp_path / "other")
    lock.path.symlink_to(tmp_path / "other")

    assert seen(lock).lock is Lock.UNREADABLE
    assert lock.trouble() is None


def test_a_note_is_read_from_the_file(lock: LifeLock):
    """The file has room for it from the start, and says nothing until then."""
    size = lock.path.stat().st_size
    assert (size, read_note(lock.path)) == (64, "")

    lock.write_note("ended with 70")

    assert (lock.path.stat().st_size, read_note(lock.path)) == (size, "ended with 70")
    lock.write_note("")
    assert read_note(lock.path) == ""
    assert read_note(lock.path.with_name("missing")) == ""


def test_a_lock_taken_again_by_a_name_says_nothing(lock: LifeLock):
    """A slot has the same file for all its runs."""
    lock.write_note("ended with 70")
    lock.release()
    assert lock.acquire()

    assert read_note(lock.path) == ""


def test_closing_another_descriptor_does_not_drop_the_lock(lock: LifeLock):
    """A backup, or a handler, opens and closes the file in this very process."""
    os.close(os.open(lock.path, os.O_RDWR))

    assert seen(lock).lock is Lock.HELD


@pytest.mark.process
def test_asking_refuses_nobody_the_lock(tmp_path: Path):
    """A question that took the lock for a moment would refuse an acquire of a free slot."""
    path = tmp_path / "slot.lock"
    asking = f"""
from pathlib import Path
from gracekit.life import LockFile, look_at_lock
path = Path({str(path)!r})
path.touch()
file = LockFile.at(path)
print("asks", flush=True)
while True:
    look_at_lock(path, file, same_boot=True)
"""
    asker = subprocess.Popen([sys.executable, "-c", asking], stdout=subprocess.PIPE)
    try:
        assert asker.stdout is not None
        asker.stdout.readline()
        refused = 0
        for _ in range(5000):
            lock = LifeLock(path)
            refused += not lock.acquire()
            lock.release()
    finally:
        asker.kill()
        asker.communicate()

    assert refused == 0


@pytest.mark.process
def test_only_one_holds_the_lock_while_its_file_is_removed(tmp_path: Path):
    """Who opened the file before its removal does not hold the lock of a file that is gone."""
    path = tmp_path / "slot.lock"
    removing = f"""
from pathlib import Path
from gracekit.life import LifeLock
print("removes", flush=True)
while True:
    if (lock := LifeLock(Path({str(path)!r}))).acquire():
        lock.release(remove=True)
"""
    remover = subprocess.Popen([sys.executable, "-c", removing], stdout=subprocess.PIPE)
    try:
        assert remover.stdout is not None
        remover.stdout.readline()
        lost = 0
        for _ in range(5000):
            lock = LifeLock(path)
            if lock.acquire():
                lost += lock.trouble() is not None
            lock.release()
    finally:
        remover.kill()
        remover.communicate()

    assert lost == 0


@pytest.mark.process
def test_a_forked_child_does_not_hold_the_lock(lock: LifeLock):
    """It would share the parent's lock; and it does not take it from the parent either."""
    come, go = multiprocessing.Event(), multiprocessing.Event()

    def child() -> None:
        come.set()
        go.wait()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        assert come.wait(10)
        assert seen(lock).lock is Lock.HELD
        lock.release()
        assert seen(lock).lock is Lock.FREE
    finally:
        go.set()
        process.join()


HOLDER = """
import sys
from pathlib import Path
from gracekit.life import LifeLock, read_identity
lock = LifeLock(Path(sys.argv[1]))
assert lock.acquire()
print(read_identity().start_ticks, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], RecordedLife]]:
    """Another process, and its life."""
    path = tmp_path / "held.lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout is not None
    ticks = int(process.stdout.readline())
    file = LockFile.at(path)
    identity = structs.replace(read_identity(), pid=process.pid, start_ticks=ticks)
    yield process, RecordedLife(identity=identity, lock_name=path.name, lock_file=file)
    process.kill()
    process.communicate()


@pytest.mark.process
def test_a_process_that_ends_while_it_is_looked_at_is_dead(
    holder: tuple[subprocess.Popen[str], RecordedLife],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The lock is looked at last: one that was held before its process had gone would seem to be
    held by something else.
    """
    process, life = holder
    assert judge(look(life, tmp_path)).is_alive
    look_up = gracekit.life._look_up

    def ends(*args: object) -> Pid:
        process.kill()
        process.wait()
        return look_up(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(gracekit.life, "_look_up", ends)

    assert judge(look(life, tmp_path)).is_dead


@pytest.mark.process
def test_a_process_that_goes_between_two_questions_is_gone(
    holder: tuple[subprocess.Popen[str], RecordedLife],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """It can be signalled, and has no entry in /proc a moment later: it is not hidden, but gone."""
    process, life = holder
    answers = [None]
    process.kill()
    process.wait()
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda *args: answers.pop() if answers else kill(*args))

    assert look(life, tmp_path).pid is Pid.GONE
    assert answers == []


def test_a_hidden_proc_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    """A service without an identity could not prove that it lives."""

    def hidden() -> Identity:
        raise FileNotFoundError(2, "No such file or directory", "/proc/self/stat")

    monkeypatch.setattr(gracekit.process, "read_identity", hidden)

    with pytest.raises(DependencyError, match=r"/proc/self/stat cannot be read .* mount proc"):
        Process().identify()


@pytest.mark.process
def test_an_identity_is_read_when_it_is_asked_for():
    """A fork is somebody else."""
    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=lambda: queue.put(read_identity()))
    process.start()
    theirs: Identity = queue.get()
    process.join()

    mine = read_identity()
    assert theirs.pid == process.pid != mine.pid
    assert (theirs.boot_id, theirs.pid_ns, theirs.time_ns) == (
        mine.boot_id, mine.pid_ns, mine.time_ns,
    )  # fmt: skip
