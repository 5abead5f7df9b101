"""ARCHITECTURE.md and docs/decisions/: they agree with the code, with each other and with git."""

from __future__ import annotations

import importlib
import re
from typing import Final

import pytest

from gracekit.config.settings import Settings
from gracekit.life import LifeEvidence, Lock, Pid, judge
from gracekit.tracker.task import ENDS, TaskState, Verb
from tests.docs.pages import DOCS, ROOT
from tests.test_architecture import ENTRANCES, FLOORS, PACKAGE, SAME_FLOOR

DIRECTORY: Final = DOCS / "decisions"
RECORDS: Final = sorted(path.name for path in DIRECTORY.glob("[0-9]*.md"))
INDEX: Final = (DIRECTORY / "index.md").read_text()
ARCHITECTURE: Final = (ROOT / "ARCHITECTURE.md").read_text()
LONGEST: Final = 250
"""Lines that a new maintainer reads in one go."""
DAY: Final = r"20\d\d-\d\d-\d\d"
GROUPS: Final = (
    "Custody",
    "Drain",
    "Recovery",
    "RabbitMQ and the wire",
    "Store",
    "Process",
    "Operating",
    "Testing",
)


def listed() -> dict[str, tuple[str, str, str, str]]:
    """File names in the index; of each its group, number, title and day as listed there."""
    found, group = {}, ""
    for line in INDEX.splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
        if row := re.fullmatch(rf"\| (\d{{4}}) \| \[(.*)\]\((\S+)\) \| ({DAY}) \|", line):
            number, title, name, day = row.groups()
            found[name] = group, number, title, day
    return found


def table(name: str, first: str) -> list[list[str]]:
    """Cells of the table in that record whose head begins with *first*, without its head."""
    text = (DIRECTORY / name).read_text()
    lines = text[text.index(f"| {first} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_numbers_of_decisions_are_without_gaps():
    """
    A new decision takes the next number, and none is given twice.
    """
    numbers = [int(name.partition("-")[0]) for name in RECORDS]

    assert numbers == list(range(1, len(RECORDS) + 1))
    assert len(RECORDS) > 40


@pytest.mark.parametrize("name", RECORDS)
def test_a_decision_has_its_parts(name: str):
    """
    Title, day, group, then context, decision and consequence, none of them empty.
    """
    text = (DIRECTORY / name).read_text()
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)

    assert re.fullmatch(
        rf"# {name[:4]}\. \S.*\n\n- Date: {DAY}(, last changed {DAY})?\n"
        rf"- Group: ({'|'.join(GROUPS)})\n\n",
        head,
    )
    assert [part.partition("\n")[0] for part in parts] == ["Context", "Decision", "Consequence"]
    assert all(len(part.partition("\n")[2].split()) > 5 for part in parts)


def test_the_index_lists_each_decision_as_its_page_says():
    """
    Under its group, with its number, its title and the day from which it stands.
    """
    said = {}
    for name in RECORDS:
        text = (DIRECTORY / name).read_text()
        head = re.match(rf"# (\d+)\. (.*)\n\n- Date: ({DAY}).*\n- Group: (.*)\n", text)
        assert head is not None
        number, title, day, group = head.groups()
        said[name] = group, number, title, day

    assert listed() == said


def test_architecture_is_read_in_one_go():
    """
    What does not fit goes into a decision, or to the docstring of the module that does it.
    """
    assert len(ARCHITECTURE.splitlines()) <= LONGEST


def test_the_table_of_floors_is_the_one_that_is_checked():
    """
    From the top down, each floor with its number and its rooms.
    """
    table = ARCHITECTURE.partition("| floor | rooms |\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[1:]]
    drawn = {int(number): set(re.findall(r"`(\w+)`", rooms)) for number, rooms in rows}

    assert drawn == dict(enumerate(map(set, FLOORS)))
    assert list(drawn) == sorted(drawn, reverse=True)
    numbers = [str(FLOORS.index(flat)) for flat in SAME_FLOOR]
    assert f"on floors {', '.join(numbers[:-1])} and {numbers[-1]} they may" in ARCHITECTURE


def test_the_house_shows_every_room_once():
    """
    A new module or package of gracekit/ is named in the tree.
    """
    tree = ARCHITECTURE.partition("## The house\n")[2].split("```")[1]
    shown = [word for line in tree.splitlines() for word in line[:24].split()]
    rooms = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}

    assert sorted(word.removesuffix("/") for word in shown) == sorted(
        rooms - ENTRANCES - {"__init__", "__pycache__"}
    )


def test_links_of_architecture_lead_somewhere():
    """
    To decisions and pages that exist.
    """
    links = re.findall(r"\]\(([^)#\s]+)\)", ARCHITECTURE)

    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_times_of_a_drain_are_the_defaults():
    """
    The drawing and the sentence below it say what a drain takes without any setting.
    """
    times = Settings()
    wait, grace, flush, margin = (
        times.drain_timeout_s,
        times.handover_grace_s,
        times.handover_flush_s,
        times.exit_margin_s,
    )
    sentence = (
        f"the wait has {wait:g} s, the grace for cancelled handlers {grace:g} s, the flush "
        f"{flush:g} s and the margin {margin:g} s"
    )

    assert sentence in " ".join(ARCHITECTURE.split())
    assert f"at {times.hard_limit_s + 0.5:g} s" in ARCHITECTURE


LOCKS: Final = {
    "its lock is held": (Lock.HELD,),
    "the file that it locked is free": (Lock.FREE,),
    "the file is missing or replaced, or the row names none": (
        Lock.MISSING,
        Lock.REPLACED,
        Lock.UNKNOWN,
    ),
    "the file cannot be read": (Lock.UNREADABLE,),
}
PIDS: Final = ((Pid.THERE,), (Pid.GONE, Pid.REUSED, Pid.EXECED), (Pid.HIDDEN, Pid.UNKNOWN))


def test_the_table_of_liveness_is_the_rule():
    """
    Each sign of a lock with each sign of a process gives the answer that the table shows.
    """
    rows = table("0023-proof-of-death.md", "| process is there")
    assert [row[0] for row in rows] == list(LOCKS)

    for words, *cells in rows:
        for cell, pids in zip(cells, PIDS, strict=True):
            for lock in LOCKS[words]:
                for pid in pids:
                    seen = LifeEvidence(lock=lock, same_boot=True, same_namespace=True, pid=pid)
                    assert judge(seen).answer.value == cell.partition(":")[0]


def test_the_table_of_orders_is_the_one_that_is_obeyed():
    """
    What an order makes of a task in each state; `refused` where the code has no end.
    """
    rows = table("0063-orders-about-tasks.md", "| ACCEPTED")
    states = (TaskState.ACCEPTED, TaskState.RUNNING, TaskState.HANDED_OVER)

    assert [row[0] for row in rows] == ["`cancel`", "`fail`", "`retry`"]
    for verb, *cells in rows:
        ends = ENDS[Verb(verb.strip("`"))]
        shown = [re.split("[,;]", cell)[0] for cell in cells[:3]]
        assert shown == [ends[state].name if state in ends else "refused" for state in states]
        retried = {state.name for state in ends if state.name in cells[3].partition(":")[0]}
        assert retried == {s.name for s in ends if s in {TaskState.FAILED, TaskState.ERRORED}}


def test_statements_with_conditions_that_span_rows_exist():
    """
    The list for authors of engines names statements of the modules where they stand.
    """
    text = (DIRECTORY / "0048-portable-statements.md").read_text()
    named = re.findall(r"`(\w+_sql)\.(\w+)`", text)
    rooms = {"leases_sql": "leases", "runs_sql": "runs"}

    assert len(named) > 10
    for module, name in named:
        where = importlib.import_module(f"gracekit.{rooms.get(module, 'journal')}.{module}")
        assert isinstance(getattr(where, name), str)
