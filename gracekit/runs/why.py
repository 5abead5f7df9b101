"""Why a run has stopped, as far as its evidence says now; how it was left is its `Verdict`.

The word is derived at every look and never stored: a run is adopted within seconds of its death,
and the kernel's word on it may come later.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from gracekit.exits import ExitCode, Verdict
from gracekit.runs.run import WATCHED, Run

_CRASHES: Final = {
    signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP,
    signal.SIGSYS,
}  # fmt: skip


class WhyRow(NamedTuple):
    """One row of the table.

    Attributes:
        word: Why, in a word.
        needs: The evidence that it needs, in words.
        fits: Whether a run has that evidence.
        seen: What is known of it, for whoever asks why the row does not fit.
    """

    word: str
    needs: str
    fits: Callable[[Run], bool]
    seen: Callable[[Run], str]


def _asked(run: Run) -> str:
    return "nobody is on record" if run.stop_source is None else f"{run.stop_source} has asked"


def _code(run: Run) -> str:
    return "it has recorded no end" if run.exit_code is None else f"it ended with {run.exit_code}"


def _kernel(run: Run) -> str:
    if run.kernel is None:
        return run.crash or "nobody has recorded how the process ended"
    oom = ", and its cgroup lacked memory" if run.kernel.oom_kills else ""
    return f"{run.kernel}{oom}"


def _gone(run: Run) -> str:
    return "nobody has said so" if run.gone_by is None else f"{run.gone_by}: {run.gone_reason}"


def _was_killed(run: Run, *numbers: int) -> bool:
    return run.kernel is not None and run.kernel.how != "exited" and run.kernel.status in numbers


def _killed(run: Run) -> bool:
    return _was_killed(run, signal.SIGKILL)


def _is_fenced(run: Run) -> bool:
    if not (run.gone_reason or "").startswith(WATCHED) or run.has_lacked_memory:
        return False
    return run.kernel is None or _killed(run) or run.kernel.status == ExitCode.INTERNAL


def _asked_by(source: str) -> Callable[[Run], bool]:
    return lambda run: run.stop_source == source


def _ended_with(code: ExitCode) -> Callable[[Run], bool]:
    return lambda run: run.exit_code == code


TABLE: Final = (
    WhyRow("operator_stop", "an operator asked for it", _asked_by("operator"), _asked),
    WhyRow("planned_stop", "a rollout asked for it", _asked_by("rollout"), _asked),
    WhyRow("user_stop", "the program or its user asked for it", _asked_by("user"), _asked),
    WhyRow(
        "host_stop",
        "a signal asked for it while the host was shut down",
        lambda run: run.stop_source == "signal" and bool(run.host_stop),
        lambda run: f"{_asked(run)}; the host was {'' if run.host_stop else 'not '}shut down",
    ),
    WhyRow("signal_stop", "a signal asked for it", _asked_by("signal"), _asked),
    WhyRow("config", "exit code 78", _ended_with(ExitCode.CONFIG), _code),
    WhyRow("dependency", "exit code 69", _ended_with(ExitCode.DEPENDENCY), _code),
    WhyRow(
        "failed",
        "exit code 70, or a fault that began the drain",
        lambda run: run.exit_code == ExitCode.INTERNAL or run.stop_source == "error",
        _code,
    ),
    WhyRow(
        "gone",
        "an operator said that it is gone",
        lambda run: run.gone_by is not None and not run.gone_by.startswith("run "),
        _gone,
    ),
    WhyRow(
        "unknown",
        "the store is an older copy",
        lambda run: run.verdict is Verdict.UNKNOWN,
        lambda _: "it is not",
    ),
    WhyRow(
        "host_reboot",
        "its host was booted since, and it has recorded no end",
        lambda run: run.exit_code is None and bool(run.rebooted),
        lambda run: "no other boot is on record" if run.exit_code is None else _code(run),
    ),
    WhyRow("fenced", "others saw no beat of it and acted in its place", _is_fenced, _gone),
    WhyRow("oom", "the kernel killed it for memory", lambda run: run.has_lacked_memory, _kernel),
    WhyRow(
        "crash_signal",
        "a signal that a crash raises",
        lambda run: (
            _was_killed(run, *_CRASHES) if run.kernel is not None else run.crash is not None
        ),
        _kernel,
    ),
    WhyRow(
        "early_signal",
        "a signal that it did not handle",
        lambda run: run.kernel is not None and run.kernel.how == "killed" and not _killed(run),
        _kernel,
    ),
    WhyRow("killed", "SIGKILL", _killed, _kernel),
    WhyRow(
        "crash_exit",
        "it exited by itself, without a drain",
        lambda run: run.kernel is not None,
        _kernel,
    ),
    WhyRow("died", "nothing else", lambda _: True, lambda _: ""),
)


def why(run: Run) -> str:
    """Why the dead *run* has stopped: the word of the first row that fits."""
    return next(row.word for row in TABLE if row.fits(run))


def explain(run: Run) -> Iterator[str]:
    """The rows up to the one that fits, each with why it does not, or does."""
    for row in TABLE:
        if row.fits(run):
            yield f"{row.word}: {row.needs}" + (f": {seen}" if (seen := row.seen(run)) else "")
            return
        yield f"not {row.word}: {row.needs}; {row.seen(run)}"
