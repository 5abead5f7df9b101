"""The SQL conditions of partial indexes over tasks, shared by queries and the schema.

SQLite uses a partial index only for a query that repeats the index's condition word
for word. A query that merely implies the condition reads the whole table, with its history.
"""

from __future__ import annotations

from typing import Final

IS_OPEN: Final = "finished_at IS NULL"
"""True for rows that are not in a terminal state. It is the condition of the index `task_open`,
and half of that of `task_open_resource`."""
IS_UNSUCCESSFUL: Final = "finished_at IS NOT NULL AND state <> 'succeeded'"
"""True for the ended rows that did not succeed, which are few in a long record. It is the condition
of the index `task_unsuccessful`."""
