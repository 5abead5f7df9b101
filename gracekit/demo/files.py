"""The files in which the demonstration's processes record events, one JSON object on each line.

A line is written by one `write` to a file opened for appending. So lines of several
processes never mix, and a killed process leaves only whole lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from gracekit.errors import GracekitError

CONFIRMED: Final = "confirmed.jsonl"
"""From the senders, once confirmed: {"id", "label", "method", "args", "items", …}."""
EFFECTS: Final = "effects.jsonl"
"""From the handlers: {"id", "item", "process", "pid", "at"}."""
PROCESSES: Final = "processes.jsonl"
"""From the story, when a process ends: {"name", "pid", "exit_code", "cursors": {id: cursor}}."""
PINGS: Final = "pings.jsonl"
"""From the pinger: {"at", "answer": null or {"process", "draining"}, "took_s"}."""
STORE: Final = "gracekit-store.db"

Entry = dict[str, Any]


class DemoError(GracekitError):
    """The demonstration could not be played or judged."""


def append(path: Path, entry: Entry) -> None:
    """Add one line."""
    line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def entries(path: Path) -> list[Entry]:
    """All complete lines; empty if there is no file."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]
