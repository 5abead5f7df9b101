"""Commands that put a shell between a platform's SIGTERM and the service.

`sh -c "program ..."` as the platform's direct child keeps SIGTERM to itself:
the service never sees it and is killed at the end of the grace period.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})


def is_shell(words: Sequence[str]) -> bool:
    """Whether a command line begins with a shell's name; a login shell's dash is dropped."""
    return bool(words) and PurePosixPath(words[0].lstrip("-")).name in SHELLS


def is_interactive(words: Sequence[str]) -> bool:
    """Whether *words* are a shell that was given neither a command nor a script."""
    return is_shell(words) and _operands(words) == (None, [])


def hides_signals(words: Sequence[str]) -> bool:
    """Whether *words* are a shell with `-c`, whose last command is no `exec`.

    `sh -c "exec program"` replaces the shell. That a shell runs a single
    command in its own place, as some do, is not relied upon.
    """
    if not is_shell(words):
        return False
    command, _ = _operands(words)
    return command is not None and not _ends_in_exec(command)


def _operands(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command of `-c`, or None and the script with its arguments."""
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
