"""`gracekit run`: what it finds, what it says, how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import click
import pytest

from gracekit.cli.main import cli
from gracekit.config.settings import Settings
from gracekit.process import FAILPOINTS_ON
from tests.cli.kit import PATIENCE_S, SERVICE, Running, Started, gracekit, write_service

pytestmark = pytest.mark.process


def test_a_crash_point_that_does_not_exist_is_explained(tmp_path: Path):
    """A sentence and exit code 78, as for any other wrong setting."""
    write_service(tmp_path)

    answer = gracekit(tmp_path, "run", "compute", GRACEKIT_FAILPOINT="acept.after", **FAILPOINTS_ON)

    assert answer.code == 78
    assert "GRACEKIT_FAILPOINT='acept.after' names no crash point: write POINT.before" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("module", "text", "target", "code", "message"),
    [
        ("compute", "", "compte", 78, "on the Python path; did you mean compute?"),
        ("compute", "", "compute.py", 78, "write module:attr, for example compute:svc"),
        ("compute", "", "compute", 78, "module 'compute' has no 'svc' or 'app'"),
        ("compute", "import compte_client", "compute", 78, "No module named 'compte_client'"),
        ("compute", "1 / 0", "compute", 70, "the module raised ZeroDivisionError"),
        ("compute", "import sys\nsys.exit(0)", "compute", 70, "the module raised SystemExit when"),
        (
            "compute",
            "raise BaseExceptionGroup('several', [KeyboardInterrupt()])",
            "compute",
            70,
            "the module raised BaseExceptionGroup when",
        ),
        ("compute", "svc = 3", "compute", 78, "is a int, not a gracekit Service"),
        ("compute", "def svc(): ...", "compute", 78, "not a gracekit Service; add --factory"),
        ("compute", "def svc(x): ...", "compute", 78, "is a function, not a gracekit Service; see"),
        (
            "compute",
            "from gracekit import Service\nsvc = Service('x')\n@svc.rpc\nasync def build(ctx): ...",
            "compute:build",
            78,
            "compute:build is a Method, not a gracekit Service; write compute:svc",
        ),
        ("compute", "def broken(:\n  pass", "compute", 70, "the module raised SyntaxError when"),
        (
            "compute",
            "from gracekit import Service\nservice = Service('x')",
            "compute:servce",
            78,
            "has no 'servce'; did you mean service?",
        ),
        (
            "compute",
            "from gracekit import Service\nsvc = Service('a*b')",
            "compute",
            78,
            "topic 'a*b' of 3 characters must be 1 to 120 of",
        ),
    ],
)
def test_a_service_that_cannot_be_found_is_explained(
    tmp_path: Path, module, text, target, code, message
):
    """No such module, an error inside it, no such attribute, no Service: each has its own words."""
    write_service(tmp_path, module, text)

    answer = gracekit(tmp_path, "run", target)

    assert (answer.code, message in answer.err) == (code, True), answer
    assert "gracekit/cli" not in answer.err
    assert "importlib" not in answer.err
    assert not (tmp_path / "gracekit-store.db").exists()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("def svc(x): ...", 78, "--factory calls compute without arguments, and that does not do"),
        (
            "def svc(): raise TypeError('x')",
            70,
            "compute: the module raised TypeError when its factory was called:",
        ),
        (
            "import sys\ndef svc(): sys.exit()",
            70,
            "compute: the module raised SystemExit when its factory was called:",
        ),
    ],
)
def test_a_factory_that_fails_is_explained(tmp_path: Path, text, code, message):
    """Its module was imported; the traceback begins where the application's own code does."""
    write_service(tmp_path, text=text)

    answer = gracekit(tmp_path, "run", "--factory", "compute")

    assert (answer.code, message in answer.err) == (code, True), answer
    assert "gracekit/cli" not in answer.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("doctor", "compute"), 70),
        (("init", "systemd", "compute"), 1),
        (("config", "show", "--app", "compute"), 1),
    ],
)
def test_a_module_that_exits_as_it_is_imported_does_not_end_a_command_with_0(
    tmp_path: Path, words, code
):
    """Whoever started the command would take it for done, although nothing was looked at or
    printed.
    """
    write_service(tmp_path, text="import sys\nsys.exit(0)")

    answer = gracekit(tmp_path, *words)

    assert (answer.code, "SystemExit" in answer.out + answer.err) == (code, True), answer


def test_a_contradiction_of_settings_is_78(tmp_path: Path):
    """A supervisor learns that a restart will not help."""
    write_service(tmp_path)

    answer = gracekit(tmp_path, "run", "compute", "--drain-timeout", "60s", "--kill-after", "30s")

    assert answer.code == 78
    assert "must be below kill_after = 30s" in answer.err


@pytest.mark.parametrize(
    ("words", "code", "anchor"),
    [
        (["compute", "--threads", "0"], 78, "configerror"),
        (["twice"], 78, "declarationerror"),
        (["compute", "--transport", "amqp://127.0.0.1:1/"], 69, "dependencyerror"),
    ],
)
def test_a_refused_start_ends_with_the_page_that_explains_it(
    tmp_path: Path, words: list[str], code: int, anchor: str
):
    """Before the Runtime opens as well as after, and in JSON too."""
    write_service(tmp_path)
    twice = "@svc.rpc()\nasync def again(ctx): ...\n"
    (tmp_path / "twice.py").write_text(SERVICE + twice + twice)

    plain = gracekit(tmp_path, "run", *words)
    as_json = gracekit(tmp_path, "run", *words, "--json")

    assert (plain.code, as_json.code) == (code, code)
    assert plain.err.endswith(f"; see docs/errors.md#{anchor}\n")
    assert json.loads(as_json.err)["message"].endswith(f"; see docs/errors.md#{anchor}")


def test_several_wrong_settings_share_one_pointer_to_their_page(tmp_path: Path):
    """It has a line of its own behind theirs."""
    write_service(tmp_path)

    answer = gracekit(tmp_path, "run", "compute", "--threads", "0", "--look-every", "0")

    assert len(answer.err.splitlines()) == 3, answer
    assert answer.err.endswith("\n  see docs/errors.md#configerror\n")


@pytest.mark.parametrize("spoil", ["symlink", "file"])
def test_something_else_in_the_place_of_the_run_directory_is_78(tmp_path: Path, spoil: str):
    """A sentence with its remedy, and nothing is made through a link."""
    write_service(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    directory = tmp_path / "gracekit-store.db-runs"
    if spoil == "symlink":
        directory.symlink_to("elsewhere")
    else:
        directory.touch()

    answer = gracekit(tmp_path, "run", "compute")

    assert answer.code == 78, answer
    assert answer.err.startswith(f"Error: {directory} is ")
    assert "Traceback" not in answer.err
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "gracekit-store.db").exists()


def test_an_ops_topic_that_is_the_topic_is_78(tmp_path: Path):
    """Each cast would be read as an ops request; the names are compared as they are in the end."""
    write_service(tmp_path)

    answer = gracekit(tmp_path, "run", "compute", GRACEKIT_OPS_TOPIC="compute")

    assert answer.code == 78
    assert "is a queue of new requests of the service 'compute'" in answer.err.replace("which ", "")
    assert not (tmp_path / "gracekit-store.db").exists()


def test_threads_that_eventlet_has_patched_are_refused(tmp_path: Path):
    """78, and a sentence that names eventlet and what to remove."""
    write_service(
        tmp_path,
        "compute",
        "import sys, types\n"
        "from gracekit import Service\n"
        "patcher = types.SimpleNamespace(is_monkey_patched=lambda what: what == 'thread')\n"
        "sys.modules['eventlet.patcher'] = patcher  # stands in for the library\n"
        "svc = Service('compute')",
    )

    answer = gracekit(tmp_path, "run", "compute")

    assert answer.code == 78
    assert "eventlet has patched the threads of this process" in answer.err
    assert "remove eventlet.monkey_patch()" in answer.err
    assert "Traceback" not in answer.err


def test_a_start_that_is_refused_logs_one_exit_code(tmp_path: Path):
    """The code that the process leaves with, in each line that names one."""
    refusal = """
@svc.on_start
async def refuse() -> None:
    from gracekit import ConfigError
    raise ConfigError("nothing is right")
"""
    write_service(tmp_path, text=SERVICE + refusal)

    answer = gracekit(tmp_path, "run", "compute")

    codes = [found.get("exit_code") for found in map(json.loads, answer.out.splitlines())]
    assert answer.code == 78
    assert [code for code in codes if code is not None] == [78, 78]


def test_a_probe_that_nobody_wrote_is_warned_of_at_the_start(tmp_path: Path):
    """Who does not ask doctor reads it in the log, with the remedy."""
    text = """
@svc.rpc(on_interrupt="probe")
async def create(ctx: Context) -> None: ...
"""
    write_service(tmp_path, text=SERVICE + text)

    with Started(tmp_path, "run", "compute") as run:
        told = json.loads(run.wait_line("service.doubted"))
        run.wait_line("service.serving")

    assert told["level"] == "WARNING"
    assert "create() has on_interrupt='probe' and no probe" in told["text"]
    assert "ERRORED: write @create.probe" in told["text"]


def test_nothing_is_imported_from_the_working_directory_unless_it_is_the_app_dir(tmp_path: Path):
    """Whoever may write where somebody happens to be must not decide what runs."""
    (tmp_path / "apps").mkdir()
    write_service(tmp_path / "apps", "shop", SERVICE + "\nimport helper\n")
    write_service(tmp_path, "helper", "")
    write_service(tmp_path, "click", "raise SystemExit('planted')")

    elsewhere = gracekit(tmp_path, "run", "shop", "--app-dir", "apps")
    (tmp_path / "click.py").rename(tmp_path / "clack.py")
    (tmp_path / "apps" / "shop.py").rename(tmp_path / "shop.py")
    here = gracekit(tmp_path, "doctor", "shop", "--json")

    assert elsewhere.code == 78
    assert "No module named 'helper'" in elsewhere.err
    assert "import" not in [one["check"] for one in here.json["findings"]]


def test_an_unknown_flag_is_a_usage_error(tmp_path: Path):
    """The command line itself was wrong: 2, as for every command."""
    answer = gracekit(tmp_path, "run", "compute", "--drain-timeot", "60s")

    assert answer.code == 2
    assert "--drain-timeout" in answer.err


def test_every_setting_has_a_flag():
    """A new setting needs no second list."""
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    flags = {parameter.name for parameter in command.params}

    settings = {f.name for f in dataclasses.fields(Settings) if f.metadata["parse"] is not None}

    assert settings <= flags
    assert all(p.help for p in command.params if isinstance(p, click.Option) and p.name in settings)


def test_logs_are_json_where_nobody_looks_and_term_exits_0(tmp_path: Path):
    """A pipe gets one JSON object a line; a factory's service is drained by TERM."""
    text = "from gracekit import Service\ndef make():\n    return Service('made')\n"
    (tmp_path / "apps").mkdir()
    write_service(tmp_path / "apps", "shop", text)

    with Started(
        tmp_path, "run", "shop:make", "--factory", "--app-dir", "apps", "--instance", "till"
    ) as run:
        line = run.wait_line("service.serving")
        run.process.send_signal(signal.SIGTERM)

        assert run.wait() == 0
        assert json.loads(line)["event"] == "service.serving"
        assert json.loads(line)["instance"] == "till"
        assert all(json.loads(text) for text in run.rest().splitlines())


def test_logs_are_text_on_a_terminal_and_ctrl_c_ends_by_int(tmp_path: Path):
    """A person reads lines, is told what a second Ctrl-C does, and the shell sees an INT."""
    write_service(tmp_path)

    with Running(tmp_path, terminal=True) as run:
        assert " INFO    service.serving service=compute" in run.seen[-1]
        run.type("\x03")
        run.wait_line("Ctrl-C again hands over now")

        assert run.wait() == -signal.SIGINT


def test_ctrl_c_while_a_service_is_imported_ends_by_int(tmp_path: Path):
    """Nothing has begun that a drain could end, and a shell must know that somebody wants to
    stop.
    """
    text = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "slow.py").write_text(text)

    with Started(tmp_path, "run", "slow:svc") as run:
        run.wait_line("importing")
        run.process.send_signal(signal.SIGINT)

        assert run.wait() == -signal.SIGINT
        assert "Aborted" not in run.rest()


def test_quit_hands_over_and_exits_75(tmp_path: Path):
    """Unfinished tasks are in the journal, and the exit code says so."""
    write_service(tmp_path)

    with Running(tmp_path) as run:
        assert gracekit(tmp_path, "cast", "compute", "work", "vm=vm-1").code == 0
        run.wait_line("at work")
        run.process.send_signal(signal.SIGQUIT)

        assert run.wait() == 75


def test_the_process_ends_when_systemd_has_read_what_it_was_told_last(tmp_path: Path):
    """systemd drops messages of a process that has ended, so the last one asks for an answer."""
    write_service(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(PATIENCE_S)
        systemd.bind(str(tmp_path / "notify"))
        with Running(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify")) as run:
            run.process.send_signal(signal.SIGTERM)
            told, received = b"", list[int]()
            while told != b"BARRIER=1":
                told, received, _, _ = socket.recv_fds(systemd, 4096, 1)
            with pytest.raises(subprocess.TimeoutExpired):
                run.process.wait(0.1)  # less than the half second that it waits for systemd
            for descriptor in received:
                os.close(descriptor)
            assert run.wait() == 0
