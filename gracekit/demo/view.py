"""What a spectator of the demonstration sees: a moving picture, or one line an event.

Both are made of the same scenes, and know nothing but what the files tell.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from gracekit.demo.files import Entry
from gracekit.demo.story import DRAIN_S, Scene
from gracekit.tracker.task import TaskState

_LABEL: Final = 19
_WORDS: Final = 14
_LEAST_COLUMNS: Final = 64
_LEAST_LINES: Final = 21  # the rows of the story
_LENGTH_S: Final = 21.0
_BAR: Final = 20

_COLOURS: Final = {"A": "36", "B": "35", "C": "34", "wait": "33", "good": "32", "bad": "31"}
_WAITING: Final = ("sent", "accepted")


@dataclass(frozen=True, slots=True)
class Mark:
    """One cell of a row: how it is drawn, and in which colour."""

    sign: str
    colour: str = ""


_EMPTY: Final = Mark(" ")
_ENDED: Final = ("✓", "✗")
_INSTANT_S: Final = 1e-6  # a mark of one cell


class Silent:
    """For `--json`: nothing is told on the way."""

    def show(self, scene: Scene) -> None:
        """See `View`."""

    def say(self, text: str) -> None:
        """See `View`."""


@dataclass(slots=True)
class Lines:
    """One line an event, for logs and pipes."""

    write: Callable[[str], None]
    _now_s: float = 0.0
    _told: dict[str, str] = field(default_factory=dict)
    _pings: int = 0

    def say(self, text: str) -> None:
        """A turn of the story."""
        self.write(f"{self._now_s:5.1f}s  -- {text}")

    def show(self, scene: Scene) -> None:
        """Tell what has changed since the last scene."""
        self._now_s = scene.now_s
        for name, phase in scene.phases.items():
            self._tell(name, name, phase)
        for request in scene.asked:
            who, word = _who_and_word(scene, request)
            self._tell(request["id"], who, f"{request['label']}: {word}")
        for ping in scene.pings[self._pings :]:
            if (answer := ping["answer"]) is not None and answer["draining"]:
                took = f"{1000 * ping['took_s']:.0f} ms"
                self._line(answer["process"], f"answers an ops ping in {took} while it drains")
        self._pings = len(scene.pings)

    def _tell(self, key: str, who: str, text: str) -> None:
        if self._told.get(key) != text:
            self._told[key] = text
            self._line(who, text)

    def _line(self, who: str, text: str) -> None:
        self.write(f"{self._now_s:5.1f}s  {who:<8}  {text}")


def _who_and_word(scene: Scene, request: Entry) -> tuple[str, str]:
    row = scene.rows.get(request["id"])
    if row is None:
        return request["sender"], f"sent, confirmed as {request['id'][:8]}"
    state = str(row["state"])
    word = {"succeeded": "done", "handed_over": "handed over"}.get(state, state)
    if row["state"] == "accepted" and row["process"] is None:
        word = "not started, anyone may"
    if row["state"] == "handed_over" and row["cursor"] is not None:
        word += f" after block {row['cursor']}"
    return str(row["process"] or "journal"), word


@dataclass(slots=True)
class Picture:
    """A row for each request and each process, drawn again and again in the same place."""

    write: Callable[[str], None]
    colours: bool = True
    _caption: str = ""
    _drawn: int = 0
    _history: dict[str, list[tuple[float, Mark]]] = field(default_factory=dict)
    _words: dict[str, str] = field(default_factory=dict)
    _pings: int = 0

    def say(self, text: str) -> None:
        """A turn of the story: the caption."""
        self._caption = text

    def show(self, scene: Scene) -> None:
        """Draw it over the last one."""
        self._remember(scene)
        columns, lines = shutil.get_terminal_size()
        picture = list(self._lines(scene, max(_LEAST_COLUMNS, columns) - 1))
        picture = picture[: max(4, lines - 1)]
        up = f"\x1b[{self._drawn}F" if self._drawn else ""
        self.write(up + "".join(f"{line}\x1b[K\n" for line in picture))
        self._drawn = len(picture)

    # -- remembering -------------------------------------------------------------------

    def _remember(self, scene: Scene) -> None:
        for name, phase in scene.phases.items():
            self._note(f"process {name}", scene.now_s, _process_mark(name, phase), phase)
        for request in scene.asked:
            who, word = _who_and_word(scene, request)
            mark = _request_mark(scene.rows.get(request["id"]))
            words = f"{word.partition(',')[0]} {who}" if mark.sign in ("█", *_ENDED) else word
            self._note(request["label"], scene.now_s, mark, words.partition(",")[0])
        for ping in scene.pings[self._pings :]:
            self._note_ping(scene, ping)
        self._pings = len(scene.pings)

    def _note(self, label: str, now_s: float, mark: Mark, words: str) -> None:
        marks = self._history.setdefault(label, [])
        shown, self._words[label] = self._words.get(label), words
        if mark.sign in _ENDED:
            if shown != words:
                marks += [(now_s, mark), (now_s + _INSTANT_S, _EMPTY)]
        elif not marks or marks[-1][1] != mark:
            marks.append((now_s, mark))

    def _note_ping(self, scene: Scene, ping: Entry) -> None:
        answer, at_s = ping["answer"], ping["at"] - scene.began_at
        mark = Mark("•", "good") if answer else Mark("x", "bad")
        marks = self._history.setdefault("ops ping", [])
        marks += [(at_s, mark), (at_s + _INSTANT_S, _EMPTY)]
        said = f"answered {answer['process']}" if answer else "no answer"
        self._words["ops ping"] = said

    # -- drawing -----------------------------------------------------------------------

    def _lines(self, scene: Scene, columns: int) -> Iterator[str]:
        cells = columns - _LABEL - _WORDS
        cell_s = max(_LENGTH_S, scene.now_s + 1) / cells
        yield f"{scene.now_s:5.1f}s  {self._countdown(scene)}"
        yield f"        {self._caption}"[:columns]
        yield ""
        first = [label for label in self._history if label.startswith("process")]
        requests = [r["label"] for r in scene.asked]
        for label in (*first, "ops ping", *requests):
            if label in self._history:
                marks = groupby(self._cells(label, cells, cell_s, scene.now_s))
                row = "".join(self._paint(m.sign * len([*same]), m.colour) for m, same in marks)
                yield f"{label:<{_LABEL}}{row}  {self._words[label][: _WORDS - 2]}"
        yield ""
        yield "        · in the queue  ░ accepted  █ runs  ▒ handed over  ✓ ended  • ping answered"

    def _countdown(self, scene: Scene) -> str:
        left = scene.drain_left_s
        if left is None:
            return "   ".join(f"{name} {phase}" for name, phase in scene.phases.items())
        full = round(_BAR * left / DRAIN_S)
        bar = self._paint("█" * full, "wait") + "░" * (_BAR - full)
        return f"drain {bar} {left:3.1f} s left"

    def _cells(self, label: str, cells: int, cell_s: float, now_s: float) -> Iterator[Mark]:
        """One sign a cell: what ended within it, else what was true at its end."""
        marks = self._history[label]
        for number in range(cells):
            begin, end = number * cell_s, (number + 1) * cell_s
            if begin > now_s:
                yield _EMPTY
                continue
            within = [mark for at, mark in marks if begin <= at < end and mark != _EMPTY]
            before = [mark for at, mark in marks if at < end]
            yield within[-1] if within else before[-1] if before else _EMPTY

    def _paint(self, text: str, colour: str) -> str:
        code = _COLOURS.get(colour)
        return f"\x1b[{code}m{text}\x1b[0m" if code and self.colours and text else text


def _process_mark(name: str, phase: str) -> Mark:
    match phase.partition(" ")[0]:
        case "starting":
            return Mark("░", name)
        case "draining":
            return Mark("▓", "wait")
        case "gone":
            return _EMPTY
        case _:
            return Mark("█", name)


def _request_mark(row: Mapping[str, str | None] | None) -> Mark:
    if row is None:
        return Mark("·")
    match row["state"]:
        case "accepted":
            return Mark("░")
        case "running":
            return Mark("█", row["process"] or "")
        case "handed_over":
            return Mark("▒", "wait")
        case TaskState.SUCCEEDED.value:
            return Mark("✓", "good")
        case _:
            return Mark("✗", "bad")


def can_draw(*, is_terminal: bool, encoding: str | None) -> bool:
    """Whether a picture can be drawn there: else lines are told."""
    columns, lines = shutil.get_terminal_size()
    is_large = columns >= _LEAST_COLUMNS and lines >= _LEAST_LINES
    utf = (encoding or "").lower().replace("-", "") == "utf8"
    return is_terminal and utf and is_large and os.environ.get("TERM") != "dumb"
