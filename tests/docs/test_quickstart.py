"""What docs/quickstart.md says can be typed in that order, and prints what the page shows."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gracekit.config.settings import BY_OPTION
from gracekit.testing import InMemoryService
from gracekit.testing import run as run_in_memory
from tests.docs.pages import WAIT_S, Page, Program, run, running

PAGE = Page("quickstart.md")


@contextmanager
def serving(directory: Path, *command: str, **env: str) -> Iterator[Program]:
    """The process of a `gracekit run`, once it serves."""
    with running(directory, "-m", *command, **env) as program:
        program.wait_text("service.serving")
        yield program


def commands(beginning: str) -> list[list[str]]:
    """The commands of the page that begin so, without their comments, in the foreground."""
    lines = re.findall(rf"^    ({beginning}.*?)(?: &)?$", PAGE.text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.process
def test_first_service_answers_as_the_page_says(tmp_path: Path):
    """The first block, the first `run` and the first `call` are all that is needed; SIGTERM
    drains it.
    """
    check_first_service(tmp_path)


def check_first_service(directory: Path, **env: str) -> None:
    """The same, with more in the environment."""
    PAGE.write_to(directory)
    with serving(directory, *commands("gracekit run")[0], **env) as service:
        assert run(directory, "-m", *commands("gracekit call")[0], **env) == PAGE.outputs[0]
        assert service.stop(signal.SIGTERM) == 0, service.log.read_text()


@pytest.mark.process
def test_drain_and_second_start_go_as_the_page_says(tmp_path: Path):
    """A drain amid the cast ends with 75, and the next start goes on with the next picture. The
    commands that look at a service work meanwhile.
    """
    check_drain_and_second_start(tmp_path)


def check_drain_and_second_start(directory: Path, **env: str) -> None:
    """The same, with more in the environment."""
    PAGE.write_to(directory)
    hurry(directory / "thumbs.py", "asyncio.sleep(1)", "asyncio.sleep(0.2)")
    hurry(directory / "ask.py", "range(60)", "range(20)")
    start = commands("gracekit run thumbs:svc")[0]
    with serving(directory, *start, **env) as service:
        assert run(directory, "ask.py", **env) == PAGE.outputs[1]
        service.wait_text("spring/0")
        assert service.stop(signal.SIGTERM) == 75, service.log.read_text()
        (*_, line, _) = service.log.read_text().splitlines()  # as JSON, where no terminal is
        told = {"event": "drain.finished", "handed_over": 1, "exit_code": 75}
        assert told.items() <= json.loads(line).items()
        done = pictures_in(service.log)
    for look in commands("gracekit (?:status|tasks)"):
        run(directory, "-m", *look, **env)

    with serving(directory, *start, **env) as service:
        for look in commands("gracekit (?:status|tasks|call thumbs)"):
            run(directory, "-m", *look, **env)
        service.wait_text("spring/19")
        run(directory, "-m", *commands("gracekit drain")[0], **env)
        assert service.process.wait(WAIT_S) == 0, service.log.read_text()
        again = pictures_in(service.log)

    assert sorted(done + again) == list(range(20))


def hurry(file: Path, slow: str, quick: str) -> None:
    text = file.read_text()
    assert text.count(slow) == 1
    file.write_text(text.replace(slow, quick))


def pictures_in(log: Path) -> list[int]:
    return [int(one) for one in re.findall(r"^spring/(\d+).jpg$", log.read_text(), re.MULTILINE)]


@pytest.mark.process
def test_settings_file_is_read_where_it_is_named(tmp_path: Path):
    """`config show` says of each of its settings that it came from the file."""
    PAGE.write_to(tmp_path)
    names = set(tomllib.loads(PAGE.files["gracekit.toml"]))
    assert names <= set(BY_OPTION)
    (show,) = re.findall(r"`gracekit (config show [^`]+)`", PAGE.text)

    shown = json.loads(run(tmp_path, "-m", "gracekit", *shlex.split(show), "--json"))

    origins = {one["setting"]: one["origin"] for one in shown["settings"]}
    assert all(origins[name].startswith("gracekit.toml:") for name in names), origins


def test_albums_are_rendered_at_one_time_and_tasks_of_one_in_turn(tmp_path: Path, monkeypatch):
    """What the page says of `resource="album"`."""
    PAGE.make_importable(tmp_path, monkeypatch)
    svc = importlib.import_module("thumbs").svc

    async def main() -> None:
        async with InMemoryService(svc) as one:
            spring, more, summer = (
                one.start_call("render", album=album, pictures=["a", "b"])
                for album in ("spring", "spring", "summer")
            )
            await one.pass_time(2.5)
            assert [spring.done(), summer.done(), more.done()] == [True, True, False]
            assert await more == 2

    run_in_memory(main())


def test_crash_loses_no_picture_and_repeats_at_most_two(tmp_path: Path, monkeypatch):
    """The next process waits for the settle time that the page names, and runs the task again."""
    PAGE.make_importable(tmp_path, monkeypatch)
    thumbs = importlib.import_module("thumbs")
    (settle_s,) = map(int, re.findall(r"waits (\d+) s because", PAGE.text))
    made: list[str] = []
    monkeypatch.setattr(thumbs, "print", lambda line, **_: made.append(line), raising=False)

    async def main() -> None:
        async with InMemoryService(thumbs.svc) as one:
            pictures = list("abcdef")
            pending = one.start_call("render", album="spring", pictures=pictures)
            await one.pass_time(3.5)
            await one.crash()
            before = len(made)
            await one.start()
            await one.pass_time(settle_s - 1)
            assert len(made) == before
            assert await pending == len(pictures)
            assert sorted(set(made)) == [f"spring/{one}" for one in pictures]
            assert len(made) <= len(pictures) + 2

    run_in_memory(main())
