"""`--watch`: shows a command's output again and again, until Ctrl-C.

On a terminal each output replaces the last one; elsewhere they follow each other, and with
`--json` each is a line.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

import click
import msgspec

from gracekit.cli.main import tell
from gracekit.cli.text import LONGEST_WHY, json_line, safe
from gracekit.config.values import format_duration, parse_duration
from gracekit.errors import ConfigError, GracekitError

EVERY: Final = "2s"
SHORTEST_S: Final = 0.1

_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """What a command shows once.

    Attributes:
        text: For people.
        data: For `--json`.
    """

    text: str
    data: dict[str, Any]


def _seconds(_ctx: click.Context, _parameter: click.Parameter, given: str | None) -> float | None:
    if given is None:
        return None
    try:
        seconds = parse_duration(given)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if seconds < SHORTEST_S:
        raise click.BadParameter(f"{given} is below {format_duration(SHORTEST_S)}")
    return seconds


watch_option: Final = click.option(
    "--watch",
    "every_s",
    is_flag=False,
    flag_value=EVERY,
    metavar="[DURATION]",
    callback=_seconds,
    help=f"Show it again every DURATION until Ctrl-C, by default every {EVERY}; with --json a "
    "line each time.",
)


def watch(look: Callable[[], Picture], *, every_s: float, as_json: bool) -> NoReturn:
    """Show what *look* returns again and again.

    If the first *look* raises, the command ends. Later errors are shown, because a store or a run
    may be unavailable for a moment only. With `--json` they are messages on standard error:
    standard output has documents of the command alone.
    """
    over_the_last = not as_json and is_redrawn()
    picture = look()
    if over_the_last:
        click.clear()
    while True:
        if as_json:
            click.echo(json_line(picture.data))
        elif over_the_last:
            head = f"{time.strftime('%H:%M:%S')}, every {format_duration(every_s)}; Ctrl-C ends"
            redraw(f"{head}\n\n{picture.text}")
        else:
            click.echo(f"\n{picture.text}")
        picture = _next(look, every_s=every_s, as_json=as_json)


def _next(look: Callable[[], Picture], *, every_s: float, as_json: bool) -> Picture:
    while True:
        time.sleep(every_s)
        try:
            return look()
        except GracekitError as error:
            if not as_json:
                why = safe(str(error), longest=LONGEST_WHY)
                return Picture(text=f"nothing to show now: {why}", data={})
            tell(str(error))


def is_redrawn() -> bool:
    """Whether standard output is a terminal whose cursor can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def redraw(text: str) -> None:
    """Replace what the terminal shows by *text*, in one write, cut to its size."""
    size = shutil.get_terminal_size()
    lines = _that_fit(text.splitlines(), size.columns, size.lines - 1)
    body = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
    click.echo(f"{_HOME}{body}{_CLEAR_BELOW}", nl=False)


def _that_fit(lines: list[str], columns: int, rows: int) -> list[str]:
    """As many of *lines* as fit into *rows*; a long line takes several rows."""
    left = rows
    for number, line in enumerate(lines):
        left -= max(1, -(-len(click.unstyle(line)) // max(1, columns)))
        if left < 1 and number < len(lines) - 1:
            return [*lines[:number], "..."]
    return lines
