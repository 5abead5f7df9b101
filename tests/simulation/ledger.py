"""Watches the disk: every step of every row and lease, who made it, and whether it was legal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import apsw

from gracekit.phase import ServiceState
from gracekit.tracker.task import _NEXT, RETRIED, TERMINAL, TaskState, Verb
from tests.played import Life, Machine
from tests.simulation.truth import Truth, Violation

_SCHEMA = """
CREATE TEMP TABLE step (
    n INTEGER PRIMARY KEY, what TEXT, key TEXT, before TEXT, after TEXT,
    owner_before TEXT, owner_after TEXT, cut TEXT, lane TEXT);
CREATE TEMP TRIGGER task_in AFTER INSERT ON main.task BEGIN
    INSERT INTO step (what, key, after, owner_after, lane)
    VALUES ('task', new.request_id || '/' || new.recipient, new.state, new.owner, new.lane); END;
CREATE TEMP TRIGGER task_step AFTER UPDATE OF state, owner, cut ON main.task BEGIN
    INSERT INTO step (what, key, before, after, owner_before, owner_after, cut, lane)
    VALUES ('task', new.request_id || '/' || new.recipient, old.state, new.state, old.owner,
            new.owner, new.cut, new.lane); END;
CREATE TEMP TRIGGER lease_step AFTER UPDATE OF lver, owner ON main.lease BEGIN
    INSERT INTO step (what, key, before, after, owner_before, owner_after)
    VALUES ('lease', new.kind || ':' || new.id, old.lver, new.lver, old.owner, new.owner); END;
CREATE TEMP TRIGGER lease_in AFTER INSERT ON main.lease BEGIN
    INSERT INTO step (what, key, owner_after)
    VALUES ('grant', new.kind || ':' || new.id, new.owner); END;
CREATE TEMP TRIGGER task_charged AFTER UPDATE OF crashes ON main.task
    WHEN new.crashes > old.crashes BEGIN
    INSERT INTO step (what, key, owner_before)
    VALUES ('charge', new.request_id || '/' || new.recipient, old.owner); END;
CREATE TEMP TRIGGER task_due AFTER UPDATE ON main.task
    WHEN new.finished_at IS NULL AND new.due_at IS NOT NULL
        AND (new.owner IS NOT NULL OR new.state <> 'accepted') BEGIN
    INSERT INTO step (what, key, after)
    VALUES ('wrong', new.request_id, 'D1: it is not due, and not free'); END;
CREATE TEMP TRIGGER task_ripe AFTER UPDATE OF due_at ON main.task
    WHEN old.due_at IS NOT NULL AND new.due_at IS NULL AND new.attempts = 0 BEGIN
    INSERT INTO step (what, key) VALUES ('ripe', new.request_id || '/' || new.recipient); END;
CREATE TEMP TRIGGER task_tried AFTER UPDATE ON main.task
    WHEN old.state = 'running' AND new.state = 'accepted' BEGIN
    INSERT INTO step (what, key, after) SELECT 'wrong', new.request_id, 'F1: a failure costs a try'
    WHERE new.crashes <> old.crashes OR new.failures <> old.failures + 1 OR new.due_at IS NULL; END;
CREATE TEMP TRIGGER task_counted AFTER UPDATE OF failures ON main.task
    WHEN new.failures NOT IN (0, old.failures) AND new.state <> 'accepted' BEGIN
    INSERT INTO step (what, key, after)
    VALUES ('wrong', new.request_id, 'F2: what is no failure costs a try'); END;
CREATE TEMP TRIGGER run_left AFTER UPDATE OF report ON main.run
    WHEN json_extract(new.report, '$.left') BEGIN
    INSERT INTO step (what, key, after) VALUES ('run', new.run_id, 'left'); END;
CREATE TEMP TRIGGER run_gone AFTER UPDATE OF gone_at ON main.run WHEN new.gone_at IS NOT NULL BEGIN
    INSERT INTO step (what, key, before, after)
    VALUES ('run', new.run_id, new.gone_by, 'gone'); END;
"""


class Ledger:
    """The history of the disk.

    Attributes:
        is_ready: The store has its tables.
        edges: How often each step of the state machine was taken.
        begun_late: (process, key) of attempts recorded after the intake was proven closed.
        left: Runs whose stop record says that nothing of them can act any more.
        fenced: Runs that an operator declared gone while their process lived: others act in their
            place.
        declared: Runs that others declared dead, as their beats had stopped, while their process
            lived: nothing may act in it any more.
        charged_alone: Keys of tasks that were by themselves in a process when it died.
        born: When each task came, as a number that rises with each step.
        granted: When each lease was granted last, as `born`.
    """

    def __init__(self, machine: Machine, truth: Truth, tell: Callable[[str], None]) -> None:
        self._machine = machine
        self._truth = truth
        self._tell = tell
        self.is_ready = False
        self._reads = 0
        self._seen = -1  # changes of the disk that were judged
        self.edges: Counter[tuple[str, str]] = Counter()
        self.reads_failed: Callable[[], bool] = lambda: False
        self._more_triggers = ""
        self._readers: list[Callable[[Life], None]] = []
        self.begun_late: set[tuple[str, str]] = set()
        self.left: set[str] = set()
        self.fenced: set[str] = set()
        self.declared: set[str] = set()
        self.check_declared: Callable[[Life, str], None] = lambda *_: None
        self.note_joined: Callable[[str], None] = lambda _: None
        self.runs: dict[str, Life] = {}
        self.charged_alone: set[str] = set()
        self.declared_dead = 0
        self._order = 0
        self.born: dict[str, int] = {}
        self.granted: dict[str, int] = {}

    @property
    def out(self) -> set[str]:
        """Runs that may not act, although their process may live."""
        return self.left | self.fenced | self.declared

    def add(self, triggers: str, read: Callable[[Life], None]) -> None:
        """Let somebody else watch this disk, too: *read* is called after each commit."""
        self._more_triggers += triggers
        self._readers.append(read)

    def read(self, actor: Life) -> None:
        """Judge what the last commit of *actor* has done."""
        disk = self._machine.disk
        if not self.is_ready:
            if not self._machine.rows("SELECT 1 FROM sqlite_master WHERE name = 'task'"):
                return
            disk.execute(_SCHEMA + self._more_triggers)
            self.is_ready = True
        if actor.runtime.run_id not in self.runs:
            self.runs[actor.runtime.run_id] = actor
            self.note_joined(actor.runtime.run_id)
        changes = disk.total_changes()
        if changes == self._seen:
            return
        self._seen = changes
        for read in self._readers:
            read(actor)
        steps = list(disk.execute("SELECT * FROM step ORDER BY n"))
        if not steps:
            return
        disk.execute("DELETE FROM step")
        self._note_charges([(step[2], step[5]) for step in steps if step[1] == "charge"])
        steps = [step for step in steps if step[1] != "charge"]
        for step in steps:
            self._judge(actor, step[1:])
        self._reads += 1
        if self._reads % 8 == 0:
            self.check_accounts()

    def _judge(self, actor: Life, step: tuple[Any, ...]) -> None:
        """Judge one row of the table `step`, less its number."""
        what, key, before, after, owner_before, owner_after, cut, lane = step
        if what == "wrong":
            raise Violation(f"{after}: {key} by {actor.name}")
        self._tell(f"{actor.name} {what} {key} {before}>{after} {cut or ''}")
        if actor.runtime.run_id in self.fenced | self.declared:
            raise Violation(f"fence: {actor.name} changed {key} after it was declared gone")
        self._note_order(what, key, before, after, owner_after)
        if what == "run":
            self._note_gone(actor, key, before or "") if after == "gone" else self._note_left(actor)
        if what in {"run", "grant", "ripe"}:
            return
        if what == "task":
            self._judge_task(actor, key, before, after)
            self._note_begun(actor, key, before, after, lane)
        else:
            self._judge_lease(actor, key, before, after, owner_before, owner_after)
        self._judge_owner(actor, key, owner_before)
        if (before, after, cut) == ("running", "handed_over", "unclean"):
            self._judge_disowned(actor, key, owner_before)

    def _note_order(
        self, what: str, key: str, before: str | None, after: str, owner: str | None
    ) -> None:
        self._order += 1
        if what == "task" and after == "accepted" and before != "handed_over":
            if before != after:  # new, or what an operator retries
                self.born[key] = self._order
        elif (what == "task" and before is None) or what == "ripe":
            self.born[key] = self._order
        elif what in {"lease", "grant"} and owner is not None:
            self.granted[key] = self._order

    def _note_charges(self, charges: list[tuple[str, str | None]]) -> None:
        """Adoption charges all that ran in one commit."""
        for owner in sorted({owner or "" for _, owner in charges}):
            keys = [key for key, whose in charges if (whose or "") == owner]
            life: Any = self.runs.get(owner)
            self._tell(f"charged for {owner}: {keys}")
            if len(keys) == 1 and life is not None and not life.had_company:
                self.charged_alone.add(keys[0])

    def _judge_task(self, actor: Life, key: str, before: str | None, after: str) -> None:
        if before == after:
            return
        if before is None:
            self.edges["", after] += 1
            if after == "running":
                self.edges["accepted", "running"] += 1
            return
        self.edges[before, after] += 1
        request_id = key.rpartition("/")[0]
        retried = TaskState(before) in RETRIED and self._truth.was_ordered(request_id, Verb.RETRY)
        if TaskState(before) in TERMINAL and not retried:
            raise Violation(f"I10: {key} went from {before} to {after} by {actor.name}")
        if TaskState(after) not in _NEXT[TaskState(before)]:
            raise Violation(f"section 5: {key} went from {before} to {after} by {actor.name}")

    def _note_begun(self, actor: Life, key: str, before: str | None, after: str, lane: str) -> None:
        if after != "running" or before == after:
            return
        serves = actor.runtime.state is ServiceState.SERVING
        if lane == "requests" and actor.closed and not serves:
            self.begun_late.add((actor.name, key))
        else:
            self.begun_late.discard((actor.name, key))

    def _judge_lease(
        self,
        actor: Life,
        key: str,
        before: str,
        after: str,
        owner_before: str | None,
        owner_after: str | None,
    ) -> None:
        if int(after) < int(before):
            raise Violation(f"I7: token of {key} fell from {before} to {after}")
        if owner_before is not None and owner_before != owner_after:
            vm = key.partition(":")[2]
            for act in self._truth.acting():
                if act.vm == vm and not act.only_asks:
                    raise Violation(
                        f"I12: lease {key} was given up by {actor.name} while {act.request_id} "
                        f"acts on it"
                    )

    def _note_left(self, actor: Life) -> None:
        """A run that says so has no handler at work: others act on its word."""
        self.left.add(actor.runtime.run_id)
        for act in self._truth.acting():
            if act.life is actor:
                raise Violation(f"I8: {actor.name} has left while {act.request_id} acts in it")

    def _note_gone(self, actor: Life, run_id: str, by: str) -> None:
        life = self.runs.get(run_id)
        lives = life is not None and life.process.lives
        if by.startswith("run "):
            self.declared_dead += 1
            self.declared |= {run_id} if lives else set()
            self.check_declared(actor, run_id)
        elif lives:
            self.fenced.add(run_id)

    def _judge_owner(self, actor: Life, key: str, owner_before: str | None) -> None:
        """Only its owner changes a row, or somebody after the owner has left, died or been fenced.

        A run leaves by its stop record, and its process goes on for a moment; an embedded one for
        as long as the program around it.
        """
        if actor.runtime.run_id in self.left:
            raise Violation(f"I8: {actor.name} changed {key} after it had left")
        if owner_before is None or owner_before == actor.runtime.run_id:
            return
        life = self.runs.get(owner_before)
        may_act = owner_before not in self.out
        if life is not None and life.process.lives and may_act:
            raise Violation(f"I8: {actor.name} changed {key} of {life.name}, which lives")

    def _judge_disowned(self, actor: Life, key: str, owner_before: str | None) -> None:
        """I17: an attempt that is on record has its handler, while its process serves.

        Only a run that could not read the row after a commit of unknown end may not know of it, and
        one whose handler was cancelled by the application gives it up.
        """
        if key in self._truth.foreign:
            return
        serves = actor.runtime.state is ServiceState.SERVING
        if owner_before == actor.runtime.run_id and serves and not self.reads_failed():
            raise Violation(f"I17: {actor.name} recorded an attempt of {key} and never made it")

    def check_accounts(self) -> None:
        """P9: accepted = terminal + transient + removed, at each commit; one in eight is asked."""
        cursor = self._machine.disk
        ((rows,),) = cursor.execute("SELECT count(*) FROM task WHERE state <> 'rejected'")
        tally: dict[Any, Any] = dict(
            cursor.execute("SELECT what, n FROM tally WHERE what IN ('accepted', 'removed')")
        )
        if tally.get("accepted", 0) != rows + tally.get("removed", 0):
            raise Violation(f"I9: accepted {tally}, but {rows} rows")


def state_of(disk: apsw.Connection, key: str) -> str:
    """The state of the row `id/recipient`; empty if there is none."""
    sql = "SELECT state FROM task WHERE request_id = ? AND recipient = ?"
    for (state,) in disk.execute(sql, key.split("/")):
        return str(state)
    return ""
