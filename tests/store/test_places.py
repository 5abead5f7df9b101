"""The place of a database, and the directories beside it: whose they are, and who may change them.

Others are played by files of another uid, which takes root.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from gracekit import Settings
from gracekit.errors import ConfigError
from gracekit.life import LifeLock
from gracekit.process import Process
from gracekit.store import files
from gracekit.store.files import (
    check_place,
    close_to_group,
    connect_writer,
    make_directory,
    open_writer_lock,
    prepare_file,
)
from gracekit.store.location import StoreLocation

STRANGER: Final = 4242
OTHER: Final = 4343
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another uid take root")

# What a process of another uid does; it prints how it was refused.
AS_OTHER: Final = """
import os, sys
from pathlib import Path
from gracekit.doctor.store_file import check_directory
from gracekit.errors import GracekitError
from gracekit.life import LifeLock
from gracekit.store.files import make_directory, prepare_file
os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
try:
    {step}
except GracekitError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    return place / "store.db"


def as_other(step: str, path: Path, uid: int = OTHER) -> str:
    """What *step* says to a process of *uid*; empty where it was let."""
    for directory in path.parent.parents:  # those of pytest are closed to others
        if stat.S_IMODE(directory.stat().st_mode) == 0o700:
            directory.chmod(0o711)
    done = subprocess.run(
        [sys.executable, "-c", AS_OTHER.format(step=step), str(uid), str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def give(path: Path, uid: int) -> None:
    os.chown(path, uid, uid, follow_symlinks=False)


# -- the directory of the database ----------------------------------------------------


@needs_root
def test_a_directory_of_somebody_else_is_refused(database: Path):
    """Its owner could take the store away, and put another one in its place."""
    give(database.parent, STRANGER)

    with pytest.raises(ConfigError, match=rf"belongs to uid {STRANGER}.* sudo -u '#{STRANGER}'"):
        prepare_file(database)
    assert not database.exists()


@pytest.mark.process
@needs_root
@pytest.mark.parametrize("owner", [0, OTHER], ids=["root's", "our own"])
def test_directories_of_root_and_our_own_will_do(tmp_path: Path, owner: int):
    """A volume of a container mostly belongs to root, and to a group of ours that may write."""
    place = tmp_path / "place"
    place.mkdir()
    os.chown(place, owner, OTHER)
    place.chmod(0o2775)

    assert as_other("prepare_file(Path(sys.argv[2]))", place / "store.db") == ""
    assert (place / "store.db").stat().st_uid == OTHER


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
def test_a_link_put_there_since_the_check_changes_no_other_file(
    database: Path, link: Callable[[Path, Path], None]
):
    """Bits of a group are taken back from what the check has passed, not from what a name leads
    to.
    """
    other = database.with_name("other")
    other.touch()
    other.chmod(0o770)
    link(database, other)

    with pytest.raises(ConfigError, match=r"no regular file|has 2 names"):
        close_to_group(database)
    assert stat.S_IMODE(other.stat().st_mode) == 0o770


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open", "sticky"])
def test_a_directory_that_everybody_may_write_is_refused(database: Path, mode: int):
    """Also a sticky one, as /tmp: whoever is first to make the -wal there owns it and reads it."""
    database.parent.chmod(mode)

    with pytest.raises(ConfigError, match="can be written by everyone") as caught:
        prepare_file(database)
    assert not database.exists()
    assert ("chmod o-w" in str(caught.value)) == (mode == 0o777)  # never of /tmp


@needs_root
@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_a_log_of_somebody_else_that_came_since_is_refused(database: Path, suffix: str):
    """SQLite takes a -wal that is there, whoever made it, and would write every request into it."""
    real = prepare_file(database)
    log = real.with_name(real.name + suffix)
    log.touch(mode=0o600)
    give(log, STRANGER)

    with pytest.raises(ConfigError, match=f"{suffix} belongs to uid {STRANGER}"):
        connect_writer(real, synchronous="FULL", busy_timeout_s=1)


def a_strangers_writer_lock(path: Path) -> None:
    path.touch(mode=0o600)
    give(path, STRANGER)


def an_open_writer_lock(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def a_linked_writer_lock(path: Path) -> None:
    path.touch(mode=0o600)
    path.with_name("other").hardlink_to(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(a_strangers_writer_lock, f"belongs to uid {STRANGER}", marks=needs_root),
        (an_open_writer_lock, "has mode 0666"),
        (a_linked_writer_lock, "has 2 names"),
    ],
    ids=["stranger's", "open", "hard link"],
)
def test_a_turn_that_came_since_is_judged_when_it_is_open(
    database: Path, spoil: Callable[[Path], None], said: str
):
    """What the descriptor shows cannot be exchanged any more; the lock of a stranger stops all."""
    real = prepare_file(database)
    spoil(real.with_name(real.name + "-writer"))

    with pytest.raises(ConfigError, match=said):
        open_writer_lock(real)


@needs_root
def test_root_is_told_to_run_as_the_owner_of_a_file(database: Path):
    """A chown by root would lock the service out of its own store."""
    database.touch(mode=0o600)
    give(database, STRANGER)

    with pytest.raises(ConfigError, match=f"run as uid {STRANGER}") as caught:
        prepare_file(database)
    assert "chown" not in str(caught.value)


@pytest.mark.process
@needs_root
def test_who_is_not_root_may_also_have_a_file_given_to_them(database: Path):
    """Both ways out are named, the second with who can do it."""
    database.touch(mode=0o600)
    give(database, STRANGER)
    give(database.parent, OTHER)

    said = as_other("prepare_file(Path(sys.argv[2]))", database)

    assert f"run as uid {STRANGER}" in said
    assert f"as root: chown {OTHER}" in said


@pytest.mark.process
@needs_root
def test_a_directory_that_cannot_be_reached_is_refused_with_a_sentence(database: Path):
    """Nothing can be seen in there, not even whether the file exists."""
    said = as_other("prepare_file(Path(sys.argv[2]))", database)

    assert said.startswith("ConfigError: ")
    assert f"a directory that uid {OTHER} may write" in said


def test_bits_that_a_volume_gives_to_the_group_are_taken_back(database: Path):
    """Kubernetes sets them on all files of a volume with fsGroup, at each start of a pod."""
    wal = database.with_name("store.db-wal")
    for file in (database, wal):
        file.touch(mode=0o600)
        file.chmod(0o660)

    prepare_file(database)

    assert [stat.S_IMODE(file.stat().st_mode) for file in (database, wal)] == [0o600, 0o600]


def test_a_look_takes_no_bits_back(database: Path):
    """`gracekit doctor` changes nothing."""
    database.touch(mode=0o600)
    database.chmod(0o660)

    check_place(database)

    assert stat.S_IMODE(database.stat().st_mode) == 0o660


# -- directories beside it ------------------------------------------------------------


def linked(directory: Path) -> None:
    (directory.parent / "elsewhere").mkdir()
    directory.symlink_to("elsewhere")


def dangling(directory: Path) -> None:
    directory.symlink_to("nowhere")


def a_file(directory: Path) -> None:
    directory.touch()


def of_a_stranger(directory: Path) -> None:
    directory.mkdir()
    give(directory, STRANGER)
    directory.chmod(0o777)


BAD_DIRECTORIES = [
    pytest.param(linked, "symbolic link", id="symlink"),
    pytest.param(dangling, "symbolic link", id="dangling symlink"),
    pytest.param(a_file, "no directory", id="file"),
    pytest.param(of_a_stranger, f"belongs to uid {STRANGER}", id="stranger's", marks=needs_root),
]


@pytest.mark.parametrize("suffix", ["-runs", "-wakeups"])
@pytest.mark.parametrize(("spoil", "said"), BAD_DIRECTORIES)
def test_a_directory_beside_the_store_is_checked_before_anything_is_made(
    database: Path, spoil: Callable[[Path], None], said: str, suffix: str
):
    """Locks and pipes prove who lives: their directory must be ours, and no way to another one."""
    spoil(database.with_name(f"store.db{suffix}"))
    before = sorted(database.parent.rglob("*"))

    with pytest.raises(ConfigError, match=said):
        prepare_file(database)
    assert sorted(database.parent.rglob("*")) == before


@pytest.mark.parametrize(("spoil", "said"), BAD_DIRECTORIES)
def test_a_directory_that_came_since_is_checked_when_it_is_used(
    database: Path, spoil: Callable[[Path], None], said: str
):
    """Between the first look and the first lock, anything may have happened."""
    directory = prepare_file(database).with_name("store.db-runs")
    spoil(directory)

    with pytest.raises(ConfigError, match=said):
        make_directory(directory)


@pytest.mark.parametrize("mode", [0o755, 0o2770, 0o1777], ids=["listed", "fsGroup", "sticky"])
def test_an_open_directory_of_ours_is_closed(database: Path, mode: int):
    """It is ours, so nobody has to be asked."""
    directory = database.with_name("store.db-runs")
    directory.mkdir()
    directory.chmod(mode)

    make_directory(directory)

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.process
@needs_root
def test_a_directory_of_root_that_everybody_may_write_is_refused(database: Path):
    """It cannot be closed by us, and anybody could put locks there."""
    directory = database.with_name("store.db-runs")
    directory.mkdir()
    directory.chmod(0o1777)
    database.parent.chmod(0o711)

    said = as_other("make_directory(Path(sys.argv[2]))", directory)

    assert "can be written by everyone" in said
    assert f"chmod o-w {directory}" in said


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=["open", "sticky"])
def test_a_run_directory_elsewhere_needs_a_safe_place_as_a_store_does(tmp_path: Path, mode: int):
    """Who may replace it could make dead runs look alive."""
    tmp_path.chmod(mode)

    with pytest.raises(ConfigError, match="can be written by everyone"):
        make_directory(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_on_a_disk_that_hosts_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Locks of other hosts are not seen there, and prove nothing."""
    shared = tmp_path / "runs"
    monkeypatch.setattr(files, "network_file_system", {shared: "NFS"}.get)

    with pytest.raises(ConfigError, match=f"^{shared} is on NFS.* choose a path on a local disk"):
        make_directory(shared)


@pytest.mark.process
@needs_root
def test_a_run_directory_that_cannot_be_made_names_its_setting(tmp_path: Path):
    """Its default is in the working directory, which nobody has chosen for it."""
    said = as_other("make_directory(Path(sys.argv[2]))", tmp_path / "gracekit-runs")

    assert "may write, by GRACEKIT_RUN_DIRECTORY" in said


# -- where a store is, by its settings ------------------------------------------------


def at(url: str, **more: str) -> StoreLocation:
    return StoreLocation(Settings(store_url=url, transport_url="memory://", **more))


def test_the_run_directory_is_beside_a_file_or_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All parts and commands find the locks of one store at one path; memory has none. Stores in
    PostgreSQL have a directory each, as the mark of one would make the other look like a copy.
    """
    monkeypatch.chdir(tmp_path)
    postgres = "postgresql://localhost/d"

    assert at("sqlite:///s.db").run_directory == tmp_path / "s.db-runs"
    assert at(postgres).run_directory == tmp_path / "gracekit-runs" / "d.gracekit"
    assert at(postgres, run_directory="/run/x").run_directory == Path("/run/x/d.gracekit")
    assert at("memory://", run_directory="r").run_directory is None


def test_a_store_says_what_it_is_and_how_messages_name_it(tmp_path: Path):
    """Only memory has no name; a store in PostgreSQL has no file, and shows no login."""
    memory, file = at("memory://"), at(f"sqlite:///{tmp_path}/s.db")
    postgres = at("postgresql://u:canary@localhost/d?schema=s")

    assert [one.is_memory for one in (memory, file, postgres)] == [True, False, False]
    assert [one.path for one in (memory, file, postgres)] == [None, tmp_path / "s.db", None]
    assert [memory.name, file.name] == [None, f"{tmp_path}/s.db"]
    assert postgres.name == "postgresql://localhost/d?schema=s"
    assert "canary" not in repr(vars(postgres))


async def test_a_file_has_an_identity_by_any_path_and_memory_has_none(tmp_path: Path):
    """Readers of one queue compare it: a copy is another store."""
    (tmp_path / "other").symlink_to(tmp_path)
    paths = (tmp_path / "s.db", tmp_path / "other" / "s.db", tmp_path / "copy.db")
    engines = [at(f"sqlite:///{path}").engine(Process()) for path in paths]
    found = []
    for engine in (*engines, at("memory://").engine(Process())):
        await engine.start()
        found.append(await engine.identity())
        await engine.stop()

    first, same, copy, memory = found
    assert first is not None
    assert (first == same, first == copy, memory) == (True, False, None)


def test_without_psycopg_a_store_in_postgresql_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is an extra; engine and reader say the same sentence."""
    for name in [one for one in sys.modules if one.startswith("gracekit.store.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    place = at("postgresql://localhost/d")

    for make in (partial(place.engine, Process()), place.reader):
        with pytest.raises(ConfigError, match=r"not installed .*: pip install 'gracekit\[postgres"):
            make()


def test_a_store_in_postgresql_is_copied_by_its_own_tools(tmp_path: Path):
    """`gracekit store backup` is for files."""
    with pytest.raises(ConfigError, match="pg_dump --schema=s for the store, pg_basebackup for"):
        at("postgresql://localhost/d?schema=s").back_up(tmp_path / "copy", now=1.0)


# -- locks ----------------------------------------------------------------------------


def a_linked_lock(path: Path) -> None:
    path.with_name("other").write_text("something of ours")
    path.symlink_to("other")


def a_second_name(path: Path) -> None:
    path.with_name("other").write_text("something of ours")
    path.hardlink_to(path.with_name("other"))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_strangers_lock(path: Path) -> None:
    path.touch()
    give(path, STRANGER)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (a_linked_lock, "is a symbolic link"),
        (a_second_name, "has 2 names"),
        (a_pipe, "is no regular file"),
        (a_directory, "is no regular file"),
        pytest.param(a_strangers_lock, f"belongs to uid {STRANGER}", marks=needs_root),
    ],
    ids=["symlink", "hard link", "pipe", "directory", "stranger's"],
)
def test_a_lock_file_is_our_own_plain_file(
    database: Path, spoil: Callable[[Path], None], said: str
):
    """What somebody has put in its place is named, with what to do, and nothing is written to
    it.
    """
    path = database.with_name("one.lock")
    spoil(path)

    with pytest.raises(ConfigError, match=rf"{said}.*remove it"):
        LifeLock(path).acquire()
    if path.with_name("other").exists():
        assert path.with_name("other").read_text() == "something of ours"


@pytest.mark.process
@needs_root
def test_a_lock_that_we_may_not_even_open_is_known_as_a_strangers(database: Path):
    """A stranger's lock says nothing of who runs here."""
    path = database.with_name("one.lock")
    a_strangers_lock(path)
    path.chmod(0o600)
    database.parent.chmod(0o1777)

    assert f"belongs to uid {STRANGER}" in as_other("LifeLock(Path(sys.argv[2])).acquire()", path)
