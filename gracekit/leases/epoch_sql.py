"""The statements of `epoch`."""

from __future__ import annotations

from typing import Final

LOOK: Final = "SELECT epoch, age, copied_at FROM epoch"
RISE: Final = "UPDATE epoch SET age = age + 1 RETURNING epoch, age"
RAISE: Final = """
UPDATE epoch SET epoch = CASE WHEN epoch > ?1 THEN epoch ELSE ?1 END + 1,
    age = CASE WHEN age > ?2 THEN age ELSE ?2 END, copied_at = NULL"""
