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

from gracekit import CallTimeoutError, Runtime, Service, Settings, Undeliverable
from gracekit.cli.main import COMMANDS
from gracekit.config.loading import load
from gracekit.rpc.oslo_wire import decode_request
from gracekit.testing import InMemoryService, Point, TaskState
from gracekit.testing import run as play
from tests.cli.kit import Started, gracekit
from tests.docs.pages import ROOT, Page, run

PAGE = Page("questions.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEAST_QUESTIONS = 25
WAIT_S = 60.0


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


def test_the_page_answers_many_questions():
    """
    Each question ends in a question mark, and has an answer that leads to another page.
    """
    asked = re.findall(r"^### (.*)$", PAGE.text, re.MULTILINE)

    assert len(asked) >= LEAST_QUESTIONS
    assert [one for one in asked if not one.endswith("?")] == []
    assert [one for one in asked if ".md" not in question(one)] == []


def test_every_link_leads_to_the_section_that_answers():
    """
    Pages are long, so a link names a section of its page; tests/docs/test_pages.py finds it there.
    """
    links = re.findall(r"\]\((\w[\w./-]*\.md)(#[\w-]+)?\)", PAGE.text)

    assert len(links) > len(re.findall(r"^### ", PAGE.text, re.MULTILINE))
    assert [page for page, anchor in links if not anchor] == []


@pytest.mark.process
def test_the_programs_in_memory_print_what_the_page_says(directory: Path):
    """
    The result of a cast is got later, and a dataclass travels as plain data.
    """
    assert run(directory, "result_later.py") == PAGE.outputs[0]
    assert run(directory, "typed.py") == PAGE.outputs[1]


# -- requests and results ------------------------------------------------------------------


def test_a_failure_of_a_cast_is_got_by_its_id_and_nothing_runs_again():
    """
    A call with the id of a FAILED cast raises what its handler raised.
    """
    svc, runs = Service("orders"), []

    @svc.rpc(on_interrupt="retry")
    async def ship(ctx, order: str) -> None:
        runs.append(order)
        raise LookupError("no such order")

    async def main() -> None:
        async with InMemoryService(svc) as one:
            request_id = await one.cast(ship, order="o-1")
            await one.settled()
            with pytest.raises(LookupError, match="no such order"):
                await one.prepare(request_id=request_id).call(ship, order="o-1")
            assert one.state_of(request_id) is TaskState.FAILED

    play(main())
    assert runs == ["o-1"]


@pytest.mark.parametrize("failures", [2, 4])
def test_the_handler_that_retries_tries_four_times(directory: Path, failures: int):
    """
    Errors that pass are hidden by the handler's own retries, others end the task as FAILED.
    """
    retrying = load_page("retrying")
    tries = 0

    async def pay(order: str) -> str:
        nonlocal tries
        tries += 1
        if tries <= failures:
            raise ConnectionError(order)
        return f"{order} is paid"

    retrying.pay = pay

    async def main() -> None:
        async with InMemoryService(retrying.svc) as one:
            if failures < 4:
                assert await one.call(retrying.charge, order="o-1") == "o-1 is paid"
            else:
                with pytest.raises(ConnectionError):
                    await one.call(retrying.charge, order="o-1")

    play(main())
    assert tries == min(failures + 1, 4)


def test_the_handler_that_retries_goes_on_with_the_next_try_after_a_drain(directory: Path):
    """
    As the loop of the page about handlers does: a stop does not give it all its tries again.
    """
    retrying, tries = load_page("retrying"), list[str]()

    async def pay(order: str) -> str:
        tries.append(order)
        raise ConnectionError(order)

    retrying.pay = pay

    async def main() -> None:
        async with InMemoryService(retrying.svc) as one:
            one.interrupt_at(2)
            pending = one.start_call(retrying.charge, order="o-1")
            await one.wait_stopped()
            assert len(tries) == 2
            await one.start()
            with pytest.raises(ConnectionError):
                await pending

    play(main())
    assert len(tries) == 4


def test_a_chained_task_is_started_once_although_its_sender_runs_twice(directory: Path):
    """
    The id of the second request is made of the first one's, so a repetition is a duplicate.
    """
    chained, shipped = load_page("chained"), load_page("orders")
    shipped.svc.start_hooks.remove(chained.open_client)  # this test's own client, in memory
    shipped.svc.stop_hooks.remove(chained.close_client)

    async def main() -> None:
        async with InMemoryService(shipped.svc) as one:
            chained.clients.append(one)
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
def test_the_hook_opens_a_client_with_the_settings_of_a_file(directory: Path):
    """
    Under `gracekit run` it finds the queue that a settings file names.
    """
    (directory / "orders.toml").write_text('transport_url = "sqlite:///in-the-file.db"\n')
    named = {"GRACEKIT_CONFIG": "orders.toml"}
    with Started(directory, "run", "chained:svc", **named) as service:
        service.wait_line("service.serving")
        packed = gracekit(directory, "call", "orders", "pack", "order=o-1", "--id", "r1", **named)
        again = ("call", "orders", "ship", "order=o-1", "--id", "r1/ship")
        shipped = gracekit(directory, *again, **named)

    assert (packed.code, shipped.out) == (0, '"o-1 is shipped"\n')
    assert not (directory / "gracekit.db").exists()


def test_the_class_gets_what_it_needs(directory: Path):
    """
    An on_start hook fills the object whose methods are served.
    """
    stock = load_page("stock")

    async def main() -> None:
        async with InMemoryService(stock.svc) as one:
            assert await one.call(stock.stock.set_level, item="screws", level=5) == 105

    play(main())


def test_a_call_that_nobody_read_in_time_is_not_run():
    """
    Its caller has left; a cast waits for as long as it takes.
    """
    svc, runs = Service("shop"), []

    @svc.rpc(on_interrupt="retry")
    async def note(ctx, who: str) -> None:
        runs.append(who)

    async def main() -> None:
        async with InMemoryService(svc) as one:
            await one.drain()
            with pytest.raises(CallTimeoutError):
                await one.prepare(timeout=5).call(note, who="caller")
            await one.cast(note, who="cast")
            await one.start()
            await one.settled()

    play(main())
    assert runs == ["cast"]


def test_types_of_arguments_are_not_checked():
    """
    A handler that says int gets the text that was sent.
    """
    svc = Service("shop")

    @svc.rpc
    async def kind(ctx, n: int) -> str:
        return type(n).__name__

    async def main() -> None:
        async with InMemoryService(svc) as one:
            assert await one.call("kind", n="four") == "str"
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


@pytest.mark.process
async def test_a_synchronous_program_calls_the_service(directory: Path):
    """
    It runs a loop in a thread of anyio's, and prints the answer.
    """
    directory.chmod(0o700)
    async with serving(load_page("orders").svc, f"sqlite:///{directory}/gracekit.db", directory):
        printed = await asyncio.to_thread(run, directory, "sync_ask.py")

    assert printed == PAGE.outputs[2]


@pytest.mark.process
async def test_a_program_without_gracekit_sends_a_request(directory: Path, rabbit_url: str):
    """
    Its JSON is a request like a client's: under the same id the client gets the result.
    """
    directory.chmod(0o700)
    orders = load_page("orders")
    async with serving(orders.svc, rabbit_url, directory):
        printed = await asyncio.to_thread(run, directory, "producer.py", rabbit_url)
        async with orders.svc.client(rabbit_url) as client:
            again = client.prepare(request_id=printed.strip())
            assert await again.call(orders.ship, order="o-3") == "o-3 is shipped"
            with pytest.raises(Exception, match="known with other content"):
                await again.call(orders.ship, order="o-4")


def test_the_keys_of_a_foreign_request_are_read():
    """
    The keys that the page's table names are those that a service reads from bare JSON.
    """
    named = re.findall(r"`([a-z_]+)`", question("Can programs without gracekit send requests?"))
    body = (
        b'{"method": "m", "args": {"a": 1}, "_unique_id": "r", "version": "1.2", '
        b'"namespace": "n", "_context_user_id": "ann", "_msg_id": "1", "_reply_q": "reply_1"}'
    )
    request = decode_request(body)

    for key in re.findall(rb'"([a-z_]+)":', body):
        assert key.decode() in named or key == b"a"
    assert (request.request_id, request.version, request.namespace) == ("r", "1.2", "n")
    assert request.context == {"user_id": "ann"}
    assert request.reply is not None
    assert request.reply.queue == "reply_1"
    assert decode_request(b'{"method": "m"}').reply is None


def test_a_client_works_under_anyio(tmp_path: Path):
    """
    anyio.run with its asyncio backend is enough for a client.
    """

    async def main() -> None:
        async with Service("orders").client(f"sqlite:///{tmp_path}/gracekit.db") as client:
            with pytest.raises(Undeliverable, match="no queues"):
                await client.cast("ship", order="o-1")

    anyio.run(main)


def test_all_extras_are_named():
    """
    The table of extras has a row for each that the project defines.
    """
    named = re.findall(r"^\| `gracekit\[(\w+)\]`", PAGE.text, re.MULTILINE)

    assert sorted(named) == sorted(PROJECT["optional-dependencies"])


# -- settings and commands -------------------------------------------------------------------


def test_the_settings_file_is_read_whole(directory: Path):
    """
    Each line of the file is a setting, and they fit together.
    """
    directory.joinpath("thumbs.toml").chmod(0o600)
    settings = load(env={}, file=directory / "thumbs.toml")

    assert settings.drain_timeout_s == 60
    assert settings.use_pending_state
    given = tomllib.loads((directory / "thumbs.toml").read_text())
    assert settings.max_running == given["max_running"]
    assert {name.removesuffix("_s") for name in settings.origins} >= set(given)


def test_numbers_of_the_page_are_the_defaults():
    """
    Default durations and counts that answers mention are the settings'.
    """
    settings = Settings()

    assert settings.retention_s == 7 * 86400
    assert settings.threads == 40
    assert (settings.drain_timeout_s, settings.hard_limit_s) == (25, 29)
    assert settings.max_body_bytes == 1 << 20
    assert settings.max_attempts == 3


def test_commands_of_the_page_exist():
    """
    Each command in backquotes, or in a block, is one of the command line's.
    """
    named = {words.split()[0] for words in re.findall(r"`gracekit ([a-z][a-z ]*)", PAGE.text)}

    assert named - set(COMMANDS) == set()


@pytest.mark.process
def test_a_cast_from_a_shell_takes_an_id(directory: Path):
    """
    The line for cron sends the same request however often it runs.
    """
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


def test_python_versions_are_those_of_the_project():
    """
    The oldest and the newest version are those of the package.
    """
    versions = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]

    assert f"{versions[0]} to {versions[-1]}" in question("Which versions of Python work?")
