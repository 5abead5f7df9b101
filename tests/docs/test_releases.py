"""docs/releases.md: what it says about versions is what the project and the code say."""

from __future__ import annotations

import importlib
import re
import subprocess
import textwrap
import tomllib
from pathlib import Path

import apsw
import pytest

from gracekit import Context, Service
from gracekit.config.choices import NOT_TWICE, OnInterrupt, choices_of
from gracekit.errors import ConfigError, SchemaTooNewError
from gracekit.recovery.decisions import policy_of
from gracekit.request.refusals import PASS_ON_FOR_S
from gracekit.rpc.sqlite.sqlite_transport import QUEUES_SCHEMA
from gracekit.runs.members import BACK_WITHIN_S
from gracekit.store.migrate import MIGRATIONS, load_migrations, migrate
from gracekit.testing import InMemoryService, TaskState
from gracekit.testing import run as play
from gracekit.version import VERSION
from tests.cli.kit import Running, gracekit, write_service
from tests.docs.pages import ROOT, Page

PAGE = Page("releases.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
LATER = "CREATE TABLE later (n)"
"""A migration of a later version."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All files of the page, which can be imported as long as the test runs."""
    PAGE.make_importable(tmp_path, monkeypatch)
    return tmp_path


def test_the_versions_of_python_are_the_packages():
    """The oldest and the newest one are those of the classifiers."""
    versions = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]

    assert f"{versions[0]} to {versions[-1]} (CPython)" in PAGE.text


def test_nothing_is_released_yet():
    """The page says so as long as the changelog has no release."""
    assert re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE) == [
        f"{VERSION.partition('.dev')[0]}, not released yet"
    ]
    assert VERSION.startswith("0.")
    assert "no release has been made yet" in PAGE.text


@pytest.mark.parametrize("package", [MIGRATIONS, QUEUES_SCHEMA])
def test_an_old_version_refuses_what_a_newer_one_has_migrated(tmp_path: Path, package: str):
    """Store and queue alike; it is a wrong configuration, whose exit code is 78."""
    texts = load_migrations(package)
    connection = apsw.Connection(str(tmp_path / "file.db"))
    migrate(connection, [*texts, LATER], path="file.db")

    with pytest.raises(SchemaTooNewError) as caught:
        migrate(connection, texts, path="file.db")

    assert isinstance(caught.value, ConfigError)
    assert "docs/releases.md, Go back" in str(caught.value)
    assert "## Go back" in PAGE.text


@pytest.mark.process
def test_the_steps_to_go_back_lose_nothing_that_was_accepted(tmp_path: Path):
    """Each condition of the page is fulfilled before the files move; then the copy is the store."""
    directory, copy = tmp_path / "site", tmp_path / "before.db"
    directory.mkdir()
    write_service(directory)
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "call", "compute", "echo", "--id", "before")
        assert gracekit(directory, "store", "backup", str(copy)).code == 0
        gracekit(directory, "call", "compute", "echo", "--id", "after")
        waiting = gracekit(directory, "doctor").out
        conditions = [
            gracekit(directory, command).out.strip() for command in ("tasks", "pending", "holds")
        ]
        assert gracekit(directory, "drain").code == 0
        run.wait()
    exits = gracekit(directory, "status").out
    moves, restore = re.findall(r"^   ```sh\n(.*?)^   ```", PAGE.text, re.MULTILINE | re.DOTALL)
    for block in (moves, restore.replace("/backups/before.db", str(copy))):
        subprocess.run(["/bin/sh", "-ec", textwrap.dedent(block)], cwd=directory, check=True)
    doctor = gracekit(directory, "doctor").out
    with Running(directory, "--instance", "api-1"):
        listed = gracekit(directory, "tasks", "--state", "all", "--json").json["tasks"]

    assert "ok    waiting: no message waits" in waiting
    assert "ok    waiting: no message waits" in PAGE.text
    assert [f"`{said}`" in PAGE.text for said in conditions] == [True] * 3, conditions
    assert re.search(r"drained +0 ", exits), exits
    (kept,) = directory.glob("new-version-*")
    assert {one.name for one in kept.iterdir()} >= {"gracekit-store.db", "gracekit.db"}
    assert "it is a backup that no service has started with" in doctor
    assert [task["request_id"] for task in listed] == ["before"]


def test_a_failed_migration_changes_nothing(tmp_path: Path):
    """All that are missing are one transaction."""
    texts = load_migrations(MIGRATIONS)
    connection = apsw.Connection(str(tmp_path / "file.db"))
    migrate(connection, texts, path="file.db")
    before = connection.execute("SELECT name FROM sqlite_schema").fetchall()

    with pytest.raises(Exception, match="migration"):
        migrate(connection, [*texts, LATER, "SELECT nonsense"], path="file.db")

    assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == before


def test_siblings_count_for_five_minutes():
    """A request goes back for a sibling so long, and one that stopped counts so long."""
    assert PASS_ON_FOR_S == BACK_WITHIN_S == 5 * 60


def test_a_changed_policy_never_repeats_what_must_not_be_repeated():
    """The exception of the page is the only one."""
    for then in choices_of(OnInterrupt):
        for now in choices_of(OnInterrupt):
            excepted = then in {"error", "probe"} and now in {"retry", "requeue"}
            assert policy_of(then, now) == ("error" if excepted else now)
    assert set(NOT_TWICE) == {"error", "probe"}


def older() -> Service:
    """The version before the page's, whose handler never ends."""
    svc = Service("thumbs")

    @svc.rpc(resource="album", on_interrupt="retry")
    async def render(ctx: Context, album: str) -> str:
        await ctx.safe_point(1)
        raise AssertionError(album)

    return svc


def test_an_argument_with_a_default_keeps_requests_of_the_older_version(directory: Path):
    """A task that the version before accepted is run by the page's version."""
    newer = importlib.import_module("thumbs").svc

    async def main() -> None:
        async with InMemoryService(older()) as one:
            one.crash_at(1)
            request_id = await one.cast("render", album="spring")
            await one.wait_crashed()
            async with InMemoryService(newer, beside=one) as two:
                await two.settled()
                assert two.state_of(request_id) is TaskState.SUCCEEDED

    play(main())


def test_a_required_argument_loses_requests_of_the_older_version():
    """A task whose arguments no version takes is ERRORED for `method_gone`."""
    newer = Service("thumbs")

    @newer.rpc(resource="album", on_interrupt="retry")
    async def render(ctx: Context, album: str, size: int) -> str:
        return f"{album} {size}"

    async def main() -> None:
        async with InMemoryService(older()) as one:
            one.crash_at(1)
            request_id = await one.cast("render", album="spring")
            await one.wait_crashed()
            async with InMemoryService(newer, beside=one) as two:
                await two.pass_time(1200)
                assert two.state_of(request_id) is TaskState.ERRORED
                assert two.row(request_id)["reason"] == "method_gone"

    play(main())
