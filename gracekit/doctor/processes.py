"""Checks of processes: whether SIGTERM reaches a service, or one that is started from here."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gracekit.doctor import proc
from gracekit.doctor.finding import Finding, fail, ok, skip, warn
from gracekit.doctor.start_command import is_interactive, is_shell
from gracekit.exits import ExitCode
from gracekit.signals import STOP_SIGNALS

LONGEST: Final = 60

_REMEDY: Final = (
    "start the service last in that shell, by: exec gracekit run MODULE:ATTR; in an image use the "
    'exec form, ENTRYPOINT ["gracekit", "run", "MODULE:ATTR"]; a script that starts it by & must '
    "send it SIGTERM itself: trap 'kill $!' TERM"
)


def check_pid(pid: int, root: Path = proc.PROC) -> Iterator[Finding]:
    """Run the checks of a running process of the service."""
    if not proc.command_of(pid, root):
        yield fail(
            f"pid {pid}",
            "there is no such process, or it may not be looked at",
            "name a living one: `gracekit status --json` lists them",
            ExitCode.DEPENDENCY,
        )
        return
    yield check_shell_above(pid, root)
    yield check_stop_signals(pid, root)
    yield check_alarm(pid, root)


def check_shell_above(pid: int, root: Path = proc.PROC) -> Finding:
    """Check for a shell between the platform and this process."""
    check = f"parents of {pid}"
    for parent in proc.parents_of(pid, root):
        words = proc.command_of(parent, root)
        if not is_shell(words):
            continue
        if is_interactive(words) and parent != 1:
            return ok(check, f"an interactive shell (pid {parent}) started it")
        # The shell exists, so it did not replace itself by exec, whatever its command says.
        seen = (
            f"{' '.join(words)[:LONGEST]!r} (pid {parent}) stands above it and passes no SIGTERM "
            "on: a stop would end as SIGKILL after the grace period, without a drain"
        )
        is_the_one = parent == 1 or proc.parent_of(parent, root) in {0, 1}
        return (fail if is_the_one else warn)(check, seen, _REMEDY)
    return ok(check, "no shell stands between it and the process that started it")


def check_stop_signals(pid: int, root: Path = proc.PROC) -> Finding:
    """Check for stop signals that a running process blocks or ignores."""
    check = f"signals of {pid}"
    masks = proc.masks_of(pid, root)
    if masks is None:
        return skip(check, "they may not be looked at from here")
    for number in STOP_SIGNALS:
        lost = "ignores" if number in masks.ignored else "blocks"
        if number in masks.ignored | masks.blocked:
            return fail(
                check,
                f"it {lost} {number.name}: no drain begins",
                "find out what set that (nohup, trap '' TERM, a library) and remove it",
            )
    if signal.SIGTERM not in masks.caught:
        return warn(
            check,
            "it has no handler for SIGTERM: it would die at once, and the next start would settle "
            "all that it had in hand",
            "run it by `gracekit run` or svc.run(), or embed Runtime with signals=True",
        )
    return ok(check, "SIGTERM, SIGINT and SIGQUIT arrive")


def check_alarm(pid: int, root: Path = proc.PROC) -> Finding:
    """Check that SIGALRM can end a process at its hard limit, by default action or handler."""
    check = f"alarm of {pid}"
    masks = proc.masks_of(pid, root)
    if masks is None:
        return skip(check, "its signals may not be looked at from here")
    untouched = signal.SIGALRM not in masks.blocked | masks.ignored
    if proc.inner_pid(pid, root)[1] == 1:
        return _alarm_of_first(check, is_caught=untouched and signal.SIGALRM in masks.caught)
    if not untouched or signal.SIGALRM in masks.caught:
        return fail(
            check,
            "SIGALRM is blocked, ignored or caught: the kernel cannot end a stuck process at its "
            "hard limit",
            "leave SIGALRM alone in the application",
        )
    return ok(check, "SIGALRM has its default action, which ends a stuck process")


def _alarm_of_first(check: str, *, is_caught: bool) -> Finding:
    if is_caught:
        return ok(check, "it is PID 1, and SIGALRM has a handler, which ends a stuck process")
    return fail(
        check,
        "it is PID 1, for which the kernel drops SIGALRM where it has no handler: a process that "
        "is stuck outlives its hard limit",
        "run it by `gracekit run` or svc.run(), or embed Runtime with signals=True; or let an init "
        "such as tini be PID 1",
    )
