"""Asks a run by its door, as the commands of operators do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gracekit.control.door_wire import LONGEST_LINE, Ask, address_of, line_of_ask, read_answer
from gracekit.runs.names import door_name


async def ask_by_door(store: Path, run_id: str, verb: str, **args: Any) -> Any:
    """The answer of a run to *verb*; waits until it has made its door.

    Raises:
        ConnectionError: the run has ended before it answered.
    """
    door = store.with_name(f"{store.name}-runs") / door_name(run_id)
    while not door.exists():
        await asyncio.sleep(0.01)
    with address_of(door) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=LONGEST_LINE)
    writer.write(line_of_ask(Ask(run_id=run_id, verb=verb, args=args)))
    line = await reader.readline()
    writer.close()
    if not line:
        raise ConnectionResetError(f"run {run_id} ended before it answered")
    return read_answer(line)
