"""The statements of `epoch`."""

from __future__ import annotations

from typing import Final

from gracekit.config.choices import NOT_TWICE
from gracekit.journal.tasks_sql import IS_OPEN

LOOK: Final = "SELECT epoch, age, copied_at FROM epoch"
RISE: Final = "UPDATE epoch SET age = age + 1 RETURNING epoch, age"
RAISE: Final = """
UPDATE epoch SET epoch = CASE WHEN epoch > ?1 THEN epoch ELSE ?1 END + 1,
    age = CASE WHEN age > ?2 THEN age ELSE ?2 END, copied_at = NULL"""
NOTE: Final = "INSERT INTO incident (at, run_id, what, detail) VALUES (?, '', ?, ?)"
# A task that is accepted in the older store may have begun, and even ended, in the newer one.
# The `repr` of a tuple of texts is valid SQL.
_DOUBTED: Final = f"{IS_OPEN} AND state = 'accepted' AND on_interrupt IN {NOT_TWICE!r}"
NOTE_DOUBT: Final = f"""
INSERT INTO incident (at, run_id, what, request_id, method, detail)
SELECT ?, '', 'restored', request_id, method, 'accepted in an older store: it may have begun since'
FROM task WHERE {_DOUBTED}"""
# It is not known whether a parked task has run since; the incident says so to those who retry it.
NOTE_PARKED: Final = f"""
INSERT INTO incident (at, run_id, what, request_id, method, detail)
SELECT ?, '', 'restored', request_id, method, 'parked in an older store: it may have run since'
FROM task WHERE {IS_OPEN} AND state = 'pending'"""
DOUBT: Final = f"""
UPDATE task SET state = 'handed_over', cut = 'unclean', owner = NULL, not_before = ? + settle_s
WHERE {_DOUBTED}"""
