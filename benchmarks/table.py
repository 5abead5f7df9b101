"""The table, in Markdown: readable in a terminal, and pasted into the README as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.measure import Figure

_HEAD: Final = (
    "bench",
    "what",
    "ours",
    "bare",
    "",
    "ours / bare",
    "quartiles",
    "worst",
    "goal",
    "",
)
_WIDTHS: Final = (8, 42, 9, 9, 10, 11, 13, 7, 7, 6)


def lines(figures: Sequence[Figure]) -> list[str]:
    """Head and one line a figure."""
    return [_line(_HEAD), _line(["-" * width for width in _WIDTHS]), *map(_row, figures)]


def _row(figure: Figure) -> str:
    bare = "" if figure.bare is None else number(figure.bare)
    ratio = "" if figure.bare is None else f"{figure.value:.2f}"
    quartiles = f"{number(figure.low)} - {number(figure.high)}"
    goal = "" if figure.goal is None else str(figure.goal)
    verdict = {None: "", True: "met", False: "MISSED"}[figure.met]
    if figure.goal is not None and figure.goal.beaten(figure.value):
        verdict = "beyond"
    ours = number(figure.ours)
    cells = (figure.bench, figure.case, ours, bare, figure.unit, ratio, quartiles)
    return _line((*cells, number(figure.worst), goal, verdict))


def _line(cells: Sequence[str]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    return f"| {' | '.join(padded)} |"


def number(value: float) -> str:
    """Three digits that matter, and no more."""
    if abs(value) >= 100:  # noqa: PLR2004 - three digits before the point
        return f"{value:,.0f}"
    return f"{value:.3g}"
