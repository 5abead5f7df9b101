"""`gracekit tasks cancel`, `fail` and `retry`: services that live, are stopped, or were killed."""

from __future__ import annotations

import os
import pwd
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from gracekit.cli.task_orders import who
from gracekit.process import FAILPOINTS_ON
from tests.cli.kit import PATIENCE_S, Running, Started, gracekit, write_service

pytestmark = pytest.mark.process

WHY = ("--reason", "wrong host")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_service(tmp_path)
    return tmp_path


def test_an_operator_is_known_by_the_kernel(monkeypatch: pytest.MonkeyPatch):
    """The record names the uid and its name; a variable that anybody can set says nothing."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "mallory")

    assert who().startswith(f"uid {os.getuid()} ({pwd.getpwuid(os.getuid()).pw_name})@")


def row(directory: Path, task_id: str) -> dict[str, Any]:
    """A task as it is on disk."""
    uri = f"file:{directory / 'gracekit-store.db'}?mode=ro"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(uri, flags=flags)
    try:
        cursor = connection.execute("SELECT * FROM task WHERE request_id = ?", (task_id,))
        names = [column[0] for column in cursor.get_description()]
        return dict(zip(names, next(iter(cursor)), strict=True))
    finally:
        connection.close()


def start_work(directory: Path, run: Running, task_id: str, vm: str = "vm-1") -> None:
    gracekit(directory, "cast", "compute", "work", f"vm={vm}", "--id", task_id)
    run.wait_line("at work")


def test_a_running_task_is_cancelled_and_its_end_is_waited_for(directory):
    """The verb returns when the row is CANCELLED; who did it and why is on record."""
    with Running(directory, "--instance", "api-1") as run:
        start_work(directory, run, "order-1")
        answer = gracekit(directory, "tasks", "cancel", "order-1", *WHY, "--json")
        listed = gracekit(directory, "tasks", "--state", "cancelled")
        again = gracekit(directory, "tasks", "cancel", "order-1", *WHY)
        retried = gracekit(directory, "tasks", "retry", "order-1")
        balanced = gracekit(directory, "status", "--json").json["accounts"]["balanced"]

    assert answer.code == 0, answer
    assert (answer.json["state"], answer.json["done"], answer.json["before"]) == (
        "cancelled", True, "running",
    )  # fmt: skip
    assert "operator: " in listed.out
    assert "wrong host" in listed.out
    assert [again.code, retried.code] == [1, 1]
    assert "has ended and cannot be cancelled: it is cancelled (operator)" in again.err
    assert "cannot be retried" in retried.err
    assert balanced


def test_a_caller_hears_of_the_cancel(directory):
    """`gracekit call` ends with the operator's reason."""
    with Running(directory) as run:
        words = ("call", "compute", "work", "vm=v", "--id", "order-1")
        with Started(directory, *words) as call:
            run.wait_line("at work")
            answer = gracekit(directory, "tasks", "fail", "order-1", *WHY)
            assert call.wait() == 1
            said = call.rest()

    assert (answer.code, row(directory, "order-1")["state"]) == (0, "failed")
    assert "was failed by an operator: wrong host" in said


def test_work_without_a_row_is_cancelled_too(directory):
    """A `requeue` task is known to its process alone."""
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", "peek", "--id", "short-1")
        run.wait_line("peeking")
        answer = gracekit(directory, "tasks", "cancel", "short-1", *WHY)
        listed = gracekit(directory, "tasks")

    assert (answer.code, listed.out) == (0, "no tasks\n")


def hand_over(directory: Path, *task_ids: str) -> None:
    """A stopped service that left tasks handed over."""
    with Running(directory) as run:
        for number, task_id in enumerate(task_ids):
            start_work(directory, run, task_id, f"vm-{number}")
        run.process.send_signal(signal.SIGQUIT)
        assert run.wait() == 75


def test_rows_of_a_stopped_service_are_changed_in_its_store(directory):
    """Cancelled and failed for good; retried, the next start runs it at once."""
    hand_over(directory, "order-c", "order-f", "order-r")

    cancelled = gracekit(directory, "tasks", "cancel", "order-c", *WHY)
    failed = gracekit(directory, "tasks", "fail", "order-f", *WHY)
    retried = gracekit(directory, "tasks", "retry", "order-r", "--json")
    states = {name: row(directory, f"order-{name}")["state"] for name in "cfr"}
    assert [a.code for a in (cancelled, failed, retried)] == [0, 0, 0], (cancelled, failed)
    assert states == {"c": "cancelled", "f": "errored", "r": "accepted"}
    assert "the next start" in cancelled.out
    assert gracekit(directory, "status", "--json").json["accounts"]["balanced"]

    with Running(directory) as run:
        run.wait_line("at work 'vm-2'")
        gracekit(directory, "call", "compute", "release", "--ops")


def test_a_failed_task_is_retried_by_a_living_service_and_by_the_next_start(directory):
    """Under the same id, and with its failure on record; the accounts balance at each step."""
    with Running(directory) as run:
        gracekit(directory, "call", "compute", "boom", "--id", "order-1")
        living = gracekit(directory, "tasks", "retry", "order-1", "--reason", "the disk is back")
        wait_for(lambda: row(directory, "order-1")["attempts"] == 2)
        wait_for(lambda: row(directory, "order-1")["state"] == "failed")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0

    stopped = gracekit(directory, "tasks", "retry", "order-1")
    balanced = gracekit(directory, "status", "--json").json["accounts"]["balanced"]
    with Running(directory):
        wait_for(lambda: row(directory, "order-1")["attempts"] == 3)

    assert (living.code, stopped.code, balanced) == (0, 0, True), living
    assert "retried; a run that serves its method and does not drain starts it again" in living.out
    assert "retried; the next start runs it" in stopped.out


def test_a_task_is_shown_with_all_that_is_on_record(directory):
    """States with moments, attempts, orders with who and why, failure with traceback, kept
    arguments without their content; while it runs its lease, its cursor and what its process says.
    """
    with Running(directory, "--instance", "api-1") as run:
        gracekit(directory, "call", "compute", "boom", "--id", "order-1")
        gracekit(directory, "tasks", "retry", "order-1", "--reason", "the disk is back")
        wait_for(lambda: row(directory, "order-1")["attempts"] == 2)
        wait_for(lambda: row(directory, "order-1")["state"] == "failed")
        failed = gracekit(directory, "tasks", "show", "order-1")
        start_work(directory, run, "work-1", "secret-vm")
        at_work = gracekit(directory, "tasks", "show", "work", "--json").json
        gracekit(directory, "cast", "compute", "peek", "--id", "short-1")
        run.wait_line("peeking")
        short = gracekit(directory, "tasks", "show", "short-1")
        with Started(directory, "call", "compute", "work", "vm=vm-2", "--id", "called-1"):
            run.wait_line("at work 'vm-2'")
            run.kill()
    gone = gracekit(directory, "tasks", "show", "called-1")
    unknown = gracekit(directory, "tasks", "show", "nothing")

    lines = [line.split(maxsplit=1) for line in failed.out.splitlines()]
    facts = {words[0]: words[1] for words in lines if len(words) > 1}
    assert (facts["task"], facts["method"]) == ("order-1", "boom version 1.0")
    assert facts["state"].startswith("failed: no ")
    assert facts["attempts"] == "2, failures 0, crashes without progress 0"
    assert facts["kept"] == "args 2 bytes, context 2 bytes"
    assert "operator_retry: " in failed.out
    assert "the disk is back (it was failed, attempt 1: LookupError: no " in failed.out
    assert r"  builtins.LookupError: no \x1b[31msuch thing" in failed.out
    assert "    raise LookupError(" in failed.out
    assert "\x1b" not in failed.out
    assert at_work["task"]["state"] == at_work["live"]["state"] == "running"
    assert (at_work["lease"]["request_id"], at_work["lease"]["token"]) == ("work-1", 1)
    assert "secret-vm" not in at_work["kept_bytes"]
    assert "alive" in at_work["owner"]
    assert "now       running for" in short.out
    assert "due       an answer to reply_" in gone.out
    assert "with its end, its caller waits until" in gone.out
    assert "lease     held for this task since" in gone.out
    assert "dead" in gone.out
    assert unknown.code == 1
    assert "no task nothing is on record" in unknown.err


def test_what_is_due_of_a_task_is_shown_and_how_far_it_came(directory):
    """Its cursor, until when it settles, and the hook that was called and has not returned."""
    text = """
import asyncio
from gracekit import Context, Service
svc = Service("compute")

@svc.rpc(on_interrupt="retry", settle="1h")
async def copy(ctx: Context) -> None:
    async for page in ctx.steps(range(5)):
        if page == 3:
            print("at page 3", flush=True)
            await asyncio.Event().wait()

@svc.rpc
async def move(ctx: Context) -> None:
    print("moving", flush=True)
    await asyncio.Event().wait()

@move.errored
async def _(ctx: Context, reason: str) -> None:
    print("its hook", flush=True)
    await asyncio.Event().wait()
"""
    write_service(directory, text=text)
    with Running(directory) as run:
        for method, line in {"copy": "at page 3", "move": "moving"}.items():
            gracekit(directory, "cast", "compute", method, "--id", f"{method}-1")
            run.wait_line(line)
        wait_for(lambda: row(directory, "copy-1")["cursor"] == "2")
        run.kill()
    orphaned = gracekit(directory, "tasks", "show", "copy-1")
    with Running(directory) as run:
        run.wait_line("its hook")
        wait_for(lambda: row(directory, "copy-1")["not_before"] is not None)
        copied = gracekit(directory, "tasks", "show", "copy-1")
        moved = gracekit(directory, "tasks", "show", "move-1")
        listed = gracekit(directory, "tasks")
        dumped = gracekit(directory, "dump")
        cancelled = gracekit(directory, "tasks", "cancel", "move-1", "--reason", "why")
        retried = gracekit(directory, "tasks", "retry", "move-1", "--reason", "why")
        drained = gracekit(directory, "drain", "--timeout", "0.1s")

    assert moved.out.partition("\nlast failure\n")[2].count("was marked ERRORED(") == 1
    assert "due       to be taken over by a run\n" in orphaned.out
    assert "cursor    2, " in copied.out
    assert "due       it settles until " in copied.out
    assert "due       its errored hook, which is being called\n" in moved.out
    assert re.search(r"^move-1 +errored hook of move ", listed.out, re.MULTILINE), listed.out
    assert "task move-1 method=errored hook of move " in dumped.out
    assert "await asyncio.Event().wait()" in dumped.out.partition("task move-1")[2]
    assert (cancelled.code, "its errored hook runs now, in compute@" in cancelled.err) == (1, True)
    assert (retried.code, "its errored hook runs now: retry it when" in retried.err) == (1, True)
    assert row(directory, "move-1")["errored_due"] == 1
    assert "  errored hook of move (move-1): running for " in drained.out
    assert "errored hook still to be called: move (move-1)\n" in drained.out
    assert ", 1 unfinished from earlier runs" in drained.out  # copy-1; the hook has its own line
    assert drained.code == 3


def wait_for(condition: Callable[[], bool]) -> None:
    """Look at the disk again and again; nothing rings when another process has written."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_run_s_task_is_cancelled_before_the_next_start(directory):
    """Its process is proven dead, so nobody has to be asked; the start does not run it again."""
    with Running(directory) as run:
        start_work(directory, run, "order-1")
        run.kill()

    answer = gracekit(directory, "tasks", "cancel", "order-1", *WHY)
    found = row(directory, "order-1")
    with Running(directory):
        later = row(directory, "order-1")["state"]

    assert (answer.code, found["state"], found["owner"]) == (0, "cancelled", None)
    assert later == "cancelled"


@pytest.mark.parametrize("phase", ["before", "after"])
def test_an_operator_s_crash_leaves_all_or_nothing(directory, phase):
    """Killed at its commit, the command has changed the row together with its record, or
    neither.
    """
    hand_over(directory, "order-1")

    kill = {"GRACEKIT_FAILPOINT": f"settle.{phase}", **FAILPOINTS_ON}
    died = gracekit(directory, "tasks", "cancel", "order-1", *WHY, **kill)
    done = phase == "after"
    state = row(directory, "order-1")["state"]
    tallies = gracekit(directory, "status", "--json").json["accounts"]
    again = gracekit(directory, "tasks", "cancel", "order-1", *WHY)

    assert died.code == -signal.SIGKILL
    assert state == ("cancelled" if done else "handed_over")
    assert (tallies["tallies"].get("operator_cancel", 0), tallies["balanced"]) == (int(done), True)
    assert again.code == int(done)


def test_an_owner_that_cannot_write_says_why_it_is_silent(directory):
    """Another program has locked the store: the run answers questions, and carries out no order."""
    with Running(directory) as run:
        start_work(directory, run, "w")
        locker = apsw.Connection(str(directory / "gracekit-store.db"))
        locker.execute("BEGIN IMMEDIATE")
        gracekit(directory, "cast", "compute", "echo")  # waits for its commit longer than the order
        answer = gracekit(directory, "tasks", "cancel", "w", *WHY)
        locker.execute("ROLLBACK")
        locker.close()

    assert answer.code == 4
    assert "did not answer to 'cancel' within 5 s; it is not ready: the store takes" in answer.err


def test_a_silent_owner_is_not_gone_round(directory):
    """It lives, so it alone may act: exit 4, and its row stays as it is."""
    with Running(directory, "--instance", "api-1") as run:
        start_work(directory, run, "order-1")
        run.process.send_signal(signal.SIGSTOP)
        answer = gracekit(directory, "tasks", "cancel", "order-1", *WHY)
        state = row(directory, "order-1")["state"]

    assert (answer.code, state) == (4, "running")
    assert "did not answer" in answer.err
    assert "it alone may act on its tasks" in answer.err


def test_an_abbreviated_id_is_confirmed_and_an_unclear_one_refused(directory):
    """A mistyped one is refused too, and names no other task, which might be cancelled in its
    place.
    """
    hand_over(directory, "order-11", "order-12")

    bare = gracekit(directory, "tasks", "retry", "order-11x")
    typo = gracekit(directory, "tasks", "retry", "odrer-11")
    unclear = gracekit(directory, "tasks", "retry", "order-1", "--yes")
    scripted = gracekit(directory, "tasks", "cancel", "order-12", *WHY)
    assert scripted.code == 0
    short = gracekit(directory, "tasks", "retry", "order", "--instance", "x")
    with Started(directory, "tasks", "retry", "order-11"[:-1] + "1", terminal=True) as exact:
        assert exact.wait() == 0

    assert [bare.code, typo.code, unclear.code, short.code] == [1, 1, 1, 1]
    assert "no task order-11x is on record; see `gracekit tasks --state all`" in bare.err
    assert "order-11" not in bare.err.replace("order-11x", "")
    assert "order-11" not in typo.err
    assert "order-1 stands for 2 tasks: order-12 (work vm:vm-1), order-11" in unclear.err


def test_the_question_is_asked_at_a_terminal(directory):
    """No is no, and yes is done. Where nobody can be asked, four characters that are
    unmistakable do.
    """
    hand_over(directory, "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210")

    slip = gracekit(directory, "tasks", "cancel", "fed", *WHY)
    piped = gracekit(directory, "tasks", "cancel", "fedc", *WHY)
    with Started(directory, "tasks", "retry", "0123456789ab", terminal=True) as no:
        no.type("n\n")
        assert no.wait() == 1
        asked = no.rest()
    state = row(directory, "0123456789abcdef0123456789abcdef")["state"]
    with Started(directory, "tasks", "retry", "0123456789ab", terminal=True) as yes:
        yes.type("y\n")
        assert yes.wait() == 0
        said = yes.rest()

    assert (slip.code, piped.code) == (2, 0)
    assert "write at least 4 characters of it, or add --yes" in slip.err
    assert "fedcba9876543210fedcba9876543210 (work vm:vm-1): cancelled" in piped.out
    assert "retry 0123456789abcdef0123456789abcdef (work vm:vm-0), handed_over?" in asked
    assert state == "handed_over"
    assert "retried; the next start runs it" in said


def test_a_periodic_job_is_listed_as_one_and_takes_no_orders(directory):
    """The list and the refusal say what it is, while it runs and after it."""
    text = """
import asyncio
from gracekit import Context, Service
svc = Service("compute")

@svc.periodic(every="10ms")
async def sweep(ctx: Context) -> None:
    print("sweeping", flush=True)
    await asyncio.Event().wait()
"""
    write_service(directory, text=text)
    with Running(directory) as run:
        run.wait_line("sweeping")
        listed = gracekit(directory, "tasks")
        (task,) = gracekit(directory, "tasks", "--json").json["tasks"]
        shown = gracekit(directory, "tasks", "show", task["request_id"])
        refused = gracekit(directory, "tasks", "cancel", task["request_id"], *WHY)
        run.process.send_signal(signal.SIGQUIT)
        run.wait()
        later = gracekit(directory, "tasks", "cancel", task["request_id"], *WHY)

    assert "periodic job, takes no orders" in listed.out
    assert (shown.code, "history" in shown.out) == (0, False)
    assert (refused.code, later.code) == (1, 1)
    assert "sweep is a periodic job and no request: it takes no orders" in refused.err
    assert "A periodic job is no task" in later.err


def test_usage_is_told(directory):
    """A reason is owed, options belong to the verb, and a wrong verb gets the nearest."""
    no_reason = gracekit(directory, "tasks", "cancel", "x")
    before = gracekit(directory, "tasks", "--json", "retry", "x")
    wrong = gracekit(directory, "tasks", "cancle", "x")

    assert [a.code for a in (no_reason, before, wrong)] == [2, 2, 2]
    assert "--reason" in no_reason.err
    assert "write --json after 'retry'" in before.err
    assert "no command 'cancle'; did you mean cancel?" in wrong.err


def test_a_handler_that_does_not_return_is_said_to_run_on(directory):
    """Exit 3: asked for, not ended; detached by Ctrl-C the order stands."""
    text = """
import asyncio
from gracekit import Context, Service
svc = Service("compute")

@svc.rpc
async def stay(ctx: Context) -> None:
    print("staying", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            print("swallowed", flush=True)
"""
    write_service(directory, text=text)
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", "stay", "--id", "order-1")
        run.wait_line("staying")
        asked = gracekit(directory, "tasks", "cancel", "order-1", *WHY, "--no-wait")
        assert asked.code == 3, asked
        run.wait_line("swallowed")
        listed = gracekit(directory, "status", "--json").json["runs"][0]["status"]["tasks"]
        words = ("tasks", "cancel", "order-1", *WHY)
        short = gracekit(directory, *words, "--timeout", "200ms", "--json")

    assert short.code == 3
    assert "asked; it ends when its handler has returned" in asked.out
    assert listed[0]["cancelled_by"] == "operator"
    assert short.json["done"] is False


def test_a_refused_repetition_does_not_hide_its_task(directory: Path):
    """Whoever sends a task's id again with other arguments must not keep operators from it."""
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", "work", "vm=vm-1", "--id", "order-1")
        run.wait_line("at work")
        gracekit(directory, "cast", "compute", "work", "vm=vm-2", "--id", "order-1")
        run.wait_line("task.rejected")
        shown = gracekit(directory, "tasks", "show", "order-1")
        ended = gracekit(directory, "tasks", "cancel", "order-1", "--reason", "r")

    assert shown.code == 0, shown
    assert "rejected" not in shown.out.splitlines()[0]
    assert ended.code == 0, ended


def test_a_cancel_that_was_taken_outlives_its_process(directory: Path):
    """A handler hangs in its thread, and the process is killed: the next run does not start it
    again.
    """
    text = """
import time
from gracekit import Context, Service
svc = Service("compute")

@svc.rpc(on_interrupt="retry")
def hang(ctx: Context) -> None:
    print("hanging", flush=True)
    time.sleep(100)
"""
    write_service(directory, text=text)
    with Running(directory) as run:
        gracekit(directory, "cast", "compute", "hang", "--id", "order-1")
        run.wait_line("hanging")
        asked = gracekit(directory, "tasks", "cancel", "order-1", *WHY, "--timeout", "200ms")
        listed, shown = (
            gracekit(directory, "tasks"),
            gracekit(directory, "tasks", "show", "order-1"),
        )
        run.kill()
    with Running(directory) as run:
        run.wait_line("task.settled")
        ended = gracekit(directory, "tasks", "show", "order-1")

    assert asked.code == 3, asked
    assert re.search("to be cancelled, by .*: wrong host", listed.out)
    assert re.search("due +to be cancelled, by .*: wrong host, when", shown.out)
    assert re.search("state +cancelled cut unclean: operator: .*: wrong host", ended.out)
    assert "order_carried_out: cancel of " in ended.out
    assert row(directory, "order-1")["attempts"] == 1
