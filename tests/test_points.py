"""Every step after which the world is different has a name, so the crash matrix can stop there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gracekit.process import Point

PACKAGE: Final = Path(__file__).resolve().parent.parent / "gracekit"
DEFINES: Final = PACKAGE / "process.py"
SETTLES: Final = ("gracekit/rpc/transport.py", "_settle_once")  # the only raw settlement


def trees(*, but: Path | None = None) -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package, parsed, with its name for messages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != but:
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


def test_every_point_is_used():
    """
    A point that no code passes would be a crash test that tests nothing.
    """
    used = {point_named_by(node) for _, tree in trees(but=DEFINES) for node in ast.walk(tree)}

    assert {point.name for point in Point} - used == set()


def test_every_batch_names_its_point():
    """
    No commit is made without a name under which the crash matrix can stop it.
    """
    nameless = [
        f"{name}:{call.lineno}"
        for name, tree in trees()
        for call in calls(tree)
        if isinstance(call.func, ast.Name)
        and call.func.id == "Batch"
        and not (call.args and names_a_point(call.args[0]))
    ]

    assert nameless == []


def test_settlements_go_through_the_delivery():
    """
    Only `Delivery` settles, once, passing its points; nobody calls a transport's raw settlement.
    """
    raw = [
        (name, function.name)
        for name, tree in trees()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in calls(function)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "settle"
        # Other things settle too: recovery settles tasks and holds.
        if name.startswith("gracekit/rpc/") or is_of_a_delivery(call.func)
    ]

    assert raw == [SETTLES]
