"""ARCHITECTURE.md and docs/decisions/: they agree with the code, with each other and with git."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.test_architecture import ENTRANCES, FLOORS, PACKAGE

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
