"""`gracekit exits`: real processes end in each way, and the listing says why."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gracekit import RpcClient
from tests.cli.kit import Running, Started, gracekit, write_service

pytestmark = pytest.mark.process

SERVICE = """
import asyncio, ctypes, os, signal
from gracekit import Context, Service

svc = Service("compute")


@svc.ops(on_interrupt="error")
async def end(ctx: Context, how: str) -> str:
    match how:
        case "user":
            ctx.request_stop("enough")
        case "program":
            os.kill(os.getpid(), signal.SIGTERM)
        case "segv":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "fork":
            if os.fork() == 0:
                ctypes.string_at(0)
            os.wait()
        case _:
            os.kill(os.getpid(), int(how))
    return how


go_on = asyncio.Event()


@svc.rpc
async def wait(ctx: Context) -> None:
    print("waits", flush=True)
    await go_on.wait()


@svc.ops
async def go(ctx: Context) -> None:
    go_on.set()


@svc.ops(on_interrupt="error")
def plain(ctx: Context) -> None:
    ctx.request_stop("from a thread")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path, text=SERVICE)
    return tmp_path


def exits(directory: Path, *words: str) -> list[dict[str, Any]]:
    answer = gracekit(directory, "exits", "--json", *words)
    assert answer.code == 0, answer
    found: list[dict[str, Any]] = answer.json["exits"]
    return found


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def ask(directory: Path, how: str) -> None:
    gracekit(directory, "cast", "compute", "end", f'how="{how}"')


# -- one process of each end --------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why", "left"),
    [
        ("user", "user_stop", "drained"),
        ("program", "signal_stop", "drained"),
        ("segv", "crash_signal", "cut_off"),  # faulthandler has written it, without a parent
        ("exit", "died", "cut_off"),
        (str(int(signal.SIGKILL)), "died", "cut_off"),
    ],
)
def test_without_a_parent_it_is_known_what_the_process_itself_knew(
    directory: Path, how: str, why: str, left: str
):
    with Running(directory) as run:
        ask(directory, how)
        run.wait()

    (found,) = exits(directory)
    assert (found["why"], found["left"]) == (why, left)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("user", "user_stop"),
        ("exit", "crash_exit"),
        ("segv", "crash_signal"),
        (str(int(signal.SIGABRT)), "crash_signal"),
        (str(int(signal.SIGKILL)), "killed"),
        (str(int(signal.SIGALRM)), "early_signal"),
    ],
)
def test_a_small_parent_keeps_the_kernel_s_word(directory: Path, how: str, why: str):
    with Running(directory, "--keep-evidence") as run:
        ask(directory, how)
        run.wait()

    (found,) = exits(directory)
    assert found["why"] == why
    assert found["kernel"]["by"] == "its parent"


def test_the_sender_of_the_signal_is_told(directory: Path):
    with Running(directory, "--keep-evidence") as run:
        run.process.terminate()
        assert run.wait() == 0

    assert f"signal SIGTERM, sent by pid {os.getpid()} (" in gracekit(directory, "exits").out


def test_a_word_that_comes_after_the_adoption_is_taken_in(directory: Path):
    """A sibling takes the dead run over before its parent, which is stopped, has written it."""
    with (
        Running(directory, "--instance", "one", "--reconcile-every", "0.5s") as sibling,
        Running(directory, "--instance", "two", "--keep-evidence") as kept,
    ):
        pid = kept.process.pid
        child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        os.kill(pid, signal.SIGSTOP)
        os.kill(child, signal.SIGKILL)
        sibling.wait_line("run.classified")
        before = exits(directory, "--instance", "two")
        os.kill(pid, signal.SIGCONT)
        line = sibling.wait_line("run.explained")
        after = exits(directory, "--instance", "two")

    assert [one["why"] for one in (*before, *after)] == ["died", "killed"]
    assert "why=killed" in line
    assert list((directory / "gracekit-store.db-runs").glob("exit-*")) == []


def test_a_drain_by_command_says_who_and_a_rollout_is_planned(directory: Path):
    for words in ((), ("--rollout",)):
        with Running(directory) as run:
            assert gracekit(directory, "drain", "--reason", "new kernel", *words).code == 0
            run.wait()

    assert [one["why"] for one in exits(directory)] == ["planned_stop", "operator_stop"]
    assert gracekit(directory, "exits").out.count("new kernel, by uid ") == 2


def test_a_start_that_failed_is_listed_though_there_was_no_run(directory: Path):
    """Wrong settings, and a broker that is away."""
    with Running(directory, "--instance", "one"):
        taken = gracekit(directory, "run", "compute", "--instance", "one")
    away = gracekit(
        directory, "run", "compute", "--transport", "amqp://127.0.0.1:1/", "--instance", "two"
    )

    shown = gracekit(directory, "exits", "--json").json
    found = {one["instance"]: one["why"] for one in (*shown["failed_starts"], *shown["exits"])}
    assert (taken.code, away.code) == (78, 69)
    assert found["two"] == "dependency"
    assert [one["why"] for one in shown["failed_starts"] if one["instance"] == "one"] == ["config"]
    assert "instance 'one' of service 'compute' is running" in gracekit(directory, "exits").out


def test_an_explanation_names_the_row_that_decides(directory: Path):
    with Running(directory, "--keep-evidence") as run:
        ask(directory, "exit")
        run.wait()
    (found,) = exits(directory)

    told = gracekit(directory, "exits", "--explain", found["run_id"][:8])
    facts = gracekit(directory, "exits", "--explain", found["run_id"], "--json").json
    unknown = gracekit(directory, "exits", "--explain", "nothing")

    first, *_, last = told.out.splitlines()
    assert first.endswith(": crash_exit, left cut_off")
    assert (
        last == "  crash_exit: it exited by itself, without a drain: exited with 3, says its parent"
    )
    assert facts["because"][-1] == last.strip()
    assert "no run nothing is among the last 1 that ended" in unknown.err


def test_looking_changes_nothing(directory: Path):
    """The store is byte for byte the same, and so are the records beside it."""
    with Running(directory, "--keep-evidence") as run:
        ask(directory, "exit")
        run.wait()
    before = {
        path: path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".db-shm"  # SQLite's own, of connections
    }
    for words in (("exits",), ("status",), ("exits", "--json")):
        gracekit(directory, *words)

    after = {path: path.read_bytes() for path in before}
    assert after == before


def test_the_crash_of_a_forked_child_is_not_ours(directory: Path):
    """It inherits where a crash is written."""
    with Running(directory) as run:
        gracekit(directory, "call", "compute", "end", "how=fork", "--ops")
        run.kill()

    assert [one["why"] for one in exits(directory)] == ["died"]


@pytest.mark.parametrize(
    ("target", "variables"),
    [("compute", {"GRACEKIT_DRAIN_TIMEOUT": "soon"}), ("no_module", {}), ("broken", {})],
)
def test_a_start_is_listed_that_failed_before_its_settings_were_known(
    directory: Path, target: str, variables: dict[str, str]
):
    """Once there is a run directory."""
    (directory / "broken.py").write_text("raise RuntimeError('out of order')")
    with Running(directory) as run:
        run.kill()
    failed = gracekit(directory, "run", target, **variables)

    (one,) = gracekit(directory, "exits", "--json").json["failed_starts"]
    assert one["code"] == failed.code
    assert one["why"] == ("failed" if target == "broken" else "config")


def test_a_wish_in_a_drain_is_kept_and_the_drain_goes_on_as_it_was_asked_for(directory: Path):
    """WHY is still who has asked for the stop."""
    with named(directory) as run:
        gracekit(directory, "cast", "compute", "wait")
        run.wait_line("waits")
        run.process.terminate()
        run.wait_line("drain.started")
        gracekit(directory, "cast", "compute", "end", "how=user", "--ops")
        until(lambda: wanted(directory))
        gracekit(directory, "call", "compute", "go", "--ops")
        assert run.wait() == 0

    assert [one["why"] for one in exits(directory)] == ["signal_stop"]


# -- a wish that stays --------------------------------------------------------------------


def wanted(directory: Path) -> int:
    return gracekit(directory, "service", "wanted", "compute", "--instance", "one").code


def named(directory: Path, *words: str) -> Running:
    return Running(directory, "--instance", "one", *words)


def stop_from_inside(directory: Path, *words: str) -> None:
    with named(directory, *words) as run:
        ask(directory, "user")
        run.wait()


def status(directory: Path) -> dict[str, Any]:
    (entry,) = gracekit(directory, "status", "--json").json["runs"]
    return {name: entry[name] for name in ("admin", "oper")}


def test_a_stop_from_inside_lasts_until_an_operator_starts_it(directory: Path):
    """As Ganeti's tests do: stopped from inside, by command, and started, in turn."""
    stop_from_inside(directory)
    seen = [(wanted(directory), status(directory))]
    told = gracekit(directory, "status").out
    with named(directory):  # by hand: the wish is not obeyed, and is told
        by_hand = (status(directory), "one is down by method end: enough, but it runs")
        said = gracekit(directory, "status").out
    seen.append((wanted(directory), status(directory)))
    stopped = gracekit(
        directory, "service", "stop", "compute", "--instance", "one", "--reason", "moved"
    )
    by_admin = gracekit(directory, "status", "--json").json["runs"][0]["wish"]
    started = gracekit(directory, "service", "start", "compute", "--instance", "one")
    seen.append((wanted(directory), status(directory)))

    assert seen == [
        (1, {"admin": "down", "oper": "S"}),
        (1, {"admin": "down", "oper": "F"}),  # the test has killed it
        (0, {"admin": "up", "oper": "F"}),
    ]
    assert "one is down by method end: enough; `gracekit service start compute" in told
    assert by_hand[0] == {"admin": "down", "oper": "R"}
    assert by_hand[1] in said
    assert (stopped.code, started.code) == (0, 0)
    assert "systemctl stop UNIT" in stopped.out
    assert (by_admin["source"], by_admin["reason"]) == ("admin", "moved")


@pytest.mark.parametrize("words", [("--on-user-stop", "restart")])
def test_by_choice_a_stop_from_inside_does_not_last(directory: Path, words: tuple[str, ...]):
    stop_from_inside(directory, *words)

    assert wanted(directory) == 0
    assert [one["why"] for one in exits(directory)] == ["user_stop"]


def test_an_instance_without_a_name_of_its_own_stays_wanted(directory: Path):
    """The next one to take the lowest free name may be another process."""
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", "plain")
        run.wait()

    (found,) = exits(directory)
    assert (found["why"], found["stop_by"], found["stop_reason"]) == (
        "user_stop",
        "method plain",
        "from a thread",
    )
    assert gracekit(directory, "status", "--json").json["runs"][0]["wish"] is None


def test_the_user_of_the_request_is_who_stopped_it(directory: Path):
    async def cast() -> None:
        async with RpcClient(f"sqlite:///{directory / 'gracekit.db'}", "compute") as client:
            await client.prepare(context={"user_id": "u-7"}).cast("end", how="user")

    with named(directory) as run:
        asyncio.run(cast())
        run.wait()

    assert exits(directory)[0]["stop_by"] == "user u-7"


def test_a_wish_that_cannot_be_read_keeps_nothing_down(directory: Path):
    """Before the first start, and with a store that is broken."""
    assert wanted(directory) == 0
    (directory / "gracekit-store.db").write_bytes(b"nonsense")
    answer = gracekit(directory, "service", "wanted", "compute", "--instance", "one")

    assert answer.code == 0
    assert "compute@one may start, as its wish cannot be read" in answer.err


def test_a_wish_is_about_one_instance_of_a_service_on_record(directory: Path):
    """So a command needs the names; a misspelt one is no success. A start asks without one, too."""
    with Running(directory) as run:
        run.kill()
    misspelt = gracekit(
        directory, "service", "stop", "compute2", "--instance", "a", "--reason", "moved"
    )
    unnamed = gracekit(directory, "service", "wanted", "compute", GRACEKIT_INSTANCE="")
    answer = gracekit(directory, "service", "start", "compute")

    assert "no run of service 'compute2' is on record" in misspelt.err
    assert unnamed.code == 0

    assert answer.code == 2
    assert "name the instance: --instance NAME" in answer.err


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"EXIT_CODE": "killed", "EXIT_STATUS": "KILL", "SERVICE_RESULT": "oom-kill"}, "oom"),
        (
            {"EXIT_CODE": "dumped", "EXIT_STATUS": "SEGV", "SERVICE_RESULT": "core-dump"},
            "crash_signal",
        ),
        ({"EXIT_CODE": "exited", "EXIT_STATUS": "4", "SERVICE_RESULT": "exit-code"}, "crash_exit"),
        ({}, "died"),  # as after a failed ExecCondition
    ],
)
def test_systemd_s_word_is_taken(directory: Path, variables: dict[str, str], code: str):
    with Started(directory, "run", "compute", INVOCATION_ID="abc", SYSTEMD_EXEC_PID="") as run:
        run.wait_line("service.serving")
        run.process.kill()
        run.wait()
    gracekit(directory, "exits", "record", "--systemd", INVOCATION_ID="abc", **variables)

    assert [one["why"] for one in exits(directory)] == [code]


def test_a_record_that_belongs_to_no_run_is_removed_after_a_day(directory: Path):
    """As of starts that failed before they had a run; a young one may be early."""
    with Running(directory) as run:
        run.kill()
    runs = directory / "gracekit-store.db-runs"
    for name, age_s in (("young", 3600), ("old", 90_000)):
        file = runs / f"exit-systemd-{name}.json"
        file.write_text('{"how": "exited", "status": 78, "by": "systemd", "invocation": "x"}')
        os.utime(file, (time.time() - age_s,) * 2)
    with Running(directory):
        until(lambda: not (runs / "exit-systemd-old.json").exists())

    assert (runs / "exit-systemd-young.json").exists()
