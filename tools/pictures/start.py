"""The picture of a start: the list of `gracekit/runtime/start_order.py`, in stages."""

from __future__ import annotations

import ast
import inspect
from typing import Final, NamedTuple

from gracekit import Settings
from gracekit.config.values import format_duration
from gracekit.drain.coordinator import RECORD
from gracekit.runtime import start_order
from tools.pictures.svg import WIDTH, Picture

_LEFT: Final = 20.0
_TOP: Final = 84
_ROW: Final = 54
_SEEN: Final = 506.0  # where the column of what others see begins


class _Stage(NamedTuple):
    """Some parts that follow each other.

    Attributes:
        name: What happens, in a few words.
        does: The same in a sentence; durations of settings in braces.
        seen: What works from then on; empty for nothing that others see.
        parts: Their names in the list, from the top down; those with a step of the stop alone too.
        kind: Its colour.
    """

    name: str
    does: str
    seen: str
    parts: tuple[str, ...]
    kind: str = "grey"


_STAGES: Final = (
    _Stage(
        "Open",
        "opens the store, takes the lock of its instance, records the run",
        "probe /livez",
        (
            "end of the watchdog",
            "HTTP endpoint",
            "store and seat",
            "count of accounts",
            "wake-ups",
            RECORD,
            "hosts",
        ),
    ),
    _Stage(
        "Take over",
        "takes over the unfinished tasks of runs that are proven dead",
        "gracekit status and the like",
        ("kinds", "door", "adoption", "history"),
        "amber",
    ),
    _Stage(
        "Connect",
        "connects to the queue; checks that no other store uses it",
        "",
        ("transport", "answers", "outbox", "epoch", "foreign readers", "deadlines"),
    ),
    _Stage(
        "Hooks",
        "calls the on_start hooks of the service",
        "",
        ("untracked work", "hooks", "threads"),
    ),
    _Stage(
        "Read ops requests",
        "opens the intake of the ops topic",
        "ops methods",
        ("ops server",),
        "green",
    ),
    _Stage(
        "Gate",
        "makes requests wait for the resources of unfinished tasks",
        "",
        ("gate",),
        "amber",
    ),
    _Stage(
        "Read new requests",
        "opens the intake of new requests",
        "all methods",
        ("new-request server",),
        "green",
    ),
    _Stage(
        "Serving",
        "the state of the service becomes serving",
        "probes /startupz and /readyz",
        ("state",),
        "green",
    ),
    _Stage(
        "Background",
        "settles unfinished tasks, now and every {reconcile_every_s}; runs jobs",
        "systemd is notified: READY=1",
        (
            "recovery",
            "reconciler",
            "jobs",
            "watch",
            "beat",
            "tidying",
            "facts",
            "watchdog",
        ),
        "blue",
    ),
)


def listed_parts() -> list[str]:
    """Names of all parts, as the list in the source has them."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(start_order.in_order)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ListedPart"
    ]
    calls.sort(key=lambda call: call.lineno)
    return [
        RECORD if ast.unparse(call.args[0]) == "RECORD" else ast.literal_eval(call.args[0])
        for call in calls
    ]


def start() -> Picture:
    """The stages from the top down.

    Raises:
        ValueError: the stages do not name the parts of the list, in its order.
    """
    named = [part for stage in _STAGES for part in stage.parts]
    if named != (listed := listed_parts()):
        raise ValueError(f"the stages name {named}, and start_order.py has {listed}")
    height = _TOP + len(_STAGES) * _ROW + 44
    picture = Picture("The order of a start", _description(), height)
    picture.text(_SEEN, _TOP - 14, "works from now on", "soft")
    picture.arrow(_LEFT + 13, _TOP, _LEFT + 13, _TOP + len(_STAGES) * _ROW, "flow")
    for number, stage in enumerate(_STAGES):
        _draw(picture, stage, number)
    foot = "The last steps of a drain stop the same parts, from the last one up."
    picture.text(_LEFT, height - 20, foot, "soft")
    return picture


def _does(stage: _Stage) -> str:
    return stage.does.format(reconcile_every_s=format_duration(Settings().reconcile_every_s))


def _description() -> str:
    steps = [
        f"{number}. {stage.name}: {_does(stage)}."
        + (f" From now on works: {stage.seen}." if stage.seen else "")
        for number, stage in enumerate(_STAGES, 1)
    ]
    return " ".join(steps) + " The last steps of a drain stop the same parts, from the last one up."


def _draw(picture: Picture, stage: _Stage, number: int) -> None:
    y = _TOP + number * _ROW
    picture.box(_LEFT, y, 26, 26, stage.kind)
    picture.text(_LEFT + 13, y + 18, str(number + 1), "strong", anchor="middle")
    picture.text(_LEFT + 42, y + 14, stage.name, "strong")
    picture.text(_LEFT + 42, y + 33, _does(stage), "small")
    if stage.seen:
        picture.text(_SEEN, y + 18, stage.seen, "strong")
    picture.line(_LEFT + 42, y + _ROW - 8, WIDTH - _LEFT, y + _ROW - 8)
