"""Checks of commands that start uvicorn, which keeps the signals of its process.

At SIGTERM uvicorn waits for the HTTP requests that it answers, and only then ends the lifespan
of the application, in which the service drains. It has no handler for SIGHUP.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from gracekit.config.values import format_duration
from gracekit.doctor.finding import Finding, fail, ok

_OPTION: Final = "--timeout-graceful-shutdown"
_VARIABLE: Final = "UVICORN_TIMEOUT_GRACEFUL_SHUTDOWN"
_BEFORE: Final = frozenset({"-m", "env", "exec", "run"})
"""Words before the name of a program that another one starts, as in `python -m uvicorn`."""
_HANGUP: Final = re.compile(r"\bkill\s+(-s\s+|-)(SIG)?(HUP|1)\b")


def check_wait(
    words: Sequence[str], environment: Mapping[str, str], where: str, *, check: str = "uvicorn"
) -> Iterator[Finding]:
    """Check that uvicorn, if the command starts it, waits a limited time for HTTP requests.

    Args:
        words: The command line.
        environment: The variables that are known of it.
        where: The unit, container or file.
        check: Name of the finding.
    """
    if not _is_uvicorn(words):
        return
    wait_s = _limit_s(words, environment)
    if wait_s is not None:
        shown = format_duration(wait_s)
        yield ok(check, f"{where}: it waits at most {shown} for HTTP requests before the drain")
    else:
        yield fail(
            check,
            f"{where} starts uvicorn without {_OPTION}: it waits for HTTP requests that are being "
            "answered, by default for ever, before the drain begins",
            f"add {_OPTION} 3, and its seconds to the platform's limit",
        )


def check_reload(words: Sequence[str], unit: Mapping[str, str], where: str) -> Iterator[Finding]:
    """Check that `systemctl reload` does not end the uvicorn of a *unit*.

    With several workers uvicorn's main process handles SIGHUP.
    """
    if not _is_uvicorn(words) or any(word.startswith("--workers") for word in _flat(words)):
        return
    if unit.get("Type") == "notify-reload":
        remedy = "set Type=notify"
    elif _HANGUP.search(unit.get("ExecReload", "")):
        remedy = "leave ExecReload out"
    else:
        return
    seen = f"{where}: systemctl reload sends SIGHUP, which ends uvicorn without a drain"
    yield fail("ExecReload", seen, f"{remedy}: settings change by a restart")


def waits_s(words: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds for which uvicorn waits before the drain; 0 for no uvicorn, or for no limit."""
    return (_limit_s(words, environment) or 0.0) if _is_uvicorn(words) else 0.0


def _limit_s(words: Sequence[str], environment: Mapping[str, str]) -> float | None:
    value, flat = environment.get(_VARIABLE, ""), _flat(words)
    for index, word in enumerate(flat):
        name, equals, rest = word.partition("=")
        if name == _OPTION:
            value = rest if equals else "".join(flat[index + 1 : index + 2])
    return float(value) if value.isdecimal() else None


def _is_uvicorn(words: Sequence[str]) -> bool:
    flat = [PurePosixPath(word).name for word in _flat(words)]
    return any(
        word == "uvicorn" and (index == 0 or flat[index - 1] in _BEFORE)
        for index, word in enumerate(flat)
    )


def _flat(words: Sequence[str]) -> list[str]:
    """The words, with those of a shell's command one by one."""
    return [part for word in words for part in (_split(word) if " " in word else [word])]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
