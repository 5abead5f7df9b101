"""One transaction for a group of batches, on a connection to PostgreSQL.

All transactions of a store take one lock, as a statement of its own: each statement behind it sees
what the last holder has committed, and the store is as serial as a file. Lock, guard and statements
are one round trip. Their counts are looked at, and COMMIT is the second one. If a batch misses, all
is rolled back and done again with a savepoint and a round trip for each batch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Final

import psycopg

from gracekit.errors import ConflictError, StoreError, UnknownCommitError
from gracekit.process import Process
from gracekit.store.batch import (
    Batch,
    BatchOutcome,
    Row,
    Value,
    caused,
    conflict,
    passed_of,
    sums_of,
)
from gracekit.store.postgres.postgres_link import PostgresLink, rows
from gracekit.store.postgres.postgres_server import PIN, Origins, note_origin
from gracekit.store.postgres.postgres_texts import numbered, only_if, returning_id, with_id_of
from gracekit.store.postgres.sqlstates import ErrorKind, error_kind, text_of
from gracekit.store.state import StatusSource

COMMIT_S: Final = 15.0
"""A COMMIT that has no answer by then is given up; its connection is closed."""
FROZEN_S: Final = 5.0
"""A holder of the lock that has sent and taken nothing for so long is ended by who waits."""

# A role's default may be another isolation level, under which the snapshot would be taken before
# the wait for the lock.
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"

# Never one that waits for a standby: to end that wait would publish a commit that is not
# replicated. One that waits for another lock is ended by its own time-out.
_END_FROZEN: Final = """
SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (CAST(CAST(classid AS BIGINT) AS BIT(32)) || CAST(CAST(objid AS BIGINT) AS BIT(32)))
        = CAST(CAST(? AS BIGINT) AS BIT(64))
    AND wait_event_type = 'Client'
    AND state_change < clock_timestamp() - ? * INTERVAL '1 s'"""


_NOW: Final = "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"
_LOCK: Final = 1  # index of the result, behind BEGIN


class ServerClock:
    """The time of the server, carried on by what passes on this machine, also asleep.

    A difference that the way of a message can explain is no step of the clock.
    """

    _WAY_S: Final = 0.05

    def __init__(self) -> None:
        self._ahead_s = time.time() - self._passed()

    @staticmethod
    def _passed() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def note(self, wall: Value) -> None:
        """Take the time that the server has just sent."""
        assert isinstance(wall, float)
        ahead_s = wall - self._passed()
        if abs(ahead_s - self._ahead_s) > self._WAY_S:
            self._ahead_s = ahead_s

    def wall(self) -> float:
        """Seconds since the epoch; from any thread."""
        return self._ahead_s + self._passed()


def lock_of(schema: str) -> int:
    """The key of the lock of a store, which is in its own schema of a database."""
    digest = hashlib.sha256(f"gracekit store {schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def begin(link: PostgresLink, lock: int) -> None:
    """Begin a transaction, and take the lock; sends only."""
    link.clear()
    link.send(_BEGIN)
    link.send(f"SELECT pg_advisory_xact_lock({lock}), {_NOW}")
    link.sync()


def take_over(
    link: PostgresLink, lock: int, source: StatusSource, clock: ServerClock, origins: Origins
) -> None:
    """Wait until no transaction of this store is under way that began before; see `note_origin`.

    Raises:
        psycopg.Error: it is not proven.
        StoreFencedError: this run was declared dead meanwhile.
    """
    begin(link, lock)
    link.send(PIN)
    guard = source.guarded
    asked = None if guard is None else link.send(numbered(guard[0]), guard[1])
    link.read()
    clock.note(rows(link.results[_LOCK])[0][1])
    if asked is not None and not link.results[asked].ntuples:
        link.roll_back()
        raise source.fence()
    note_origin(link, origins)
    link.send("COMMIT")
    link.read()


def end_frozen(link: PostgresLink, lock: int) -> None:
    """End the connection of a process that holds the lock and is stopped."""
    link.ask(_END_FROZEN, lock, FROZEN_S)


class PostgresGroup:
    """Commits one group of batches.

    Args:
        link: Not used by others meanwhile.
        lock: Of the store.
        process: Its `reach` is called with each batch's point, before and after the commit.
        source: Has the guard.
        clock: Gets the server's time.
    """

    def __init__(
        self,
        link: PostgresLink,
        lock: int,
        process: Process,
        source: StatusSource,
        clock: ServerClock,
    ) -> None:
        self._link = link
        self._lock = lock
        self._process = process
        self._source = source
        self._clock = clock
        self._is_begun = False  # the time was asked, and is not read yet
        self._guard_at: int | None = None  # index of the guard's result

    def run(self, batches: Sequence[Batch]) -> list[BatchOutcome]:
        """Commit every batch that can be; return one outcome for each, in order.

        Raises:
            psycopg.Error: nothing was done.
            StoreFencedError: nothing was done.
            UnknownCommitError: the connection was lost during COMMIT.
        """
        outcomes = self._together(batches)
        if outcomes is None:
            self._link.roll_back()
            outcomes = self._apart(batches)
        passed = passed_of(batches, outcomes)
        if not passed:
            self._link.roll_back()
            return outcomes
        for batch in passed:
            self._process.reach(batch.point, "before")
        self._commit()
        for batch in passed:
            self._process.reach(batch.point, "after")
        return outcomes

    def _begin(self) -> None:
        begin(self._link, self._lock)
        self._is_begun = True
        self._guard_at = None
        if (guard := self._source.guarded) is not None:
            self._guard_at = self._link.send(numbered(guard[0]), guard[1])

    def _read(self) -> None:
        """Take the results of all that was sent, the guard's first."""
        self._link.read()
        if self._is_begun:
            self._is_begun = False
            self._clock.note(rows(self._link.results[_LOCK])[0][1])
        if self._guard_at is not None:
            if not self._link.results[self._guard_at].ntuples:
                raise self._source.fence()
            self._guard_at = None

    def _together(self, batches: Sequence[Batch]) -> list[BatchOutcome] | None:
        """Try all without savepoints; None if a batch fails."""
        self._begin()
        try:
            places = [self._send(batch) for batch in batches]
            self._send_sums(batches)
            self._read()
            return [self._rows(batch, at) for batch, at in zip(batches, places, strict=True)]
        except (ConflictError, ValueError, TypeError):
            return None
        except psycopg.Error as error:
            if not _is_of_batch(error):
                raise
            return None

    def _apart(self, batches: Sequence[Batch]) -> list[BatchOutcome]:
        """Do each batch behind a savepoint of its own."""
        self._begin()
        outcomes = [self._attempt(batch) for batch in batches]
        self._send_sums(passed_of(batches, outcomes))
        self._read()
        return outcomes

    def _attempt(self, batch: Batch) -> BatchOutcome:
        self._link.send("SAVEPOINT batch")
        try:
            try:
                places = self._send(batch)
            finally:
                self._read()
            outcome: BatchOutcome = self._rows(batch, places)
        except ConflictError as error:
            outcome = error
        except (psycopg.Error, ValueError, TypeError) as error:
            if isinstance(error, psycopg.Error) and not _is_of_batch(error):
                raise
            text = text_of(error) if isinstance(error, psycopg.Error) else str(error)
            refused = StoreError(f"the batch {batch.point.value} was rolled back: {text}")
            outcome = caused(refused, error)
        if isinstance(outcome, StoreError):
            self._link.send("ROLLBACK TO SAVEPOINT batch")
        self._link.send("RELEASE SAVEPOINT batch")  # with what is sent next
        return outcome

    def _send(self, batch: Batch) -> list[int | None]:
        """Send the statements; return the index of each one's result, None if it is left out."""
        places: list[int | None] = []
        for index, (sql, values, _, _, inserts, after, of) in enumerate(batch.statements):
            params = values
            text = returning_id(sql) if inserts else numbered(sql)
            if of is not None:
                text = with_id_of(sql, batch.statements[of].sql)
            if after is not None:
                asked = batch.statements[after]
                joined = only_if(sql, asked.sql) if after == index - 1 and of is None else None
                if joined is not None:
                    text, params = joined, (*params, *asked.params)
                elif not self._returned(places[after]):
                    places.append(None)
                    continue
            places.append(self._link.send(text, params))
        return places

    def _returned(self, place: int | None) -> bool:
        """Whether a statement has returned a row: a round trip."""
        if place is None:
            return False
        self._read()
        return self._link.results[place].ntuples > 0

    def _send_sums(self, batches: Sequence[Batch]) -> None:
        for sql, key, number in sums_of(batches):
            self._link.send(numbered(sql), (key, number))

    def _rows(self, batch: Batch, places: Sequence[int | None]) -> list[list[Row]]:
        """What the statements have returned.

        Raises:
            ConflictError: one has touched another number of rows than expected.
        """
        returned: list[list[Row]] = []
        for index, (statement, place) in enumerate(zip(batch.statements, places, strict=True)):
            result = None if place is None else self._link.results[place]
            returned.append([] if result is None else rows(result))
            is_left_out = result is None or (
                statement.after is not None and not returned[statement.after]
            )
            if statement.expect is None or is_left_out or result is None:
                continue
            found = len(returned[-1]) if statement.returns else result.command_tuples or 0
            if found != statement.expect:
                raise conflict(batch, index, found)
        return returned

    def _commit(self) -> None:
        link = self._link
        link.notices.clear()
        try:
            place = link.send("COMMIT")
            link.read(within_s=COMMIT_S)
        except psycopg.Error as error:
            if error_kind(error) is not ErrorKind.UNREACHABLE:
                raise  # the server has rolled back, and says why
            link.close()
            raise _unknown(text_of(error)) from error
        if link.notices:  # a wait for a standby was cancelled
            text = "; ".join(link.notices)
            link.close()
            raise _unknown(text)
        status = link.results[place].command_status
        if status != b"COMMIT":
            raise psycopg.errors.InFailedSqlTransaction(f"COMMIT was answered by {status!r}")


def _unknown(why: str) -> UnknownCommitError:
    return UnknownCommitError(
        f"{why}: it is not known whether the commit holds; read the rows again before acting"
    )


def _is_of_batch(error: psycopg.Error) -> bool:
    return error_kind(error) in {ErrorKind.BATCH, ErrorKind.SETUP}
