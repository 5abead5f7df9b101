"""Judges a demonstration: compares the confirmed requests with the store and the effects.

It reads only files, and the result does not depend on the code under test: a lost
id or a repeated effect in the files is found, whatever its cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from gracekit.config.settings import Settings
from gracekit.config.urls import file_url
from gracekit.demo.app import (
    CONFIRMED,
    EFFECTS,
    PROCESSES,
    START,
    DemoError,
    Entry,
    entries,
)
from gracekit.exits import ExitCode
from gracekit.journal.rows import from_json
from gracekit.listings import listings_sql as sql
from gracekit.store.batch import Row
from gracekit.store.location import ReadOnlyStore, StoreLocation
from gracekit.tracker.task import TERMINAL, TaskState

STORE: Final = "gracekit-store.db"
ENDED: Final = frozenset(state.value for state in TERMINAL)
_REPEATABLE: Final = "retry"
_ORDERLY: Final = (ExitCode.DRAINED, ExitCode.HANDED_OVER)


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all confirmed requests.

    Attributes:
        accepted: Number of rows in the journal.
        finished: Number of ended rows by the name of the process that ended them.
        lost: By id: why a confirmed request is lost (no ended row, or effects are missing).
        run_twice: By id: what was done again though it must not be.
    """

    accepted: int
    finished: Mapping[str, int]
    lost: Mapping[str, str]
    run_twice: Mapping[str, str]

    @property
    def good(self) -> bool:
        """Whether nothing was lost or run twice."""
        return not self.lost and not self.run_twice

    def sentence(self) -> str:
        """The last line of the demonstration."""
        finished = "".join(f"finished in {name}: {n}, " for name, n in self.finished.items())
        twice = len(self.run_twice)
        return f"accepted {self.accepted}, {finished}{len(self.lost)} lost, {twice} run twice"


async def judge(directory: Path, store_url: str | None = None) -> Judgement:
    """Compare the files of a finished demonstration; its store is one of them without *store_url*.

    Raises:
        DemoError: there is none in *directory*.
        ConfigError: its store is missing or cannot be read.
    """
    confirmed, processes = entries(directory / CONFIRMED), entries(directory / PROCESSES)
    if not confirmed:
        raise DemoError(f"{directory} holds no demonstration: name a directory kept by --keep")
    rows = await _rows(reader_of(directory, store_url), processes)
    effects: dict[str, list[Entry]] = {}
    for effect in entries(directory / EFFECTS):
        effects.setdefault(effect["id"], []).append(effect)
    ended = [row for row in rows.values() if row["state"] in ENDED]
    by_process = Counter(row["process"] or "nobody" for row in ended)
    return Judgement(
        accepted=len(rows),
        finished={p["name"]: 0 for p in processes} | dict(by_process),
        lost=dict(_lost(confirmed, rows, effects)),
        run_twice=dict(_run_twice(effects, rows, processes)),
    )


async def _rows(reader: ReadOnlyStore, processes: list[Entry]) -> dict[str, Entry]:
    reader.open()
    try:
        return await read_rows(reader, {entry["pid"]: entry["name"] for entry in processes})
    finally:
        reader.close()


def reader_of(directory: Path, store_url: str | None = None) -> ReadOnlyStore:
    """A reader of the demonstration's store, not opened yet."""
    url = store_url or file_url(directory / STORE)
    reader = StoreLocation(Settings(store_url=url)).reader()
    assert reader is not None  # it is not in memory
    return reader


async def read_rows(reader: ReadOnlyStore, names: Mapping[int, str]) -> dict[str, Entry]:
    """The journal by request id, in order of acceptance.

    Args:
        reader: An open reader of the store.
        names: Names of the story's processes, by pid.

    Returns:
        For each: {"id", "state", "on_interrupt", "cursor", "process": name of its owner or None}.
    """
    found = await reader.query(sql.OF_THE_DEMO)
    return {str(columns[0]): _row(columns, names) for columns in found}


def _row(columns: Row, names: Mapping[int, str]) -> Entry:
    request_id, state, on_interrupt, cursor, pid = columns
    return {
        "id": request_id,
        "state": state,
        "on_interrupt": on_interrupt,
        "cursor": from_json(cursor),
        "process": None if pid is None else names.get(int(pid)),
    }


def _lost(
    confirmed: list[Entry], rows: Mapping[str, Entry], effects: Mapping[str, list[Entry]]
) -> Iterator[tuple[str, str]]:
    for request in confirmed:
        row = rows.get(request["id"])
        if row is None:
            yield request["id"], f"{request['label']} has no row"
        elif row["state"] not in ENDED:
            yield request["id"], f"{request['label']} is still {row['state']}"
        elif row["state"] == TaskState.SUCCEEDED.value:
            done = {effect["item"] for effect in effects.get(request["id"], ())}
            missing = [item for item in request["items"] if item not in done]
            if missing:
                yield request["id"], f"{request['label']} succeeded without {missing}"


def _run_twice(
    effects: Mapping[str, list[Entry]], rows: Mapping[str, Entry], processes: list[Entry]
) -> Iterator[tuple[str, str]]:
    ends = {process["name"]: process for process in processes}
    for request_id, done in effects.items():
        row = rows.get(request_id, {"on_interrupt": "error"})
        first: dict[str | int, Entry] = {}
        for effect in done:
            before = first.setdefault(effect["item"], effect)
            if before is not effect and not _may_repeat(row, effect, before, ends):
                yield request_id, f"{effect['item']} in {before['process']}, {effect['process']}"


def _may_repeat(row: Entry, effect: Entry, before: Entry, ends: Mapping[str, Entry]) -> bool:
    """Whether an item may be done again after *before* has done it.

    A `retry` method may start again in another process. An item up to the committed
    cursor must not be done again; a later item only after a crash.
    """
    end = ends.get(before["process"])
    if row["on_interrupt"] != _REPEATABLE or end is None or end["name"] == effect["process"]:
        return False
    if effect["item"] == START:
        return True
    cursor = end["cursors"].get(effect["id"])
    is_behind = isinstance(effect["item"], int) and cursor is not None and effect["item"] <= cursor
    return end["exit_code"] not in _ORDERLY and not is_behind
