"""Exit codes of wrong input, for every command: 78 for settings, 2 for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner, Result

from gracekit.cli.main import COMMANDS, cli
from gracekit.config.settings import BY_OPTION

NEEDED: Final = {
    "run": "served",
    "call": "compute echo",
    "cast": "compute echo",
    "extend": "--by 5m",
    "tasks show": "x",
    "tasks cancel": "x --reason y",
    "tasks fail": "x --reason y",
    "tasks retry": "x --reason y",
    "pending retry": "x",
    "pending give-up": "x --reason y",
    "pending cancel": "x --reason y",
    "holds end": "name key --reason y",
    "runs gone": "x --reason y",
    "hosts gone": "x --reason y",
    "exits record": "--systemd",
    "service wanted": "x --instance y",
    "service start": "x --instance y",
    "service stop": "x --instance y --reason z",
    "keep": "--record r -- true",
    "store backup": "copy.db",
    "lease create": "vm:v",
    "lease delete": "vm:v",
    "lease status": "vm:v",
    "lease force": "vm:v --token 1 --reason y",
    "lease run": "vm:v -- true",
    "init systemd": "served",
    "init k8s": "served --image i",
    "init docker": "served",
}
"""What a command cannot be called without."""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its words; a group that lists is one itself."""
    with click.Context(cli) as ctx:
        for name in COMMANDS:
            command = cli.get_command(ctx, name)
            assert command is not None
            inner = command.commands if isinstance(command, click.Group) else {}
            if not inner or getattr(command, "invoke_without_command", False):
                yield name, command
            yield from ((f"{name} {verb}", part) for verb, part in inner.items())


ALL: Final = dict(commands())


def options_of(name: str, metavar: str) -> list[str]:
    parts = (part for part in ALL[name].params if isinstance(part, click.Option))
    return [part.opts[0] for part in parts if part.metavar == metavar]


DURATIONS: Final = [(name, one) for name in ALL for one in options_of(name, "DURATION")]
LENIENT: Final = "service wanted"
"""It must not keep a service down whose settings are wrong: the start itself then says so."""
URLS: Final = [(name, one) for name in ALL if name != LENIENT for one in options_of(name, "URL")]


@pytest.fixture
def gracekit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs one command in a directory with a service's module and an empty transport."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served.py").write_text("from gracekit import Service\nsvc = Service('compute')\n")
    (tmp_path / "gracekit.db").touch(mode=0o600)

    def invoke(name: str, *words: str, **variables: str) -> Result:
        needed = NEEDED.get(name, "").split()
        given = [*words, *needed] if "--" in needed else [*needed, *words]
        return CliRunner().invoke(cli, [*name.split(), *given], env=variables)

    return invoke


def refused(result: Result) -> bool:
    return isinstance(result.exception, SystemExit) and "Traceback" not in result.output


@pytest.mark.parametrize(("name", "option"), URLS)
def test_a_url_of_an_unknown_scheme_is_78(gracekit, name: str, option: str):
    """Whatever the command: a supervisor or a script knows by the code that another try will not
    help.
    """
    result = gracekit(name, option, "ftp://somewhere/x")

    assert (result.exit_code, refused(result)) == (78, True), result.output
    assert "must begin with" in result.output


@pytest.mark.parametrize(("name", "option"), DURATIONS)
def test_a_text_that_is_no_duration_is_refused_with_its_option(gracekit, name: str, option: str):
    """Of a setting with 78, as from every other source; of an option of one command with 2."""
    result = gracekit(name, option, "5 parsecs")
    is_setting = option.removeprefix("--").replace("-", "_") in BY_OPTION

    code = 78 if is_setting else 2
    assert (result.exit_code, refused(result)) == (code, True), result.output
    assert "is not a duration" in result.output
    assert option in result.output


@pytest.mark.parametrize("name", [n for n in ALL if n not in {"demo", "keep", LENIENT}])
def test_a_wrong_variable_is_78(gracekit, name: str):
    """Every command reads the environment, as the service does, but for the demonstration and
    `keep`, which have no use for it.
    """
    result = gracekit(name, GRACEKIT_DRAIN_TIMEOUT="5 parsecs")

    assert (result.exit_code, refused(result)) == (78, True), result.output
    assert "GRACEKIT_DRAIN_TIMEOUT" in result.output


@pytest.mark.parametrize("name", ALL)
def test_an_option_that_there_is_not_is_2(gracekit, name: str):
    """The command line could not be read: click's convention."""
    result = gracekit(name, "--bogus")

    assert (result.exit_code, refused(result)) == (2, True), result.output
    assert "--bogus" in result.output
