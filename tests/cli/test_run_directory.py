"""The run directory, and commands for a store in PostgreSQL that need no server."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.cli.kit import Running, gracekit, write_service

pytestmark = pytest.mark.process

POSTGRES: Final = "postgresql://shop:canary@localhost/d?passfile=/canary"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_commands_find_a_run_by_a_run_directory_elsewhere(directory: Path):
    """Its lock and its door are there alone, and an operator's command needs the same setting."""
    elsewhere = {"GRACEKIT_RUN_DIRECTORY": "here/runs"}
    (directory / "here").mkdir(mode=0o700)
    with Running(directory, "--instance", "api-1", **elsewhere) as run:
        healthy = gracekit(directory, "health", **elsewhere)
        blind = gracekit(directory, "health")
        doctor = gracekit(directory, "doctor", "--json", **elsewhere)
        drained = gracekit(directory, "drain", **elsewhere)
        ended = run.wait()

    seen = {one["check"]: one["seen"] for one in doctor.json["findings"] if one["area"] == "store"}
    assert (healthy.code, blind.code, drained.code, ended) == (0, 4, 0, 0)
    assert "1 live: compute@api-1" in seen["runs"]
    assert seen["doors"] == "each run that lives has one, and answers"
    assert (directory / "here" / "runs" / "mark").exists()
    assert not (directory / "gracekit-store.db-runs").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("config", "show"), 0),
        (("doctor", "compute:svc"), None),
        (("health",), 4),
        (("init", "systemd", "compute:svc", "--systemd-version", "252"), 0),
        (("run", "compute", "--store", POSTGRES), 78),
    ],
)
def test_no_command_shows_the_password_of_a_store(
    directory: Path, words: tuple[str, ...], code: int | None
):
    """It is in the environment alone."""
    answer = gracekit(directory, *words, GRACEKIT_STORE_URL=POSTGRES)

    assert code in {None, answer.code}, answer
    assert "canary" not in (answer.out + answer.err)


def test_doctor_says_nothing_of_a_file_where_the_store_is_on_a_server(directory: Path):
    """Nor that it is in memory."""
    answer = gracekit(directory, "doctor", "--json", GRACEKIT_STORE_URL=POSTGRES)

    assert {one["area"] for one in answer.json["findings"]} >= {"settings", "transport", "host"}
    assert not [one for one in answer.json["findings"] if one["area"] == "store"]
