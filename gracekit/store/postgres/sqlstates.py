"""What an error of PostgreSQL means for a commit: one table, by SQLSTATE.

The longest entry that the SQLSTATE begins with decides. An error without one is a lost connection.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final

import psycopg

from gracekit.errors import ConfigError, DependencyError, GracekitError


class ErrorKind(enum.Enum):
    """What follows from an error, if no COMMIT was sent."""

    AGAIN = "again"  # nothing was done, and the same may succeed now
    BATCH = "batch"  # the batch is refused; others of its group are not
    UNREACHABLE = "unreachable"  # nothing was done; another connection is needed
    BROKEN = "broken"  # the server cannot write any more
    SETUP = "setup"  # schema, login or rights are wrong: as BATCH, but a person must act


_KINDS: Final[Mapping[str, ErrorKind]] = {
    "08": ErrorKind.UNREACHABLE,  # the connection
    "22": ErrorKind.BATCH,  # a value
    "23": ErrorKind.BATCH,  # a constraint
    "25006": ErrorKind.UNREACHABLE,  # read-only: a standby, or a server that will be one
    "25P03": ErrorKind.AGAIN,  # the server ended a transaction that was idle for too long
    "28": ErrorKind.SETUP,  # the login
    "3D": ErrorKind.SETUP,  # the database
    "3F": ErrorKind.SETUP,  # the schema
    "40001": ErrorKind.AGAIN,  # serialization
    "40P01": ErrorKind.AGAIN,  # deadlock
    "42": ErrorKind.SETUP,  # a table, a column or a right (42501)
    "53100": ErrorKind.BROKEN,  # the disk is full
    "53200": ErrorKind.AGAIN,  # memory
    "53300": ErrorKind.UNREACHABLE,  # too many connections
    "54": ErrorKind.BATCH,  # a limit of the server
    "55P03": ErrorKind.AGAIN,  # a lock was not granted in time
    "57014": ErrorKind.AGAIN,  # cancelled, by a time-out or by a person
    "57P": ErrorKind.UNREACHABLE,  # the server stops, or a person ended the connection
    "58": ErrorKind.BROKEN,  # the system below the server
    "XX": ErrorKind.BROKEN,  # damage
}

# A server sends no SQLSTATE that libpq shows of a login that it refuses, only a sentence.
_SETUP_TEXT: Final = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|does not exist|permission denied"
    r"|not permitted to log in|certificate|does not support SSL"
)


def error_kind(error: psycopg.Error) -> ErrorKind:
    """What *error* means if it came before COMMIT was sent."""
    state = error.sqlstate
    if state is None:
        return ErrorKind.UNREACHABLE
    for length in (5, 3, 2):
        if (kind := _KINDS.get(state[:length])) is not None:
            return kind
    return ErrorKind.BATCH


def text_of(error: psycopg.Error) -> str:
    """The error as one line for a message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text} (SQLSTATE {error.sqlstate})" if error.sqlstate else text


def start_error(error: psycopg.Error, where: str) -> GracekitError:
    """The error of a start that *error* has ended."""
    text = text_of(error)
    kind = error_kind(error)
    if kind is ErrorKind.SETUP or (error.sqlstate is None and _SETUP_TEXT.search(text)):
        return ConfigError(
            f"{where} refuses this service: {text}; check the user, the password and the names of "
            "the database and the schema in GRACEKIT_STORE_URL, and the rights of that user"
        )
    return DependencyError(f"{where} cannot be reached: {text}")
