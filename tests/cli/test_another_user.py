"""Commands of a user who may not read the service's directory: one sentence says whose it is."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from gracekit import Settings
from gracekit.process import Process
from gracekit.store.location import StoreLocation
from tests.cli.kit import environment

STRANGER: Final = 4242
OTHER: Final = 4343
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another uid take root")

COMMANDS: Final = (
    "status",
    "status --instance web",
    "tasks",
    "tasks show t1",
    "tasks cancel t1 --reason why",
    "holds",
    "incidents",
    "drain web",
    "health",
    "dump web",
    "store backup copy.db",
)
LOADING: Final = ("doctor", "config show")

# A process of another uid; all modules are loaded before, as it may not read their files either.
AS_OTHER: Final = """
import importlib, json, os, sys, traceback
from click.testing import CliRunner
from gracekit.cli.main import COMMANDS, cli
for target, _ in COMMANDS.values():
    importlib.import_module(target.partition(":")[0])
os.setgroups([]), os.setgid({uid}), os.setuid({uid})
said = []
for line in json.loads(sys.argv[1]):
    answer = CliRunner().invoke(cli, line.split())
    trace = traceback.format_exception(*answer.exc_info)
    assert isinstance(answer.exception, SystemExit), (line, trace)
    said.append((line, answer.exit_code, answer.output))
print(json.dumps(said))
"""


async def make_store(path: Path) -> None:
    engine = StoreLocation(Settings(store_url=f"sqlite:///{path}")).engine(Process())
    await engine.start()
    await engine.stop()


def as_other(place: Path, commands: tuple[str, ...]) -> list[tuple[str, int, str]]:
    """The exit status and the words of each command, in the working directory *place*."""
    for directory in place.parents:  # those of pytest are closed to others
        if stat.S_IMODE(directory.stat().st_mode) == 0o700:
            directory.chmod(0o711)
    done = subprocess.run(
        [sys.executable, "-c", AS_OTHER.format(uid=OTHER), json.dumps(commands)],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [(line, code, output) for line, code, output in json.loads(done.stdout)]


@pytest.mark.process
@needs_root
@pytest.mark.parametrize(("mode", "what"), [(0o700, "place"), (0o755, "gracekit-store.db")])
def test_a_store_of_another_user_is_named_with_the_user_to_run_as(
    tmp_path: Path, mode: int, what: str
):
    """Each command ends with 78 and names the file or directory, its owner, and the way to run
    it.
    """
    place = tmp_path / "place"
    place.mkdir()
    asyncio.run(make_store(place / "gracekit-store.db"))
    (place / "gracekit-store.db-runs").mkdir(mode=0o700, exist_ok=True)
    for path in (place, *place.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    place.chmod(mode)

    named = place if what == "place" else place / what
    for line, code, output in as_other(place, COMMANDS):
        assert (line, code) == (line, 78), output
        closed = f"{named}-runs" if line == "health" and named != place else named
        assert f"{closed} belongs to uid {STRANGER}, and uid {OTHER} may not" in output, line
        assert f"run as uid {STRANGER}, for example by: sudo -u '#{STRANGER}'" in output, line


@pytest.mark.process
@needs_root
def test_a_closed_working_directory_is_not_called_missing(tmp_path: Path):
    """Commands that load a service name the working directory and its owner, and end with 78."""
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    os.chown(place, STRANGER, STRANGER)

    for line, code, output in as_other(place, LOADING):
        assert (line, code) == (line, 78), output
        assert f"{place} belongs to uid {STRANGER}, and uid {OTHER} may not enter it" in output
        assert f"sudo -u '#{STRANGER}'" in output
