"""Whether the store is an older copy, a restored backup or a file without its `-wal`, or is lost.

The store has a mark that rises at each start and every half minute. The highest mark is also kept
beside the locks of its runs, so a store with a lower one is an older copy. A copy that
`gracekit store backup` has made says so itself, until the first start on it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from gracekit.store.batch import Value
from gracekit.store.engine import Queries
from gracekit.store.place import StorePlace

EPOCH_BITS: Final = 40
FILE: Final = "mark"
OLDER: Final = "store_older"
"""Incident: a start found an older copy of the store."""
LOST: Final = "store_lost"
"""Incident: a start found a store that is new and empty where another one was."""
PUT_BACK: Final = "put the store or its newest backup back, as docs/backup.md tells"
"""The remedy for a lost store."""
# A parameter instead of the word would keep SQLite from using the index `incident_store_older`.
_LOOK: Final = """
SELECT epoch, age, copied_at, (SELECT max(at) FROM incident WHERE what = 'store_older') FROM epoch
"""


async def copied_at(engine: Queries, directory: Path | None) -> float:
    """Wall time up to which the record of runs counts that have not beaten since.

    What such a run did later, such as its end, was recorded in the newer store, which is gone.

    Args:
        engine: The store.
        directory: Of the locks of its runs; None for a store in memory.

    Returns:
        Minus infinity if the store is the last one that was here, and infinity if it is an
        older one and the time of the copy is not known.
    """
    # The incident, written by the first start on the copy, is somewhat later than the copy.
    ((epoch, age, copied, noted),) = await engine.query(_LOOK)
    if copied is not None:
        return float(str(copied))
    if directory is not None and read_mark(directory) > mark_of(epoch, age):
        return math.inf
    return -math.inf if noted is None else float(str(noted))


def read_mark(directory: Path) -> int:
    """The highest mark that was kept beside the run locks; 0 for none."""
    try:
        return int((directory / FILE).read_text())
    except (OSError, ValueError):  # there is none, or the file is not gracekit's
        return 0


def mark_of(epoch: Value, age: Value) -> int:
    """Epoch and age as one number, which rises with either."""
    assert isinstance(epoch, int)
    assert isinstance(age, int)
    return epoch << EPOCH_BITS | age


def lost_store(place: StorePlace) -> str:
    """A sentence if a store in a file existed at *place* where there is none now; otherwise empty.

    Of a store in PostgreSQL only the server knows.
    """
    path, directory = place.path, place.run_directory
    # No mark is seen in a closed directory.
    if path is None or directory is None or not read_mark(directory) or path.exists():
        return ""
    return f"{path} is lost: services have used a store there, as {directory} knows"
