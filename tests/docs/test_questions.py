"""The answers of docs/questions.md: their programs run, their tables agree with the project."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import anyio
import pytest

from gracekit import Runtime, Service, Settings, Undeliverable
from gracekit.cli.main import COMMANDS
from gracekit.testing import InMemoryService, Point, TaskState
from gracekit.testing import run as play
from tests.cli.kit import Started, gracekit
from tests.docs.pages import ROOT, Page, run

PAGE = Page("questions.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEAST_QUESTIONS = 12


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All files of the page, which can be imported as long as the test runs."""
    PAGE.make_importable(tmp_path, monkeypatch)
    return tmp_path


def question(words: str) -> str:
    """The text of one question's answer."""
    return PAGE.text.partition(f"\n### {words}\n")[2].partition("\n### ")[0]


def load_page(name: str) -> ModuleType:
    """One file of the page, as a module."""
    return importlib.import_module(name)


def test_the_page_answers_questions():
    """Each question ends in a question mark, and has an answer that leads to another page."""
    asked = re.findall(r"^### (.*)$", PAGE.text, re.MULTILINE)

    assert len(asked) >= LEAST_QUESTIONS
    assert [one for one in asked if not one.endswith("?")] == []
    assert [one for one in asked if ".md" not in question(one)] == []


def test_every_link_leads_to_the_section_that_answers():
    """Pages are long, so a link names a section of its page; tests/docs/test_pages.py finds it
    there.
    """
    links = re.findall(r"\]\((\w[\w./-]*\.md)(#[\w-]+)?\)", PAGE.text)

    assert len(links) > LEAST_QUESTIONS
    assert [page for page, anchor in links if not anchor] == ["index.md"]


# -- requests and results ------------------------------------------------------------------


def test_a_chained_task_is_started_once_although_its_sender_runs_twice(directory: Path):
    """The id of the second request is made of the first one's, so a repetition is a duplicate."""
    chained, shipped = load_page("chained"), load_page("orders")

    async def main() -> None:
        async with InMemoryService(shipped.svc) as one:
            one.crash_at(Point.FINISH, "before")
            await one.prepare(request_id="r1").cast(chained.pack, order="o-1")
            await one.wait_crashed()
            await one.start()
            await one.settled()
            assert one.row("r1")["attempts"] == 2
            assert one.state_of("r1/ship") is TaskState.SUCCEEDED
            assert one.row("r1/ship")["attempts"] == 1

    play(main())


@pytest.mark.process
def test_the_chain_goes_by_the_queue_that_a_settings_file_names(directory: Path):
    """The client of a handler sends where its service reads."""
    (directory / "orders.toml").write_text('transport_url = "sqlite:///in-the-file.db"\n')
    named = {"GRACEKIT_CONFIG": "orders.toml"}
    with Started(directory, "run", "chained:svc", **named) as service:
        service.wait_line("service.serving")
        packed = gracekit(directory, "call", "orders", "pack", "order=o-1", "--id", "r1", **named)
        again = ("call", "orders", "ship", "order=o-1", "--id", "r1/ship")
        shipped = gracekit(directory, *again, **named)

    assert (packed.code, shipped.out) == (0, '"o-1 is shipped"\n')
    assert not (directory / "gracekit.db").exists()


def test_types_of_arguments_are_checked():
    """A handler that says int gets no text."""
    svc = Service("shop")

    @svc.rpc
    async def kind(ctx, n: int) -> str:
        return type(n).__name__

    async def main() -> None:
        async with InMemoryService(svc) as one:
            assert await one.call("kind", n=4) == "int"
            with pytest.raises(TypeError, match="n: expected int, got str"):
                await one.call("kind", n="four")
            with pytest.raises(TypeError):
                await one.call("kind", m=4)

    play(main())


# -- programs around a service ---------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(svc: Service, transport_url: str, directory: Path) -> AsyncIterator[Runtime]:
    """The service of the page on a real queue, with a store beside it."""
    store_url = f"sqlite:///{directory}/gracekit-store.db"
    settings = Settings(transport_url=transport_url, store_url=store_url)
    async with Runtime(svc, settings) as runtime:
        yield runtime


def test_a_client_works_under_anyio(tmp_path: Path):
    """anyio.run with its asyncio backend is enough for a client."""

    async def main() -> None:
        async with Service("orders").client(f"sqlite:///{tmp_path}/gracekit.db") as client:
            with pytest.raises(Undeliverable, match="no queues"):
                await client.cast("ship", order="o-1")

    anyio.run(main)


def test_all_extras_are_named():
    """The table of extras has a row for each that the project defines."""
    named = re.findall(r"^\| `gracekit\[(\w+)\]`", PAGE.text, re.MULTILINE)

    assert sorted(named) == sorted(PROJECT["optional-dependencies"])


# -- settings and commands -------------------------------------------------------------------


def test_commands_of_the_page_exist():
    """Each command in backquotes, or in a block, is one of the command line's."""
    named = {words.split()[0] for words in re.findall(r"`gracekit ([a-z][a-z ]*)", PAGE.text)}

    assert named - set(COMMANDS) == set()


@pytest.mark.process
def test_a_cast_from_a_shell_takes_an_id(directory: Path):
    """The line for cron sends the same request however often it runs."""
    directory.chmod(0o700)
    orders = load_page("orders")
    url = f"sqlite:///{directory}/gracekit.db"

    async def main() -> list[str]:
        async with serving(orders.svc, url, directory):
            send = ("-m", "gracekit", "cast", "orders", "ship", "order=nightly", "--id", "n-1")
            printed = [
                await asyncio.to_thread(run, directory, *send, GRACEKIT_TRANSPORT_URL=url)
                for _ in range(2)
            ]
            async with orders.svc.client(url) as client:
                again = client.prepare(request_id="n-1")
                assert await again.call(orders.ship, order="nightly") == "nightly is shipped"
            return printed

    assert asyncio.run(main()) == ["n-1\n", "n-1\n"]
