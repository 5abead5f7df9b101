"""Displays the demonstration: an animated table, or one line for each event.

Both are made from the same snapshots, whose data comes only from the files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Final

import msgspec

from gracekit.demo.app import Entry
from gracekit.demo.story import DRAIN_S, Snapshot
from gracekit.tracker.task import TaskState

_LABEL: Final = 19
_WORDS: Final = 14
_LEAST_COLUMNS: Final = 64
_LEAST_LINES: Final = 21  # the rows of the story
_CELL_S: Final = 0.5
_BAR: Final = 20

_COLOURS: Final = {"A": "36", "B": "35", "C": "34", "wait": "33", "good": "32", "bad": "31"}


class Cell(msgspec.Struct, frozen=True):
    """One cell of a row: its character and colour."""

    sign: str
    colour: str = ""


_EMPTY: Final = Cell(" ")
_PROCESS: Final = {"starting": Cell("░"), "draining": Cell("▓", "wait"), "gone": _EMPTY}
_REQUEST: Final = {
    TaskState.ACCEPTED.value: Cell("░"),
    TaskState.HANDED_OVER.value: Cell("▒", "wait"),
    TaskState.SUCCEEDED.value: Cell("✓", "good"),
}
_ENDED: Final = ("✓", "✗")
_INSTANT: Final = (*_ENDED, "•", "x")  # what is drawn in one cell, and not until the next mark


class PlainView(msgspec.Struct):
    """One line for each event, for logs and pipes."""

    write: Callable[[str], None]
    _now_s: float = 0.0
    _told: dict[str, str] = msgspec.field(default_factory=dict)
    _pings: int = 0

    def say(self, text: str) -> None:
        """Write a step of the story."""
        self.write(f"{self._now_s:5.1f}s  -- {text}")

    def show(self, snapshot: Snapshot) -> None:
        """Write lines for the changes since the last snapshot."""
        self._now_s = snapshot.now_s
        for name, phase in snapshot.phases.items():
            self._tell(name, name, phase)
        for request in snapshot.asked:
            who, word = _who_and_word(snapshot, request)
            self._tell(request["id"], who, f"{request['label']}: {word}")
        for ping in snapshot.pings[self._pings :]:
            if (answer := ping["answer"]) is not None and answer["draining"]:
                took = f"{1000 * ping['took_s']:.0f} ms"
                self._line(answer["process"], f"answers an ops ping in {took} while it drains")
        self._pings = len(snapshot.pings)

    def _tell(self, key: str, who: str, text: str) -> None:
        if self._told.get(key) != text:
            self._told[key] = text
            self._line(who, text)

    def _line(self, who: str, text: str) -> None:
        self.write(f"{self._now_s:5.1f}s  {who:<8}  {text}")


def _who_and_word(snapshot: Snapshot, request: Entry) -> tuple[str, str]:
    row = snapshot.rows.get(request["id"])
    if row is None:
        return request["sender"], f"sent, confirmed as {request['id'][:8]}"
    state = str(row["state"])
    word = {"succeeded": "done", "handed_over": "handed over"}.get(state, state)
    if row["state"] == "accepted" and row["process"] is None:
        word = "not started, anyone may"
    if row["state"] == "handed_over" and row["cursor"] is not None:
        word += f" after block {row['cursor']}"
    return str(row["process"] or "journal"), word


class TableView(msgspec.Struct):
    """A table with a row for each request and process, redrawn in place."""

    write: Callable[[str], None]
    colours: bool = True
    _caption: str = ""
    _drawn: int = 0
    _rows: dict[str, list[Cell]] = msgspec.field(default_factory=dict)
    _words: dict[str, str] = msgspec.field(default_factory=dict)
    _pings: int = 0

    def say(self, text: str) -> None:
        """Show a step of the story as the caption."""
        self._caption = text

    def show(self, snapshot: Snapshot) -> None:
        """Draw the table over the last one."""
        now_s = snapshot.now_s
        for name, phase in snapshot.phases.items():
            self._note(f"process {name}", now_s, _process_mark(name, phase), phase)
        for ping in snapshot.pings[self._pings :]:
            answer = ping["answer"]
            cell = Cell("•", "good") if answer else Cell("x", "bad")
            self._note("ops ping", now_s, cell, f"answered {answer['process']}" if answer else "")
        self._pings = len(snapshot.pings)
        for request in snapshot.asked:
            who, word = _who_and_word(snapshot, request)
            cell = _request_mark(snapshot.rows.get(request["id"]))
            word = word.partition(",")[0]
            words = f"{word} {who}" if cell.sign in ("█", *_ENDED) else word
            self._note(request["label"], now_s, cell, words)
        columns, lines = shutil.get_terminal_size()
        drawing = [*self._lines(snapshot, max(_LEAST_COLUMNS, columns) - 1)][: max(4, lines - 1)]
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        self.write(up + "".join(f"{line}\x1b[K\n" for line in drawing))
        self._drawn = len(drawing)

    def _note(self, label: str, now_s: float, cell: Cell, words: str) -> None:
        """Draw *cell* from the last one in that row until now, or only now if it is an instant."""
        if cell.sign in _ENDED and self._words.get(label) == words:
            return  # it is in the row already
        self._words[label] = words
        row, at = self._rows.setdefault(label, []), int(now_s / _CELL_S)
        between = row[-1] if row and row[-1].sign not in _INSTANT else _EMPTY
        row += [between] * (at - len(row))
        row[at:] = [cell]

    def _lines(self, snapshot: Snapshot, columns: int) -> Iterator[str]:
        cells = columns - _LABEL - _WORDS
        joined = 1 + int(snapshot.now_s / _CELL_S) // cells  # so that a long story fits, too
        yield f"{snapshot.now_s:5.1f}s  {self._countdown(snapshot)}"
        yield f"        {self._caption}"[:columns]
        yield ""
        for label in sorted(self._rows, key=_place):
            marks = [*_joined(self._rows[label], joined)]
            drawn = groupby(marks + [_EMPTY] * (cells - len(marks)))
            row = "".join(self._paint(m.sign * len([*same]), m.colour) for m, same in drawn)
            yield f"{label:<{_LABEL}}{row}  {self._words[label][: _WORDS - 2]}"
        yield ""
        yield "        · in the queue  ░ accepted  █ runs  ▒ handed over  ✓ ended  • ping answered"

    def _countdown(self, snapshot: Snapshot) -> str:
        left = snapshot.drain_left_s
        if left is None:
            return "   ".join(f"{name} {phase}" for name, phase in snapshot.phases.items())
        full = round(_BAR * left / DRAIN_S)
        bar = self._paint("█" * full, "wait") + "░" * (_BAR - full)
        return f"drain {bar} {left:3.1f} s left"

    def _paint(self, text: str, colour: str) -> str:
        code = _COLOURS.get(colour)
        return f"\x1b[{code}m{text}\x1b[0m" if code and self.colours and text else text


def _joined(row: list[Cell], number: int) -> Iterator[Cell]:
    for at in range(0, len(row), number):
        cells = [cell for cell in row[at : at + number] if cell != _EMPTY]
        yield cells[-1] if cells else _EMPTY


def _place(label: str) -> int:
    return 0 if label.startswith("process") else 1 if label == "ops ping" else 2


def _process_mark(name: str, phase: str) -> Cell:
    return _PROCESS.get(phase.partition(" ")[0], Cell("█", name))


def _request_mark(row: Mapping[str, str | None] | None) -> Cell:
    if row is None:
        return Cell("·")
    if row["state"] == TaskState.RUNNING.value:
        return Cell("█", row["process"] or "")
    return _REQUEST.get(row["state"] or "", Cell("✗", "bad"))


def can_draw(*, is_terminal: bool, encoding: str | None) -> bool:
    """Whether the terminal can show the table; if not, `PlainView` is used."""
    columns, lines = shutil.get_terminal_size()
    is_large = columns >= _LEAST_COLUMNS and lines >= _LEAST_LINES
    utf = (encoding or "").lower().replace("-", "") == "utf8"
    return is_terminal and utf and is_large and os.environ.get("TERM") != "dumb"
