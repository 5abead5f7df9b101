"""The share manager of examples/shares as processes: every rule, every answer, a kill, a restart.

The records, the backend's own log and the incidents are the judges.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from examples.shares.api import Api
from examples.shares.database import TRANSIENT, Database, Record
from examples.shares.driver import DummyDriver, Fault, Thing
from examples.shares.manager import svc
from gracekit.recovery.resources.kinds import How
from tests.examples.shares_site import HOST, README, ROWS, Row
from tests.loops import without_settings
from tests.process.helpers import ROOT, WAIT_S, ServiceProcess, Site, until

pytestmark = pytest.mark.process

SIZE = 7  # on record
THERE = {
    "ready": Thing(size=SIZE, export_locations=["nas:/x"]),
    "other size": Thing(size=8, export_locations=["nas:/x"]),
    "broken": Thing(state="broken", size=SIZE),
    "working": Thing(state="working", size=SIZE),
    "absent": Thing(state="gone"),
}
FAULTS: tuple[Fault, ...] = ("raise", "not implemented", "hang")
ASKED_AGAIN = {"working", "raise", "hang"}
ORDER = tuple(TRANSIENT)


class Case(NamedTuple):
    """One resource: a row of the table, and what the backend says of it."""

    row: Row
    answer: str

    @property
    def id(self) -> str:
        return f"{self.row}-{self.answer}"

    @property
    def end(self) -> str:
        """The status in which it is to end."""
        match self.row.how:
            case How.LEAVE:
                return self.row.status
            case How.MARK:
                return self.row.failed
            case How.DELETE:
                return self.row.failed if self.answer in FAULTS else "deleted"
            case How.PROBE:
                return "available" if self.answer in {"ready", "other size"} else self.row.failed

    @property
    def has_one_call(self) -> bool:
        """Whether a life that settles it calls the backend exactly once."""
        return self.row.how is How.DELETE or self.answer not in ASKED_AGAIN

    @property
    def is_ensured(self) -> bool:
        """Whether it is a share that each later start asks for, as it is available."""
        return self.row.kind == "share" and self.end == "available"


CASES = {case.id: case for row in ROWS for case in (Case(row, said) for said in (*THERE, *FAULTS))}


class Call(NamedTuple):
    """One line of the backend's log."""

    call: str
    id: str
    pid: int
    at: float


class Life(NamedTuple):
    """One process of the manager, and the cases that were settled before it and at its end."""

    pid: int
    before: set[str]
    after: set[str]


class Shares(Site):
    """The records, the backend, and the lives of the manager."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.database = Database(root / "shares.db")
        self.backend = DummyDriver(root / "backend")
        self.database.create()

    def start_manager(
        self, *, stuck_after: str = "10m", max_wait: str = "0.6s", **settings: object
    ) -> ServiceProcess:
        """Start the manager's next life, with short times."""
        variables = (
            f"SHARES_DATABASE={self.database.path}",
            f"SHARES_BACKEND={self.backend.root}",
            f"SHARES_STUCK_AFTER={stuck_after}",
            f"SHARES_MAX_WAIT={max_wait}",
        )
        times = {"host": HOST, "reconciliation_interval": "1s", "log_format": "text"}
        run = (sys.executable, "-m", "gracekit", "run", "examples.shares.manager:svc")
        return self._start(["env", *variables, *run], times | settings)

    def add(self, case: Case) -> None:
        """A record in a transient status, and what the backend is to say of it."""
        self.insert(case.row.kind, case.id, case.row.status)
        self.backend.put(case.row.kind, case.id, THERE.get(case.answer, THERE["ready"]))
        if case.answer in FAULTS:
            self.backend.plant(case.id, case.answer)

    def insert(self, kind: str, id_: str, status: str, **more: object) -> None:
        given = {"size": SIZE, "updated_at": 5.0} | more
        self.database.insert(Record(kind=kind, id=id_, host=HOST, status=status, **given))

    @property
    def records(self) -> dict[str, Record]:
        return {record.id: record for record in self.database.all()}

    @property
    def statuses(self) -> dict[str, str]:
        return {id_: record.status for id_, record in self.records.items()}

    @property
    def calls(self) -> list[Call]:
        path = self.backend.root / "backend.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Call(**json.loads(line)) for line in lines]

    @property
    def incidents(self) -> list[tuple[str, str]]:
        """About resources: `kind:id`, and what was done."""
        rows = self.rows(
            "SELECT method, detail FROM incident"
            " WHERE what IN ('resource_settled', 'resource_failed')"
        )
        return [(row["method"], row["detail"].removeprefix(f"{row['method']}: ")) for row in rows]

    async def reaches(self, wanted: dict[str, str]) -> None:
        """Wait until the records have these statuses."""

        def differing() -> dict[str, tuple[str, str]]:
            now = self.statuses
            return {id_: (now[id_], end) for id_, end in wanted.items() if now[id_] != end}

        await until(lambda: not differing(), lambda: f"(now, wanted): {differing()}")


@pytest.fixture
def shares(tmp_path: Path) -> Iterator[Shares]:
    """Without any process yet; none is left behind."""
    site = Shares(tmp_path)
    yield site
    site.close()


# -- the table ----------------------------------------------------------------------------


async def test_every_status_ends_as_the_table_says_whatever_the_backend_answers(
    shares: Shares,
) -> None:
    """All statuses of the table and all answers side by side, one kill -9 and one restart in the
    middle: each record ends as its row says, once, and the backend is called as often as needed.
    """
    for case in CASES.values():
        shares.add(case)
    busy = [Case(row, "busy") for row in ROWS]
    for case in busy:
        shares.insert(case.row.kind, case.id, case.row.status, task_state="migrating")

    first = await live_until(shares, "share-deleting-hang", ServiceProcess.kill)
    second = await live_until(shares, "share_group-deleting-hang", ServiceProcess.terminate)
    third = shares.start_manager(probe_timeout="0.5s")
    await shares.reaches({id_: case.end for id_, case in CASES.items()})

    assert await third.stop() == 0, third.log[-3000:]
    assert 0 < len(first.after) < len(second.after) < len(CASES)
    statuses = shares.statuses
    assert {case.id: statuses[case.id] for case in busy} == {c.id: c.row.status for c in busy}
    for case in CASES.values():
        check_record(case, shares.records[case.id])
    check_calls(shares.calls, [first, second, Life(third.pid, second.after, set(CASES))])
    check_incidents(shares, first)


async def live_until(shares: Shares, called: str, end: Callable[[ServiceProcess], None]) -> Life:
    """One life of the manager, which is ended while it calls the backend about *called*."""
    before = settled(shares)
    process = shares.start_manager(probe_timeout="0.5s")
    await until(lambda: any(call.id == called for call in shares.calls), called)
    end(process)
    await process.exit_code()
    return Life(process.pid, before, settled(shares))


def settled(shares: Shares) -> set[str]:
    """Cases that have a rule and have ended."""
    statuses = shares.statuses
    return {id_ for id_, case in CASES.items() if statuses[id_] != case.row.status}


def check_record(case: Case, record: Record) -> None:
    """Its size is the backend's if its rule has asked for that, else that on record."""
    asks_size = case.row.status in {"extending", "shrinking"} and case.end == "available"
    assert record.size == (8 if asks_size and case.answer == "other size" else SIZE), record
    if case.row.status.startswith("creating"):
        assert record.export_locations == (("nas:/x",) if case.is_ensured else ()), record


def check_calls(calls: list[Call], lives: list[Life]) -> None:
    """Each life has called the backend for what it has settled or begun, and for nothing else."""
    assert {(call.id, call.call) for call in calls} == {
        (id_, case.row.call) for id_, case in CASES.items() if case.row.call
    }
    numbers = Counter((call.id, call.pid) for call in calls)
    for life in lives:
        for id_, case in CASES.items():
            number = numbers[id_, life.pid]
            if id_ in life.before or not case.row.call:
                assert number == (id_ in life.before and case.is_ensured), (case, life.pid)
            elif id_ in life.after:
                assert number == 1 if case.has_one_call else number > 0, (case, life.pid)
            else:
                assert number <= 1 or not case.has_one_call, (case, life.pid)
    firsts = dict.fromkeys(call.id for call in calls)
    kinds = [CASES[id_].row.kind for id_ in firsts]
    assert kinds == sorted(kinds, key=ORDER.index)


def check_incidents(shares: Shares, killed: Life) -> None:
    """Each end is an incident, unless the kill came between the record and its incident."""
    incidents = Counter((about, detail.partition(" by ")[0]) for about, detail in shares.incidents)
    ends = {
        (f"{case.row.kind}:{id_}", f"{case.row.status} -> {case.end}"): id_
        for id_, case in CASES.items()
        if case.row.how is not How.LEAVE
    }
    assert incidents.keys() <= ends.keys()
    assert set(incidents.values()) == {1}
    assert {ends[end] for end in ends.keys() - incidents.keys()} <= killed.after
    assert len(ends) - len(incidents) <= 16, "no more than act at one time"


# -- what needs what ----------------------------------------------------------------------


async def test_what_needs_a_failed_parent_fails_without_a_question(shares: Shares) -> None:
    """A share server that is in error takes its shares along, and they their snapshots and
    backups.
    """
    families = (
        ("share_server", "srv-7", "creating", None, "error"),
        ("share", "sh-1", "creating", "srv-7", "error"),
        ("share", "sh-2", "manage_starting", "srv-7", "manage_error"),
        ("share", "sh-3", "deleting", "srv-7", "error_deleting"),
        ("snapshot", "sn-1", "creating", "sh-1", "error"),
        ("share_group", "gr-1", "creating", "srv-7", "error"),
        ("share_group_snapshot", "gs-1", "creating", "gr-1", "error"),
        ("backup", "ba-1", "deleting", "sh-2", "error_deleting"),
        ("share_server", "srv-8", "server_migrating", None, "server_migrating"),
        ("share", "sh-4", "creating", "srv-8", "available"),
    )
    for kind, id_, status, parent, _ in families:
        shares.insert(kind, id_, status, parent=parent)
        shares.backend.put(kind, id_, THERE["ready"])

    life = await shares.start_manager().serving()
    await shares.reaches({id_: end for _, id_, _, _, end in families})

    assert await life.stop() == 0, life.log[-3000:]
    assert [call.id for call in shares.calls] == ["sh-4"]
    reasons = {about: detail.rpartition(": ")[2] for about, detail in shares.incidents}
    assert {about: why for about, why in reasons.items() if why.startswith("dependency")} == {
        "share:sh-1": "dependency share_server:srv-7",
        "share:sh-2": "dependency share_server:srv-7",
        "share:sh-3": "dependency share_server:srv-7",
        "snapshot:sn-1": "dependency share:sh-1",
        "share_group:gr-1": "dependency share_server:srv-7",
        "share_group_snapshot:gs-1": "dependency share_group:gr-1",
        "backup:ba-1": "dependency share:sh-2",
    }
    assert life.log.count("dependency share_server:srv-7") == 4


# -- drift --------------------------------------------------------------------------------

STUCK_S = 2.0
DRIFTED = (("extending", "available"), ("creating", "available"), ("deleting", "deleted"))


async def test_drift_is_settled_by_a_later_pass_and_slow_requests_are_not_touched(
    shares: Shares,
) -> None:
    """50 records that are changed by hand while the manager runs, beside 50 requests that take
    longer than `stuck_after`: the periodic pass settles the former, and leaves the latter alone.
    """
    drifted = {f"drifted-{n}": DRIFTED[n % len(DRIFTED)] for n in range(50)}
    slow = {f"slow-{n}" for n in range(50)}
    for id_ in (*drifted, *slow):
        shares.insert("share", id_, "available")
        shares.backend.put("share", id_, THERE["ready"])
    manager = await shares.start_manager(stuck_after=f"{STUCK_S}s", max_running=60).serving()
    await manager.wait_log("reconciliation.finished")
    asked_at_start = len(shares.calls)

    for id_ in slow:
        shares.backend.plant(id_, "hang")
    async with svc.client(shares.url) as client:
        api = Api(shares.database, client, HOST)
        for id_ in slow:
            await api.extend_share(id_, size=9)
    await until(lambda: len(shares.calls) == asked_at_start + len(slow), "50 at work")
    drifted_at = time.time()
    for id_, (status, _) in drifted.items():
        assert shares.database.write("share", id_, seen="available", status=status)
    await shares.reaches({id_: end for id_, (_, end) in drifted.items()})

    passes = manager.log.count("reconciliation.finished")
    await manager.wait_log("reconciliation.finished", times=passes + 1)
    records = shares.records
    assert {records[id_].status for id_ in slow} == {"extending"}
    assert shares.rows("SELECT left_alone FROM resource_pass") == [{"left_alone": len(slow)}]
    assert min(records[id_].updated_at for id_ in drifted) >= drifted_at + STUCK_S
    assert max(records[id_].updated_at for id_ in slow) <= drifted_at
    assert Counter(call.id for call in shares.calls[asked_at_start:]) == dict.fromkeys(
        (*drifted, *slow), 1
    )
    for id_ in slow:
        shares.backend.mend(id_)
    await shares.reaches(dict.fromkeys(slow, "available"))
    assert {shares.records[id_].size for id_ in slow} == {9}
    assert len(shares.calls) == asked_at_start + len(drifted) + len(slow)
    assert await manager.stop() == 0, manager.log[-3000:]


# -- by hand ------------------------------------------------------------------------------


class Terminals:
    """Types what the README's section "By hand" says, each block in the environment of the first.

    Attributes:
        blocks: The indented ones, in their order.
    """

    def __init__(self, directory: Path) -> None:
        section = README.read_text().partition("\n## By hand\n")[2].partition("\n## ")[0]
        blocks = re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)
        assert "/tmp/shares" in blocks[0]
        text = {"/tmp/shares": str(directory), "gracekit run": "exec python -m gracekit run"}
        for said, typed in text.items():
            blocks = [block.replace(said, typed) for block in blocks]
        self._exports, *self.blocks = blocks
        self.log = directory / "log"
        self._env = without_settings()

    def start(self, block: str, output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        command = ("bash", "-ec", self._exports + block.replace("python ", f"{sys.executable} "))
        return subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=output)

    async def run(self, block: str) -> None:
        """Type the lines; one that shows the records again and again, until all are available."""
        for line in block.splitlines():
            await until(lambda line=line: self._is_done(line), line)

    def _is_done(self, line: str) -> bool:
        with self.start(line, subprocess.PIPE) as process:
            said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, line
        return not line.endswith(" show") or b"available" in said


async def test_what_the_readme_says_can_be_typed(tmp_path: Path) -> None:
    """The commands of its section "By hand", in their order; a share is made, stuck, and
    settled.
    """
    terminals = Terminals(tmp_path)
    serve, make, change, mend = terminals.blocks
    with terminals.log.open("wb") as log:
        manager = terminals.start(serve, log)
    try:
        await until(lambda: "service.serving" in terminals.log.read_text(), "it serves")
        await terminals.run(make)
        await terminals.run(change)
        await until(lambda: "resource.left" in terminals.log.read_text(), "it was asked for")
        await terminals.run(mend)
        manager.terminate()
        assert manager.wait(WAIT_S) == 0
    finally:
        manager.kill()
        manager.wait()
    (share,) = Database(tmp_path / "shares.db").all()
    assert (share.status, share.size) == ("available", 9)
    assert "resource.settled" in terminals.log.read_text()
