"""The picture of a drain: one that was made for it, in virtual time, with the default settings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from gracekit import Context, Done, Service, Settings
from gracekit.config.settings import ALARM_AFTER_HARD_LIMIT_S
from gracekit.config.values import format_duration
from gracekit.testing import InMemoryService, run
from tools.pictures.svg import WIDTH, Picture

# Seconds before the drain at which each of its tasks begins.
_BEGINS: Final = {"endless": 12.0, "stepped": 8.0, "usual": 7.0, "short": 2.0}
_OPS_AT: Final = 12.0

svc = Service("pictured")


@svc.rpc(on_interrupt="retry")
async def short(_: Context) -> None:
    """Ends by itself in the drain."""
    await asyncio.sleep(10)


@svc.rpc(on_interrupt="retry")
async def stepped(ctx: Context) -> None:
    """Has safe points; how long it takes is not known yet."""
    async for _ in ctx.steps(range(6)):
        await asyncio.sleep(6)


@svc.rpc(on_interrupt="retry")
async def usual(ctx: Context) -> None:
    """Has safe points; how long it takes is known by its last attempts."""
    async for _ in ctx.steps(range(6)):
        await asyncio.sleep(4)


@svc.rpc(on_interrupt="probe")
async def endless(_: Context) -> None:
    """Has no safe point and outlives the drain; cleans up when it is cancelled."""
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(1)


@endless.probe
async def _is_done(_: Context) -> Done:
    return Done(None)


@svc.ops
async def is_draining(ctx: Context) -> bool:
    """Answered also in the drain."""
    return ctx.draining


class _Watched(InMemoryService):
    """Notes each event of the drain, with the seconds since it was asked for."""

    began_at: float | None = None

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        super().hear(name, fields)
        now = asyncio.get_running_loop().time()
        if name == "drain.started":
            self.began_at, self.heard = now, []
        if self.began_at is not None:
            self.heard.append((now - self.began_at, name, dict(fields)))


class Drained:
    """How a drain went that four tasks met; all moments in seconds since it was asked for.

    Attributes:
        ends: By method: when its task ended, and how (`succeeded`, or how it was cut).
        closed: By lane: when its intake was closed.
        gone: When the run had ended.
        exit_code: Of the process.
    """

    def __init__(self) -> None:
        self.ends: dict[str, tuple[float, str]] = {}
        self.closed: dict[str, float] = {}
        self.gone, self.exit_code = 0.0, 0
        run(self._drain())

    async def _drain(self) -> None:
        async with _Watched(svc) as one:
            for _ in range(5):  # from now on its duration is known
                await one.call(usual)
            await self._begin(one)
            one.interrupt()
            await one.pass_time(_OPS_AT / 2)
            late = await one.cast(short)
            await one.pass_time(_OPS_AT / 2)
            assert await one.call(is_draining)
            await one.wait_stopped()
            assert one.state_of(late) is None  # in the queue, not in the journal
            for event in one.heard:
                self._note(*event)
            await one.start()  # settles what is left

    async def _begin(self, one: InMemoryService) -> None:
        methods = {"endless": endless, "stepped": stepped, "usual": usual, "short": short}
        rest = [*_BEGINS.values(), 0.0][1:]
        for (name, before_s), later_s in zip(_BEGINS.items(), rest, strict=True):
            one.start_call(methods[name])
            await one.pass_time(before_s - later_s)

    def _note(self, at: float, name: str, fields: Mapping[str, Any]) -> None:
        at = round(at, 3)
        match name:
            case "intake.closed":
                self.closed[fields["lane"]] = at
            case "task.finished":
                self.ends[fields["method"]] = at, fields["outcome"]
            case "task.handed_over":
                self.ends[fields["method"]] = at, fields["cut"]
            case "drain.finished":
                self.gone, self.exit_code = at, fields["exit_code"]


class _Scale:
    """Seconds to pixels: the last seconds are enlarged, since four things happen in them."""

    left, right = 196.0, WIDTH - 20.0
    bent = 510.0
    before_s = 3.0  # shown of the time before the drain

    def __init__(self, deadline_s: float, end_s: float) -> None:
        self.deadline_s = deadline_s
        self.end_s = end_s

    def __call__(self, seconds: float) -> float:
        if seconds <= self.deadline_s:
            share = (seconds + self.before_s) / (self.deadline_s + self.before_s)
            return self.left + share * (self.bent - self.left)
        share = (seconds - self.deadline_s) / (self.end_s - self.deadline_s)
        return self.bent + share * (self.right - self.bent)


_TOP: Final = 104
_ROW: Final = 46
_BAR: Final = 18


def drain() -> Picture:
    """One drain, row by row: the intakes, four tasks, and the process."""
    settings, drained = Settings(), Drained()
    at = _Scale(settings.drain_timeout_s, settings.hard_limit_s + 2 * ALARM_AFTER_HARD_LIMIT_S)
    bottom = _TOP + 7 * _ROW
    title = "A drain over time, with the default settings"
    picture = Picture(title, _description(settings, drained), bottom + 100)
    _draw_times(picture, settings, at, bottom)
    _draw_rows(picture, drained, at)
    alarm = format_duration(settings.hard_limit_s + ALARM_AFTER_HARD_LIMIT_S)
    left = "unfinished work is in the journal for the next start."
    limits = "All times are limits: a step that is done earlier ends earlier."
    notes = (
        f"A dot is a safe point. Exit code {drained.exit_code}: {left}",
        f"{limits} At {alarm} the kernel ends a process that is still there.",
    )
    picture.texts(20, bottom + 68, notes, "soft")
    return picture


def _description(settings: Settings, drained: Drained) -> str:
    deadline, limit = map(format_duration, (settings.drain_timeout_s, settings.hard_limit_s))
    ends = {name: format_duration(at) for name, (at, _) in drained.ends.items()}
    return (
        "SIGTERM comes at 0 s. The intake of new requests closes at once; ops requests are "
        f"answered until {format_duration(drained.closed['ops'])}. A task that ends by itself at "
        f"{ends['short']} succeeds. A task with safe points whose duration is unknown stops at "
        f"its next safe point at {ends['stepped']} and is handed over. One that is known to end "
        f"in time passes its safe points and succeeds at {ends['usual']}. A task without safe "
        f"points runs until the deadline at {deadline}, is cancelled, cleans up until "
        f"{ends['endless']} and is handed over. Then the process exits with code "
        f"{drained.exit_code}, before the hard limit of {limit}."
    )


def _draw_times(picture: Picture, settings: Settings, at: _Scale, bottom: int) -> None:
    """The bounds of the steps on top, and the moments at the bottom."""
    end, y = 0.0, 56
    picture.texts(20, y + 14, ("the drain takes", "at most"))
    for name, seconds in (
        ("wait for tasks", settings.drain_timeout_s),
        ("hand over", settings.handover_grace_s),
        ("flush", settings.handover_flush_s),
        ("stop", settings.exit_margin_s),
    ):
        width = at(end + seconds) - at(end)
        picture.box(at(end) + 1, y, width - 2, 36, "panel")
        middle = at(end) + width / 2
        picture.text(middle, y + 15, name, "small", anchor="middle")
        picture.text(middle, y + 30, format_duration(seconds), "soft", anchor="middle")
        end += seconds
    picture.line(20, bottom, WIDTH - 20, bottom)
    picture.text(20, bottom + 24, "seconds", "small")
    moments = {
        0.0: ("SIGTERM", "blue"),
        settings.drain_timeout_s: ("deadline", "amber"),
        settings.hard_limit_s: ("hard limit", "red"),
    }
    deadline = int(settings.drain_timeout_s)
    for seconds in (*range(0, deadline, 5), *range(deadline, int(end) + 1)):
        picture.line(at(seconds), bottom, at(seconds), bottom + 8)
        picture.text(at(seconds), bottom + 24, str(seconds), "small", anchor="middle")
    for seconds, (name, kind) in moments.items():
        picture.line(at(seconds), y, at(seconds), bottom + 8, f"{kind} dashed")
        picture.text(at(seconds), bottom + 41, name, kind, anchor="middle")


def _draw_rows(picture: Picture, drained: Drained, at: _Scale) -> None:
    ends = {name: end for name, (end, _) in drained.ends.items()}
    rows = _Rows(picture, at)
    rows.add("new requests", "intake", "green", drained.closed["requests"])
    rows.note("closed: requests wait in the queue")
    rows.add("ops requests", "intake", "green", drained.closed["ops"])
    rows.inside("answered until the wait is over")
    rows.note("closed")
    rows.add("task", "has no safe points", "blue", ends["short"], since=-_BEGINS["short"])
    rows.note("ends by itself: succeeded")
    rows.add("task", "has safe points", "blue", ends["stepped"])
    _draw_points(rows, "stepped", 6, until=ends["stepped"])
    rows.note("stops at a safe point: handed over")
    rows.add("task", "is known to end in time", "blue", ends["usual"])
    _draw_points(rows, "usual", 4, until=ends["usual"] - 1)
    rows.note("succeeded")
    rows.add("task", "has no safe points", "blue", at.deadline_s)
    rows.extend(ends["endless"], "amber")
    rows.note("cancelled: handed over")
    rows.add("process", "", "grey", drained.gone)
    rows.note(f"exit code {drained.exit_code}", "strong")


def _draw_points(rows: _Rows, method: str, every_s: int, *, until: float) -> None:
    for moment in range(every_s - int(_BEGINS[method]), int(until) + 1, every_s):
        if moment > -_Scale.before_s:
            rows.dot(moment, "blue")


class _Rows:
    """Rows from the top down; `note`, `dot` and `extend` are about the last one."""

    def __init__(self, picture: Picture, at: _Scale) -> None:
        self._picture = picture
        self._at = at
        self._y = _TOP - _ROW
        self._end = 0.0

    def add(self, name: str, note: str, kind: str, end: float, since: float | None = None) -> None:
        self._y += _ROW
        self._picture.line(20, self._y, WIDTH - 20, self._y)
        self._picture.text(20, self._y + 20, name, "strong")
        self._picture.text(20, self._y + 37, note, "soft")
        begin = self._at(-self._at.before_s if since is None else since)
        self._end = self._at(end)
        self._picture.box(begin, self._y + 14, self._end - begin, _BAR, kind)

    def extend(self, end: float, kind: str) -> None:
        begin, self._end = self._end, self._at(end)
        self._picture.box(begin, self._y + 14, self._end - begin, _BAR, kind)

    def inside(self, words: str) -> None:
        x = self._at(0) + (self._end - self._at(0)) / 2
        self._picture.text(x, self._y + 28, words, "small", anchor="middle")

    def dot(self, seconds: float, kind: str) -> None:
        self._picture.dot(self._at(seconds), self._y + 14 + _BAR / 2, kind)

    def note(self, words: str, kind: str = "small") -> None:
        self._picture.text(self._end + 9, self._y + 28, words, kind)
