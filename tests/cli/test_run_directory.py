"""The run directory, and commands for a store in PostgreSQL that need no server."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.cli.kit import gracekit, write_service

pytestmark = pytest.mark.process

POSTGRES: Final = "postgresql://shop:canary@localhost/d?passfile=/canary"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_a_store_in_a_file_has_its_run_directory_beside_it(directory: Path):
    """Elsewhere, a migration would not see the runs that it must wait for."""
    refused = gracekit(directory, "run", "compute:svc", GRACEKIT_RUN_DIRECTORY="here")

    assert refused.code == 78
    assert "run_directory = here is for a store in PostgreSQL" in refused.err


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
    of_store = [one["check"] for one in answer.json["findings"] if one["area"] == "store"]
    assert of_store == ["server"]
