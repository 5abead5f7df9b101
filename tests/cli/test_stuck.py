"""`gracekit tasks --stuck`, as an operator reads it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cli.kit import PATIENCE_S, Answer, Running, gracekit, write_service

pytestmark = pytest.mark.process

NAPPING = """
import asyncio

from gracekit import Context, Service

svc = Service("compute")


@svc.rpc
async def nap(ctx: Context, long: bool = False) -> None:
    if long:
        print("napping", flush=True)
        await asyncio.Event().wait()
"""


def wait_stuck(directory: Path, *words: str) -> Answer:
    """The first list with a stuck task."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = gracekit(directory, "tasks", "--stuck", *words)
        if "p95" in answer.out or time.monotonic() > deadline:
            return answer


def test_a_stuck_task_is_listed_with_the_reason(tmp_path):
    """Table and JSON have the same words; tasks that are not stuck are in neither."""
    write_service(tmp_path, text=NAPPING)
    with Running(tmp_path) as run:
        for _ in range(5):
            gracekit(tmp_path, "call", "compute", "nap")
        nothing = gracekit(tmp_path, "tasks", "--stuck")
        gracekit(tmp_path, "cast", "compute", "nap", "long=true", "--id", "order-1")
        run.wait_line("napping")
        shown = wait_stuck(tmp_path)
        (task,) = gracekit(tmp_path, "tasks", "--stuck", "--json").json["tasks"]
        (other,) = gracekit(tmp_path, "tasks", "--json").json["tasks"]

    assert (nothing.code, nothing.out) == (0, "no task is stuck\n")
    header, line = shown.out.splitlines()
    assert header.split()[-2:] == ["WHY", "LISTED"]
    assert "order-1" in line
    assert "x its p95 of " in line
    assert "x its p95 of " in task["why_listed"]
    assert task["p95_s"] < 1
    assert other["why_listed"] is None
