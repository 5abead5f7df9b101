"""One meaning a word, one word a meaning: docs/glossary.md says which."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
GIVEN_UP: Final = {
    "bells?": "wake-up",
    "rings?": "wake-up",
    "ringer": "wake-up",
    "desks?": "the client or inspector that asks",
    "process slots?": "instance",
    "seats? of (a|the|its) lane": "claim limit",
    "turns? of the loop": "iteration of the loop",
    "verdicts? (of|by) (recovery|a probe)": "decision",
    "(cold|graceful|hard|hot|soft|warm) (shutdown|stop)s?": "drain, cancel",
}
"""Words that are not used, each with the word that is. In any case; a line may end between two."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under *heading*, without its first two rows."""
    text = GLOSSARY.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    ]


def headings() -> list[str]:
    """The tables of words."""
    return re.findall(r"^## (.*)$", GLOSSARY.read_text(), re.MULTILINE)


def sources() -> Iterator[tuple[str, str]]:
    """What gracekit and its pages say, by file."""
    paths = [*(ROOT / "gracekit").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for path in sorted(paths):
        if path != GLOSSARY:
            yield str(path.relative_to(ROOT)), path.read_text()


def classes() -> dict[str, list[str]]:
    """Modules by the name of each public class or alias that they define; no type variables."""
    found = defaultdict(list)
    for path in sorted((ROOT / "gracekit").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in names:
                if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name) and not name.endswith("_co"):
                    found[name].append(str(path.relative_to(ROOT)))
    return found


def test_no_name_of_a_class_is_given_twice():
    """A reader who searches for a name finds one thing."""
    twice = {name: places for name, places in classes().items() if len(places) > 1}

    assert twice == {}


@pytest.mark.parametrize("heading", headings())
def test_each_table_of_words_is_in_order(heading):
    """A word is found where the alphabet has it."""
    words = [row[0].strip("*") for row in rows(heading)]

    assert words == sorted(words)
    assert words


def test_each_word_is_explained_once():
    """Two explanations of one word would be two meanings."""
    words = [row[0] for heading in headings() for row in rows(heading)]

    assert len(words) > 60
    assert sorted(set(words)) == sorted(words)


def given_up() -> list[re.Pattern[str]]:
    """Patterns of the words that are not used any more."""
    return [
        re.compile(rf"\b({one})\b".replace(" ", r"\s+(?:#\s*)?"), re.IGNORECASE) for one in GIVEN_UP
    ]


@pytest.mark.parametrize("word", given_up(), ids=lambda word: word.pattern)
def test_a_word_that_was_given_up_does_not_come_back(word: re.Pattern[str]):
    """`GIVEN_UP` says which word it was replaced by."""
    found = [f"{name}: {match[0]}" for name, text in sources() for match in word.finditer(text)]

    assert found == []


@pytest.mark.parametrize(
    "text",
    ["a bell between them", "Ring it", "one desk", "a process\n    # slot", "turns of the loop"],
)
def test_a_word_that_was_given_up_would_be_found(text: str):
    """In any case, number, and across the end of a line of a comment."""
    assert any(word.search(text) for word in given_up())
