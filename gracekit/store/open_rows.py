"""The condition for open rows: words that a query shares with an index of the schema.

SQLite uses a partial index only for a query that repeats the index's condition
word for word; one that merely implies it reads the whole table, history and all.
"""

from __future__ import annotations

from typing import Final

IS_OPEN: Final = "finished_at IS NULL"
"""Of a row that is not in its last state: the condition of `task_open`, and half of that of
`task_open_resource`."""
