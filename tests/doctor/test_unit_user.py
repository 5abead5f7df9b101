"""Whether the user that a unit names may use the files of its service."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracekit import Settings
from gracekit.doctor.finding import Finding, Level
from gracekit.doctor.machine.permissions import READ, SEARCH, WRITE, Account, account_of, obstacle
from gracekit.doctor.platform.units import check_unit

NOBODY = 65_534
STRANGER = Account(name="stranger", uid=4_000_001, groups=frozenset({4_000_001}))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may enter: pytest's own ones are closed to others."""
    path = Path(tempfile.mkdtemp()).resolve()
    path.chmod(0o755)
    yield path
    for inside in path.rglob("*"):
        if inside.is_dir() and not inside.is_symlink():
            inside.chmod(0o700)
    shutil.rmtree(path)


def directory(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def file(path: Path, mode: int, text: str = "") -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


# -- one file -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "bits", "is_free"),
    [
        (0o604, READ, True),
        (0o600, READ, False),
        (0o640, READ, False),
        (0o602, READ | WRITE, False),
        (0o606, READ | WRITE, True),
        (0o701, SEARCH, True),
        (0o776, SEARCH, False),
    ],
)
def test_others_have_the_last_bits_of_a_mode(place, mode, bits, is_free):
    """
    A user who neither owns the file nor is in its group has no other right.
    """
    path = file(place / "file", mode)

    found = obstacle(STRANGER, path, bits)

    assert (found is None) is is_free
    assert found is None or found.place == path


def test_the_first_class_that_fits_decides(place):
    """
    The owner of a file with mode 0077 may do nothing with it, though everybody else may.
    """
    path = file(place / "file", 0o077)
    owner = Account(name="owner", uid=path.stat().st_uid or 7, groups=frozenset())
    member = Account(name="member", uid=4_000_001, groups=frozenset({path.stat().st_gid}))
    path.chmod(0o707)

    assert obstacle(member, path, READ) is not None
    assert obstacle(STRANGER, path, READ) is None
    path.chmod(0o077)
    assert os.geteuid() == 0 or obstacle(owner, path, READ) is not None
    assert obstacle(member, path, READ) is None


def test_root_meets_no_obstacle(place):
    """
    The kernel does not ask root for the bits of a mode.
    """
    path = file(directory(place / "closed", 0o000) / "file", 0o000) if os.geteuid() == 0 else place

    assert obstacle(Account(name="root", uid=0, groups=frozenset({0})), path, WRITE) is None


def test_each_directory_above_a_file_must_be_open(place):
    """
    The obstacle is the closed directory, not the file in it.
    """
    closed = directory(place / "closed", 0o700)
    path = file(directory(closed / "open", 0o755) / "file", 0o644)

    found = obstacle(STRANGER, path, READ)

    assert found is not None
    assert found.place == closed
    assert str(found).startswith(f"{closed} (mode 0700, owner ")


def test_directories_behind_a_link_count_too(place):
    """
    The interpreter of a virtual environment is a link, often into a home.
    """
    closed = directory(place / "closed", 0o700)
    file(closed / "python3", 0o755)
    directory(place / "bin", 0o755)
    (place / "bin" / "python3").symlink_to("../closed/python3")
    (place / "link").symlink_to(place / "bin" / "python3")

    found = obstacle(STRANGER, place / "link", SEARCH)

    assert found is not None
    assert found.place == closed


def test_what_is_not_there_is_no_obstacle(place):
    """
    The first start makes it, or another check names it; links in a circle lead nowhere.
    """
    (place / "circle").symlink_to(place / "circle")

    assert obstacle(STRANGER, place / "absent" / "file", READ) is None
    assert obstacle(STRANGER, place / "circle", READ) is None


def test_a_user_has_its_own_group_unless_the_unit_names_another():
    """
    Root's group is 0 everywhere, and an unknown user or group is no user.
    """
    plain, other = account_of("root"), account_of("0", "65534", ("4000001",))

    assert plain is not None
    assert other is not None
    assert 0 in plain.groups
    assert {NOBODY, 4_000_001} <= other.groups
    assert account_of("no-such-user") is None
    assert account_of("root", "no-such-group") is None


# -- a unit -------------------------------------------------------------------------


def unit(place: Path, *lines: str, program: Path | str = "/bin/true") -> list[Finding]:
    """What is found about the user of a unit with *lines*."""
    text = [
        "[Service]",
        f"ExecStart={program} run compute:svc",
        f"WorkingDirectory={place}",
        *lines,
    ]
    path = file(place / "compute.service", 0o644, "\n".join(text))
    found = check_unit(Settings(host="node-1"), str(path))
    return [one for one in found if one.check in {"User", "ProtectHome"}]


def environment(store: Path, **more: Path) -> list[str]:
    named = {"STORE_URL": f"sqlite:///{store}", "TRANSPORT_URL": "amqp://broker/v", **more}
    return [f"Environment=GRACEKIT_{name}={value}" for name, value in named.items()]


@pytest.fixture
def somebody() -> str:
    """A user of this machine that is neither root nor the one that runs the tests."""
    account = account_of("nobody")
    if account is None or os.geteuid() == account.uid:
        pytest.skip("this machine has no other user for this test")
    return "User=nobody"


def test_a_user_who_may_use_all_files_is_ok(place, somebody):
    """
    The store's directory is open, and the program is the system's.
    """
    open_to_all = directory(place / "store", 0o777)

    (found,) = unit(place, somebody, *environment(open_to_all / "store.db"))

    assert (found.level, "nobody may use" in found.seen) == (Level.OK, True)


def test_a_closed_store_directory_fails_for_the_user_of_the_unit(place, somebody):
    """
    The sentence has the user, the directory and its mode, and the remedy gives it to the user.
    """
    closed = directory(place / "store", 0o755)

    (found,) = unit(place, somebody, *environment(closed / "store.db"))

    assert found.level is Level.FAIL
    assert f"nobody, the user of compute.service, may not make files in {closed} (mode 0755" in (
        found.seen
    )
    assert found.remedy == f"as root: chown nobody {closed}"


@pytest.mark.parametrize(
    ("variable", "what"),
    [("ADMIN_TOKEN_FILE", "the token file"), ("CONFIG", "the settings file")],
)
def test_a_file_that_the_user_may_not_read_fails(place, somebody, variable, what):
    """
    The service reads it as its user, and not as root.
    """
    named = file(place / "named", 0o600)
    store = directory(place / "store", 0o777) / "store.db"

    (found,) = unit(place, somebody, *environment(store, **{variable: named}))

    assert found.level is Level.FAIL
    assert f"may not read {named} (mode 0600" in found.seen
    assert what in found.seen


def test_an_interpreter_behind_a_closed_directory_fails(place, somebody):
    """
    One finding names the closed directory, and all that the service uses behind it.
    """
    home = directory(place / "home", 0o700)
    python = file(home / "python3", 0o755)
    program = file(place / "gracekit", 0o755, f"#!{python}\n")
    store = directory(place / "store", 0o777) / "store.db"

    (found,) = unit(place, somebody, *environment(store), program=program)

    assert found.level is Level.FAIL
    assert f"may not enter {home} (mode 0700" in found.seen
    assert f"the interpreter {python}" in found.seen
    assert f"chmod o+x {home}" in found.remedy


def test_a_directory_that_systemd_makes_is_not_judged(place, somebody):
    """
    Before the first start it is not there, or belongs to another user.
    """
    lines = environment(Path("/var/lib/no-such-service/store.db"))

    (found,) = unit(place, somebody, "StateDirectory=other no-such-service", *lines)

    assert found.level is Level.OK


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["User=no-such-user"], "this machine does not have the user no-such-user"),
        (["User=nobody", "DynamicUser=yes"], "systemd makes a user for each start"),
    ],
)
def test_a_user_that_is_not_known_here_is_skipped(place, lines, said):
    """
    Its permissions cannot be calculated, and that is said.
    """
    (found,) = unit(place, *lines)

    assert found.level is Level.SKIP
    assert said in found.seen


@pytest.mark.parametrize(
    "lines", [[], ["User=nobody", "AmbientCapabilities=CAP_DAC_OVERRIDE"], ["User=root"]]
)
def test_a_service_with_the_rights_of_root_has_no_obstacle(place, lines):
    """
    Cases: no user is named, its process may override modes, and root.
    """
    closed = directory(place / "closed", 0o700)

    found = unit(place, *lines, *environment(closed / "store.db"))

    assert {one.level for one in found} <= {Level.OK}


@pytest.mark.parametrize(
    ("lines", "is_lost"),
    [
        (["ProtectHome=yes"], True),
        (["ProtectHome=tmpfs"], True),
        (["ProtectHome=tmpfs", "BindPaths=/home/no-such-user"], False),
        (["ProtectHome=read-only"], True),
        (["ProtectHome=read-only", "ReadWritePaths=-/home/no-such-user/store"], False),
        (["ProtectHome=no"], False),
    ],
)
def test_a_store_in_a_home_that_the_unit_closes_fails(place, lines, is_lost):
    """
    `ProtectHome=` closes homes even for root.
    """
    found = unit(place, *lines, *environment(Path("/home/no-such-user/store/store.db")))

    assert ([one.check for one in found if one.level is Level.FAIL] == ["ProtectHome"]) is is_lost
