"""docs/settings.md: its files are read, and its commands print what it shows; as in errors.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from gracekit import Settings
from gracekit.cli.main import cli
from gracekit.config import load
from gracekit.errors import ConfigError
from tests.docs.pages import Page

PAGE = Page("settings.md")
SHOWN = re.compile(r"^```console\n\$ ([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files of the page, and a service."""
    PAGE.write_to(tmp_path)
    for file in tmp_path.glob("*.toml"):
        file.write_text(
            f"# {file.name}\n{file.read_text()}"
        )  # as a reader copies it, for its lines
    (tmp_path / "thumbs.py").write_text("from gracekit import Service\nsvc = Service('thumbs')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "output"), SHOWN.findall(PAGE.text + Page("errors.md").text))
def test_a_command_prints_what_the_page_shows(place: Path, line: str, output: str):
    """Where a value comes from, and how wrong ones are reported."""
    words = shlex.split(line)
    variables = dict(word.split("=") for word in words[: words.index("gracekit")])

    done = CliRunner().invoke(cli, words[words.index("gracekit") + 1 :], env=variables)

    assert [one.rstrip() for one in done.output.splitlines()] == output.splitlines()


def test_a_value_from_code_does_not_read_the_environment(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`load` reads it, and the file."""
    monkeypatch.setenv("GRACEKIT_RETENTION", "1d")

    exec(compile(PAGE.files["embedded.py"], "embedded.py", "exec"), found := {})

    assert capsys.readouterr().out == PAGE.outputs[0]
    assert found["in_code"].retention_s == Settings().retention_s
    assert found["from_everywhere"].retention_s == 86400.0


@pytest.mark.parametrize(
    ("flags", "env", "defaults", "value"),
    [
        ({"drain_timeout": "1s"}, {"GRACEKIT_DRAIN_TIMEOUT": "2s"}, "4s", 1.0),
        ({}, {"GRACEKIT_DRAIN_TIMEOUT": "2s"}, "4s", 2.0),
        ({}, {}, "4s", 60.0),
    ],
)
def test_the_first_place_that_sets_a_value_wins(place: Path, flags, env, defaults, value: float):
    """An option, a variable, the file."""
    service = {"drain_timeout": defaults}

    assert load(flags, env, Path("thumbs.toml"), defaults=service).drain_timeout_s == value


def test_the_defaults_of_a_service_win_over_those_of_gracekit():
    """And over nothing else."""
    assert load(env={}, defaults={"drain_timeout": "4s"}).drain_timeout_s == 4.0
    assert load(env={}).drain_timeout_s == Settings().drain_timeout_s


@pytest.mark.parametrize(
    "name",
    ["transport_url", "store_url", "host", "instance", "ops_topic", "exchange", "declare_profile"],
)
def test_a_service_has_no_default_for_what_is_needed_before_it(name: str):
    """The page lists these settings."""
    with pytest.raises(ConfigError, match="is no default of a service"):
        load(env={}, defaults={name: "memory://"})


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("25s", 25), ("5m", 300), ("1h", 3600), ("7d", 604800)]
)
def test_a_duration_has_the_units_of_the_page(text: str, seconds: float):
    """Without a unit it is seconds."""
    assert load({"drain_timeout": text}, {}).drain_timeout_s == seconds
    assert load({"drain_timeout": str(seconds)}, {}).drain_timeout_s == seconds


@pytest.mark.parametrize("text", ["true", "1", "yes", "on", "false", "0", "no", "off"])
def test_a_truth_value_may_be_written_in_four_ways(text: str):
    """In any case."""
    expected = text in {"true", "1", "yes", "on"}

    assert load({"use_pending_state": text.upper()}, {}).use_pending_state is expected


def test_an_empty_variable_unsets_what_may_be_unset():
    """Over what a file has said."""
    optional = ["INSTANCE", "KILL_AFTER", "ADMIN_TOKEN_FILE", "ADMIN_TLS"]
    words = ["DEDUPE_CONTEXT", "NOTIFICATION_CONTEXT", "REPLY_QUEUES", "ADMIN_HOSTS"]

    found = load(env={f"GRACEKIT_{name}": "" for name in [*optional, *words]})

    assert [getattr(found, name.lower()) for name in words] == [""] * 4
    assert (found.instance, found.kill_after_s) == (None, None)
    assert (found.admin_token_file, found.admin_tls) == (None, None)


def test_a_table_in_a_file_is_refused(place: Path):
    """One `name = value` a line is all there is."""
    (place / "thumbs.toml").write_text("[drain]\ntimeout = 1\n")

    with pytest.raises(ConfigError, match="settings stand in no table"):
        load(env={}, file=Path("thumbs.toml"))
