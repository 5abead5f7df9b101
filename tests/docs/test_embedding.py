"""What docs/embedding.md says: its programs run, and its tables agree with the code."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from gracekit import DrainReport, Runtime, ServiceState
from gracekit.config.settings import Settings
from gracekit.exits import ExitCode
from tests.docs.pages import WAIT_S, Page, Program, run, running

PAGE = Page("embedding.md")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """All blocks of the page, as files."""
    PAGE.write_to(tmp_path)
    return tmp_path


def wait_answer(program: Program, url: str, status: int) -> str:
    """The body of the first answer with that *status*."""

    def ask() -> str:
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                got, body = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            got, body = error.code, error.read().decode()
        except OSError:
            return ""
        return body if got == status else ""

    return program.wait_for(ask)


def post(url: str) -> tuple[int, str]:
    """Status and body of the answer."""
    try:
        with urllib.request.urlopen(url, data=b"", timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


UNTIL_GO = """    import time
    from pathlib import Path

    while not Path("go").exists():
        time.sleep(0.02)
        if ctx.cancelled:
            raise OSError
    return 2 * n
"""


@pytest.fixture
def port() -> str:
    """One that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


# -- programs -----------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("program", ["smallest.py", "with_anyio.py", "synchronous.py"])
def test_program_prints_what_the_page_shows(directory: Path, program: str):
    """Each serves, calls itself, drains and ends."""
    shown = re.split(rf"^# {program}$", PAGE.text, flags=re.MULTILINE)[1]
    (output, *_) = re.findall(r"^```text\n(.*?)^```", shown, re.MULTILINE | re.DOTALL)

    assert run(directory, program) == output


@pytest.mark.process
def test_fastapi_program_serves_and_drains_when_it_shuts_down(directory: Path, port: str):
    """uvicorn chooses the exit code; the end of the service is on record."""
    with running(directory, "-m", "uvicorn", "app:app", "--port", port) as program:
        assert wait_answer(program, f"http://127.0.0.1:{port}/readyz", 200) == '"serving"'
        assert wait_answer(program, f"http://127.0.0.1:{port}/double/4", 200) == "8"
        assert program.stop(signal.SIGTERM) == -signal.SIGTERM  # 143, as a shell says it

    status = run(directory, "-m", "gracekit", "status")
    assert re.search(r"gone \d+s .* drained", status), status
    assert "1 succeeded" in status


@pytest.mark.process
def test_each_answer_of_the_program_for_production_is_that_of_the_page(directory: Path, port: str):
    """200 while it serves, and 503 for what comes in the drain; 202 for a task that outlives it,
    whose result is there after the restart.
    """
    inside = (directory / "inside.py").read_text()
    assert "    return 2 * n\n" in inside
    (directory / "inside.py").write_text(inside.replace("    return 2 * n\n", UNTIL_GO))
    ready, url = f"http://127.0.0.1:{port}/readyz", f"http://127.0.0.1:{port}/double/4"

    with (
        ThreadPoolExecutor() as pool,
        running(directory, "embedded.py", port, GRACEKIT_DRAIN_TIMEOUT="6s") as program,
    ):
        assert wait_answer(program, ready, 200) == '"serving"'
        waiting = pool.submit(post, url)
        program.wait_for(
            lambda: "running" in run(directory, "-m", "gracekit", "tasks", "--state", "running")
        )
        program.process.terminate()
        assert wait_answer(program, ready, 503) == '"draining"'
        assert post(url)[0] == 503
        assert program.process.wait(WAIT_S) == ExitCode.HANDED_OVER, program.log.read_text()
        status, answer = waiting.result(WAIT_S)
        assert status == 202
        assert "Traceback" not in program.log.read_text()

    (directory / "go").touch()
    with running(directory, "embedded.py", port) as program:
        assert wait_answer(program, ready, 200) == '"serving"'
        again = f"{url}?request_id={json.loads(answer)['request_id']}"
        assert (post(again), post(url)) == ((200, '{"result":8}'), (200, '{"result":8}'))
        assert program.stop(signal.SIGTERM) == 0
    assert "2 succeeded" in run(directory, "-m", "gracekit", "status")


@pytest.mark.process
def test_caller_of_a_task_that_fails_gets_its_id_and_the_class_of_the_error(
    directory: Path, port: str
):
    """502 for an exception of the handler and for an operator's order, and no traceback in the
    log.
    """
    inside = (directory / "inside.py").read_text()
    fails = "    if n < 0:\n        raise KeyError(n)\n" + UNTIL_GO
    (directory / "inside.py").write_text(inside.replace("    return 2 * n\n", fails))
    url = f"http://127.0.0.1:{port}/double"

    with ThreadPoolExecutor() as pool, running(directory, "embedded.py", port) as program:
        assert wait_answer(program, f"http://127.0.0.1:{port}/readyz", 200) == '"serving"'
        raised, again = (post(f"{url}/-4?request_id=id-raised") for _ in range(2))
        waiting = pool.submit(post, f"{url}/4?request_id=id-ended")
        program.wait_for(
            lambda: "id-ended" in run(directory, "-m", "gracekit", "tasks", "--state", "running")
        )
        run(directory, "-m", "gracekit", "tasks", "cancel", "id-ended", "--reason", "not wanted")
        ended = waiting.result(WAIT_S)
        assert program.stop(signal.SIGTERM) == 0
        log = program.log.read_text()

    assert raised == again == (502, '{"request_id":"id-raised","error":"KeyError"}')
    assert ended == (502, '{"request_id":"id-ended","error":"TaskCancelledError"}')
    assert "Traceback" not in log
    assert "service.serving" in log


@pytest.mark.process
@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"GRACEKIT_DRAIN_TIMEOUT": "abc"}, ExitCode.CONFIG),
        ({"GRACEKIT_TRANSPORT_URL": "amqp://127.0.0.1:1/"}, ExitCode.DEPENDENCY),
        ({}, ExitCode.CONFIG),
    ],
    ids=["setting", "broker", "port"],
)
def test_program_for_production_that_is_refused_ends_as_gracekit_run_does(
    directory: Path, wrong: dict[str, str], code: ExitCode
):
    """The exit code of the error, and one line; with an empty *wrong* the port alone is in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str((free if wrong else taken).getsockname()[1])
        if wrong:
            free.close()
        with running(directory, "embedded.py", port, **wrong) as program:
            assert program.process.wait(WAIT_S) == code
            said = program.log.read_text()

    assert "Traceback" not in said
    assert re.findall(r"^Error: .*$", said, re.MULTILINE) == said.splitlines()[-1:]


@pytest.mark.process
def test_program_with_signals_of_its_own_ends_with_the_code_of_the_drain(directory: Path):
    """Its handler asks for the stop, and `serve` returns the report."""
    with running(directory, "program.py") as program:
        program.wait_text("serving")
        assert run(directory, "-m", "gracekit", "call", "inside", "double", "n=21") == "42\n"
        assert program.stop(signal.SIGTERM) == 0
        assert program.log.read_text() == "serving\n0 finished, 0 handed over\n"


@pytest.mark.process
def test_drain_by_a_command_ends_the_service_and_not_the_program(directory: Path, port: str):
    """A program that does nothing about it stays there without a service."""
    with running(directory, "-m", "uvicorn", "app:app", "--port", port) as program:
        wait_answer(program, f"http://127.0.0.1:{port}/readyz", 200)
        run(directory, "-m", "gracekit", "drain")
        assert wait_answer(program, f"http://127.0.0.1:{port}/readyz", 503) == '"stopped"'
        assert program.process.poll() is None


def test_settings_come_from_where_the_page_says(directory: Path, monkeypatch: pytest.MonkeyPatch):
    """`Settings(...)` asks no variable; flags of `load` win over a variable, and a file does
    not.
    """
    monkeypatch.chdir(directory)
    monkeypatch.setenv("GRACEKIT_DRAIN_TIMEOUT", "33s")
    monkeypatch.setenv("GRACEKIT_MAX_RUNNING", "7")
    PAGE.make_importable(directory, monkeypatch)

    configured = importlib.import_module("configured")

    found = {
        name: (runtime.settings.drain_timeout_s, runtime.settings.max_running)
        for name, runtime in vars(configured).items()
        if isinstance(runtime, Runtime)
    }
    assert found == {"by_value": (60, 100), "as_text": (60, 7), "from_file": (33, 7)}


# -- tables -------------------------------------------------------------------------------------


def rows(heading: str) -> list[str]:
    """The first cells of the table of a section."""
    section = re.split(rf"^## {re.escape(heading)}$", PAGE.text, flags=re.MULTILINE)[1]
    section = re.split(r"^## ", section, flags=re.MULTILINE)[0]
    return [line.split("|")[1] for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)][2:]


def test_runtime_is_shown_whole():
    """Each public member has its row; `ground` and `wired` are internal."""
    named = set(re.findall(r"runtime\.(\w+)", " ".join(rows("The Runtime"))))
    assert named == {name for name in vars(Runtime) if not name.startswith("_")}
    assert {"by", "reason"} <= inspect.signature(Runtime.request_stop).parameters.keys()
    states = re.findall(r"a `ServiceState`: (.*?) \|", PAGE.text)[0]
    assert re.findall(r"`(\w+)`", states) == [state.value for state in ServiceState]


def test_report_is_shown_whole():
    """Each field and property of the report has its row."""
    named = set(re.findall(r"`(\w+)`", " ".join(rows("Reports and exit codes"))))
    properties = {name for name, value in vars(DrainReport).items() if isinstance(value, property)}
    assert named == {field.name for field in fields(DrainReport)} | properties


def test_limit_of_a_drain_is_that_of_the_settings():
    """The drain's timeout, and what follows it."""
    (drain_s, more_s) = re.findall(r"`drain_timeout` \((\d+) s\) and (\d+)\s+s more", PAGE.text)[0]
    settings = Settings()
    assert settings.drain_timeout_s == float(drain_s)
    assert settings.hard_limit_s == float(drain_s) + float(more_s)


FORMS = {
    "systemd": (
        [r"^ExecStart=.*$", r"^TimeoutStopSec=.*$", r"^Type=.*$", r"^ExecReload=.*\n"],
        r"`(ExecStart=[^`]+)`, `(TimeoutStopSec=\d+)`(?:, `(Type=notify)`, and no `(ExecReload)`)?",
        "--unit",
    ),
    "k8s": (
        [r"command: \[gracekit, run.*$", r"terminationGracePeriodSeconds: .*$"],
        r"`(command: [^`]+)`, `(terminationGracePeriodSeconds: \d+)`",
        "--manifest",
    ),
}


@pytest.mark.process
@pytest.mark.parametrize(("platform", "row"), [("systemd", 0), ("k8s", 1)])
@pytest.mark.parametrize("form", [0, 1])
def test_changed_lines_make_files_that_doctor_accepts(
    directory: Path, platform: str, row: int, form: int
):
    """What `gracekit init` prints, with the lines of the table in place of its own."""
    words = {"systemd": ("--user", "root"), "k8s": ("--image", "inside:1")}[platform]
    text = run(directory, "-m", "gracekit", "init", platform, "inside:svc", *words)
    lines = [line for line in PAGE.text.splitlines() if " | `" in line and line.startswith("| ")]
    table = [line for line in lines if re.match(r"\| (systemd|Kubernetes) \|", line)]
    old, new, option = FORMS[platform]
    cell = table[row].split(" | ")[1 + form]
    for pattern, line in zip(old, re.search(new, cell).groups(), strict=False):  # type: ignore[union-attr]
        if line == "ExecReload":  # printed for systemd before 253
            text = re.sub(pattern, "", text, flags=re.MULTILINE)
        elif line is not None:
            text, number = re.subn(pattern, lambda _, line=line: line, text, flags=re.MULTILINE)
            assert number == 1, pattern
    text = re.sub(r"(GRACEKIT_KILL_AFTER(?:=|\n +value: \"))\d+", r"\g<1>34", text)
    (directory / "changed").write_text(text)

    words = ("doctor", "inside:svc", option, "changed", "--json")
    found = json.loads(run(directory, "-m", "gracekit", *words))["findings"]

    judged = [one for one in found if one["area"] == "platform"]
    assert judged
    assert [one for one in judged if one["level"] in {"warn", "fail"}] == []
