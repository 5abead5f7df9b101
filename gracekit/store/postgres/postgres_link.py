"""One connection to PostgreSQL: statements go out in a pipeline, their results are read together.

The calls are those of libpq, because each of them must have an end: whatever the server or the
network does, `read` returns or raises by its deadline. libpq would wait for ever for the answer to
a COMMIT that waits for a standby.

A *Sync* follows each 64 KiB. The server counts a transaction as idle, and ends it after its
time-out, only behind a Sync. Without one, a process that is stopped while it sends would keep the
store's lock.
"""

from __future__ import annotations

import itertools
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from gracekit.store.batch import Row, Value
from gracekit.store.postgres.postgres_texts import encoded, numbered, rows_of

CONNECT_S: Final = 5
"""Of each host, unless the URL has another `connect_timeout`."""
ANSWER_S: Final = 20.0
"""A server that has not answered by then is lost; above the sum of its own time-outs."""
LOCK_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 10
IDLE_TIMEOUT_S: Final = 2
"""Between two messages of a transaction. A stopped process holds up the others for so long."""

_SYNC_BYTES: Final = 65536
_MOST_PREPARED: Final = 256
_LOOK_S: Final = 0.05  # between two calls of `given_up`


class PostgresLink:
    """A connection, used by one thread at a time.

    Args:
        url: Of the database, as libpq takes it.
        schema: Of the store.
        read_only: Whether every statement that writes is refused.
        given_up: Called while an answer is awaited; if it returns True, the connection is closed.

    Attributes:
        results: Of the statements since `clear`, in their order; `read` appends them.
        notices: What the server has said beside its answers, since `clear`.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        *,
        read_only: bool = False,
        given_up: Callable[[], bool] | None = None,
    ) -> None:
        self._connection = psycopg.connect(
            **_parameters(url, schema, read_only=read_only),  # type: ignore[arg-type]  # texts
            autocommit=True,
        )
        self._pg = self._connection.pgconn
        self._pg.enter_pipeline_mode()
        self.results: list[pq.abc.PGresult] = []
        self.notices: list[str] = []
        self._connection.add_notice_handler(self._take_notice)
        self._given_up = given_up
        self._poll = select.poll()
        self._expected: deque[_Expected] = deque()
        self._sent = 0
        self._unsynced = 0
        self._seen: set[str] = set()  # texts that were sent once: at the second time, prepare them
        self._names: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self._numbers = itertools.count()
        self._is_stale = False  # the server has prepared statements that are not in `_names`

    def _take_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        self.notices.append(str(notice.message_primary))

    @property
    def is_lost(self) -> bool:
        """Whether this connection cannot be used any more."""
        return self._connection.closed

    def close(self) -> None:
        """Close the socket, whatever is under way on it."""
        self._connection.close()

    def clear(self) -> None:
        """Forget the results; the next statement has the number 0. Not within a transaction."""
        self.results.clear()
        self.notices.clear()
        self._sent = 0
        if self._is_stale or len(self._names) > _MOST_PREPARED:
            self._forget()
            self._queue("DEALLOCATE ALL", (), (), ())
            self._expected[-1] = _IGNORED
            self._forget()
            self._is_stale = False

    def _forget(self) -> None:
        """Use no prepared statement any more: after an error it is not known which there are."""
        self._seen.clear()
        self._names.clear()
        self._is_stale = True

    def send(self, sql: str, params: Sequence[Value] = ()) -> int:
        """Send one statement, with `$n` for each value.

        Returns:
            The index that its result will have in `results`.

        Raises:
            ValueError, TypeError: a value cannot be sent; the statement was not sent.
            psycopg.Error: the connection is lost.
        """
        parts = [encoded(value) for value in params]
        types = tuple(part[0] for part in parts)
        formats = tuple(part[1] for part in parts)
        values = tuple(part[2] for part in parts)
        self._queue(sql, types, values, formats)
        self._sent += 1
        self._unsynced += len(sql) + sum(len(value) for value in values if value is not None)
        if self._unsynced > _SYNC_BYTES:
            self.sync()
            self._flush(time.monotonic() + ANSWER_S)
        return self._sent - 1

    def _queue(
        self,
        sql: str,
        types: tuple[int, ...],
        values: Sequence[bytes | None],
        formats: Sequence[int],
    ) -> None:
        key = (sql, types)
        name = self._names.get(key)
        if name is None and sql in self._seen:
            name = self._names[key] = b"s%d" % next(self._numbers)
            self._pg.send_prepare(name, sql.encode(), types)
            self._expected.append(_IGNORED)
        if name is None:
            self._seen.add(sql)
            self._pg.send_query_params(sql.encode(), values, types, formats)
        else:
            self._pg.send_query_prepared(name, values, formats)
        self._expected.append(_RESULT)

    def sync(self) -> None:
        """Send a Sync: behind it the server counts how long the transaction is idle."""
        self._pg.pipeline_sync()
        self._expected.append(_SYNC)
        self._unsynced = 0

    def read(self, *, within_s: float = ANSWER_S) -> None:
        """Send a Sync, and take the results of all that was sent.

        Raises:
            psycopg.Error: the first error of them; all results are taken nevertheless. Without a
                SQLSTATE: the connection is lost, also if there is no answer within *within_s*.
        """
        deadline = time.monotonic() + within_s
        self.sync()
        self._flush(deadline)
        first: psycopg.Error | None = None
        while self._expected:
            expected = self._expected.popleft()
            result = self._result(deadline)
            if expected is not _SYNC:
                self._pg.get_result()  # None, which ends the results of one statement
            if expected is _RESULT:
                self.results.append(result)
            if first is None and result.status == pq.ExecStatus.FATAL_ERROR:
                first = psycopg.errors.error_from_result(result)
                if self._pg.status == pq.ConnStatus.BAD:
                    break
        if first is not None:
            self._forget()
            if self._pg.status == pq.ConnStatus.BAD:
                self.close()
            raise first

    def ask(self, sql: str, *params: Value, within_s: float = ANSWER_S) -> list[Row]:
        """Send one statement alone, with `?` for each value; return its rows."""
        self.clear()
        self.send(numbered(sql), params)
        self.read(within_s=within_s)
        return rows(self.results[0])

    def roll_back(self) -> None:
        """End the transaction without its changes."""
        self.send("ROLLBACK")
        self.read()

    def _result(self, deadline: float) -> pq.abc.PGresult:
        while self._pg.is_busy():
            self._wait(select.POLLIN, deadline)
            self._pg.consume_input()
        result = self._pg.get_result()
        if result is None:
            raise self._lost(f"the connection is lost: {self._pg.get_error_message()}")
        return result

    def _flush(self, deadline: float) -> None:
        """Send what is queued; take what comes meanwhile, or both sides could wait for ever."""
        while self._pg.flush():
            if self._wait(select.POLLIN | select.POLLOUT, deadline) & select.POLLIN:
                self._pg.consume_input()

    def _wait(self, what: int, deadline: float) -> int:
        fd = self._pg.socket
        self._poll.register(fd, what)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._lost("the server does not answer in time")
            if self._given_up is not None and self._given_up():
                raise self._lost("the query was given up")
            for _, found in self._poll.poll(1000 * (left_s if self._given_up is None else _LOOK_S)):
                return found

    def _lost(self, why: str) -> psycopg.OperationalError:
        self.close()
        return psycopg.OperationalError(why)


class _Expected:
    """What the server answers next."""


_RESULT: Final = _Expected()
_IGNORED: Final = _Expected()
_SYNC: Final = _Expected()


def rows(result: pq.abc.PGresult) -> list[Row]:
    """The rows that a statement has returned."""
    count = result.ntuples
    if not count:
        return []
    columns = range(result.nfields)
    get = result.get_value
    return rows_of(
        [result.ftype(column) for column in columns],
        [[get(number, column) for column in columns] for number in range(count)],
    )


def shown(url: str, schema: str) -> str:
    """The store in messages, without a password."""
    given = conninfo_to_dict(url)
    ports = str(given.get("port") or "").split(",")
    hosts = itertools.zip_longest(str(given.get("host", "")).split(","), ports, fillvalue=ports[-1])
    where = ",".join(f"{host}:{port}" if port else str(host) for host, port in hosts)
    return f"postgresql://{where}/{given.get('dbname', '')}?schema={schema}"


def _parameters(url: str, schema: str, *, read_only: bool) -> dict[str, object]:
    """What libpq connects with: the URL, and what each connection of gracekit needs."""
    given = conninfo_to_dict(url)
    settings = {
        "search_path": f'"{schema}"',
        "lock_timeout": f"{LOCK_TIMEOUT_S}s",
        "statement_timeout": f"{STATEMENT_TIMEOUT_S}s",
        "idle_in_transaction_session_timeout": f"{IDLE_TIMEOUT_S}s",
        "client_min_messages": "warning",  # what is said below is no notice
        "extra_float_digits": "1",  # a time comes back as it was written
        "bytea_output": "hex",
    }
    if read_only:
        settings["default_transaction_read_only"] = "on"
        given["target_session_attrs"] = "primary"  # libpq would take this session for a standby's
    return {
        "connect_timeout": CONNECT_S,
        "application_name": "gracekit",
        "target_session_attrs": "read-write",
        **given,
        "client_encoding": "UTF8",
        "options": " ".join(_options(str(given.get("options") or ""), settings.items())),
    }


def _options(given: str, settings: Iterable[tuple[str, str]]) -> Iterable[str]:
    if given:
        yield given
    for name, value in settings:
        escaped = value.replace("\\", "\\\\").replace(" ", "\\ ")
        yield f"-c {name}={escaped}"
