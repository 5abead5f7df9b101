"""How `gracekit drain` shows a drain: in flight over time, and why each task still blocks it.

The chart is plain text. It needs the extra `rich` and a terminal, where it is redrawn in place;
otherwise `cli.drain` prints lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gracekit.cli.text import safe
from gracekit.cli.watch import is_redrawn
from gracekit.config.values import duration
from gracekit.listings.reports import RunAnswer
from gracekit.rpc.oslo_wire import MAX_NAME
from gracekit.tracker.task import Lane, TaskState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

ROWS: Final = 6
"""Height of a chart."""
NARROWEST: Final = 20
DEADLINE: Final = "│"
KILL: Final = "┃"
_BARS: Final = " ▁▂▃▄▅▆▇█"
_LANES: Final = {
    Lane.OPS.value: "ops method",
    Lane.PERIODIC.value: "periodic job",
    Lane.BACKGROUND.value: "work of a handler",
}

CountAt = tuple[float, int]
"""Seconds since the drain began, and how many tasks were in flight from then on."""


def why_it_blocks(task: RunAnswer) -> str:
    """`work vm:12 (order-1): no safe point since 12s`: a task of a run's status, in words.

    A hook has the id of the task that it is called for.
    """
    what = " ".join(safe(task[key]) for key in ("method", "resource") if task.get(key))
    about = task.get("about")
    name = f"{what} ({safe(about or task.get('task_id'), longest=MAX_NAME)})"
    lane = None if about else _LANES.get(str(task.get("lane")))
    return f"{name}: {f'{lane}, ' if lane else ''}{_why(task)}"


def _why(task: RunAnswer) -> str:
    if task.get("waits_for"):
        return f"waits for {safe(task['waits_for'])}"
    if task.get("state") != TaskState.RUNNING.value:
        return f"{safe(task.get('state'))} for {duration(task.get('age_s'))}"
    if task.get("cancelled_by"):
        return f"cancelled ({safe(task['cancelled_by'])}), and it has not returned"
    if task.get("about"):
        return f"running for {duration(task.get('age_s'))}"
    since = task.get("safe_point_age_s")
    if since is None:
        return f"running for {duration(task.get('age_s'))}, no safe point yet"
    return f"no safe point since {duration(since)}"


class DrainPicture(msgspec.Struct, kw_only=True):
    """The picture of one drain.

    Attributes:
        title: A line above the chart.
        levels: Each change of the number in flight: since when, and how many.
        now_s: Seconds since the drain began.
        deadline_s: When tasks are cancelled, on the same clock.
        kill_s: When the platform would kill the process; None if that is not known.
        reasons: Lines below the chart.
    """

    title: str
    levels: Sequence[CountAt]
    now_s: float
    deadline_s: float
    kill_s: float | None
    reasons: Sequence[str]

    def lines(self, width: int) -> list[str]:
        """The picture, *width* characters wide."""
        return [self.title, *self._chart(width), *(f"  {reason}" for reason in self.reasons)]

    def _chart(self, width: int) -> list[str]:
        most = max((number for _, number in self.levels), default=0)
        margin = len(str(most))
        columns = max(NARROWEST, width - margin - 3)
        span = max(self.deadline_s, self.kill_s or 0.0, self.now_s, 1.0) * 1.05
        values = self._values(columns, span)
        marks = self._marks(columns, span)
        rows = []
        for row in reversed(range(ROWS)):
            label = str(most) if row == ROWS - 1 else "0" if row == 0 else ""
            cells = (
                marks.get(column) or _bar(value, most, row) for column, value in enumerate(values)
            )
            rows.append(f"{label:>{margin}} ┤{''.join(cells)}".rstrip())
        return [*rows, " " * (margin + 2) + self._legend(columns)]

    def _values(self, columns: int, span: float) -> list[int]:
        """The largest number in flight in the time of each column; 0 in the future."""
        values = [0] * columns
        ends = [*(at for at, _ in self.levels[1:]), self.now_s]
        for (begin, number), end in zip(self.levels, ends, strict=True):
            first, last = (min(columns - 1, int(at / span * columns)) for at in (begin, end))
            for column in range(first, last + 1):
                values[column] = max(values[column], number)
        return values

    def _marks(self, columns: int, span: float) -> dict[int, str]:
        marks = {int(self.deadline_s / span * columns): DEADLINE}
        if self.kill_s is not None:
            marks[int(self.kill_s / span * columns)] = KILL
        return marks

    def _legend(self, columns: int) -> str:
        words = f"{DEADLINE} deadline {duration(self.deadline_s)}"
        if self.kill_s is not None:
            words += f"   {KILL} kill_after {duration(self.kill_s)}"
        return f"{words:>{columns}}"


def _bar(value: int, most: int, row: int) -> str:
    """The part of a column that is in one row; the lowest row is 0."""
    eighths = round(value / most * ROWS * 8) if most else 0
    if value and row == 0:
        eighths = max(1, eighths)
    return _BARS[max(0, min(8, eighths - row * 8))]


class Burndown:
    """Redraws drains in place on a terminal."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live
        self._pictures: dict[str, DrainPicture] = {}
        self._shown = ""

    def show(self, run_id: str, picture: DrainPicture | None) -> None:
        """Draw one run's drain as it stands now; None removes it."""
        from rich.text import Text  # noqa: PLC0415 - an extra

        if picture is None:
            self._pictures.pop(run_id, None)
        else:
            self._pictures[run_id] = picture
        width = self._console.width
        lines = [line for one in self._pictures.values() for line in (*one.lines(width), "")]
        shown = "\n".join(lines[:-1])
        if shown == self._shown:
            return
        self._shown = shown
        text = Text(shown, no_wrap=True, overflow="ellipsis")
        text.highlight_regex(DEADLINE, "yellow")
        text.highlight_regex(KILL, "red")
        self._live.update(text, refresh=True)

    def say(self, line: str) -> None:
        """Print a line above the drawing."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def burndown(*, wanted: bool) -> Iterator[Burndown | None]:
    """Show a drawing of the drain; None if none is wanted, or without a terminal or `rich`."""
    made = _rich() if wanted and is_redrawn() else None
    if made is None:
        yield None
        return
    console, live = made
    with live:
        yield Burndown(console, live)


def _rich() -> tuple[Console, Any] | None:
    try:
        from rich.console import Console  # noqa: PLC0415 - an extra
        from rich.live import Live  # noqa: PLC0415
    except ImportError:
        return None
    console = Console(highlight=False)
    if not _is_unicode(console.encoding):
        return None
    return console, Live(console=console, auto_refresh=False, transient=True)


def _is_unicode(encoding: str) -> bool:
    try:
        (_BARS + DEADLINE + KILL).encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True
