"""ARCHITECTURE.md and docs/decisions/: they agree with the code, with each other and with git."""

from __future__ import annotations

import importlib
import re
from typing import Final

import pytest

from gracekit.config.settings import Settings
from gracekit.life import LifeEvidence, Lock, Pid, judge
from gracekit.tracker.task import ENDS, TaskState, Verb
from tests.docs.pages import DOCS, ROOT, Page
from tests.test_architecture import ENTRANCES, FLOORS, PACKAGE, SAME_FLOOR

INDEX: Final = (DOCS / "decisions" / "index.md").read_text()
ARCHITECTURE: Final = (ROOT / "ARCHITECTURE.md").read_text()
LONGEST: Final = 250
"""Lines that a new maintainer reads in one go."""
PAGES: Final = {
    path.name: Page(f"decisions/{path.name}")
    for path in sorted((DOCS / "decisions").glob("*.md"))
    if path.name != "index.md"
}
"""A page for each group; each decision is a section, and its heading is its number."""


def decisions() -> dict[tuple[str, str], str]:
    """Text of each decision by its page and its number."""
    return {
        (name, text[:4]): text[4:]
        for name, page in PAGES.items()
        for text in re.split(r"^## (?=\d{4}$)", page.text, flags=re.MULTILINE)[1:]
    }


DECISIONS: Final = decisions()


def table(name: str, number: str, first: str) -> list[list[str]]:
    """Cells of the table in that decision whose head begins with *first*, without its head."""
    text = DECISIONS[name, number]
    lines = text[text.index(f"| {first} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_no_number_of_a_decision_is_given_twice():
    """On each page they rise."""
    numbers = [number for _, number in DECISIONS]

    assert len(set(numbers)) == len(numbers) > 40
    for name in PAGES:
        there = [number for page, number in DECISIONS if page == name]
        assert there == sorted(there) != []


@pytest.mark.parametrize(("name", "number"), DECISIONS)
def test_a_decision_has_its_parts(name: str, number: str):
    """Title, day, then context, decision and consequence, none of them empty."""
    head, *parts = re.split(
        r"^\*(Context|Decision|Consequence)\.\*", DECISIONS[name, number], flags=re.MULTILINE
    )

    assert re.fullmatch(r"\n\n\*\*\S.*\.\*\* Since 20\d\d-\d\d-\d\d\.\n\n", head)
    assert parts[::2] == ["Context", "Decision", "Consequence"]
    assert all(len(part.split()) > 5 for part in parts[1::2])


def test_the_index_lists_each_decision_as_its_page_says():
    """With its title, its page and its number."""
    listed = re.findall(r"^- \[(.*)\]\((.*)#(\d{4})\)$", INDEX, re.MULTILINE)
    said = {key: text.partition("**")[2].partition(".**")[0] for key, text in DECISIONS.items()}

    assert {(name, number): title for title, name, number in listed} == said
    assert len(listed) == len(said)


def test_architecture_is_read_in_one_go():
    """What does not fit goes into a decision, or to the docstring of the module that does it."""
    assert len(ARCHITECTURE.splitlines()) <= LONGEST


def test_the_table_of_floors_is_the_one_that_is_checked():
    """From the top down, each floor with its number and its rooms."""
    table = ARCHITECTURE.partition("| floor | rooms |\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[1:]]
    drawn = {int(number): set(re.findall(r"`(\w+)`", rooms)) for number, rooms in rows}

    assert drawn == dict(enumerate(map(set, FLOORS)))
    assert list(drawn) == sorted(drawn, reverse=True)
    numbers = [str(FLOORS.index(flat)) for flat in SAME_FLOOR]
    assert f"on floors {', '.join(numbers[:-1])} and {numbers[-1]} they may" in ARCHITECTURE


def test_the_house_shows_every_room_once():
    """A new module or package of gracekit/ is named in the tree."""
    tree = ARCHITECTURE.partition("## The house\n")[2].split("```")[1]
    shown = [word for line in tree.splitlines() for word in line[:24].split()]
    rooms = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}

    assert sorted(word.removesuffix("/") for word in shown) == sorted(
        rooms - ENTRANCES - {"__init__", "__pycache__"}
    )


def test_links_of_architecture_lead_somewhere():
    """To pages that exist, and to decisions on them."""
    links = re.findall(r"\]\(([^)\s]+)\)", ARCHITECTURE)
    targets = [link.partition("#")[::2] for link in links]

    assert len(links) > 15
    assert [target for target, _ in targets if not (ROOT / target).is_file()] == []
    assert [
        (target, anchor)
        for target, anchor in targets
        if anchor and anchor not in Page(f"../{target}").anchors
    ] == []


def test_times_of_a_drain_are_the_defaults():
    """The drawing and the sentence below it say what a drain takes without any setting."""
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
    """Each sign of a lock with each sign of a process gives the answer that the table shows."""
    rows = table("recovery.md", "0023", "| process is there")
    assert [row[0] for row in rows] == list(LOCKS)

    for words, *cells in rows:
        for cell, pids in zip(cells, PIDS, strict=True):
            for lock in LOCKS[words]:
                for pid in pids:
                    seen = LifeEvidence(lock=lock, same_boot=True, same_namespace=True, pid=pid)
                    assert judge(seen).answer.value == cell.partition(":")[0]


def test_the_table_of_orders_is_the_one_that_is_obeyed():
    """What an order makes of a task in each state; `refused` where the code has no end."""
    rows = table("operating.md", "0063", "| ACCEPTED")
    states = (TaskState.ACCEPTED, TaskState.RUNNING, TaskState.HANDED_OVER)

    assert [row[0] for row in rows] == ["`cancel`", "`fail`", "`retry`"]
    for verb, *cells in rows:
        ends = ENDS[Verb(verb.strip("`"))]
        shown = [re.split("[,;]", cell)[0] for cell in cells[:3]]
        assert shown == [ends[state].name if state in ends else "refused" for state in states]
        retried = {state.name for state in ends if state.name in cells[3].partition(":")[0]}
        assert retried == {s.name for s in ends if s in {TaskState.FAILED, TaskState.ERRORED}}


def test_statements_that_need_one_writer_exist():
    """What went wrong without one is named by the module where it stands."""
    text = DECISIONS["store.md", "0048"]
    named = re.findall(r"`(\w+_sql)\.(\w+)`", text)
    rooms = {"leases_sql": "leases", "runs_sql": "runs"}

    assert len(named) == 4
    for module, name in named:
        where = importlib.import_module(f"gracekit.{rooms.get(module, 'journal')}.{module}")
        assert isinstance(getattr(where, name), str)
