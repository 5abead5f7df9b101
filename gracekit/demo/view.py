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

from gracekit.demo.files import Entry
from gracekit.demo.story import DRAIN_S, Snapshot
from gracekit.tracker.task import TaskState

_LABEL: Final = 19
_WORDS: Final = 14
_LEAST_COLUMNS: Final = 64
_LEAST_LINES: Final = 21  # the rows of the story
_LENGTH_S: Final = 21.0
_BAR: Final = 20

_COLOURS: Final = {"A": "36", "B": "35", "C": "34", "wait": "33", "good": "32", "bad": "31"}
_WAITING: Final = ("sent", "accepted")


class Cell(msgspec.Struct, frozen=True):
    """One cell of a row: its character and colour."""

    sign: str
    colour: str = ""


_EMPTY: Final = Cell(" ")
_ENDED: Final = ("✓", "✗")
_INSTANT_S: Final = 1e-6  # a mark of one cell


class SilentView:
    """Displays nothing, for `--json`."""

    def show(self, snapshot: Snapshot) -> None:
        """See `View`."""

    def say(self, text: str) -> None:
        """See `View`."""


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
    _history: dict[str, list[tuple[float, Cell]]] = msgspec.field(default_factory=dict)
    _words: dict[str, str] = msgspec.field(default_factory=dict)
    _pings: int = 0

    def say(self, text: str) -> None:
        """Show a step of the story as the caption."""
        self._caption = text

    def show(self, snapshot: Snapshot) -> None:
        """Draw the table over the last one."""
        self._remember(snapshot)
        columns, lines = shutil.get_terminal_size()
        drawing = list(self._lines(snapshot, max(_LEAST_COLUMNS, columns) - 1))
        drawing = drawing[: max(4, lines - 1)]
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        self.write(up + "".join(f"{line}\x1b[K\n" for line in drawing))
        self._drawn = len(drawing)

    # -- remembering -------------------------------------------------------------------

    def _remember(self, snapshot: Snapshot) -> None:
        for name, phase in snapshot.phases.items():
            self._note(f"process {name}", snapshot.now_s, _process_mark(name, phase), phase)
        for request in snapshot.asked:
            who, word = _who_and_word(snapshot, request)
            cell = _request_mark(snapshot.rows.get(request["id"]))
            words = f"{word.partition(',')[0]} {who}" if cell.sign in ("█", *_ENDED) else word
            self._note(request["label"], snapshot.now_s, cell, words.partition(",")[0])
        for ping in snapshot.pings[self._pings :]:
            self._note_ping(snapshot, ping)
        self._pings = len(snapshot.pings)

    def _note(self, label: str, now_s: float, cell: Cell, words: str) -> None:
        drawn = self._history.setdefault(label, [])
        shown, self._words[label] = self._words.get(label), words
        if cell.sign in _ENDED:
            if shown != words:
                drawn += [(now_s, cell), (now_s + _INSTANT_S, _EMPTY)]
        elif not drawn or drawn[-1][1] != cell:
            drawn.append((now_s, cell))

    def _note_ping(self, snapshot: Snapshot, ping: Entry) -> None:
        answer, at_s = ping["answer"], ping["at"] - snapshot.began_at
        cell = Cell("•", "good") if answer else Cell("x", "bad")
        drawn = self._history.setdefault("ops ping", [])
        drawn += [(at_s, cell), (at_s + _INSTANT_S, _EMPTY)]
        said = f"answered {answer['process']}" if answer else "no answer"
        self._words["ops ping"] = said

    # -- drawing -----------------------------------------------------------------------

    def _lines(self, snapshot: Snapshot, columns: int) -> Iterator[str]:
        cells = columns - _LABEL - _WORDS
        cell_s = max(_LENGTH_S, snapshot.now_s + 1) / cells
        yield f"{snapshot.now_s:5.1f}s  {self._countdown(snapshot)}"
        yield f"        {self._caption}"[:columns]
        yield ""
        first = [label for label in self._history if label.startswith("process")]
        requests = [r["label"] for r in snapshot.asked]
        for label in (*first, "ops ping", *requests):
            if label in self._history:
                drawn = groupby(self._cells(label, cells, cell_s, snapshot.now_s))
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

    def _cells(self, label: str, cells: int, cell_s: float, now_s: float) -> Iterator[Cell]:
        """The cells of a row: each shows a mark within its time, or else the state at its end."""
        drawn = self._history[label]
        for number in range(cells):
            begin, end = number * cell_s, (number + 1) * cell_s
            if begin > now_s:
                yield _EMPTY
                continue
            within = [cell for at, cell in drawn if begin <= at < end and cell != _EMPTY]
            before = [cell for at, cell in drawn if at < end]
            yield within[-1] if within else before[-1] if before else _EMPTY

    def _paint(self, text: str, colour: str) -> str:
        code = _COLOURS.get(colour)
        return f"\x1b[{code}m{text}\x1b[0m" if code and self.colours and text else text


def _process_mark(name: str, phase: str) -> Cell:
    match phase.partition(" ")[0]:
        case "starting":
            return Cell("░", name)
        case "draining":
            return Cell("▓", "wait")
        case "gone":
            return _EMPTY
        case _:
            return Cell("█", name)


def _request_mark(row: Mapping[str, str | None] | None) -> Cell:
    if row is None:
        return Cell("·")
    match row["state"]:
        case "accepted":
            return Cell("░")
        case "running":
            return Cell("█", row["process"] or "")
        case "handed_over":
            return Cell("▒", "wait")
        case TaskState.SUCCEEDED.value:
            return Cell("✓", "good")
        case _:
            return Cell("✗", "bad")


def can_draw(*, is_terminal: bool, encoding: str | None) -> bool:
    """Whether the terminal can show the table; if not, `PlainView` is used."""
    columns, lines = shutil.get_terminal_size()
    is_large = columns >= _LEAST_COLUMNS and lines >= _LEAST_LINES
    utf = (encoding or "").lower().replace("-", "") == "utf8"
    return is_terminal and utf and is_large and os.environ.get("TERM") != "dumb"
