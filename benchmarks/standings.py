"""All workers side by side: a table with a line for each, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.measure import quantile
from benchmarks.table import number

RATE_OF_CASTS: Final = "casts"
CPU_OF_A_CAST: Final = "processor time of a cast"
CPU_OF_A_CALL: Final = "processor time of a call, 32"
KEPT: Final = "memory of a request in flight"
IDLE: Final = "idle"
OWN: Final = ", own client"
"""Behind a case of calls: called by its own library's client, and not by the lean caller."""
OWN_CPU_OF_A_CALL: Final = "client's processor time of a call, 32"
WIDTHS: Final = (1, 32, 256)
"""So many calls wait at one time."""


def rate_of_calls(waiting: int) -> str:
    """The case of their rate."""
    return f"calls, {waiting} waiting"


def latency(share: str, waiting: int) -> str:
    """The case of p50 or p99."""
    return f"{share} of a call, {waiting}"


@dataclass(frozen=True, slots=True)
class Standing:
    """What one worker was seen to do.

    Attributes:
        label: Its name, for people.
        ours: Whether it is gracekit's.
        values: Case to its value in each round; a case that it does not have is missing.
    """

    label: str
    ours: bool
    values: Mapping[str, Sequence[float]]

    def median(self, case: str) -> float | None:
        """Over the rounds; None if it has no such case."""
        found = self.values.get(case)
        return statistics.median(found) if found else None


def side_by_side(standings: Sequence[Standing]) -> Iterator[str]:
    """The medians as Markdown."""
    heads = (
        "worker",
        "casts/s",
        "CPU ms of 1,000 casts",
        *(f"calls/s, {waiting}" for waiting in WIDTHS),
        "CPU ms of 1,000 calls, 32",
        *(f"p50 / p99 ms, {waiting}" for waiting in WIDTHS),
        "own client: p50 / p99 ms, 1",
        "own client: calls/s, 32",
        "own client: CPU ms of its 1,000 calls, 32",
        "idle ms/s",
        "KiB a request in flight",
    )
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'---:|' * (len(heads) - 1)}"
    for one in standings:
        cells = (
            one.label,
            _cell(one.median(RATE_OF_CASTS)),
            _cell(one.median(CPU_OF_A_CAST)),
            *(_cell(one.median(rate_of_calls(waiting))) for waiting in WIDTHS),
            _cell(one.median(CPU_OF_A_CALL)),
            *(
                _latencies(one, latency("p50", waiting), latency("p99", waiting))
                for waiting in WIDTHS
            ),
            _latencies(one, latency("p50", 1) + OWN, latency("p99", 1) + OWN),
            _cell(one.median(rate_of_calls(32) + OWN)),
            _cell(one.median(OWN_CPU_OF_A_CALL)),
            _cell(one.median(IDLE)),
            _cell(one.median(KEPT)),
        )
        yield f"| {' | '.join(cells)} |"


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)


def _latencies(one: Standing, *cases: str) -> str:
    half, most = map(one.median, cases)
    return "" if half is None or most is None else f"{number(half)} / {number(most)}"


# -- the picture --------------------------------------------------------------------------

_PANELS: Final = (
    (RATE_OF_CASTS, "casts/s", "more is better"),
    (rate_of_calls(32), "calls/s, 32 waiting", "more is better"),
    (CPU_OF_A_CAST, "processor time of the worker, us a cast", "less is better"),
    (CPU_OF_A_CALL, "processor time of the worker, us a call, 32 waiting", "less is better"),
)
_WIDTH: Final = 980
_LEFT: Final = 190  # where bars begin
_RIGHT: Final = 860  # where the longest ends
_ROW: Final = 19
_LINE: Final = 150  # letters
_STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#222}.head{font-weight:600}"
    ".small{font-size:11px;fill:#666}.spread{stroke:#111;stroke-opacity:.45}"
)
_COLOURS: Final = {True: "#3a7d44", False: "#8fa3b8"}


def draw(standings: Sequence[Standing], notes: Mapping[str, str]) -> str:
    """The SVG text: a panel for each question, a bar for each worker, with its quartiles."""
    parts, y = [], 22
    for line in wrap(" · ".join(f"{name} {value}" for name, value in notes.items()), _LINE):
        y += 15
        parts.append(f'<text class="small" x="12" y="{y}">{escape(line)}</text>')
    for case, title, hint in _PANELS:
        there = [(one, one.values[case]) for one in standings if one.values.get(case)]
        if not there:
            continue
        y += 14
        parts.append(f'<text class="head" x="12" y="{y + 12}">{escape(title)}</text>')
        parts.append(
            f'<text class="small" x="{_RIGHT}" y="{y + 12}" text-anchor="end">{hint}</text>'
        )
        y += 20
        most = max(quantile(sorted(values), 0.75) for _, values in there)
        for one, values in there:
            parts += _bar(one, sorted(values), most, y)
            y += _ROW
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 14}" role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{y + 14}" fill="#fff"/>',
            '<text class="head" x="12" y="20">Workers on RabbitMQ: medians and quartiles</text>',
            *parts,
            "</svg>\n",
        )
    )


def _bar(one: Standing, ordered: Sequence[float], most: float, y: int) -> list[str]:
    low, value, high = (quantile(ordered, share) for share in (0.25, 0.5, 0.75))
    begin, wide, end = (round((_RIGHT - _LEFT) * v / most, 1) for v in (low, value, high))
    colour, middle = _COLOURS[one.ours], y + 8
    return [
        f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(one.label)}</text>',
        f'<rect x="{_LEFT}" y="{y + 2}" width="{wide}" height="12" fill="{colour}"/>',
        f'<path class="spread" d="M{_LEFT + begin} {middle}H{_LEFT + end}"/>',
        f'<text x="{_LEFT + max(wide, end) + 6:.1f}" y="{y + 12}">{number(value)}</text>',
    ]
