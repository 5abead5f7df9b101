"""Recognises commands in which a shell keeps the platform's SIGTERM from the service.

If `sh -c "program ..."` is the platform's direct child, the shell does not pass SIGTERM
on: the service never gets it, and is killed at the end of the grace period.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


def is_shell(words: Sequence[str]) -> bool:
    """Whether a command line begins with a shell's name, or a login shell's, as in `-bash`."""
    return bool(words) and PurePosixPath(words[0].lstrip("-")).name in SHELLS


def is_interactive(words: Sequence[str]) -> bool:
    """Whether *words* are a shell without a command and without a script."""
    return is_shell(words) and _operands(words) == (None, [])


def hides_signals(words: Sequence[str]) -> bool:
    """Whether *words* are a shell with `-c` whose last command is not an `exec`.

    With `sh -c "exec program"` the program replaces the shell. Some shells also do so
    for a single command without exec, but that is not relied on.
    """
    if not is_shell(words):
        return False
    command, _ = _operands(words)
    return command is not None and not _ends_in_exec(command)


def _operands(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command of `-c`; or None, and the script with its arguments."""
    rest, has_command = list(words[1:]), False
    while rest and rest[0][:1] in {"-", "+"} and rest[0] != "-":
        option = rest.pop(0)
        if option == "--":
            break
        if not option.startswith("--"):
            has_command = has_command or "c" in option
            if option.endswith("o"):  # `-o pipefail`, `-euo pipefail`
                rest = rest[1:]
    return (" ".join(rest), []) if has_command else (None, rest)


def _ends_in_exec(command: str) -> bool:
    command = command.strip().strip("'\"")
    last = command.replace("&&", ";").replace("\n", ";").split(";")[-1]
    try:
        words = shlex.split(last)
    except ValueError:
        words = last.split()
    return bool(words) and words[0] == "exec"
