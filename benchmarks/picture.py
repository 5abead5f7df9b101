"""The picture: a bar for each figure, its goal as a mark, on a scale where bare is 1.

Written as SVG text: a drawing library would be the largest thing installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.measure import Figure
from benchmarks.table import number

_WIDTH: Final = 980
_LEFT: Final = 330  # where bars begin
_RIGHT: Final = 700  # where the longest ends
_ROW: Final = 19
_GROUP: Final = 34
_LEAST, _MOST = 0.125, 8.0  # ends of the scale, which is logarithmic
_TICKS: Final = (0.125, 0.25, 0.5, 1, 2, 4, 8)
_COLOURS: Final = {None: "#8fa3b8", True: "#3a7d44", False: "#c2571a"}
_STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#222}.head{font-weight:600}.small{font-size:11px;"
    "fill:#666}.grid{stroke:#ddd}.one{stroke:#888}.goal{stroke:#111;stroke-width:2}"
    ".spread{stroke:#111;stroke-opacity:.45}"
)


def draw(figures: Sequence[Figure], machine: Mapping[str, str]) -> str:
    """The SVG text of all figures that have something to be set against."""
    shown = [figure for figure in figures if figure.bare is not None or figure.goal is not None]
    parts, y = [], 64
    for bench, group in groupby(shown, key=lambda figure: figure.bench):
        parts.append(f'<text class="head" x="12" y="{y + 14}">{escape(bench)}</text>')
        y += 20
        for figure in group:
            parts += _bar(figure, y)
            y += _ROW
        y += _GROUP - _ROW
    head = "how often the bare cost (or the goal, where nothing bare exists); black mark: goal"
    notes = escape(" · ".join(machine.values()))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 10}" role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{y + 10}" fill="#fff"/>',
            f'<text class="head" x="12" y="20">What gracekit costs: {escape(head)}</text>',
            f'<text class="small" x="12" y="37">{notes}</text>',
            *_grid(y),
            *parts,
            "</svg>\n",
        )
    )


def _grid(bottom: int) -> list[str]:
    found = []
    for tick in _TICKS:
        x, kind = _x(tick), "one" if tick == 1 else "grid"
        found.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="60" y2="{bottom}"/>')
        found.append(f'<text class="small" x="{x}" y="55" text-anchor="middle">{tick:g}x</text>')
    return found


def _bar(figure: Figure, y: int) -> list[str]:
    """Bar from 1 to the value, so that better and worse than bare go different ways."""
    scale = 1.0 if figure.bare is not None or figure.goal is None else figure.goal.limit
    value, low, high = (_x(v / scale) for v in (figure.value, figure.low, figure.high))
    one, colour, middle = _x(1), _COLOURS[figure.met], y + 8
    wide = max(1.0, abs(value - one))
    parts = [
        f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(figure.case)}</text>',
        f'<rect x="{min(one, value)}" y="{y + 2}" width="{wide:.1f}" height="12" fill="{colour}"/>',
        f'<line class="spread" x1="{low}" x2="{high}" y1="{middle}" y2="{middle}"/>',
        f'<text x="{_RIGHT + 14}" y="{y + 12}">{escape(_words(figure))}</text>',
    ]
    if figure.goal is not None:
        goal = _x(figure.goal.limit / scale)
        parts.append(f'<line class="goal" x1="{goal}" x2="{goal}" y1="{y}" y2="{y + 16}"/>')
    return parts


def _words(figure: Figure) -> str:
    told = f"{number(figure.ours)} {figure.unit}"
    if figure.bare is not None:
        told = f"{figure.value:.2f} ({told})"
    verdict = {None: "", True: ", met", False: ", MISSED"}[figure.met]
    return told + (f"; goal {figure.goal}{verdict}" if figure.goal is not None else "")


def _x(value: float) -> float:
    share = math.log(min(_MOST, max(_LEAST, value)) / _LEAST) / math.log(_MOST / _LEAST)
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)
