"""How a run ended: its exit code, and the verdict that another run records later.

Only `classify` turns evidence into a verdict. It is a pure function, and its
answer is stored once for each run.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from gracekit.errors import (
    AlreadyRunningError,
    ConfigError,
    DeclarationError,
    DependencyError,
    GracekitError,
    StoreLockedError,
    StoreUnreachableError,
    UnknownCommitError,
)


class ExitCode(enum.IntEnum):
    """Exit codes of the process, for its supervisor (BSD sysexits where one fits)."""

    DRAINED = 0
    DEPENDENCY = 69  # a broker or store could not be reached at start
    INTERNAL = 70  # an error in gracekit, a broken store, or a forced end
    HANDED_OVER = 75  # stopped on time, unfinished work is in the journal
    CONFIG = 78  # restarting will not help


class Verdict(enum.Enum):
    """The class of one run's end, as the journal stores it."""

    DRAINED = "drained"
    HANDED_OVER = "handed_over"  # intended stop, leftovers in the journal
    STOP_TIMEOUT = "stop_timeout"  # a stop was begun and not ended
    KILLED = "killed"  # no record of a stop: kill -9, out of memory, power, a crash
    FAILED = "failed"  # it left a record of its own failure
    UNKNOWN = "unknown"  # the store is an older copy, from before the run ended

    @property
    def left(self) -> str:
        """How it left its tasks: drained, handed_over, cut_off, failed, unknown."""
        was_cut = self in {Verdict.STOP_TIMEOUT, Verdict.KILLED}
        return "cut_off" if was_cut else self.value


class ExitEvidence(NamedTuple):
    """What is known of an ended run.

    Attributes:
        stop_begun: A stop-intent is on record and was not withdrawn.
        exit_code: Code of the stop record; None if the run wrote none.
        is_outdated: The store is a copy from before the run ended, so a record may be missing.
    """

    stop_begun: bool
    exit_code: int | None
    is_outdated: bool = False


def classify(evidence: ExitEvidence) -> Verdict:
    """Name the end of a run; first match wins."""
    match evidence:
        case ExitEvidence(exit_code=ExitCode.DRAINED):
            return Verdict.DRAINED
        case ExitEvidence(exit_code=ExitCode.HANDED_OVER):
            return Verdict.HANDED_OVER
        case ExitEvidence(exit_code=None, is_outdated=True):
            return Verdict.UNKNOWN
        case ExitEvidence(stop_begun=True, exit_code=None):
            return Verdict.STOP_TIMEOUT
        case ExitEvidence(exit_code=None):
            return Verdict.KILLED
        case _:
            return Verdict.FAILED


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a process that *error* ends before it has served."""
    match error:
        case ConfigError() | DeclarationError() | AlreadyRunningError():
            return ExitCode.CONFIG
        case (
            DependencyError() | StoreLockedError() | StoreUnreachableError() | UnknownCommitError()
        ):
            return ExitCode.DEPENDENCY
        case _:
            return ExitCode.INTERNAL


def explained(error: GracekitError) -> str:
    """The text of an *error* that refuses a start, with a reference to the docs at its end.

    A class that is not in `gracekit.errors` is explained there under its nearest base class.
    """
    documented = next(kind for kind in type(error).__mro__ if kind.__module__ == _DOCUMENTED)
    text = str(error) or type(error).__name__
    # If there are several problems, each has a line; the reference is for all of them.
    between = "\n" if "\n" in text else "; "
    return f"{text}{between}see docs/errors.md#{documented.__name__.lower()}"


_DOCUMENTED: Final = GracekitError.__module__
