"""What travels to the store: a batch of statements that succeed or fail as one.

Journal and leases each add statements to one batch, so that an outcome, the
end of its lease and the reply that is due are one commit. A statement may say
how many rows it must touch; any other number rolls the whole batch back. That
is the compare-and-set on which every change of a row rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gracekit.process import Point

Value = str | bytes | int | float | None
Row = tuple[Value, ...]


class Statement(NamedTuple):
    """One SQL statement.

    Attributes:
        sql: Text with `?` placeholders.
        params: One value a placeholder.
        expect: Rows that it must return (RETURNING, SELECT) or, for a statement
            that returns none, change; None for any number.
        returns: Whether *expect* counts returned rows instead of changed ones.
        inserts: It inserts a row, and its row id is what it is said to return.
        after: Carried out only if the statement of this index returned a row; None for always.
    """

    sql: str
    params: Sequence[Value]
    expect: int | None
    returns: bool = False
    inserts: bool = False
    after: int | None = None


class Batch:
    """Statements of one commit, in order.

    Args:
        point: Names this commit for the crash matrix.
        durable: False for commits that a power cut may take back (SQLite's
            `synchronous=NORMAL`); a killed process loses neither kind.
    """

    __slots__ = ("durable", "point", "statements", "sums")

    def __init__(self, point: Point, *, durable: bool = True) -> None:
        self.point: Final = point
        self.durable: Final = durable
        self.statements: list[Statement] = []
        self.sums: list[tuple[str, str, int]] = []

    def add(
        self, sql: str, *params: Value, expect: int | None = None, after: int | None = None
    ) -> int:
        """Append a statement; *expect* counts the rows it changes.

        Args:
            sql: Text with `?` placeholders.
            params: One value a placeholder.
            expect: See `Statement`.
            after: Index of a statement before it; it is left out if that one returned nothing.

        Returns:
            Its index: `rows[index]` of the commit holds the rows it returned.
        """
        self.statements.append(Statement(sql, params, expect, after=after))
        return len(self.statements) - 1

    def ask(self, sql: str, *params: Value, expect: int | None = None) -> int:
        """As `add`, for a statement that returns rows; *expect* counts these."""
        self.statements.append(Statement(sql, params, expect, returns=True))
        return len(self.statements) - 1

    def insert(self, sql: str, *params: Value) -> int:
        """As `ask`, for an INSERT that must insert one row; RETURNING would take longer.

        Returns:
            Its index: `rows[index]` of the commit holds the one row `(row id,)`.
        """
        self.statements.append(Statement(sql, params, 1, inserts=True))
        return len(self.statements) - 1

    def add_up(self, sql: str, key: str, number: int) -> None:
        """Add *number* to a sum, once for all batches of the transaction that pass.

        Args:
            sql: Text with two placeholders, the key and the number, in which two
                executions do the same as one with the sum of their numbers.
            key: Which sum.
            number: What is added.
        """
        self.sums.append((sql, key, number))
