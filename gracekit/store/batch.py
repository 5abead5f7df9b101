"""A batch: statements that are committed together or not at all.

Journal and leases add their statements to the same batch, so that an outcome,
the end of its lease and the reply to send are one commit. A statement may say
how many rows it must touch; any other number rolls the whole batch back. Every
change of a row relies on this compare-and-set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gracekit.errors import ConflictError, StoreError
from gracekit.process import Point

Value = str | bytes | int | float | None
Row = tuple[Value, ...]
BatchOutcome = list[list[Row]] | StoreError
"""What each statement returned, or why nothing of the batch was done."""


class Statement(NamedTuple):
    """One SQL statement.

    Attributes:
        sql: Text with `?` placeholders.
        params: One value for each placeholder.
        expect: How many rows it must return (RETURNING, SELECT) or, if it returns
            none, how many it must change; None for any number.
        returns: Whether *expect* counts returned rows instead of changed ones.
        inserts: It inserts one row, and the row id is reported as its result.
        after: Run it only if the statement with this index returned a row; None for always.
        of: Index of an earlier statement that inserts; the id of its row is put before *params*.
    """

    sql: str
    params: Sequence[Value]
    expect: int | None
    returns: bool = False
    inserts: bool = False
    after: int | None = None
    of: int | None = None


class Batch:
    """Statements of one commit, in order.

    Args:
        point: Names this commit, so that tests can crash before or after it.
        durable: False for commits that may be lost in a power cut (SQLite's
            `synchronous=NORMAL`); a killed process loses neither kind. On PostgreSQL all commits
            are durable, as a server can crash while the run lives, and knows better.
    """

    __slots__ = ("durable", "point", "statements", "sums")

    def __init__(self, point: Point, *, durable: bool = True) -> None:
        self.point: Final = point
        self.durable: Final = durable
        self.statements: list[Statement] = []
        self.sums: list[tuple[str, str, int]] = []

    def add(
        self,
        sql: str,
        *params: Value,
        expect: int | None = None,
        after: int | None = None,
        of: int | None = None,
    ) -> int:
        """Append a statement; *expect* counts the rows it changes.

        Args:
            sql: Text with `?` placeholders.
            params: One value for each placeholder.
            expect: See `Statement`.
            after: Index of an earlier statement; skip this one if that one returned no row.
            of: Index of an earlier `insert`; the first placeholder gets the id of its row.

        Returns:
            Its index: `rows[index]` of the commit holds the rows it returned.
        """
        self.statements.append(Statement(sql, params, expect, after=after, of=of))
        return len(self.statements) - 1

    def ask(self, sql: str, *params: Value, expect: int | None = None) -> int:
        """As `add`, for a statement that returns rows; *expect* counts these."""
        self.statements.append(Statement(sql, params, expect, returns=True))
        return len(self.statements) - 1

    def insert(self, sql: str, *params: Value) -> int:
        """As `ask`, for an INSERT of exactly one row; faster than RETURNING.

        Returns:
            Its index: `rows[index]` of the commit holds the one row `(row id,)`.
        """
        self.statements.append(Statement(sql, params, 1, inserts=True))
        return len(self.statements) - 1

    def add_up(self, sql: str, key: str, number: int) -> None:
        """Add *number* to a sum that all batches of one transaction share.

        One statement adds up the numbers of all batches that are committed.

        Args:
            sql: Text with two placeholders, the key and the number. Running it twice must
                have the same effect as running it once with the sum of both numbers.
            key: Names the sum.
            number: The amount to add.
        """
        self.sums.append((sql, key, number))


def passed_of(batches: Sequence[Batch], outcomes: Sequence[BatchOutcome]) -> list[Batch]:
    """The batches that did not fail."""
    return [
        batch for batch, outcome in zip(batches, outcomes, strict=True) if isinstance(outcome, list)
    ]


def sums_of(batches: Sequence[Batch]) -> list[tuple[str, str, int]]:
    """The sums of *batches*, each once: statement, key, number."""
    sums: dict[tuple[str, str], int] = {}
    for batch in batches:
        for sql, key, number in batch.sums:
            sums[sql, key] = sums.get((sql, key), 0) + number
    return [(sql, key, number) for (sql, key), number in sums.items()]


def conflict(batch: Batch, index: int, found: int) -> ConflictError:
    """The error of a batch whose statement *index* touched *found* rows."""
    statement = batch.statements[index]
    return ConflictError(
        f"statement {index} of the batch {batch.point.value} "
        f"{'returned' if statement.returns else 'changed'} {found} rows instead of "
        f"{statement.expect}, so that the batch was rolled back; read the rows again: "
        f"{statement.sql}",
        statement=index,
    )


def caused(outcome: StoreError, cause: Exception) -> StoreError:
    """Set the cause of *outcome*, an error made for one waiter.

    Waiters do not share an error, as each raises it and so adds its own traceback.
    """
    outcome.__cause__ = cause
    return outcome
