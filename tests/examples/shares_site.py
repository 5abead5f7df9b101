"""What the tests of examples/shares have in common: the table that the example obeys, and looks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from examples.shares import manager
from examples.shares.database import Record
from examples.shares.driver import DummyDriver
from gracekit import ResourceKind
from gracekit.recovery.resources.kinds import How

HOST = "vm-0"

README = Path(manager.__file__).with_name("README.md")
RULES = {"ask": How.PROBE, "delete again": How.DELETE, "mark": How.MARK, "leave": How.LEAVE}


class Row(NamedTuple):
    """One status of the README's table.

    Attributes:
        call: What the rule calls of the driver; empty for nothing.
        failed: The status that is written if that fails; empty for none.
    """

    kind: str
    status: str
    how: How
    call: str
    failed: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.status}"


def table() -> Iterator[Row]:
    """The rules as the README has them, a row for each status."""
    text = README.read_text().partition("\n## The rules\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    kind = ""
    for line in lines:
        kind_cell, statuses, rule, failed = (cell.strip() for cell in line.split("|")[1:-1])
        kind = kind_cell.strip("`") or kind
        (how,) = [how for words, how in RULES.items() if rule.startswith(words)]
        asked = re.search(r"`(get_\w+)`", rule)
        call = asked[1] if asked else f"delete_{kind}" if how is How.DELETE else ""
        for status in re.findall(r"`(\w+)`", statuses):
            yield Row(kind, status, how, call, failed.strip("`"))


ROWS = list(table())
ASKED = [row for row in ROWS if row.how is How.PROBE]
DELETED = [row for row in ROWS if row.how is How.DELETE]


def kind_of(name: str) -> ResourceKind:
    return manager.svc.kinds[name]


def record(id_: str, status: str = "creating", *, kind: str = "share", **more: Any) -> Record:
    return Record(**{"kind": kind, "id": id_, "host": HOST, "status": status, **more})


def log_of(backend: DummyDriver, id_: str) -> list[str]:
    """The calls about one thing, in order."""
    path = backend.root / "backend.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line["call"] for line in map(json.loads, lines) if line["id"] == id_]
