"""The statements of `epoch`."""

from __future__ import annotations

from typing import Final

from gracekit.store.older import EPOCH_BITS

LOOK: Final = "SELECT epoch, age, copied_at FROM epoch"
RISE: Final = "UPDATE epoch SET age = age + 1 RETURNING epoch, age"
# As `sqlite.backup` marks a copy: the next start finds it, and doubts what it says.
RAISE_TOKENS: Final = f"UPDATE epoch SET epoch = epoch + 1, floor = (epoch + 1) * {1 << EPOCH_BITS}"
MARK_COPY: Final = f"{RAISE_TOKENS}, copied_at = ?"
# Misses while a run may act or a lease is held.
RETIRE: Final = f"""{MARK_COPY}
WHERE NOT EXISTS (SELECT 1 FROM beat) AND NOT EXISTS (
    SELECT 1 FROM lease WHERE owner IS NOT NULL)"""
_RAISED: Final = "(CASE WHEN epoch > ?1 THEN epoch ELSE ?1 END + 1)"
RAISE: Final = f"""
UPDATE epoch SET epoch = {_RAISED}, floor = {_RAISED} * {1 << EPOCH_BITS},
    age = CASE WHEN age > ?2 THEN age ELSE ?2 END, copied_at = NULL"""
