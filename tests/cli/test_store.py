"""`gracekit store backup`: one whole file, beside a service that goes on."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import apsw
import pytest

from gracekit.errors import ConfigError
from gracekit.store.sqlite.backup import publish
from tests.cli.kit import GRACEKIT, Running, environment, gracekit, write_service

pytestmark = pytest.mark.process

UNSHARE = ("unshare", "--mount", "sh", "-c")
BACKUP = (*GRACEKIT, "store", "backup", "small/copy.db")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_a_backup_is_one_private_file_with_all_that_was_committed(directory: Path):
    """Also what is in the -wal alone; the service goes on, and its store is not marked."""
    copy = directory / "copy.db"
    with Running(directory, "--instance", "api-1"):
        gracekit(directory, "call", "compute", "echo", "--id", "one")
        made = gracekit(directory, "store", "backup", "copy.db")
        again = gracekit(directory, "store", "backup", "copy.db")
        shown = gracekit(directory, "store", "backup", "other.db", "--json")
        assert gracekit(directory, "call", "compute", "echo").code == 0

    assert made.code == 0
    into = gracekit(directory, "store", "backup", ".")
    assert (into.code, f"name a file in it: {directory}/gracekit.db" in into.err) == (78, True)
    assert f"{copy}: {copy.stat().st_size} bytes, 1 requests" in made.out
    assert copy.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in directory.glob("*copy.db*")) == ["copy.db"]
    connection = apsw.Connection(str(copy), flags=apsw.SQLITE_OPEN_READONLY)
    assert connection.execute("SELECT request_id, state FROM task").fetchall() == [
        ("one", "succeeded")
    ]
    assert connection.execute("SELECT copied_at > 0 FROM epoch").get == 1
    assert connection.execute("PRAGMA journal_mode").get == "delete"
    connection.close()
    assert (again.code, "exists, and is not written over" in again.err) == (78, True)
    assert shown.json["tasks"] == 1


def test_what_cannot_be_backed_up_leaves_nothing_behind(directory: Path):
    """No store, or no place for the copy, is said; no half of a copy stays."""
    missing = gracekit(directory, "store", "backup", "copy.db")
    with Running(directory, "--instance", "api-1"):
        nowhere = gracekit(directory, "store", "backup", "no/where/copy.db")

    assert (missing.code, "there is no store at" in missing.err) == (78, True)
    assert (nowhere.code, "cannot be created" in nowhere.err) == (78, True)
    assert list(directory.glob("*copy*")) == []


def test_a_file_that_appears_meanwhile_is_not_written_over(tmp_path: Path):
    """A name is free when the copy begins; when it is whole, somebody else may have taken it."""
    part, target = tmp_path / "copy.db.part", tmp_path / "copy.db"
    part.write_text("ours")
    target.write_text("theirs")

    with pytest.raises(ConfigError, match="exists, and is not written over"):
        publish(part, target)

    assert target.read_text() == "theirs"


def test_a_file_system_without_links_writes_over_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There the name is taken by an empty file first."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "as FAT says")

    monkeypatch.setattr(os, "link", refuse)
    part, target = tmp_path / "copy.db.part", tmp_path / "copy.db"
    part.write_text("ours")

    publish(part, target)
    part.write_text("again")
    with pytest.raises(ConfigError, match="exists, and is not written over"):
        publish(part, target)

    assert target.read_text() == "ours"


def test_a_dangling_link_is_no_free_name(directory: Path):
    """What stands there is somebody's, whatever it leads to."""
    (directory / "copy.db").symlink_to("nowhere")
    with Running(directory, "--instance", "api-1"):
        made = gracekit(directory, "store", "backup", "copy.db")

    assert (made.code, "exists, and is not written over" in made.err) == (78, True)
    assert (directory / "copy.db").is_symlink()
    assert sorted(path.name for path in directory.glob("*copy.db*")) == ["copy.db"]


def test_a_backup_onto_a_full_disk_says_so(directory: Path):
    """And leaves nothing behind."""
    (directory / "small").mkdir()
    mounted = "mount -t tmpfs -o size=16k none small || exit 9"
    with Running(directory, "--instance", "api-1"):
        done = subprocess.run(
            [*UNSHARE, f'{mounted}; "$@"; echo exit $?; ls -A small', "sh", *BACKUP],
            cwd=directory,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")

    assert "could not be copied to" in done.stderr
    assert "the disk is full" in done.stderr
    assert done.stdout == "exit 4\n"


def test_doctor_says_that_a_store_is_lost(directory: Path):
    """The run locks beside it know that there was one."""
    fresh = gracekit(directory, "doctor")
    with Running(directory, "--instance", "api-1"):
        gracekit(directory, "call", "compute", "echo")
    for path in directory.glob("gracekit-store.db*"):
        if path.is_file():
            path.unlink()
    lost = gracekit(directory, "doctor")

    assert "is lost: services have used a store there" not in fresh.out
    assert "is lost: services have used a store there" in lost.out
    assert (fresh.code, lost.code) == (0, 78)


def test_doctor_says_that_a_store_is_a_backup_or_an_older_one(directory: Path):
    """Before the start that raises its tokens, and not after it."""
    store = directory / "gracekit-store.db"
    with Running(directory, "--instance", "api-1"):
        gracekit(directory, "store", "backup", "copy.db")
        well = gracekit(directory, "doctor")
    for path in directory.glob("gracekit-store.db-[ws]*"):
        path.unlink()
    (directory / "copy.db").rename(store)
    backup = gracekit(directory, "doctor")
    connection = apsw.Connection(str(store))
    connection.execute("UPDATE epoch SET copied_at = NULL")
    connection.close()
    (directory / "gracekit-store.db-runs" / "mark").write_text("7\n")  # of a newer store
    older = gracekit(directory, "doctor")
    with Running(directory, "--instance", "api-1"):
        after = gracekit(directory, "doctor")

    assert "a backup that no service has started with" in backup.out
    assert "a newer store was here" in older.out
    for answer in (well, after):
        assert "the last one that was here" in answer.out


FULL_DISK = """
mount -t tmpfs -o size=2m,mode=700 none small || exit 9
cp gracekit-store.db gracekit.db small/ && cat /dev/zero > small/rest 2> /dev/null
for words in "status" "cast compute echo" "call compute echo" "run compute"; do
    timeout 60 "$@" $words || echo "exit $?"
done
"""


def on_full_disk(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    """What *script* says, which has the words of gracekit as its arguments."""
    (directory / "small").mkdir()
    done = subprocess.run(
        [*UNSHARE, script, "sh", *GRACEKIT],
        cwd=directory,
        env=environment(
            GRACEKIT_STORE_URL=f"sqlite:///{directory}/small/gracekit-store.db",
            GRACEKIT_TRANSPORT_URL=f"sqlite:///{directory}/small/gracekit.db",
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    return done


def test_a_damaged_store_on_a_full_disk_is_damaged(directory: Path):
    """Room on the disk would not mend it: only what cannot be written is for want of room."""
    (directory / "gracekit-store.db").write_bytes(b"no database" * 1000)
    (directory / "gracekit.db").touch()
    done = on_full_disk(directory, FULL_DISK)

    assert "gracekit-store.db cannot be read as a store: file is not a database" in done.stderr
    assert "gracekit-store.db is full" not in done.stderr


def test_every_command_names_a_full_disk(directory: Path):
    """In the same words, whether it reads or writes, the store or the queue."""
    with Running(directory):
        gracekit(directory, "call", "compute", "echo")
    done = on_full_disk(directory, FULL_DISK)

    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 4, done.stderr
    assert all(re.search(r"the disk of \S+\.db is full: make room on it", line) for line in lines)
    assert "cannot be" not in done.stderr
    assert done.stdout.split() == ["exit", "1", "exit", "5", "exit", "5", "exit", "70"]
