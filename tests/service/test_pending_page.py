"""What docs/pending.md says can be typed, and its tables agree with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gracekit import Context, InvalidArgumentsError, NoCapacity, Service, Settings
from gracekit.request.parked_tasks import MAX_PAGE
from gracekit.request.task_api import task_methods
from gracekit.testing import InMemoryService
from tests.loops import without_settings
from tests.oslo.kit import oslo_python
from tests.process.helpers import WAIT_S, until
from tests.testing.virtual import virtual

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "pending.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
OUTPUTS = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

Start = Callable[..., subprocess.Popen[bytes]]


def section(title: str) -> str:
    """The text between a heading and the next one of its level."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of the rows of the first table in *text*, without its heading."""
    rows = text.partition("|---")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# -- the tables ---------------------------------------------------------------------------


def test_the_settings_are_listed_with_their_defaults():
    """In the words in which a user sets them."""
    said = {cells[0].strip("`"): cells[1].strip("`") for cells in table(section("Settings"))}
    settings = Settings()

    assert said == {
        "use_pending_state": str(settings.use_pending_state).lower(),
        "pending_timeout": f"{settings.pending_timeout_s / 3600:g}h",
        "pending_max": str(settings.pending_max),
        "notification_topic": settings.notification_topic,
        "notification_context": settings.notification_context,
    }


def test_responsibility_passes_in_these_words():
    """Whoever turns PENDING on must have read them."""
    words = "Responsibility passes to the resolver the moment the task is parked."
    assert words in section("States").replace("\n", " ")


def test_the_methods_of_the_task_api_are_listed_with_their_arguments():
    """Names, order and defaults."""
    said = {cells[0].strip("`"): cells[1] for cells in table(section("The task API"))}
    assert list(said) == [method.name for method in task_methods()]
    for method in task_methods():
        parameters = list(method.signature.parameters.values())
        words = [
            one.name + ("" if one.default is one.empty else f"={one.default!r}".replace("'", '"'))
            for one in parameters
        ]
        assert re.findall(r"`([^`]+)`", said[method.name]) == words
    assert f"at most {MAX_PAGE}" in said["list_pending"]


@virtual
async def test_the_fields_of_payloads_and_answers_are_listed():
    """Of both notifications, and of a task as the task API shows it."""
    svc = Service("scheduler", task_api=True, defaults={"use_pending_state": True})

    @svc.rpc(resource="vm")
    async def build(ctx: Context, vm: str) -> None:
        raise NoCapacity("no", requested={"machines": 1})

    async with InMemoryService(svc) as one:
        task_id = await one.cast(build, vm="81")
        await one.settled()
        tasks = one.prepare(ops=True, namespace="gracekit.tasks", version="1.1")
        shown = await tasks.call("get", task_id=task_id)
        sent = {told.event_type: told for told in one.notifications()}

    update, no_capacity = re.findall(r"(\| field \|.*?)\n\n", section("Notifications"), re.DOTALL)
    for text, event_type in ((update, "task.update"), (no_capacity, "task.no_capacity")):
        names = [name for cells in table(text) for name in re.findall(r"`(\w+)`", cells[0])]
        assert sorted(names) == sorted(sent[event_type].payload)
        assert f"`{event_type}`, priority {sent[event_type].priority}" in PAGE
    (answer,) = [cells[2] for cells in table(section("The task API")) if cells[0] == "`get`"]
    assert re.findall(r"`(\w+)`", answer) == list(shown)


def test_what_is_missing_is_kept_up_to_the_size_that_the_page_says():
    """4 KiB as JSON."""
    NoCapacity("no", requested={"a": "x" * 4000})
    with pytest.raises(InvalidArgumentsError, match="at most 4096"):
        NoCapacity("no", requested={"a": "x" * 4096})
    assert "at most 4 KiB as JSON" in section("What a handler writes").replace("\n", " ")


# -- the programs -------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program of the page; its output goes to the file of its name. None is left behind."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    env = without_settings()
    env |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    started: list[subprocess.Popen[bytes]] = []

    def begin(
        output: str, *arguments: str, python: str | Path = sys.executable, **more: str
    ) -> subprocess.Popen[bytes]:
        with (tmp_path / output).open("ab") as out:
            process = subprocess.Popen(
                (python, *arguments), cwd=tmp_path, env=env | more, stdout=out, stderr=out
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_every_program_has_a_test():
    """One that is added to the page needs one here."""
    assert sorted(PROGRAMS) == [
        "ask.py",
        "listen.py",
        "oslo_listen.py",
        "resolver.py",
        "scheduler.py",
        "waits.py",
    ]


@pytest.mark.process
def test_the_life_in_memory_prints_what_the_page_says(start: Start, tmp_path: Path):
    """A reader can copy it."""
    assert start("out", "waits.py").wait(WAIT_S) == 0

    assert (tmp_path / "out").read_text() == OUTPUTS[0]


@pytest.mark.process
async def test_service_caller_listener_and_resolver_work_together(start: Start, tmp_path: Path):
    """As processes, with a restart of the service while a task waits."""
    service = ("-m", "gracekit", "run", "scheduler:svc")

    def has(name: str, text: str) -> bool:
        path = tmp_path / name
        return path.exists() and text in path.read_text()

    scheduler = start("log", *service)
    await until(lambda: has("log", "service.serving"), "it serves")
    listener = start("heard", "listen.py")
    asking = start("asked", "ask.py")
    await until(lambda: has("asked", "build-81 waits"), "it is parked")
    await until(lambda: has("heard", "task.no_capacity vm:81 1"), "it was told")
    listener.terminate()  # it would share the queue with the resolver
    scheduler.terminate()
    assert scheduler.wait(WAIT_S) == 0  # what is parked does not hold it up

    start("log-2", *service)
    await until(lambda: has("log-2", "service.serving"), "it serves again")
    start("resolved", "resolver.py")
    assert asking.wait(WAIT_S) == 0, (tmp_path / "asked").read_text()
    await until(lambda: has("log-2", "82 is not built: gave_up"), "it is given up")

    lines = (tmp_path / "asked").read_text().splitlines(keepends=True)
    assert "".join(lines[-2:]) == OUTPUTS[2]
    assert set(lines[:-2]) == {"80 is built\n", "build-81 waits\n"}


@pytest.mark.process
async def test_a_listener_of_oslo_gets_what_is_missing(
    start: Start, tmp_path: Path, rabbit_url: str
):
    """With the flags and the exchange that the page names."""
    at_broker = {"GRACEKIT_TRANSPORT_URL": rabbit_url}
    url = rabbit_url.replace("amqp://", "rabbit://")
    start("log", "-m", "gracekit", "run", "scheduler:svc", **at_broker)
    log = tmp_path / "log"
    await until(lambda: "service.serving" in log.read_text(), log.read_text)
    start("heard", "oslo_listen.py", url, python=oslo_python())
    call = ("-m", "gracekit", "call", "scheduler", "build", 'vm="81"', "memory_mb=8192")
    start("called", *call, **at_broker)

    heard = tmp_path / "heard"
    said = "task.no_capacity vm:81 1 {'memory_mb': 8192}\n"
    await until(lambda: said in heard.read_text(), heard.read_text)
