"""`gracekit status --watch` and `tasks --watch`: at a terminal, in a pipe, as JSON."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cli.kit import Running, Started, cast_many, gracekit, write_service
from tests.cli.test_schemas import Schemas

pytestmark = pytest.mark.process


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_a_terminal_shows_one_picture_over_the_other_until_ctrl_c(directory):
    """Each picture is drawn from the top without clearing, and shows changes; at the end the
    command dies of SIGINT.
    """
    with (
        Running(directory, "--instance", "api-1") as run,
        Started(directory, "status", "--watch", "200ms", terminal=True) as watch,
    ):
        watch.wait_line("every 200ms; Ctrl-C ends")
        watch.wait_line("serving")
        run.process.send_signal(signal.SIGTERM)
        run.wait()
        watch.wait_line("gone ")
        watch.type("\x03")
        code = watch.wait()
        said = watch.rest()

    assert code == -signal.SIGINT
    assert said.count("\x1b[2J") == 1  # the terminal is cleared once, and then written over
    assert said.count("\x1b[H") > 1
    assert "Traceback" not in said


def test_a_pipe_gets_each_picture_behind_an_empty_line(directory):
    """There are no terminal codes; `tasks` is watched with the options of the list."""
    with (
        Running(directory) as run,
        Started(directory, "tasks", "--resource", "vm-1", "--watch", "200ms") as watch,
    ):
        watch.wait_line("no tasks")
        gracekit(directory, "cast", "compute", "work", "vm=vm-1")
        run.wait_line("at work")
        watch.wait_line("vm:vm-1")
        watch.process.send_signal(signal.SIGINT)
        code = watch.wait()
        said = watch.rest()

    assert code == -signal.SIGINT
    assert said.startswith("\nno tasks\n\n")
    assert "\x1b" not in said


@pytest.mark.parametrize("command", ["status", "tasks"])
def test_watched_json_is_a_document_a_line(directory, command: str):
    """Each line can be read by itself, and is what the command prints without --watch."""
    with Running(directory):
        once = gracekit(directory, command, "--json").json
        with Started(directory, command, "--json", "--watch", "100ms") as watch:
            lines = [watch.wait_line("{") for _ in range(3)]

    assert [json.loads(line).keys() for line in lines] == [once.keys()] * 3


def test_a_store_that_is_away_for_a_moment_does_not_end_the_watch(directory):
    """The picture says so, and a later one shows the store again; the first look must succeed."""
    gracekit(directory, "status")
    with Running(directory) as run:
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    store, aside = directory / "gracekit-store.db", directory / "aside.db"
    with Started(directory, "status", "--watch", "100ms") as watch:
        watch.wait_line("accepted 0")
        store.rename(aside)
        watch.wait_line(f"nothing to show now: {store} is lost")
        aside.rename(store)
        watch.wait_line("accepted 0")
    store.rename(aside)
    refused = gracekit(directory, "status", "--watch")

    assert refused.code == 78
    assert f"{store} is lost" in refused.err


def test_watched_json_has_a_message_where_there_is_nothing_to_show(directory):
    """As for any command, a JSON line on standard error; the lines of pictures fit their schema."""
    gracekit(directory, "status")
    with Running(directory) as run:
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    store, aside = directory / "gracekit-store.db", directory / "aside.db"
    with Started(directory, "status", "--json", "--watch", "100ms") as watch:
        watch.wait_line('"accounts"')
        store.rename(aside)
        told = json.loads(watch.wait_line("is lost: services have used a store there"))
        aside.rename(store)
        watch.wait_line('"accounts"')
        seen = [json.loads(line) for line in watch.seen]

    assert told["message"].startswith(f"{store} is lost")
    schemas = Schemas()
    for line in seen:
        if "message" not in line:
            schemas.check("status", line)


def test_a_picture_is_not_longer_than_the_terminal(directory):
    """Otherwise its first lines would scroll away, and the next picture would begin below."""
    with Running(directory):
        cast_many(directory, 40)
        words = ("tasks", "--watch", "100ms")
        more = {"terminal": True, "LINES": "20", "COLUMNS": "200"}
        with Started(directory, *words, **more) as watch:  # type: ignore[arg-type]
            watch.wait_line("...")
            watch.wait_line("...")
            said = "\n".join(watch.seen)

    *_, last = re.split(r"\x1b\[H", said)
    assert len(last.splitlines()) <= 20


@pytest.mark.parametrize(
    ("given", "why"), [("0", "0 is below 100ms"), ("soon", "'soon' is not a duration")]
)
def test_a_wrong_pause_is_refused(directory, given: str, why: str):
    """The command ends at once, without a traceback."""
    answer = gracekit(directory, "status", f"--watch={given}")

    assert answer.code == 2
    assert why in answer.err
