"""The picture of custody: who must not lose a request, from its sender to its end, and its ack."""

from __future__ import annotations

from typing import Final

from gracekit.config.choices import OnInterrupt, choices_of
from gracekit.tracker.task import TERMINAL, TRANSIENT, TaskState
from tools.pictures.svg import WIDTH, Picture

_LEFT: Final = 20.0
_COLUMN: Final = (WIDTH - 2 * _LEFT) / 4
_BAR: Final = 64
_UNJOURNALED: Final = "requeue"

_WAY: Final = ("being sent", "in the queue", "accepted or running", "ended")
_IF_LOST: Final = (
    ("The sender gets an error", "and may send it again", "by the same request id."),
    ("The queue delivers it", "again, to any process", "of the service."),
    ("The next start runs it", "again, asks its probe, or", "marks it errored."),
    ("A repeated request id", "gets the recorded", "answer and runs nothing."),
)
_IF_LOST_UNJOURNALED: Final = (
    "The queue delivers it again. If it was running, it is",
    "journaled from now on, so that its crashes are counted.",
)


def custody() -> Picture:
    """Two rows: methods whose requests are journaled, and `requeue` methods."""
    journaled = [word for word in choices_of(OnInterrupt) if word != _UNJOURNALED]
    picture = Picture("Who is responsible for a request", _description(journaled), 546)
    for number, words in enumerate(_WAY):
        picture.text(_x(number) + 12, 64, words, "soft")
    _draw_journaled(picture, journaled)
    _draw_unjournaled(picture)
    return picture


def _description(journaled: list[str]) -> str:
    words = ", ".join(journaled)
    return (
        "The sender is responsible for a request until the queue confirms it; then cast returns. "
        f"The queue is responsible until the request is accepted: with on_interrupt {words} that "
        "is a commit to the journal, and only after it the message is acknowledged. The journal "
        f"keeps the task while it is {_listed(_states(TRANSIENT))}, until a commit records its "
        f"outcome: {_listed(_states(TERMINAL))}. Then the reply is sent. With on_interrupt "
        f"{_UNJOURNALED} there is no journal row: the queue keeps the message until the handler "
        "has ended, and only then the message is acknowledged."
    )


def _states(states: frozenset[TaskState]) -> list[str]:
    """As people write them, in the order of the enum; REJECTED never was a task."""
    found = [state for state in TaskState if state in states and state is not TaskState.REJECTED]
    return [state.word.replace("_", " ") for state in found]


def _listed(words: list[str]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1]


def _x(column: int) -> float:
    return _LEFT + column * _COLUMN


def _draw_journaled(picture: Picture, journaled: list[str]) -> None:
    top = 78
    words = ", ".join(f'"{word}"' for word in journaled)
    _draw_head(picture, top, words)
    _bar(picture, 0, 1, top, "grey", "sender")
    _bar(picture, 1, 2, top, "amber", "queue")
    _bar(picture, 2, 3, top, "blue", "journal", *_in_pairs(_states(TRANSIENT)))
    _bar(picture, 3, 4, top, "green", "nobody", *_in_pairs(_states(TERMINAL)))
    _step(picture, 1, top, "the queue confirms,", "cast returns")
    _step(picture, 2, top, "commit to the journal,", "ack")
    _step(picture, 3, top, "commit of the outcome,", "reply")
    picture.text(_x(0) + 12, top + 180, "If a process or a connection dies meanwhile:", "small")
    for number, lines in enumerate(_IF_LOST):
        picture.texts(_x(number) + 12, top + 201, lines, "soft")


def _draw_unjournaled(picture: Picture) -> None:
    top = 328
    _draw_head(picture, top, f'"{_UNJOURNALED}"')
    _bar(picture, 0, 1, top, "grey", "sender")
    _bar(picture, 1, 3, top, "amber", "queue")
    _bar(picture, 3, 4, top, "green", "nobody", "no record is kept")
    _step(picture, 1, top, "the queue confirms,", "cast returns")
    _step(picture, 3, top, "reply,", "ack")
    picture.texts(_x(1) + 12, top + 182, _IF_LOST_UNJOURNALED, "soft")


def _draw_head(picture: Picture, top: int, words: str) -> None:
    picture.line(_LEFT, top, WIDTH - _LEFT, top)
    picture.text(_LEFT, top + 24, f"on_interrupt = {words}", "strong")


def _bar(picture: Picture, start: int, end: int, top: int, kind: str, *words: str) -> None:
    picture.box(_x(start) + 3, top + 38, _x(end) - _x(start) - 6, _BAR, kind)
    picture.text(_x(start) + 12, top + 58, words[0], "strong")
    picture.texts(_x(start) + 12, top + 76, words[1:])


def _in_pairs(words: list[str]) -> list[str]:
    return [", ".join(words[number : number + 2]) for number in range(0, len(words), 2)]


def _step(picture: Picture, boundary: int, top: int, first: str, second: str) -> None:
    """What moves the request on; an ack is what people look for, so it stands out."""
    x, y = _x(boundary), top + 38 + _BAR
    picture.arrow(x, y + 20, x, y + 5, "flow")
    picture.text(x, y + 34, first, "small", anchor="middle")
    if second == "ack":
        picture.box(x - 26, y + 39, 52, 20, "red")
        picture.text(x, y + 54, "ack", "strong", anchor="middle")
    else:
        picture.text(x, y + 52, second, "small", anchor="middle")
