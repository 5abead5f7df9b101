"""The group of commands: what it loads, how it refuses, what every command offers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gracekit.cli.call import arguments
from gracekit.cli.main import COMMANDS, cli
from gracekit.cli.text import clock, json_text, table
from gracekit.config.values import duration
from gracekit.process import Process
from gracekit.store.migrate import MIGRATIONS, load_migrations
from gracekit.store.sqlite.sqlite_engine import SqliteEngine
from tests.cli.kit import GRACEKIT, PATIENCE_S, ROOT, Running, environment, gracekit, write_service

pytestmark = pytest.mark.process


def test_help_loads_no_broker_and_no_command(tmp_path: Path):
    """`gracekit --help` is answered from a table; commands load when they are used."""
    code = (
        "import sys; from gracekit.cli.main import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "print([n for n in sys.modules if n in ('aio_pika', 'gracekit.testing')"
        " or (n.startswith('gracekit.cli.') and n not in ('gracekit.cli.main',"
        " 'gracekit.cli.text'))])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"  {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_json_and_help(name: str):
    """What a person can read, a script can read too."""
    command = cli.get_command(click.Context(cli), name)

    assert command is not None
    parts = list(command.commands.values()) if isinstance(command, click.Group) else [command]
    for part in parts:
        assert part.help
        # The output of these is for platforms, for people, and for a database.
        if name not in {"init", "demo", "keep"} and part.name not in {"sql", "wanted", "record"}:
            assert any("--json" in parameter.opts for parameter in part.params)


def test_a_wrong_command_gets_the_nearest_name(tmp_path: Path):
    """A typing error costs one look, not a manual."""
    answer = gracekit(tmp_path, "drian")

    assert answer.code == 2
    assert "no command 'drian'; did you mean drain?" in answer.err


def test_all_wrong_settings_are_told_at_once(tmp_path: Path):
    """Contradictions and unknown names come as one message."""
    answer = gracekit(
        tmp_path,
        *("status", "--store", "sqlite:///a.db", "--transport", "sqlite:///a.db"),
        GRACEKIT_DRAIN_TIMEOT="3s",
    )

    assert answer.code == 78
    assert "transport_url and store_url both name a.db" in answer.err
    assert "GRACEKIT_DRAIN_TIMEOT; did you mean GRACEKIT_DRAIN_TIMEOUT?" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_json_where_they_read_as_json():
    """`n=3` is a number, `name=vm-1` a text, and an object is taken whole."""
    words = ("n=3", "name=vm-1", "on=true", 'text="3"', "list=[1, 2]", "x=NaN", "eq=a=b")

    assert arguments(words, '{"more": null}') == {
        "n": 3,
        "name": "vm-1",
        "on": True,
        "text": "3",
        "list": [1, 2],
        "x": "NaN",
        "eq": "a=b",
        "more": None,
    }


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (("n",), None, "'n' is not NAME=VALUE"),
        (("=3",), None, "'=3' is not NAME=VALUE"),
        (("n=1", "n=2"), None, "'n' is given twice"),
        (("n=1",), '{"n": 2}', "'n' is given twice"),
        ((), "[1]", "must be a JSON object, not list"),
        ((), "{", "--args is not JSON"),
        ((), '{"n": NaN}', "NaN is not JSON"),
        (("d=" + "[" * 100_000,), None, "argument 'd' nests too deeply to be read"),
        ((), '{"d":' * 100_000, "--args nests too deeply to be read"),
    ],
)
def test_wrong_arguments_are_usage_errors(words, text, message):
    """Each says what is wrong with the word that was typed."""
    with pytest.raises(click.UsageError, match=message):
        arguments(words, text)


def test_tables_and_json_cannot_move_the_cursor():
    """Control characters and direction marks of names and results are shown, not obeyed."""
    wire = "a\x1b[2J\nb\u202ec\x9b"

    shown = table(("NAME",), [(wire,)]) + json_text({wire: "ä\x7f"})

    assert not any(sign in shown for sign in ("\x1b[2J", "\u202e", "\x9b", "\x7f"))
    assert r"a\x1b[2J\nb\u202ec\x9b" in shown
    assert "ä" in shown


def test_durations_show_two_units():
    """As an operator says them."""
    assert [duration(s) for s in (None, 0.4, 41, 72, 4200, 266400)] == [
        "-", "0s", "41s", "1m12s", "1h10m", "3d02h",
    ]  # fmt: skip
    assert clock(42.9) == "00:42"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_no_error(tmp_path, closed):
    """As a service manager may start it: the command does its work, and its exit status says so."""
    command = [sys.executable, "-m", "gracekit", "config", "show", "drain_timeout"]
    ran = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}', *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )

    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("--help",), ("config", "show"), ("status",), ("holds",)])
def test_a_full_standard_output_is_a_sentence_and_an_exit_code(tmp_path, words, unbuffered):
    """Whoever sends a listing to a full disk is told so, and the process ends."""
    make_store(tmp_path / "gracekit-store.db")
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [*GRACEKIT, *words],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            env=environment(PYTHONUNBUFFERED=unbuffered),
        )

    said = "Error: standard output cannot be written: No space left on device\n"
    assert (ran.returncode, ran.stderr) == (1, said)


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("drian --json", 2, "no command 'drian'; did you mean drain?"),
        ("status --json --store sqlite:///none.db", 78, "there is no store at"),
        ("status --json --instance api-1", 4, "no run of instance 'api-1' is on record"),
        ("tasks --json --limit x", 2, "'x' is not a valid integer range"),
        ("tasks --bogus --json", 2, "No such option '--bogus'"),
        ("tasks cancel x --reason y --json", 1, "no task x is on record"),
        ("holds end a b --json", 2, "Missing option '--reason'"),
        ("call compute echo --json", 4, "Undeliverable: there are no queues at"),
        ("quiet --json", 4, "no run is on record"),
        ("store backup --json gracekit-store.db", 78, "exists, and is not written over"),
        ("config show --json nonsense", 78, "nonsense"),
    ],
)
def test_with_json_a_refusal_is_one_json_line_on_standard_error(tmp_path, command, code, message):
    """A script that reads JSON reads why it was refused in the same way, for every command."""
    make_store(tmp_path / "gracekit-store.db")

    answer = gracekit(tmp_path, *command.split())

    (line,) = answer.err.splitlines()
    assert message in json.loads(line)["message"]
    assert answer.code == code
    assert not answer.out or "error" in answer.json


def make_store(path: Path) -> None:
    """A store in which nothing is on record."""

    async def make() -> None:
        engine = SqliteEngine(path, load_migrations(MIGRATIONS), process=Process())
        await engine.start()
        await engine.stop()

    path.parent.chmod(0o700)
    asyncio.run(make())


@pytest.mark.parametrize(
    "words",
    [
        ("run", "compute"),
        ("status",),
        ("call", "compute", "echo"),
        ("config", "show"),
        ("doctor",),
        ("init", "docker", "compute"),
        ("store", "backup", "copy.db"),
    ],
)
def test_a_working_directory_that_was_deleted_is_78_and_a_sentence(tmp_path: Path, words):
    """The default URLs are relative to it, as --config and --app-dir may be."""
    done = without_directory(tmp_path, words)

    assert done.returncode == 78, done
    assert done.stderr == "Error: the working directory was deleted: cd to one that exists\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("status",), 78, "there is no store at "),
        (("health", "--ready"), 4, "no run of "),
        (("drain", "--reason", "move"), 78, "there is no store at "),
    ],
)
def test_who_names_absolute_paths_needs_no_working_directory(tmp_path: Path, words, code, said):
    """A probe of a pod or an order to a run must not depend on where it was started."""
    done = without_directory(
        tmp_path,
        words,
        GRACEKIT_STORE_URL=f"sqlite:///{tmp_path}/store.db",
        GRACEKIT_TRANSPORT_URL=f"sqlite:///{tmp_path}/queue.db",
    )

    assert done.returncode == code, done
    assert said in done.stderr


def without_directory(tmp_path: Path, words, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a command says in a working directory that was deleted."""
    (tmp_path / "old").mkdir()
    return subprocess.run(
        ["/bin/sh", "-c", 'rmdir ../old && exec "$@"', "sh", *GRACEKIT, *words],
        cwd=tmp_path / "old",
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_an_argument_that_is_no_utf_8_is_refused_with_a_sentence(tmp_path: Path):
    """No name on record is written so; with --json the sentence is a line of JSON."""
    write_service(tmp_path)
    with Running(tmp_path) as run:
        run.kill()
    for words in (
        *(("tasks", "show", "\udcff\udcfe\udcfd"), ("tasks", "--resource", "\udcff")),
        ("tasks", "cancel", "\udcff\udcfe\udcfd\udcfc", "--reason", "r"),
    ):
        answer = gracekit(tmp_path, *words)
        as_json = gracekit(tmp_path, *words, "--json")
        assert (answer.code, as_json.code) == (2, 2), answer
        assert answer.err.startswith("Error: an argument is not UTF-8"), words
        assert json.loads(as_json.err)["message"].startswith("an argument is not UTF-8")
