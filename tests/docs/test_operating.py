"""Every command of docs/operating.md and docs/stopping.md is run; tables agree with the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import apsw
import pytest
from click.testing import CliRunner, Result

from gracekit.cli.call import NOT_RUN
from gracekit.cli.main import cli
from gracekit.config.choices import RejectReason, choices_of
from gracekit.tracker.task import ENDS, Reason, TaskState, Verb
from tests.cli.kit import Running, Started, write_service
from tests.docs.pages import Page
from tests.docs.tables import commands, section, tables

PAGE: Final = Page("operating.md")
SHOWN: Final = frozenset(commands(PAGE.text) + commands(Page("stopping.md").text))
EXAMINED: Final = frozenset(line for line in SHOWN if " doctor " in line and " --" in line)
"""Run by the tests of deploying.md, which have the files, but for --quiet."""
SENT_AGAIN: Final = frozenset(line for line in SHOWN if line.startswith("gracekit cast "))
"""Run by the test of dead letters in test_operating_screens.py."""

SERVICE: Final = """
import asyncio

from gracekit import Context, Service

svc = Service("thumbs")
go = asyncio.Event()


@svc.rpc(resource="album", on_interrupt="retry")
async def render(ctx: Context, album: str) -> None:
    print("rendering", album, flush=True)
    await go.wait()


@svc.rpc
async def boom(ctx: Context) -> None:
    raise LookupError("no such disk")


@svc.rpc
async def expect(ctx: Context, vm: str) -> None:
    await ctx.hold("migration", vm, at_most="1h")


@svc.ops
async def release(ctx: Context) -> None:
    go.set()
"""


class Operator:
    """Types commands of the pages, as they stand there.

    Attributes:
        typed: What was typed so far.
    """

    def __init__(self) -> None:
        self.typed: set[str] = set()

    def type(self, line: str, *, code: int = 0) -> str:
        """Run a command in this process; what it printed."""
        self.typed.add(line)
        result = invoke(line)
        assert result.exit_code == code, f"{line}\n{result.output}"
        return result.output

    def examine(self, line: str) -> str:
        """Run a command that finds nothing wrong, but for the shell that may run these tests."""
        self.typed.add(line)
        output = invoke(line).output
        failed = [one for one in output.splitlines() if one.lstrip().startswith("FAIL")]
        assert [one for one in failed if "parents of" not in one] == [], output
        assert " FAIL," in output
        return output

    def watch(self, directory: Path, line: str) -> Started:
        """Start a command that goes on by itself."""
        self.typed.add(line)
        return Started(directory, *words_of(line))


def words_of(line: str) -> list[str]:
    """The words of a command, without `gracekit`; what stands in quotes is one."""
    parts = line.split('"')
    return [
        word
        for number, part in enumerate(parts)
        for word in ([part] if number % 2 else part.split())
    ][1:]


def invoke(line: str) -> Result:
    return CliRunner().invoke(cli, words_of(line))


def send(*words: str) -> None:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code in {0, 1, NOT_RUN}, result.output


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of service and operator."""
    monkeypatch.chdir(tmp_path)
    write_service(tmp_path, text=SERVICE)
    write_service(tmp_path, "thumbs", SERVICE)
    return tmp_path


def lines_after(command: str) -> list[str]:
    """What the page shows as the output of the first such command."""
    _, _, after = PAGE.text.partition(f"$ {command}\n")
    return after.partition("```")[0].partition("$ ")[0].splitlines()


def columns_of(command: str) -> list[str]:
    """The words of the columns that the page explains."""
    rows = next(tables(section(PAGE.text, f"Columns of `{command}`")))
    return " ".join(row[0] for row in rows).split()


@pytest.mark.process
def test_the_commands_of_the_page_do_what_it_says(directory: Path):
    """One story that types them all: looks, orders about tasks and runs, a drain that a hold
    keeps.
    """
    op = Operator()
    with Running(directory, "--instance", "api-1") as run:
        _look(op, directory, run)
        _order(op, run)
        _close_and_open(op)
        _drain(op, directory, run)
    op.typed |= _say_gone(op, directory)
    op.typed |= _say_host_gone(op, directory)
    op.type("gracekit prune --dry-run")
    op.type("gracekit prune")

    assert op.typed >= SHOWN - EXAMINED - SENT_AGAIN


def _look(op: Operator, directory: Path, run: Running) -> None:
    send("cast", "thumbs", "render", "album=spring", "--id", "9f31c2aa")
    run.wait_line("rendering spring")
    send("call", "thumbs", "boom", "--id", "e20ea3aa")
    send("call", "thumbs", "nonsense")

    status, tasks = op.type("gracekit status"), op.type("gracekit tasks")
    assert status.split()[:10] == lines_after("gracekit status")[0].split()
    assert tasks.splitlines()[0].split() == lines_after("gracekit tasks")[0].split()
    assert status.splitlines()[0].split() == columns_of("gracekit status")
    assert tasks.splitlines()[0].split() == columns_of("gracekit tasks")
    assert ": balanced" in status
    hosts = op.type("gracekit hosts").splitlines()
    assert hosts[0].split() == [name.strip(",") for name in columns_of("gracekit hosts")]
    assert op.type("gracekit tasks --stuck") == "no task is stuck\n"
    assert "e20ea3aa" in op.type("gracekit tasks --state failed --state errored")
    assert "9f31c2aa" in op.type("gracekit tasks --resource album:spring")
    assert "policy    retry" in op.type("gracekit tasks show 9f31c2")
    assert "unknown_method" in op.type("gracekit tasks --state rejected")
    assert "nonsense" in op.type("gracekit incidents --what rejected")
    assert op.type("gracekit health --ready") == "pass\n"
    assert "task 9f31c2aa method=render" in op.type("gracekit dump")
    assert "default" in op.type("gracekit config show drain_timeout --app thumbs:svc")
    assert op.type("gracekit holds") == "no holds\n"
    op.type("gracekit pending")
    assert op.type("gracekit tasks --state handed_over") == "no tasks\n"
    op.examine("gracekit doctor")
    examined = op.examine("gracekit doctor thumbs:svc")
    areas = [line for line in examined.splitlines() if line and " " not in line]
    assert areas == [row[0] for row in table_rows("Examine a service with doctor")]
    op.examine("gracekit doctor thumbs:svc --quiet")


def _order(op: Operator, run: Running) -> None:
    assert "retried" in op.type('gracekit tasks retry e20ea3 --reason "disk is back"')
    op.type('gracekit tasks cancel 9f31c2 --reason "wrong host"')
    assert invoke("gracekit tasks show 9f31c2").output.count("cancelled") > 0

    send("cast", "thumbs", "render", "album=summer", "--id", "77aa01aa")
    run.wait_line("rendering summer")
    op.type('gracekit tasks fail 77aa01 --reason "disk is gone"')

    assert "wrong host" in op.type("gracekit incidents --what operator")


def _close_and_open(op: Operator) -> None:
    op.type('gracekit quiet api-1 --reason "look at the disk"')
    assert "quiet" in invoke("gracekit status").output.split()
    op.type("gracekit resume api-1")
    assert "serving" in invoke("gracekit status").output.split()
    op.type("gracekit reconcile --dry-run")
    op.type('gracekit reconcile --reason "the backend is back"')


def _drain(op: Operator, directory: Path, run: Running) -> None:
    send("cast", "thumbs", "render", "album=autumn", "--id", "autumn")
    run.wait_line("rendering autumn")
    drain = 'gracekit drain api-1 --timeout 60s --reason "kernel update"'
    with op.watch(directory, drain) as watching:
        shown = watching.wait_line("in flight 1   00:0")
        assert " / 01:00   longest render album:autumn " in shown
        assert shown.endswith("expected finish unknown: 1 of 1 without history")
        watching.wait_line("render album:autumn (autumn): running for")
        other = invoke("gracekit drain api-1 --timeout 5s --no-wait")
        assert (other.exit_code, "its deadline stands" in other.output) == (0, True), other.output
        op.type('gracekit extend api-1 --by 5m --reason "nearly done"')
        op.type("gracekit resume api-1")
        watching.wait_line("was resumed and serves on")
    send("call", "thumbs", "release", "--ops")
    send("call", "thumbs", "expect", "vm=vm-1")

    with op.watch(directory, "gracekit drain") as first:
        first.wait_line("waits for hold migration vm-1")
        with op.watch(directory, "gracekit drain --watch api-1") as second:
            second.wait_line("was draining already")
            op.type('gracekit holds end migration vm-1 --reason "the vm is gone"')
            assert (first.wait(), second.wait(), run.wait()) == (0, 0, 0)


def _say_gone(op: Operator, directory: Path) -> set[str]:
    """A run on a machine that nobody can look into; its id is not that of the page."""
    with Running(directory, "--instance", "worker-0") as run:
        run.kill()
    for lock in (directory / "gracekit-store.db-runs").glob("*.lock"):
        lock.unlink()
    store = apsw.Connection(str(directory / "gracekit-store.db"))
    store.execute("UPDATE run SET boot_id = 'another' WHERE instance = 'worker-0'")
    (run_id,) = store.execute("SELECT run_id FROM run WHERE instance = 'worker-0'").fetchone() or ()
    store.close()
    assert "not proven" in invoke("gracekit status").output

    (line,) = (line for line in SHOWN if line.startswith("gracekit runs gone "))
    op.type(line.replace("4be1f0", str(run_id)[:8]))

    assert "not proven" not in invoke("gracekit status").output
    return {line}


def _say_host_gone(op: Operator, directory: Path) -> set[str]:
    """Nothing lives on it any more; its name is not that of the page."""
    store = apsw.Connection(str(directory / "gracekit-store.db"))
    (host,) = store.execute("SELECT host FROM run").fetchone() or ()
    store.close()
    (line,) = (line for line in SHOWN if line.startswith("gracekit hosts gone "))
    said = op.type(line.replace("node-2", str(host)))

    assert said.startswith(f"{host} is on record as gone: host scrapped")
    return {line}


def test_with_a_wrong_setting_only_doctor_works(directory: Path):
    """It names the setting, and examines what does not depend on settings."""
    wrong = {"GRACEKIT_DRAIN_TIMOUT": "60s"}

    refused = CliRunner().invoke(cli, ["status"], env=wrong)
    examined = CliRunner().invoke(cli, ["doctor", "thumbs:svc"], env=wrong)

    assert (refused.exit_code, examined.exit_code) == (78, 78)
    assert "did you mean GRACEKIT_DRAIN_TIMEOUT" in refused.output
    assert "application" in examined.output.splitlines()


# -- tables and the code ----------------------------------------------------------------


def table_rows(heading: str) -> Iterator[list[str]]:
    """The rows of the first table below a heading."""
    yield from next(tables(section(PAGE.text, heading)))


def test_the_reasons_of_errored_tasks_are_those_of_the_code():
    """Each with its meaning."""
    assert [row[0] for row in table_rows("A task is ERRORED")] == [one.value for one in Reason]


def test_the_reasons_of_refused_requests_are_those_of_the_code():
    """Each with its meaning."""
    listed = [row[0] for row in table_rows("Requests are refused")]

    assert listed == list(choices_of(RejectReason))


def test_the_table_of_orders_is_that_of_the_code():
    """What an order makes of a task in each state, and which are refused."""
    said: dict[tuple[Verb, str], str] = {}
    for states, *ends in table_rows("Act on a task"):
        for state in states.partition(" (")[0].split(", "):
            for verb, end in zip((Verb.CANCEL, Verb.FAIL, Verb.RETRY), ends, strict=True):
                said[verb, state] = end.split()[0].rstrip(":,")

    states = set(TaskState) - {TaskState.REJECTED}
    assert said == {
        (verb, state.name): ENDS[verb][state].name if state in ENDS[verb] else "refused"
        for verb in (Verb.CANCEL, Verb.FAIL, Verb.RETRY)
        for state in states
    }
