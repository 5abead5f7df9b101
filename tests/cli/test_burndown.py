"""`gracekit drain` at a terminal and without one: the burndown, and why each task still blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracekit.cli.burndown import DrainPicture, why_it_blocks
from tests.cli.kit import ROOT, Running, Started, gracekit, write_service
from tests.cli.test_drain import start_work

STEPPING = """
import asyncio

from gracekit import Context, Service

svc = Service("compute")
go = asyncio.Event()


@svc.rpc
async def copy(ctx: Context) -> None:
    async for _ in ctx.steps(range(2)):
        print("a block", flush=True)
        await go.wait()


@svc.ops
async def release(ctx: Context) -> None:
    go.set()
"""


def picture(**more: object) -> DrainPicture:
    given = {
        "title": "in flight 4",
        "levels": [(0.0, 8), (10.0, 4)],
        "now_s": 20.0,
        "deadline_s": 60.0,
        "kill_s": 90.0,
        "reasons": ["work (a): no safe point since 12s"],
    }
    return DrainPicture(**{**given, **more})  # type: ignore[arg-type]


def test_the_chart_falls_with_the_tasks_and_has_two_lines():
    """
    It shows tasks in flight up to now, and the deadline and kill_after at their times.
    """
    title, *rows, legend, reason = picture().lines(100)

    assert (title, reason) == ("in flight 4", "  work (a): no safe point since 12s")
    assert [row.count("█") for row in rows] == [11, 11, 11, 21, 21, 21]
    assert {row.index("│") for row in rows} == {3 + int(60 / 94.5 * 96)}
    assert {row.index("┃") for row in rows} == {3 + int(90 / 94.5 * 96)}
    assert legend.endswith("│ deadline 1m00s   ┃ kill_after 1m30s")
    assert all(len(row) <= 100 for row in [*rows, legend])


def test_a_chart_without_kill_after_or_tasks_has_one_line():
    """
    Without tasks no bar is drawn, and no number is invented.
    """
    lines = picture(levels=[(0.0, 0)], kill_s=None, reasons=[]).lines(60)

    assert not any("█" in line or "┃" in line for line in lines)
    assert "│ deadline 1m00s" in lines[-1]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"safe_point_age_s": 12.0}, "no safe point since 12s"),
        ({"age_s": 65.0}, "running for 1m05s, no safe point yet"),
        ({"cancelled_by": "operator"}, "cancelled (operator), and it has not returned"),
        ({"lane": "ops"}, "ops method, running for 3s, no safe point yet"),
        ({"lane": "periodic"}, "periodic job, running for 3s, no safe point yet"),
        ({"lane": "background"}, "work of a handler, running for 3s, no safe point yet"),
        ({"lane": "background", "about": "a"}, "running for 3s"),
        (
            {"state": "accepted", "waits_for": "lease vm:12 held by task b"},
            "waits for lease vm:12 held by task b",
        ),
        (
            {"state": "succeeded", "waits_for": "its answer to reach the caller"},
            "waits for its answer to reach the caller",
        ),
        ({"waits_for": "the store\x1b[2J"}, r"waits for the store\x1b[2J"),
        ({"state": "accepted"}, "accepted for 3s"),
    ],
)
def test_why_a_task_blocks_is_said_in_words(said: dict[str, object], why: str):
    """
    The words are made of the run's report; control characters in it are escaped.
    """
    task = {"task_id": "a", "method": "work", "resource": "vm:12", "lane": "requests"}
    task |= {"state": "running", "age_s": 3.0} | said

    assert why_it_blocks(task) == f"work vm:12 (a): {why}"


@pytest.mark.process
def test_a_terminal_draws_the_drain_and_then_says_the_verdict(tmp_path: Path):
    """
    It shows the chart with both lines and the reasons; at the end only the verdict stays.
    """
    write_service(tmp_path, text=STEPPING)
    with Running(tmp_path) as run:
        gracekit(tmp_path, "cast", "compute", "copy", "--id", "order-1")
        run.wait_line("a block")
        words = ("drain", "--timeout", "60s")
        more = {"GRACEKIT_KILL_AFTER": "120s", "LINES": "40", "COLUMNS": "120"}
        with Started(tmp_path, *words, terminal=True, **more) as drain:
            drain.wait_line("in flight 1")
            drain.wait_line("kill_after 2m00s")
            drain.wait_line("copy (order-1): ")
            gracekit(tmp_path, "call", "compute", "release", "--ops")
            assert drain.wait() == 3  # it stops at its next safe point
            said = drain.rest()
        assert run.wait() == 75

    assert "│" in said
    assert "┃" in said
    assert ", no safe point yet" in said
    assert "verdict: handed_over: 1 finished, 1 handed over" in said


@pytest.mark.process
@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_rich_or_a_terminal_lines_tell_why(tmp_path: Path, *, is_terminal: bool):
    """
    It prints a line for each change, and below it why the oldest tasks still run.
    """
    write_service(tmp_path)
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "rich.py").write_text("raise ImportError('not installed')\n")
    more = {"PYTHONPATH": f"{tmp_path / 'without'}:{ROOT}"} if is_terminal else {}
    with Running(tmp_path) as run:
        for number in range(7):
            start_work(tmp_path, run, f"vm-{number}")
        with Started(tmp_path, "drain", "--timeout", "60s", terminal=is_terminal, **more) as drain:
            drain.wait_line("in flight 7")
            drain.wait_line("  work vm:vm-0 (")
            drain.wait_line("  and 2 tasks more")
            gracekit(tmp_path, "call", "compute", "release", "--ops")
            assert drain.wait() == 0
            said = drain.rest()

    assert said.count(", no safe point yet") >= 5
    assert "┃" not in said
    assert "│" not in said


@pytest.mark.process
def test_ctrl_c_leaves_the_drawing_and_says_that_the_drain_goes_on(tmp_path: Path):
    """
    The terminal is restored: its cursor is shown again.
    """
    write_service(tmp_path)
    with Running(tmp_path, "--instance", "api-1") as run:
        start_work(tmp_path, run)
        with Started(tmp_path, "drain", "--timeout", "60s", terminal=True) as drain:
            drain.wait_line("deadline 1m00s")
            drain.type("\x03")
            assert drain.wait() == 130
            said = drain.rest()

    assert "detached; the drain of api-1 goes on" in said
    assert said.rindex("\x1b[?25h") < said.index("detached")
