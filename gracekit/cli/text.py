"""Text for terminals: tables, durations and JSON, all of it harmless to show.

Everything that came from a wire or a row passes `safe` or `json_text`, so that
no name or result can move the cursor or forge a line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import click

from gracekit.config.urls import redact_url
from gracekit.config.values import duration
from gracekit.telemetry.safe_text import LONGEST_TEXT, escape

_GAP: Final = "  "
LONGEST_WHY: Final = 1024
"""Characters of a sentence that says why something is not shown."""
_MINUTE_S: Final = 60

Colour = Literal["green", "yellow", "red", "bold"]


def safe(value: object, *, longest: int = LONGEST_TEXT) -> str:
    """*value* on one line without control characters, cut at *longest*; `-` for None and empty."""
    text = "-" if value is None else str(value)
    return escape(text, longest=longest) or "-"


def json_text(value: Any) -> str:
    """*value* as JSON text, without logins of URLs; unseen letters are escaped."""
    return verbatim_json(_redacted(value))


def verbatim_json(value: Any) -> str:
    """As `json_text`, for the result of a call, which is the caller's own: nothing is left out."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _redacted(value: Any) -> Any:
    """*value*, without the logins of URLs that stand in its texts, as `safe` shows them."""
    match value:
        case str():
            return redact_url(value)
        case dict():
            return {key: _redacted(item) for key, item in value.items()}
        case list() | tuple():
            return [_redacted(item) for item in value]
        case None | bool() | int() | float():
            return value
    return redact_url(str(value))


def requested_words(requested: Mapping[str, Any]) -> str:
    """`memory_mb=8192 zone=a`: what a parked task asks for; numbers and lists as in JSON."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in requested.items()
    )


def progress_words(progress: Mapping[str, Any]) -> str:
    """`41 of 100 copying, 12s ago`: what a handler has said by `ctx.progress`, and when."""
    of = "" if progress["of"] is None else f" of {progress['of']}"
    note = f" {progress['note']}" if progress["note"] else ""
    return f"{progress['done']}{of}{note}, {duration(max(0.0, time.time() - progress['at']))} ago"


def clock(seconds: float) -> str:
    """`00:42`, as a stop watch shows it."""
    whole = max(0, int(seconds))
    return f"{whole // _MINUTE_S:02d}:{whole % _MINUTE_S:02d}"


def plural(number: int, noun: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def counts(numbers: Iterable[tuple[str, int]]) -> str:
    """`2 running, 1 accepted`; empty if there are none."""
    return ", ".join(f"{number} {name}" for name, number in numbers if number)


def paint(text: str, colour: Colour) -> str:
    """*text* in colour, where NO_COLOR is not set; click takes it off again outside terminals."""
    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, bold=True) if colour == "bold" else click.style(text, fg=colour)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their longest cell; cells are made safe."""
    cells = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    lines = [_line(headers, widths, bold=True), *(_line(row, widths) for row in cells)]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], *, bold: bool = False) -> str:
    text = _GAP.join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return paint(text.rstrip(), "bold") if bold else text.rstrip()
