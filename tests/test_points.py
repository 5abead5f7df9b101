"""Every step after which the world is different has a name, so the crash matrix can stop there."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gracekit.process import FAILPOINT_VARIABLE, FAILPOINTS_ON, Point, Process, Side
from gracekit.rpc.transport import Delivery, Settlement, shared_queue
from gracekit.store.batch import Batch
from gracekit.store.sqlite.sqlite_engine import MemoryEngine

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "gracekit"
DEFINES: Final = PACKAGE / "process.py"
COMMITS: Final = {
    "gracekit/store/group.py",  # batches, which name their point
    "gracekit/store/migrate.py",  # the schema, before anything was accepted
    "gracekit/store/postgres/postgres_group.py",  # as group.py
    "gracekit/store/postgres/postgres_migrate.py",  # as migrate.py
}
LEASE_CHANGE: Final = re.compile(r"\b(INTO|UPDATE|DELETE FROM)\s+lease\b")
SETTLES: Final = ("gracekit/rpc/transport.py", "_settle_once")  # the only raw settlement


def trees(*, but: Path | None = None) -> Iterator[tuple[str, ast.Module]]:
    """Every module of production, parsed, with its name for messages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != but and "testing" not in path.relative_to(PACKAGE).parts:
            yield str(path.relative_to(PACKAGE.parent)), ast.parse(path.read_text(), str(path))


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Every call in *tree*."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def point_named_by(node: ast.AST) -> str | None:
    """`ACK` for the expression `Point.ACK`."""
    match node:
        case ast.Attribute(value=ast.Name(id="Point"), attr=str(name)):
            return name
    return None


def names_a_point(node: ast.AST) -> bool:
    """Whether an argument is `Point.X`, or a choice between two of them."""
    if isinstance(node, ast.IfExp):
        return names_a_point(node.body) and names_a_point(node.orelse)
    return point_named_by(node) in Point.__members__


def is_of_a_delivery(function: ast.expr) -> bool:
    """Whether an expression like `job.delivery.settle` speaks of a delivery."""
    match function:
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner)):
            return "delivery" in owner.lower()
    return False


class Watched(Process):
    """Notes the points that are passed."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[tuple[Point, Side] | str] = []

    def reach(self, point: Point, phase: Side) -> None:
        self.passed.append((point, phase))


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text in *tree*, its docstrings too."""
    return (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function in *tree*."""
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_point_is_used():
    """A point that no code passes would be a crash test that tests nothing."""
    used = {point_named_by(node) for _, tree in trees(but=DEFINES) for node in ast.walk(tree)}

    assert {point.name for point in Point} - used == set()


def test_every_batch_names_its_point():
    """No commit is made without a name under which the crash matrix can stop it."""
    nameless = [
        f"{name}:{call.lineno}"
        for name, tree in trees()
        for call in calls(tree)
        if isinstance(call.func, ast.Name)
        and call.func.id == "Batch"
        and not (call.args and names_a_point(call.args[0]))
    ]

    assert nameless == []


PASSES = "from gracekit.process import *; Process().reach(Point.ACCEPT, 'after'); print('lives')"


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "switch", "code", "said"),
    [
        ("accept.after", {}, 0, "lives"),
        ("no such point", {}, 0, "lives"),
        ("accept.after", FAILPOINTS_ON, -signal.SIGKILL, ""),
        ("accept.after:2", FAILPOINTS_ON, 0, "lives"),
        ("accept.aftr", FAILPOINTS_ON, 1, "'accept.aftr' names no crash point: write POINT.before"),
        ("acept.after", FAILPOINTS_ON, 1, "for the third passing; points are accept, accept_and"),
        ("accept.after:0", FAILPOINTS_ON, 1, "names no crash point"),
    ],
)
def test_a_crash_point_acts_only_where_tests_have_switched_it_on(
    place: str, switch: dict[str, str], code: int, said: str
):
    """A variable that was left in a service's environment kills nothing; a wrong one is a
    sentence.
    """
    env = {"PATH": os.environ["PATH"], FAILPOINT_VARIABLE: place, **switch}
    ended = subprocess.run(
        [sys.executable, "-c", PASSES],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    assert ended.returncode == code
    assert said in ended.stdout + ended.stderr


def test_nothing_else_commits():
    """Rows change in a batch or not at all: no other module ends a transaction."""
    committing = {name for name, tree in trees() if "COMMIT" in texts(tree)}

    assert committing == COMMITS


async def test_a_commit_passes_its_point_before_and_after():
    """A kill can stop a batch with its statements carried out and not committed, and just
    committed.
    """
    process = Watched()
    engine = MemoryEngine(["CREATE TABLE note (text TEXT)"], process=process)
    await engine.start()
    batch = Batch(Point.ACCEPT)
    batch.add("INSERT INTO note VALUES ('accepted')")

    await engine.commit(batch)
    await engine.stop()

    assert process.passed == [(Point.ACCEPT, "before"), (Point.ACCEPT, "after")]


def test_a_lease_changes_with_the_leases_batches_only():
    """Who may act is decided in one room, in batches, and so in commits that have a name."""
    changing = {
        name for name, tree in trees() if any(LEASE_CHANGE.search(text) for text in texts(tree))
    }

    using = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and ("leases_sql" in str(node.module) or any(a.name == "leases_sql" for a in node.names))
    }

    room = "gracekit/leases"
    assert changing == {f"{room}/leases_sql.py", f"{room}/declarations_sql.py"}
    assert using == {f"{room}/leases.py", f"{room}/declarations.py"}


def test_every_reply_passes_its_point_before_and_after():
    """Above the transports only replies and notifications are sent, and each where the crash matrix
    can stop it.
    """
    phases = {
        f"{name}:{function.name}": {
            argument.value
            for call in calls(function)
            if call.args and point_named_by(call.args[0]) in {"REPLY", "NOTIFY"}
            for argument in call.args[1:]
            if isinstance(argument, ast.Constant)
        }
        for name, tree in trees()
        if not name.startswith("gracekit/rpc/")
        for function in functions(tree)
        for call in calls(function)
        if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("publish")
    }

    assert phases != {}
    assert [name for name, passed in phases.items() if passed != {"before", "after"}] == []


@pytest.mark.parametrize("how", Settlement)
async def test_a_settlement_passes_its_point_before_and_after(how: Settlement):
    """An ack, a return and a dead letter can each be stopped on either side."""
    process = Watched()

    async def settle(how: Settlement, reason: str) -> None:
        process.passed.append(how.value)

    delivery = Delivery(
        body=b"",
        queue=shared_queue("q"),
        redelivered=False,
        expires_in_s=None,
        headers={},
        process=process,
        settle=settle,
    )

    await delivery._settle_once(how, "why")

    point = Point(how.value)
    assert process.passed == [(point, "before"), how.value, (point, "after")]


def test_settlements_go_through_the_delivery():
    """Only `Delivery` settles, once, passing its points; nobody calls a transport's raw
    settlement.
    """
    raw = [
        (name, function.name)
        for name, tree in trees()
        for function in functions(tree)
        for call in calls(function)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "settle"
        # Other things settle too: recovery settles tasks and holds.
        if name.startswith("gracekit/rpc/") or is_of_a_delivery(call.func)
    ]

    assert raw == [SETTLES]
