"""`gracekit reconcile`: a pass by hand, and what status and doctor say of resources."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cli.kit import Running, Started, gracekit, write_service

pytestmark = pytest.mark.process

SERVICE: Final = """
import json
import time
from pathlib import Path

import asyncio

from gracekit import Absent, Context, Found, Service, Settled, Wait
from gracekit.control.hand_passes import NEWS_WITHIN_S

svc = Service("shares")
go = asyncio.Event()
server = svc.kind("share_server")
share = svc.kind("share", after=server)
records = Path(__file__).with_name("records.json")


def read():
    return json.loads(records.read_text())


def finder(kind):
    async def find(ctx, *, after, limit):
        rows = [(i, row) for k, i, row in sorted(read()) if k == kind and (after or "") < i]
        return [
            Found(i, row["status"], since=row["since"], needs=[server.of(row.get("server"))])
            for i, row in rows
            if row["status"] in {"creating", "deleting", "migrating", "odd"}
        ][:limit]

    return find


def writer(kind):
    async def write(ctx, found, status, facts):
        rows = read()
        for k, i, row in rows:
            if (k, i, row["status"]) == (kind, found.id, found.status) and "lost" not in i:
                row["status"] = status
                records.write_text(json.dumps(rows))
                return True
        return False

    return write


for kind in (server, share):
    kind.find(finder(kind.name))
    kind.write(writer(kind.name))
server.mark(creating="error")


@share.probe("creating", failed="error")
async def was_it_created(ctx: Context, found: Found) -> Settled | Absent | Wait:
    if found.id == "sh-3":
        return Wait("1h")
    if found.id.startswith("slow-"):
        print("asking", found.id, flush=True)
        await go.wait()
    return Settled("available", export_locations=["10.0.0.1:/a", "10.0.0.2:/a"])


@share.delete("deleting", done="deleted", failed="error_deleting")
async def delete_again(ctx: Context, found: Found) -> None: ...


share.leave("migrating", why="migration_continue goes on with it")


@svc.rpc(resource="share", on_interrupt="retry")
async def extend(ctx: Context, share: str) -> str:
    print("at work", share, flush=True)
    await asyncio.sleep(3600)


@svc.ops
async def let_go(ctx: Context) -> None:
    go.set()


@svc.ops
async def answered(ctx: Context) -> None:
    await asyncio.sleep(2 * NEWS_WITHIN_S)  # by then each earlier look at the pass has its answer
"""

ROWS: Final[list[Any]] = [
    ["share_server", "srv-7", {"status": "creating", "since": 1}],
    ["share", "sh-1", {"status": "creating", "since": 1}],
    ["share", "sh-2", {"status": "deleting", "since": 1}],
    ["share", "sh-4", {"status": "migrating", "since": 1}],
    ["share", "sh-5", {"status": "creating", "since": 1, "server": "srv-7"}],
    ["share", "sh-6", {"status": "creating", "since": 1}],
    ["share", "sh-7", {"status": "available", "since": 1}],
]
WAITS: Final = ["share", "sh-3", {"status": "creating", "since": 1}]
SLOW: Final = ["share", "slow-1", {"status": "creating", "since": 1}]
LATER: Final = ["share", "slow-2", {"status": "creating", "since": 1}]
ONE_AT_ONCE: Final = {"GRACEKIT_RECONCILE_AT_ONCE": "1"}
DELETE: Final = "async def delete_again(ctx: Context, found: Found) -> None: ..."
HANGS: Final = """
def delete_again(ctx: Context, found: Found) -> None:
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.05)
""".strip()
FIND: Final = "    async def find(ctx, *, after, limit):\n"
HOLD: Final = "        print('finding', kind, flush=True)\n        await go.wait()\n"
BY_HAND: Final = {"GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "1h"}
OFF: Final = {
    "GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "0s",
    "GRACEKIT_STARTUP_RECONCILIATION_ENABLED": "false",
}


def prepare(directory: Path, *more: Any) -> None:
    """The service, and records of which none was touched yet."""
    write_service(directory, "compute", SERVICE)
    (directory / "records.json").write_text(json.dumps([*ROWS, *more]))


def statuses(directory: Path) -> dict[str, str]:
    """As the records say."""
    rows = json.loads((directory / "records.json").read_text())
    return {name: row["status"] for _, name, row in rows}


def serving(directory: Path, **more: str) -> Running:
    return Running(directory, "--instance", "api-1", **more)


@contextlib.contextmanager
def in_a_rule(directory: Path, *words: str, **options: Any) -> Iterator[tuple[Running, Started]]:
    """A pass by hand that is in the first of two slow rules: the run, and the command."""
    prepare(directory, SLOW, LATER)
    rows = [row for row in json.loads((directory / "records.json").read_text()) if row[1] != "sh-5"]
    (directory / "records.json").write_text(json.dumps(rows))
    with (
        serving(directory, **BY_HAND, **ONE_AT_ONCE) as run,
        Started(directory, "reconcile", *words, **options) as command,
    ):
        run.wait_line("asking slow-1")
        yield run, command


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(tmp_path: Path):
    """One line for each resource in a transient status, in the order of the kinds and ids."""
    prepare(tmp_path)
    with serving(tmp_path, **BY_HAND) as run:
        assert gracekit(tmp_path, "cast", "shares", "extend", "share=sh-6", "--id", "r-6").code == 0
        run.wait_line("at work sh-6")
        answer = gracekit(tmp_path, "reconcile", "--dry-run", **BY_HAND)

    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert answer.code == 0
    assert [line.split(" ", 4)[:3] + line.split(" ", 4)[4:] for line in lines[:-1]] == [
        ["KIND", "ID", "STATUS", "WOULD"],
        ["share_server", "srv-7", "creating", "mark error"],
        ["share", "sh-1", "creating", "ask was_it_created, else error"],
        ["share", "sh-2", "deleting", "delete again (delete_again), else error_deleting"],
        ["share", "sh-4", "migrating", "leave: migration_continue goes on with it"],
        ["share", "sh-5", "creating", "write error: dependency share_server:srv-7"],
        ["share", "sh-6", "creating", "leave: request r-6 (extend) runs on api-1"],
    ]
    assert lines[-1] == "4 would be settled, 2 left; nothing was changed"
    assert set(statuses(tmp_path).values()) == {"creating", "deleting", "migrating", "available"}


def test_one_resource_is_settled_alone(tmp_path: Path):
    """The line says from which status to which, with what facts, by which rule and token."""
    prepare(tmp_path)
    with serving(tmp_path, **BY_HAND):
        answer = gracekit(tmp_path, "reconcile", "--resource", "share:sh-1")
        none = gracekit(tmp_path, "reconcile", "--resource", "share:sh-7")
        unknown = gracekit(tmp_path, "reconcile", "--kind", "shar")
        both = gracekit(tmp_path, "reconcile", "--kind", "share", "--resource", "share:sh-1")

    assert answer.out.splitlines() == [
        "share:sh-1  creating -> available   export_locations=2   by was_it_created, token 1",
        "1 settled, 0 left",
    ]
    assert answer.code == 0
    changed = {name for name, status in statuses(tmp_path).items() if status == "available"}
    assert changed == {"sh-1", "sh-7"}
    assert (none.code, none.out) == (
        0,
        "share:sh-7 was not found in a transient status: nothing to settle\n",
    )
    assert unknown.code == 1
    assert "no kind 'shar'; did you mean share?; it has share_server, share" in unknown.err
    assert both.code == 2


def test_a_record_that_refuses_the_token_is_exit_status_3(tmp_path: Path):
    """With --resource: it was asked for, and has its status still."""
    prepare(tmp_path, ["share", "lost-1", {"status": "deleting", "since": 1}])
    with serving(tmp_path, **BY_HAND):
        answer = gracekit(tmp_path, "reconcile", "--resource", "share:lost-1")

    assert answer.code == 3
    assert answer.out.splitlines() == [
        (
            "share:lost-1  deleting   not written: write answered False though the status is "
            "unchanged: the record may hold a newer token; was the store lost?"
        ),
        "0 settled, 1 moved on, 0 left",
    ]


def test_what_was_left_is_listed_with_its_reason(tmp_path: Path):
    """The first 20, behind what was changed: the number alone would not say which, nor why."""
    left = [["share", f"z-{n:02}", {"status": "migrating", "since": 1}] for n in range(25)]
    prepare(tmp_path, *left)
    with serving(tmp_path, **BY_HAND):
        answer = gracekit(tmp_path, "reconcile", "--kind", "share")

    why = "migrating   left: migration_continue goes on with it"
    lines = answer.out.splitlines()
    assert lines[:3] == [
        "share:sh-1  creating -> available   export_locations=2   by was_it_created, token 1",
        "share:sh-2  deleting -> deleted   by delete_again, token 1",
        "share:sh-6  creating -> available   export_locations=2   by was_it_created, token 1",
    ]
    assert lines[3:5] == [
        f"share:sh-4  {why}",
        "share:sh-5  creating   left: waits for share_server:srv-7",
    ]
    assert lines[5:23] == [f"share:z-{n:02}  {why}" for n in range(18)]
    assert lines[23:] == ["and 7 more", "3 settled, 27 left"]


def test_what_waits_is_exit_status_3_and_is_shown_by_status(tmp_path: Path):
    """A failed rule is 1; without a living run it is 4."""
    prepare(tmp_path, WAITS)
    with serving(tmp_path, **BY_HAND):
        waits = gracekit(tmp_path, "reconcile", "--resource", "share:sh-3")
        shown = gracekit(tmp_path, "status")
        whole = gracekit(tmp_path, "reconcile", "--json")
        after = gracekit(tmp_path, "status", "--json")
    nobody = gracekit(tmp_path, "reconcile")

    assert waits.code == 3
    assert "share:sh-3  creating   waits: was_it_created said Wait" in waits.out
    assert "resources: 1 waiting (oldest share:sh-3, " in shown.out
    assert "no pass has finished yet" in shown.out
    assert whole.code == 1  # sh-5 needs a server that has failed
    assert whole.json["counts"] == {
        "settled": 4, "failed": 1, "waiting": 1, "left": 1, "moved_on": 0, "stale": 0,
    }  # fmt: skip
    (resources,) = after.json["resources"]
    assert resources["waiting"] == 1
    assert resources["last_pass"]["settled"] == 4
    assert nobody.code == 4
    assert statuses(tmp_path)["sh-5"] == "error"


def test_without_unasked_settling_everything_says_so_and_a_pass_by_hand_settles(tmp_path: Path):
    """Neither tasks nor resources are settled; a request for such a resource is refused with the
    way out; `gracekit reconcile` settles both.
    """
    prepare(tmp_path)
    with serving(tmp_path, **OFF) as killed:
        gracekit(tmp_path, "cast", "shares", "extend", "share=sh-7", "--id", "r-7")
        killed.wait_line("at work sh-7")
        killed.kill()
    with serving(tmp_path, **OFF) as run:
        run.wait_line("reconciliation.finished")
        shown = gracekit(tmp_path, "status")
        told = gracekit(tmp_path, "doctor", "compute:svc", **OFF)
        refused = gracekit(tmp_path, "call", "shares", "extend", "share=sh-7")
        before = statuses(tmp_path)
        foreseen = gracekit(tmp_path, "reconcile", "--dry-run")
        settled = gracekit(tmp_path, "reconcile")
        run.wait_line("at work sh-7")  # it is run again

    assert "without owner: 1 handed_over; started ones are not settled unasked" in shown.out
    assert "resources: 5 waiting, and none is settled unasked" in shown.out
    assert "`gracekit reconcile` settles them" in shown.out
    assert "1 handed_over without a living owner, " in told.out
    assert "5 resources waiting; started ones are not settled unasked" in told.out
    assert refused.code == 5
    assert "r-7 was interrupted, and nothing settles that by itself" in refused.err
    assert "run `gracekit reconcile`" in refused.err
    assert before["sh-1"] == "creating"
    *_, tasks, last = foreseen.out.splitlines()
    assert tasks.startswith("1 unfinished task would be settled first; resources that it names may")
    assert last == "5 would be settled, 1 left; nothing was changed"
    assert settled.out.splitlines()[-1] == "4 settled, 1 failed, 1 left; 1 task settled"
    assert statuses(tmp_path)["sh-1"] == "available"


def test_a_service_without_kinds_says_so(tmp_path: Path):
    """The words "0 settled" would look as if all were well."""
    write_service(tmp_path, "compute", 'from gracekit import Service\n\nsvc = Service("plain")\n')
    with serving(tmp_path, **BY_HAND):
        answers = [gracekit(tmp_path, "reconcile", *more) for more in ((), ("--dry-run",))]

        odd = gracekit(tmp_path, "reconcile", "--kind", "vm")

    assert (odd.code, "has no kind 'vm'; it declares none by svc.kind()" in odd.err) == (1, True)
    assert [answer.out for answer in answers] == ["plain declares no kinds of resources\n"] * 2
    assert [answer.code for answer in answers] == [0, 0]


def test_two_services_with_one_kind_cannot_share_a_store(tmp_path: Path):
    """The second start is refused with both names, as their rules would fight."""
    prepare(tmp_path)
    other = SERVICE.replace('Service("shares")', 'Service("backups")')
    write_service(tmp_path, "backups", other)
    with serving(tmp_path, **BY_HAND):
        refused = gracekit(tmp_path, "run", "backups:svc", **BY_HAND)

    assert refused.code == 78
    assert "settled by shares@api-1 and by backups in one store" in refused.err


def test_doctor_judges_kinds(tmp_path: Path):
    """It names their order, and a method whose resource has no kind."""
    prepare(tmp_path)
    text = SERVICE.replace('resource="share"', 'resource="shere"').replace(
        "share: str) -> str", "shere: str) -> str"
    )
    write_service(tmp_path, "odd", text)
    good = gracekit(tmp_path, "doctor", "compute:svc")
    odd = gracekit(tmp_path, "doctor", "odd:svc")

    assert "kinds: settled in this order: share_server (1 statuses), then share" in good.out
    assert (
        "resource='shere', and no svc.kind('shere') is declared (did you mean 'share'?)" in odd.out
    )


def test_what_passes_do_not_settle_is_shown_everywhere(tmp_path: Path):
    """A kind whose `find` raises, and what waits of a kind that the service has no longer, which
    `gracekit reconcile` drops. Doctor also says that runs of one host share their passes.
    """
    prepare(tmp_path, WAITS)
    with serving(tmp_path, **BY_HAND, GRACEKIT_HOST="node-1"):
        gracekit(tmp_path, "reconcile", "--resource", "share:sh-3")
    text = SERVICE.replace('svc.kind("share",', 'svc.kind("volume",')
    raises = "        raise OSError('the database is away')\n"
    write_service(tmp_path, "compute", text.replace(FIND, FIND + raises))
    no_wait = {"GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS": "0s", "GRACEKIT_HOST": "node-1"}
    with serving(tmp_path, **no_wait) as run, Running(tmp_path, **no_wait):
        run.wait_line("reconciliation.finished")
        shown = gracekit(tmp_path, "status")
        plain = gracekit(tmp_path, "status", "--json")
        told = gracekit(tmp_path, "doctor")
        incidents = gracekit(tmp_path, "incidents", "--what", "resource_kind_broken")
    with serving(tmp_path, **BY_HAND, GRACEKIT_HOST="node-1"):
        dropped = gracekit(tmp_path, "reconcile")

    broken = (
        "could not be listed for 0s: share_server.find, find(): OSError('the database is away')"
    )
    gone = "share:sh-3 (1 of 1) of shares on node-1 has no rule: no such kind"
    for answer in (shown, told):
        words = " ".join(answer.out.split())
        assert f"kind share_server of shares on node-1 {broken}" in re.sub(r" \d+s:", " 0s:", words)
        assert gone in words
    assert "2 runs of shares on node-1: one of them makes each pass for all" in told.out
    (resources,) = plain.json["resources"]
    assert [one["kind"] for one in resources["broken"]] == ["share_server", "volume"]
    assert resources["undeclared"] == [{"kind": "share", "id": "sh-3", "number": 1}]
    assert "volume: waits for share_server: share_server.find" in incidents.out
    assert dropped.code == 1
    why = "no kind share is declared: what is on record of it is dropped"
    assert f"share:sh-3  creating   left: {why}" in dropped.out


def test_a_pass_behind_another_one_says_once_what_it_waits_for(tmp_path: Path):
    """After five seconds, in which most passes end."""
    prepare(tmp_path, SLOW)
    with serving(tmp_path, GRACEKIT_STARTUP_RECONCILIATION_WAIT_SECONDS="0s") as run:
        run.wait_line("asking slow-1")
        with Started(tmp_path, "reconcile") as command:
            line = command.wait_line("waits")
            time.sleep(6)
            gracekit(tmp_path, "call", "shares", "let_go", "--ops")
            code, said = command.wait(), command.rest()

    assert line == "waits until the pass that is under way has ended"
    assert code == 0
    assert said.count("waits until the pass") == 1


def test_ctrl_c_detaches_and_the_pass_goes_on(tmp_path: Path):
    """It says in which run, and how to look at it; exit status 130."""
    with in_a_rule(tmp_path, terminal=True) as (run, command):
        command.wait_line("srv-7")
        command.type("\x03")
        code, said = command.wait(), command.rest()
        gracekit(tmp_path, "call", "shares", "let_go", "--ops")
        run.wait_line("reconciliation.finished")

    assert code == 130
    assert "detached; the pass goes on in shares@api-1. See `gracekit status`" in said
    assert "`gracekit incidents --what resource`" in said
    assert statuses(tmp_path)["slow-2"] == "available"


def test_ctrl_c_in_a_dry_run_leaves_nothing_to_look_at(tmp_path: Path):
    """The run still finds, and changes nothing; exit status 130."""
    prepare(tmp_path)
    write_service(tmp_path, "compute", SERVICE.replace(FIND, FIND + HOLD))
    with (
        serving(tmp_path, **BY_HAND) as run,
        Started(tmp_path, "reconcile", "--dry-run", terminal=True) as command,
    ):
        run.wait_line("finding share_server")
        command.type("\x03")
        code, said = command.wait(), command.rest()

    assert code == 130
    assert "interrupted; nothing was changed" in said


def test_a_thread_that_hangs_holds_up_its_resource_alone(tmp_path: Path):
    """The others are settled, exit status 3; who hangs is shown with its task, and left from
    then on.
    """
    prepare(tmp_path)
    hangs = SERVICE.replace("after=server)", 'after=server, max_wait="1s")').replace(DELETE, HANGS)
    write_service(tmp_path, "compute", hangs)
    rows = [row for row in json.loads((tmp_path / "records.json").read_text()) if row[1] != "sh-5"]
    (tmp_path / "records.json").write_text(json.dumps(rows))
    with serving(tmp_path, **BY_HAND) as run:
        first = gracekit(tmp_path, "reconcile", "--kind", "share")
        again = gracekit(tmp_path, "reconcile", "--resource", "share:sh-2")
        tasks = gracekit(tmp_path, "tasks")
        (tmp_path / "go").touch()
        run.wait_line("resource.failed")

    assert first.code == again.code == 3
    assert "sh-2  deleting   waits: delete_again has not ended: no answer within 1 s" in first.out
    assert first.out.splitlines()[-1] == "2 settled, 1 waiting, 1 left"
    assert "sh-2  deleting   left: its rule has not ended for " in again.out
    assert "rule delete_again of kind share" in tasks.out
    assert statuses(tmp_path)["sh-2"] == "error_deleting"


# -- a pass that is cut short -----------------------------------------------------------


@pytest.mark.parametrize("order", ["quiet", "drain"])
def test_a_pass_that_a_drain_or_a_quiet_cuts_short_says_so(tmp_path: Path, order: str):
    """Also when the process ends right behind it: exit status 3."""
    with in_a_rule(tmp_path) as (run, command):
        if order == "quiet":
            gracekit(tmp_path, "quiet")
        else:
            run.process.send_signal(signal.SIGTERM)
        run.wait_line("intake.closed")
        gracekit(tmp_path, "call", "shares", "let_go", "--ops")
        code, said = command.wait(), command.rest()

    assert code == 3
    assert "share:slow-1  creating -> available" in said
    assert "the pass was cut short: the service stopped taking requests" in said
    assert statuses(tmp_path)["slow-2"] == "creating"


def test_a_pass_whose_run_is_killed_says_that_the_run_has_ended(tmp_path: Path):
    """Exit status 3; with --json what was seen of the pass is shown."""
    with in_a_rule(tmp_path, "--json") as (run, command):
        run.kill()
        code, said = command.wait(), command.rest()

    message, _, document = said.partition("\n")
    assert code == 3
    assert "shares@api-1 ended " in json.loads(message)["message"]
    assert "killed. Its pass has ended with it" in json.loads(message)["message"]
    assert "the next start settles what is left" in json.loads(message)["message"]
    assert json.loads(document)["interrupted"] is True


def test_a_run_that_ends_before_it_was_asked_again_has_ended(tmp_path: Path):
    """It is not called silent, and nobody waits for its answer."""
    with in_a_rule(tmp_path) as (run, command):
        command.process.send_signal(signal.SIGSTOP)
        gracekit(tmp_path, "call", "shares", "answered", "--ops")
        run.process.send_signal(signal.SIGTERM)
        run.wait_line("intake.closed")
        gracekit(tmp_path, "call", "shares", "let_go", "--ops")
        assert run.wait() == 0
        command.process.send_signal(signal.SIGCONT)
        code, said = command.wait(), command.rest()

    assert code == 3
    assert "drained. Its pass has ended with it" in said
    assert "lives and did not answer" not in said


def test_a_dry_run_that_is_cut_short_says_so(tmp_path: Path):
    """Its list is not whole: exit status 3."""
    prepare(tmp_path)
    write_service(tmp_path, "compute", SERVICE.replace(FIND, FIND + HOLD))
    with (
        serving(tmp_path, **BY_HAND) as run,
        Started(tmp_path, "reconcile", "--dry-run") as command,
    ):
        run.wait_line("finding share_server")
        gracekit(tmp_path, "quiet")
        code, said = command.wait(), command.rest()

    assert code == 3
    assert "the pass was cut short" in said
    assert "0 would be settled, 0 left; nothing was changed" in said


def test_passes_are_paused_for_all_runs_also_before_one_lives(tmp_path: Path):
    """It is told by `status` and on record; another pause takes its place, and 0s ends it."""
    write_service(tmp_path)
    with Running(tmp_path) as run:
        run.kill()
    paused = gracekit(tmp_path, "reconcile", "--pause", "1h", "--reason", "storage is moved")
    shown = gracekit(tmp_path, "status")
    (pause,) = gracekit(tmp_path, "status", "--json").json["pauses"]
    ended = gracekit(tmp_path, "reconcile", "--pause", "0s", "--json")
    wrong = gracekit(tmp_path, "reconcile", "--pause", "1h", "--dry-run")
    notes = gracekit(tmp_path, "incidents", "--what", "operator_pause", "--json").json

    assert (paused.code, ended.code, wrong.code) == (0, 0, 2)
    assert paused.out == "compute begins no pass unasked for 1h00m\n"
    assert "resources of compute: no pass is begun unasked for " in shown.out
    assert pause["reason"] == "storage is moved"
    assert gracekit(tmp_path, "status", "--json").json["pauses"] == []
    assert [one["request_id"] for one in notes["incidents"]] == ["compute", "compute"]
