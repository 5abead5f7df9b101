"""A wrong settings file: commands for operators name its line, and how to go on without it."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from gracekit import Settings
from gracekit.cli.main import cli
from gracekit.process import Process
from gracekit.store.location import StoreLocation

WRONG = 'max_running = 20\ndrain_timeout = "5 parsecs"\n'
SAID = "drain_timeout in wrong.toml, line 2: '5 parsecs' is not a duration; write 25, 25s"


async def make_store(url: str) -> None:
    engine = StoreLocation(Settings(store_url=url)).engine(Process())
    await engine.start()
    await engine.stop()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The store of a service; the working directory has a wrong file of settings."""
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    for name in ("GRACEKIT_CONFIG", "GRACEKIT_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "wrong.toml").write_text(WRONG)
    (tmp_path / "wrong.toml").chmod(0o600)
    asyncio.run(make_store("sqlite:///store.db"))
    return "sqlite:///store.db"


def follow(output: str) -> int:
    """The status of the command that the last line of *output* ends with."""
    words = shlex.split(output.splitlines()[-1].rpartition(": ")[2])
    env: dict[str, str | None] = {}
    if words[:2] == ["env", "-u"]:
        env, words = {words[2]: None}, words[3:]
    assert words[0] == "gracekit"
    return CliRunner().invoke(cli, words[1:], env=env).exit_code


@pytest.mark.parametrize("words", [["status"], ["tasks"], ["tasks", "show"], ["holds"]])
def test_a_wrong_file_is_named_with_its_line_and_the_way_on(url: str, words: list[str]):
    """File, line, rule and remedy; then the same command without the file."""
    more = ["x"] if words[-1] == "show" else []
    answer = CliRunner().invoke(cli, [*words, *more, "--config", "wrong.toml", "--store", url])

    assert answer.exit_code == 78
    assert SAID in answer.output
    assert answer.output.splitlines()[-1].strip() == (
        "to go on without wrong.toml, with all else as before: gracekit "
        f"{' '.join(words)} --store {url}"
    )
    if not more:
        assert follow(answer.output) == 0


def test_the_way_on_names_the_store_of_the_file_and_leaves_out_the_variable(url: str):
    """With GRACEKIT_CONFIG the file would be read again; its store is named, as it is known."""
    Path("wrong.toml").write_text(f'{WRONG}store_url = "{url}"\n')

    answer = CliRunner().invoke(cli, ["status"], env={"GRACEKIT_CONFIG": "wrong.toml"})

    assert answer.exit_code == 78
    last = answer.output.splitlines()[-1].strip()
    assert last == (
        "to go on without wrong.toml, with all else as before: env -u GRACEKIT_CONFIG gracekit "
        f"status --store {url}"
    )
    assert follow(answer.output) == 0


def test_a_command_that_sends_needs_the_queue(url: str):
    """The URLs of the file are given as options; not one with a password, which others could
    read.
    """
    Path("wrong.toml").write_text(f'{WRONG}transport_url = "sqlite:///q.db"\n')
    known = CliRunner().invoke(cli, ["call", "compute", "echo", "--config", "wrong.toml"])
    Path("wrong.toml").write_text(f'{WRONG}transport_url = "amqp://u:canary@h/v"\n')
    secret = CliRunner().invoke(cli, ["cast", "compute", "echo", "--config", "wrong.toml"])

    assert known.output.strip().endswith("gracekit call --transport sqlite:///q.db")
    assert secret.output.strip().endswith(
        "gracekit cast --transport sqlite:////path/to/gracekit.db"
    )
    assert "canary" not in secret.output


def test_a_store_that_is_not_known_is_left_to_fill_in(url: str):
    """A file that cannot be read does not say where the store is."""
    Path("wrong.toml").write_text('drain_timeout = "5s\n')

    answer = CliRunner().invoke(cli, ["status", "--config", "wrong.toml"])

    assert answer.exit_code == 78
    assert "cannot read the settings in wrong.toml: Illegal character" in answer.output
    assert "line 1" in answer.output
    assert 'write one `name = "value"` a line' in answer.output
    assert answer.output.splitlines()[-1].strip() == (
        "to go on without wrong.toml, with all else as before: gracekit status --store "
        "sqlite:////path/to/gracekit-store.db"
    )


def test_a_file_that_names_no_store_is_just_left_out(url: str):
    """The service then uses the default, as the command does; but a misspelt name may mean the
    store.
    """
    plain = CliRunner().invoke(cli, ["status", "--config", "wrong.toml"])
    Path("wrong.toml").write_text(f'{WRONG}store_ulr = "{url}"\n')
    misspelt = CliRunner().invoke(cli, ["status", "--config", "wrong.toml"])

    assert plain.output.splitlines()[-1].endswith("with all else as before: gracekit status")
    assert misspelt.output.splitlines()[-1].endswith("/path/to/gracekit-store.db")


def test_a_fault_that_is_not_the_file_s_shows_no_way_without_it(url: str):
    """Without the file the variable would be as wrong."""
    Path("wrong.toml").write_text("max_running = 20\n")

    answer = CliRunner().invoke(
        cli, ["status", "--config", "wrong.toml"], env={"GRACEKIT_DRAIN_TIMEOUT": "5 parsecs"}
    )

    assert answer.exit_code == 78
    assert "to go on without" not in answer.output
