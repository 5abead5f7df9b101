"""Tables of a page, and the commands that it shows, for tests that compare them with the code."""

from __future__ import annotations

import re
from collections.abc import Iterator


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of the same height or a greater one."""
    (marks,) = re.findall(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    _, _, below = text.partition(f"{marks} {heading}\n")
    return re.split(rf"^#{{1,{len(marks)}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a text: rows of cells, without head, rule and backquotes."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        _, _, *lines = block.splitlines()
        yield [
            [cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in lines
        ]


def commands(text: str) -> list[str]:
    """The `gracekit` commands of a page's consoles, without what stands behind `#`."""
    consoles = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for console in consoles for line in console.splitlines()]
    found = [line[2:].partition("  #")[0].strip() for line in lines if line.startswith("$ ")]
    return [line for line in found if line.startswith("gracekit ")]
