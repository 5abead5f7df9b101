"""A service with one method, which notes when it begins: `gracekit run benchmarks.first:svc`.

It loads nothing else, so that what is timed is the start of gracekit.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.plain import note_moment
from gracekit import Context, Service

NOTE = "GRACEKIT_TEST_BENCH_FIRST"
"""Variable: file for the moment, in monotonic nanoseconds."""

svc = Service("bench")


@svc.rpc
async def work(ctx: Context, vm: str, note: str) -> None:  # noqa: ARG001 - as sent
    """Note when it began."""
    note_moment(Path(os.environ[NOTE]))
