"""A wrong settings file: commands for operators name its line."""

from __future__ import annotations

import asyncio
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


@pytest.mark.parametrize("words", [["status"], ["tasks"], ["tasks", "show"], ["holds"]])
def test_a_wrong_file_is_named_with_its_line(url: str, words: list[str]):
    """File, line, rule and remedy. Without the file the command does its work."""
    more = ["x"] if words[-1] == "show" else []
    answer = CliRunner().invoke(cli, [*words, *more, "--config", "wrong.toml", "--store", url])

    assert answer.exit_code == 78
    assert SAID in answer.output
    if not more:
        assert CliRunner().invoke(cli, [*words, "--store", url]).exit_code == 0


def test_a_file_that_cannot_be_read_is_named_too(url: str):
    """With the line at which it is no TOML, and what a line looks like."""
    Path("wrong.toml").write_text('drain_timeout = "5s\n')

    answer = CliRunner().invoke(cli, ["status", "--config", "wrong.toml"])

    assert answer.exit_code == 78
    assert "cannot read the settings in wrong.toml: Illegal character" in answer.output
    assert "line 1" in answer.output
    assert 'write one `name = "value"` a line' in answer.output
